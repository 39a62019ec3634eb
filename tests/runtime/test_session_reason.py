"""Answers: transformers' tokens, however they are asked for and whatever was asked before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import BundleFactory, CheckpointFactory
from motrt.engines.bundle import Bundle
from motrt.engines.errors import ConfigError
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.engines.tensors import Array
from motrt.runtime import Runtime, SamplingParams
from motrt.runtime.text_model import TextModel, TokenSequence
from motrt.runtime.tokenizer import Tokenizer

QUESTION = "What will the red square do next?"
GREEDY = SamplingParams(max_new_tokens=64, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=48, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(checkpoint: CheckpointFactory) -> Callable[[str, list[int]], list[int]]:
    """Return transformers' greedy continuation of ids, with its cache."""
    models: dict[str, Any] = {}
    made: dict[tuple[Any, ...], list[int]] = {}

    def run(kind: str, ids: list[int]) -> list[int]:
        import torch
        from diffusers import Cosmos3OmniTransformer

        from motrt.calibration.reference.text_model import build_text_model

        if kind not in models:
            models[kind] = build_text_model(
                Cosmos3OmniTransformer.from_pretrained(checkpoint(kind), subfolder="transformer")
            )
        key = (kind, *ids)
        if key not in made:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # too small to share; on a busy machine 20x faster
            with torch.no_grad():
                tokens = models[kind].generate(
                    torch.tensor([ids]), max_new_tokens=64, do_sample=False, use_cache=True
                )
            torch.set_num_threads(threads)
            made[key] = tokens[0, len(ids) :].tolist()
        return made[key]

    return run


@pytest.fixture(scope="module")
def shared_runtime(bundle: BundleFactory) -> Iterator[Runtime]:
    """Return a runtime for tests that say nothing about what came before."""
    with Runtime.open(bundle("nano-like"), threads=1) as runtime:
        yield runtime


@pytest.fixture
def fresh(bundle: BundleFactory) -> Iterator[Callable[..., Runtime]]:
    opened: list[Runtime] = []

    def make(kind: str = "nano-like", lowering: str = "native", **options: Any) -> Runtime:
        opened.append(Runtime.open(bundle(kind, "fp32", lowering), threads=1, **options))
        return opened[-1]

    yield make
    for runtime in opened:
        runtime.close()


def prompt_ids(bundle: Path, text: str = QUESTION) -> list[int]:
    tokenizer = Tokenizer.open(Bundle.open(bundle))
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    finally:
        tokenizer.close()


@pytest.mark.parametrize("kind", ["nano-like", "super-like", "edge-like"])
def test_64_greedy_tokens_are_transformers(
    bundle: BundleFactory,
    fresh: Callable[..., Runtime],
    expected: Callable[[str, list[int]], list[int]],
    kind: str,
) -> None:
    want = expected(kind, prompt_ids(bundle(kind)))
    assert len(want) == 64
    for lowering, residency in (("native", "separate"), ("portable", "shared")):
        result = fresh(kind, lowering, residency=residency).reason(QUESTION, GREEDY)
        assert result.token_ids == want
        assert (result.finish_reason, result.reused_tokens) == ("length", 0)


@pytest.mark.parametrize("lowering", ["native", "portable"])
def test_a_prompt_of_one_token(
    bundle: BundleFactory, expected: Callable[[str, list[int]], list[int]], lowering: str
) -> None:
    found = Bundle.open(bundle("nano-like", "fp32", lowering))
    backend = OnnxRuntimeBackend(found, threads=1)
    sequence = TokenSequence(TextModel(found, backend, capacity=128))
    tokens: list[int] = []
    logits = sequence.extend([5])
    while len(tokens) < 64:
        tokens.append(int(logits.argmax()))
        logits = sequence.extend(tokens[-1:])
    assert tokens == expected("nano-like", [5])
    backend.close()


@pytest.mark.parametrize(
    ("kind", "lowering"), [("nano-like", "native"), ("edge-like", "portable")]
)
def test_seeds_fix_the_draws(fresh: Callable[..., Runtime], kind: str, lowering: str) -> None:
    first = fresh(kind, lowering).reason(QUESTION, DRAWN)
    other = fresh(kind, lowering)
    assert other.reason(QUESTION, DRAWN).token_ids == first.token_ids
    another_seed = SamplingParams(max_new_tokens=48, temperature=1.0, seed=8, ignore_eos=True)
    assert other.reason(QUESTION, another_seed).token_ids != first.token_ids


def test_pieces_join_to_the_text(shared_runtime: Runtime) -> None:
    for params in (GREEDY, DRAWN):
        stream = shared_runtime.reason_stream(QUESTION, params)
        pieces = list(stream)
        assert len(pieces) > 8
        assert (
            "".join(pieces) == stream.result.text == shared_runtime.reason(QUESTION, params).text
        )


def test_a_stop_text_ends_the_answer_before_it(shared_runtime: Runtime) -> None:
    whole = shared_runtime.reason(QUESTION, GREEDY)
    stop = whole.text[20:24]
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, stop=("never in it", stop))
    stream = shared_runtime.reason_stream(QUESTION, params)
    assert "".join(stream) == stream.result.text == whole.text[: whole.text.index(stop)]
    assert stream.result.finish_reason == "stop"
    assert len(stream.result.token_ids) < 64


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(shared_runtime: Runtime) -> None:
    whole = shared_runtime.reason(QUESTION, GREEDY)
    token = whole.token_ids[10]
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, stop_token_ids=(token,))
    result = shared_runtime.reason(QUESTION, params)
    assert result.token_ids == whole.token_ids[: whole.token_ids.index(token)]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "lowering"), [("nano-like", "portable"), ("edge-like", "native")]
)
def test_chunks_of_a_prompt_are_one_prompt(
    fresh: Callable[..., Runtime], kind: str, lowering: str
) -> None:
    question = f"{QUESTION} " * 12
    whole = fresh(kind, lowering, chunk_size=1024).reason(question, GREEDY)
    assert whole.prompt_tokens > 128  # the cache grows on the way
    assert (
        fresh(kind, lowering, chunk_size=7).reason(question, GREEDY).token_ids == whole.token_ids
    )


@pytest.mark.parametrize(
    ("kind", "lowering"), [("nano-like", "native"), ("edge-like", "portable")]
)
def test_two_answers_in_a_row_are_two_fresh_runtimes(
    fresh: Callable[..., Runtime], kind: str, lowering: str
) -> None:
    questions = (QUESTION, "What happens after the ball hits the wall?", QUESTION)
    one = fresh(kind, lowering)
    tokens = [one.reason(question, GREEDY).token_ids for question in questions]
    assert tokens[0] == tokens[2] != tokens[1]
    assert tokens[1] == fresh(kind, lowering).reason(questions[1], GREEDY).token_ids


def test_a_second_turn_computes_what_is_new(fresh: Callable[..., Runtime]) -> None:
    one = fresh()
    first = one.reason(QUESTION, GREEDY, system="You are a helpful assistant.")
    asked = [*first.messages, {"role": "user", "content": "And then?"}]
    second = one.reason(asked, GREEDY)
    afresh = fresh().reason(asked, GREEDY)
    assert afresh.reused_tokens == 0
    assert first.prompt_tokens <= second.reused_tokens < second.prompt_tokens
    assert second.token_ids == afresh.token_ids
    assert second.prompt_tokens == afresh.prompt_tokens
    # The same once more: all but the one token whose logits are wanted.
    assert one.reason(asked, GREEDY).reused_tokens == second.prompt_tokens - 1


def test_swap_keeps_the_conversation_over_a_generation(fresh: Callable[..., Runtime]) -> None:
    from motrt.runtime import GenerationParams

    one = fresh(residency="swap")
    first = one.reason(QUESTION, GREEDY)
    one.generate(
        "A car.", GenerationParams(num_frames=1, height=32, width=32, num_inference_steps=1)
    )
    second = one.reason([*first.messages, {"role": "user", "content": "And then?"}], GREEDY)
    assert second.reused_tokens >= first.prompt_tokens


@pytest.mark.parametrize("lowering", ["native", "portable"])
def test_an_answer_goes_on_to_the_capacity_exactly(
    bundle: BundleFactory, fresh: Callable[..., Runtime], lowering: str
) -> None:
    count = len(prompt_ids(bundle("nano-like")))
    whole = fresh("nano-like", lowering).reason(QUESTION, GREEDY)
    for room in (1, 7):
        runtime = fresh("nano-like", lowering, capacity=count + room)
        result = runtime.reason(QUESTION, GREEDY)
        # The last token is read off the full cache and needs no place in it.
        assert result.token_ids == whole.token_ids[: room + 1]
        assert result.finish_reason == "length"


def test_a_prompt_that_is_too_long_costs_nothing(
    bundle: BundleFactory, fresh: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(prompt_ids(bundle("nano-like")))
    runtime = fresh(capacity=count)
    short = runtime.reason("Hi", SamplingParams(max_new_tokens=2))

    def never(*args: Any) -> Array:
        raise AssertionError("something was computed")

    with monkeypatch.context() as patch:
        patch.setattr("motrt.engines.onnxruntime_towers.OnnxRuntimeReasoner.forward", never)
        with pytest.raises(ConfigError, match=rf"got {count} tokens and 1 new ones; .*{count}"):
            runtime.reason(QUESTION)
        with pytest.raises(ConfigError, match="longer than the K/V cache"):
            runtime.generate(QUESTION * 4)
    again = runtime.reason("Hi", SamplingParams(max_new_tokens=2))
    assert again.token_ids == short.token_ids


def test_the_cache_is_as_large_as_the_conversation(fresh: Callable[..., Runtime]) -> None:
    runtime = fresh(capacity=100_000)
    assert runtime.cache_nbytes == 0
    runtime.reason(QUESTION, SamplingParams(max_new_tokens=4))
    assert 0 < runtime.cache_nbytes <= 128 * 2 * 3 * 2 * 64 * 4  # rows, k and v, layers, heads, D


def test_both_backends_give_the_same_answer(
    bundle: BundleFactory, shared_runtime: Runtime
) -> None:
    from motrt.export.torch_backend import TorchBackend

    with Runtime.open(bundle("nano-like"), backend=TorchBackend) as runtime:
        result = runtime.reason(QUESTION, GREEDY)
    assert result.token_ids == shared_runtime.reason(QUESTION, GREEDY).token_ids


def test_timings_and_messages_are_those_of_the_answer(shared_runtime: Runtime) -> None:
    result = shared_runtime.reason(QUESTION, SamplingParams(max_new_tokens=3), system="Be brief.")
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant"]
    assert result.messages[-1]["content"] == result.text
    assert result.timings.keys() == {"prefill", "decode", "total", "tokens_per_second"}
    assert np.isclose(
        result.timings["prefill"] + result.timings["decode"], result.timings["total"]
    )

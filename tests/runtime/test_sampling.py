"""Sampling against transformers' processors, filter by filter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError, ExecutionError
from motrt.runtime.params import SamplingParams
from motrt.runtime.sampling import (
    Sampler,
    keep_top_k,
    keep_top_p,
    penalize_presence,
    penalize_repetition,
    scale_temperature,
)

VOCAB = 1000


def _logits(seed: int, size: int = VOCAB, scale: float = 4.0) -> np.ndarray[Any, Any]:
    return (np.random.RandomState(seed).standard_normal(size) * scale).astype(np.float32)


def _reference(name: str, value: float, logits: np.ndarray[Any, Any], ids: Any = ()) -> Any:
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    processor = getattr(logits_process, name)(value)
    given = torch.tensor([list(ids)], dtype=torch.long)
    return processor(given, torch.from_numpy(logits.copy())[None])[0].numpy()


def _probabilities(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exponentials / exponentials.sum())


# Filters.


@pytest.mark.parametrize("penalty", [0.5, 1.05, 1.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_repetition_penalty_equals_transformers(seed: int, penalty: float) -> None:
    logits = _logits(seed)
    ids = np.random.RandomState(seed).randint(0, VOCAB, 50)
    expected = _reference("RepetitionPenaltyLogitsProcessor", penalty, logits, ids)
    assert np.array_equal(penalize_repetition(logits, ids, penalty), expected)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.9])
def test_temperature_equals_transformers(temperature: float) -> None:
    logits = _logits(1)
    expected = _reference("TemperatureLogitsWarper", temperature, logits)
    assert np.allclose(scale_temperature(logits, temperature), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, 20, 999, 1000, 5000])
@pytest.mark.parametrize("scale", [4.0, 0.0])
def test_top_k_equals_transformers(top_k: int, scale: float) -> None:
    logits = np.round(_logits(2, scale=scale), 1)  # with equal ones
    expected = _reference("TopKLogitsWarper", top_k, logits)
    assert np.array_equal(keep_top_k(logits, top_k), expected)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.8, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_equals_transformers(seed: int, scale: float, top_p: float) -> None:
    logits = _logits(seed, scale=scale)
    expected = _reference("TopPLogitsWarper", top_p, logits)
    kept = np.isfinite(keep_top_p(logits, top_p))
    if top_p == 1:  # theirs is a filter that generate() does not even use then
        assert kept.all()
        return
    # What they drop for the rounding of their float32 sums is next to impossible.
    different = kept != np.isfinite(expected)
    assert _probabilities(logits)[different].sum() < 1e-6
    assert different.sum() <= (2 if top_p > 0.99 else 0)


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], dtype=np.float32))
    for top_p, kept in ((0.4, [1]), (0.51, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        assert np.flatnonzero(np.isfinite(keep_top_p(logits, top_p))).tolist() == kept


def test_a_filter_works_on_what_another_left() -> None:
    logits = keep_top_k(_logits(4), 20)
    expected = _reference("TopPLogitsWarper", 0.8, logits)
    assert np.array_equal(keep_top_p(logits, 0.8), expected)


def test_presence_counts_once_and_frequency_each_time() -> None:
    counts = np.array([0, 1, 3])
    logits = np.zeros(3, dtype=np.float32)
    assert penalize_presence(logits, counts, 1.5).tolist() == [0, -1.5, -1.5]
    assert penalize_presence(logits, counts, 0.5, 0.25).tolist() == [0, -0.75, -1.25]


# The whole.


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = np.array([1, 3, 3, 2], dtype=np.float32)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, do_sample=False),
    ):
        assert Sampler(params).sample(logits) == 1


def test_repetition_looks_at_prompt_and_answer_and_presence_at_the_answer() -> None:
    logits = np.array([4, 3, 2.5], dtype=np.float32)
    repetition = Sampler(SamplingParams(repetition_penalty=2.0), prompt_ids=[0])
    assert [repetition.sample(logits) for _ in range(3)] == [1, 2, 0]
    presence = Sampler(SamplingParams(presence_penalty=1.2), prompt_ids=[0, 0])
    assert [presence.sample(logits) for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(SamplingParams(frequency_penalty=1.2))
    assert [frequency.sample(logits) for _ in range(4)] == [0, 1, 0, 2]


def test_repetition_comes_before_presence() -> None:
    logits = np.array([1.0, -0.2], dtype=np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), [])
    assert sampler.sample(logits) == 0
    # 1 / 2 - 1 = -0.5; the other order gives 0, which would win.
    assert sampler.sample(logits) == 1


@pytest.mark.parametrize("size", [5, VOCAB, 151_936])
def test_the_same_seed_draws_the_same_tokens(size: int) -> None:
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=3407)
    runs = []
    for _ in range(2):
        sampler = Sampler(params)
        runs.append([sampler.sample(_logits(step, size)) for step in range(5)])
    assert runs[0] == runs[1]


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probabilities).astype(np.float32) * 2  # temperature 2 undoes it
    sampler = Sampler(SamplingParams(temperature=2.0, top_p=0.85, seed=0))
    counts = Counter(sampler.sample(logits) for _ in range(5_000))
    expected = probabilities[:3] / 0.9
    assert set(counts) == {0, 1, 2}
    found = np.array([counts[i] for i in range(3)]) / 5_000
    assert np.abs(found - expected).max() < 0.03
    # A distribution that is off by a tenth would be noticed.
    assert np.abs(found - np.array([0.4, 0.4, 0.2])).max() > 0.03


@settings(deadline=None, max_examples=100)
@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=30),
    temperature=st.floats(0, 1e300),
    top_k=st.integers(0, 40),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_the_logits_an_allowed_token_is_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    row = np.array(logits, dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    drawn = Sampler(params).sample(row)
    if top_k:
        assert row[drawn] >= np.sort(row)[-min(top_k, row.size)]
    assert 0 <= drawn < row.size
    assert np.array_equal(row, np.array(logits, dtype=np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_name_the_step(bad: float) -> None:
    sampler = Sampler(SamplingParams())
    logits = _logits(0)
    sampler.sample(logits)
    logits[7] = bad
    with pytest.raises(ExecutionError, match=r"not finite at step 1; got -?(nan|inf) at id 7, 1"):
        sampler.sample(logits)


@pytest.mark.parametrize("shape", [(), (0,), (1, 5)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="wrong shape"):
        Sampler(SamplingParams()).sample(np.zeros(shape, np.float32))


@pytest.mark.parametrize("ids", [[-1], [VOCAB]])
def test_a_prompt_beyond_the_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="beyond the vocabulary"):
        Sampler(SamplingParams(), ids).sample(_logits(0))


# Parameters.


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": 0},
        {"top_p": -0.5},
        {"top_p": 1.01},
        {"top_p": True},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": None},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.0},
        {"seed": "1"},
        {"seed": True},
        {"stop": "text"},
        {"stop": ("",)},
        {"stop": (3,)},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": [1]},
        {"ignore_eos": 1},
        {"do_sample": 1},
        {"do_sample": True},
    ],
)
def test_bad_parameters_are_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name} makes no sense|temperature 0"):
        SamplingParams(**values)


def test_numpy_numbers_are_numbers() -> None:
    params: Any = {"seed": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(4)}
    assert not SamplingParams(**params).is_greedy

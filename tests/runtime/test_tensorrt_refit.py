"""Refits of running TensorRT engines, on the scripted TensorRT: both engines change, or neither."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # the bundles are exported here

from motrt.engines.errors import ExecutionError
from motrt.runtime import GenerationParams, Runtime, SamplingParams
from tensorrt_stage import CAPACITY, Stage

PARAMS = GenerationParams(num_frames=1, height=32, width=32, num_inference_steps=2, seed=3)


def _opened(place: Stage, **options: Any) -> Runtime:
    from motrt.engines.tensorrt_backend import TensorRtBackend

    return Runtime.open(
        place.root,
        backend=lambda b: TensorRtBackend(b, flavour="tensorrt-rtx", **options),
        capacity=2048,
    )


def _state(runtime: Runtime) -> tuple[list[int], bytes]:
    """Both modes as users have them: an answer's tokens, and latents."""
    answer = runtime.reason("Hello", SamplingParams(max_new_tokens=6))
    return answer.token_ids, runtime.generate("A red square.", PARAMS).latents.tobytes()


@pytest.fixture
def place(stage: Callable[..., Stage], request: pytest.FixtureRequest) -> Stage:
    weights = getattr(request, "param", "refit")
    return stage("nano-like", "portable", weights, max_context=2048)


@pytest.mark.parametrize("place", ["refit", "inputs"], indirect=True)
@pytest.mark.parametrize("residency", ["separate", "swap"])
def test_a_b_a_gives_the_bits_back(
    place: Stage, checkpoint: Callable[..., Path], residency: str
) -> None:
    with _opened(place, residency=residency) as runtime:
        before = _state(runtime)
        result = runtime.refit(checkpoint("nano-like", seed=1))
        assert result.changed
        between = _state(runtime)
        assert between[1] != before[1]
        again = runtime.refit(checkpoint("nano-like", seed=1))
        assert not again.changed
        runtime.refit(restore=True)
        assert _state(runtime) == before
    with Runtime.open(place.root, capacity=2048) as reference:  # ONNX Runtime
        reference.refit(checkpoint("nano-like", seed=1))
        latents = np.frombuffer(_state(reference)[1], np.float32)
    got = np.frombuffer(between[1], np.float32)
    assert np.abs(got - latents).max() <= 1e-3 * np.abs(latents).max()


def test_only_what_changed_moves(place: Stage, checkpoint: Callable[..., Path]) -> None:
    from motrt.engines.tensorrt_backend.weights import Refit

    moved: list[int] = []
    call = Refit.__call__

    def count(self: Refit) -> None:
        moved.append(len(self._names))
        call(self)

    with pytest.MonkeyPatch.context() as patch, _opened(place) as runtime:
        _state(runtime)
        patch.setattr(Refit, "__call__", count)
        result = runtime.refit(checkpoint("nano-like", seed=1))
    assert sum(moved) <= result.tensors["moved"]
    assert len(moved) == 2


FAULTS = [
    "refit_cuda_engine_async:reasoner",
    "refit_cuda_engine_async:generator",
    "execute_async_v3:generator",
    "set_named_weights:norm_moe_gen.weight",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_if_one_engine_fails_neither_changes(
    place: Stage, checkpoint: Callable[..., Path], fault: str
) -> None:
    with _opened(place) as runtime:
        before = _state(runtime)
        place.trt.faults[fault] = 1
        with pytest.raises(ExecutionError, match="TensorRT d"):
            runtime.refit(checkpoint("nano-like", seed=1))
        assert place.trt.faults[fault] == 0
        assert _state(runtime) == before
        assert runtime.refit(checkpoint("nano-like", seed=1)).changed
        assert _state(runtime) != before


@pytest.mark.parametrize("place", ["inputs"], indirect=True)
def test_weights_that_both_read_come_back_too(
    place: Stage, checkpoint: Callable[..., Path]
) -> None:
    with _opened(place) as runtime:
        before = _state(runtime)
        place.trt.faults["execute_async_v3:generator"] = 2  # the probe runs before and after
        with pytest.raises(ExecutionError, match="did not run the generator"):
            runtime.refit(checkpoint("nano-like", seed=1))
        place.trt.faults.clear()
        assert _state(runtime) == before


def test_an_engine_that_is_not_open_comes_with_the_new_weights(
    place: Stage, checkpoint: Callable[..., Path]
) -> None:
    with _opened(place) as runtime:
        runtime.refit(checkpoint("nano-like", seed=1))
        fresh = _state(runtime)
    with _opened(place) as runtime:
        _state(runtime)
        runtime.refit(checkpoint("nano-like", seed=1))
        assert _state(runtime) == fresh


def test_a_branch_of_other_weights_is_refused(
    place: Stage, checkpoint: Callable[..., Path]
) -> None:
    from motrt.engines.probe_inputs import probe_feeds

    with _opened(place) as runtime:
        backend: Any = runtime._backend
        branch = backend.generator().branch({}, {})
        feeds = probe_feeds(runtime.bundle.generator_contract())
        branch(feeds)
        runtime.refit(checkpoint("nano-like", seed=1))
        with pytest.raises(ExecutionError, match="other weights than when this branch began"):
            branch(feeds)


def test_a_plan_that_does_not_take_the_probe_is_refitted_without(
    stage: Callable[..., Stage], checkpoint: Callable[..., Path]
) -> None:
    from motrt.engines.plans import ClipSize

    place = stage("nano-like", "portable", max_context=2048, sizes=(ClipSize(1, 256, 256),))
    with _opened(place) as runtime:
        backend: Any = runtime._backend
        backend.generator()
        result = runtime.refit(checkpoint("nano-like", seed=1))
        assert result.changed
        assert result.probe["generator"]["after"] is None


def test_closing_frees_the_device(place: Stage) -> None:
    with _opened(place) as runtime:
        _state(runtime)
        assert place.cuda.used > CAPACITY
    del runtime
    gc.collect()
    assert (place.cuda.used, place.cuda.pinned) == (0, {})

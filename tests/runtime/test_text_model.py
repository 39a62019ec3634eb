"""The reasoner over token ids: however tokens are fed, the numbers are those of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.bundle import Bundle
from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.export.torch_backend import TorchBackend
from motrt.runtime.positions import text_positions
from motrt.runtime.text_model import TextModel, TokenSequence

IDS = np.random.RandomState(7).randint(0, 500, 300).tolist()
BACKENDS: dict[str, Callable[[Bundle], Any]] = {
    "separate": lambda bundle: OnnxRuntimeBackend(bundle, threads=2),
    "shared": lambda bundle: OnnxRuntimeBackend(bundle, residency="shared", threads=2),
    "swap": lambda bundle: OnnxRuntimeBackend(bundle, residency="swap", threads=2),
    "torch": TorchBackend,
}
CASES = [
    ("nano-like", "native", "separate"),
    ("nano-like", "portable", "separate"),
    ("edge-like", "native", "shared"),
    ("edge-like", "portable", "shared"),
    ("shared", "native", "swap"),
    ("super-like", "native", "torch"),
    ("edge-like", "native", "torch"),
]


@pytest.fixture(params=CASES, ids="-".join)
def opened(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Iterator[Any]:
    kind, lowering, backend = request.param
    found = Bundle.open(bundle(kind, "fp32", lowering))
    engine = BACKENDS[backend](found)
    yield lambda **options: TextModel(found, engine, **{"capacity": 512, **options})
    engine.close()


def _close(a: Any, b: Any) -> None:
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_prefill_and_decode_equal_one_call(opened: Callable[..., TextModel]) -> None:
    model = opened()
    one = TokenSequence(model)
    expected = one.extend(IDS[:20])
    for split in (1, 7, 19):
        parts = TokenSequence(model)
        parts.extend(IDS[:split])
        for token in IDS[split:19]:
            parts.extend([token])
        _close(parts.extend([IDS[19]]), expected)
        for name, array in one.context().items():
            _close(parts.context()[name], array)


def test_chunks_equal_one_call_across_a_growing_cache(opened: Callable[..., TextModel]) -> None:
    expected = TokenSequence(opened(chunk_size=1000)).extend(IDS)
    _close(TokenSequence(opened(chunk_size=37)).extend(IDS), expected)


def test_the_last_token_matters(opened: Callable[..., TextModel]) -> None:
    """The sibling that a tolerance needs: one wrong token is far outside it."""
    model = opened()
    a = TokenSequence(model).extend(IDS[:20])
    b = TokenSequence(model).extend([*IDS[:19], (IDS[19] + 1) % 500])
    assert np.abs(a - b).max() > 1e-2 * np.abs(a).max()


def test_a_prefix_is_reused(opened: Callable[..., TextModel]) -> None:
    model = opened()
    sequence = TokenSequence(model)
    sequence.extend(IDS[:50])
    wanted = [*IDS[:30], *IDS[200:230]]
    assert sequence.rewind_to_prefix_of(wanted) == 30
    logits = sequence.extend(wanted[30:])
    fresh = TokenSequence(model)
    _close(logits, fresh.extend(wanted))
    for name, array in fresh.context().items():
        _close(sequence.context()[name], array)
    assert sequence.rewind_to_prefix_of(wanted) == len(wanted) - 1
    _close(sequence.extend(wanted[-1:]), logits)


def test_the_capacity_is_exact(opened: Callable[..., TextModel]) -> None:
    model = opened(capacity=40)
    sequence = TokenSequence(model)
    sequence.extend(IDS[:39])
    sequence.extend(IDS[39:40])
    with pytest.raises(ConfigError, match="got 41 tokens; expected at most 40"):
        sequence.extend(IDS[40:41])
    assert len(sequence) == 40
    with pytest.raises(ConfigError, match="at most 40"):
        TokenSequence(model).extend(IDS[:41])


@pytest.mark.parametrize("ids", [[], [-1], [512], [3, 100000]])
def test_ids_that_are_none_are_refused(opened: Callable[..., TextModel], ids: list[int]) -> None:
    with pytest.raises(ConfigError):
        TokenSequence(opened()).extend(ids)


def test_bfloat16_is_refused_on_the_cpu(bundle: Callable[..., Path]) -> None:
    with pytest.raises(ExecutionError, match=r"cannot run bfloat16.*--precision fp32"):
        OnnxRuntimeBackend(Bundle.open(bundle("nano-like", "bf16", "portable")))


def test_a_provider_that_is_not_there_is_an_error(bundle: Callable[..., Path]) -> None:
    found = Bundle.open(bundle("nano-like"))
    with pytest.raises(ExecutionError, match="provider is not there; got CUDAExecutionProvider"):
        OnnxRuntimeBackend(found, providers=["CUDAExecutionProvider"])


def test_rotary_rows_of_text_are_computed_once_and_equal(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Bundle.open(bundle("nano-like"))
    model = TextModel(found, OnnxRuntimeBackend(found, threads=1), capacity=8192)
    rows: list[int] = []
    real = model.rotary

    def counted(positions: np.ndarray[Any, Any]) -> Any:
        rows.append(positions.shape[1])
        return real(positions)

    monkeypatch.setattr(model, "rotary", counted)
    for start in range(0, 8192, 256):
        for got, expected in zip(
            model.text_rotary(start, 256), real(text_positions(start, 256)), strict=True
        ):
            assert np.array_equal(got, expected)
    assert rows == [1024, 2048, 4096, 8192]

"""Rotary axes and tables equal diffusers' rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers.models.transformers.transformer_cosmos3 import (
    Cosmos3VLTextRotaryEmbedding,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.model_config import ModelConfig
from motrt.engines.rotary import HEIGHT, TIME, WIDTH, rotary_axes, rotary_tables
from motrt.export.torch_rotary import reference_inv_freq


def _reference(config: ModelConfig) -> Any:
    return Cosmos3VLTextRotaryEmbedding(config.head_dim, config.rope_theta, config.rope_axes_dim)


def _diffusers_tables(config: ModelConfig, positions: np.ndarray) -> list[np.ndarray]:
    tables = _reference(config)(torch.from_numpy(positions)[:, None], "cpu", torch.float32)
    return [table[0, :, : config.head_dim // 2].numpy() for table in tables]


def _ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance between two float32 arrays, in steps of the format."""
    steps = [np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) for bits in map(_bits, (a, b))]
    return int(np.abs(steps[0] - steps[1]).max())


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32).astype(np.int64)


@given(
    half=st.integers(1, 64),
    axes=st.tuples(*[st.integers(0, 40)] * 3),
)
@settings(deadline=None, max_examples=200)
def test_axes_equal_diffusers_slices(half: int, axes: tuple[int, int, int]) -> None:
    config = ModelConfig(head_dim=2 * half, rope_axes_dim=axes)
    # Each axis of this "angle" is its own number, so what remains is which axis was taken.
    angles = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, half).clone()
    taken = _reference(config).apply_interleaved_mrope(angles, axes)
    assert rotary_axes(config) == tuple(taken[0, 0].int().tolist())


def test_axes_of_the_published_models() -> None:
    axes = rotary_axes(ModelConfig())
    assert [axes.count(axis) for axis in (TIME, HEIGHT, WIDTH)] == [24, 20, 20]
    assert axes[:6] == (TIME, HEIGHT, WIDTH) * 2
    assert axes[60:] == (TIME,) * 4
    # Shares of 20 want slots up to 59; only 32 exist.
    narrow = rotary_axes(ModelConfig(head_dim=64))
    assert [narrow.count(axis) for axis in (TIME, HEIGHT, WIDTH)] == [11, 11, 10]


@pytest.mark.parametrize(("theta", "head_dim"), [(5e6, 128), (1e8, 128), (1e4, 64), (7e5, 6)])
def test_frequencies_are_diffusers(theta: float, head_dim: int) -> None:
    config = ModelConfig(rope_theta=theta, head_dim=head_dim)
    inv_freq = reference_inv_freq(config)
    assert inv_freq.dtype == np.float32
    assert np.array_equal(inv_freq, _reference(config).inv_freq.numpy())


@pytest.mark.parametrize("theta", [5e6, 1e8])
def test_tables_are_within_one_ulp_of_diffusers(theta: float) -> None:
    config = ModelConfig(rope_theta=theta)
    rng = np.random.default_rng(0)
    time = np.concatenate(
        [np.arange(4000), 15000 + np.arange(2000) / 4, 15000 + rng.random(6000) * 3000]
    )
    space = rng.integers(0, 300, (2, len(time)))
    positions = np.concatenate([time[None], space]).astype(np.float32)
    axes = rotary_axes(config)
    got = rotary_tables(reference_inv_freq(config), axes, positions)
    want = _diffusers_tables(config, positions)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == (len(time), 64)
        assert _ulps(ours, theirs) <= 1

    # The bound sees a better angle, a rounded frequency and a swapped axis.
    exact = positions.astype(np.float64).T[:, list(axes)] * reference_inv_freq(config)
    assert _ulps(np.cos(exact).astype(np.float32), want[0]) > 1000
    off = reference_inv_freq(config) * np.float32(1 + 1e-6)
    assert _ulps(rotary_tables(off, axes, positions)[0], want[0]) > 1000
    swapped = tuple({TIME: TIME, HEIGHT: WIDTH, WIDTH: HEIGHT}[axis] for axis in axes)
    assert _ulps(rotary_tables(reference_inv_freq(config), swapped, positions)[0], want[0]) > 1000

"""Patches equal diffusers' packing, exactly, and come back as they were."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.runtime.patches import patch_grid, patchify, unpatchify


@given(
    channels=st.integers(1, 5),
    frames=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    patch=st.integers(1, 3),
)
@settings(deadline=None, max_examples=200)
def test_patches_equal_diffusers(
    channels: int, frames: int, height: int, width: int, patch: int
) -> None:
    shape = (channels, frames, height, width)
    latents = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    config = SimpleNamespace(latent_patch_size=patch, latent_channel=channels)
    model = SimpleNamespace(config=config)
    transformer = diffusers.Cosmos3OmniTransformer
    packed, sizes = transformer._patchify_and_pack_latents(
        model, [torch.from_numpy(latents)[None]]
    )

    patches, grid = patchify(latents, patch)
    assert grid == patch_grid(frames, height, width, patch)
    assert np.array_equal(patches, packed.numpy())

    unpacked = transformer._unpatchify_and_unpack_latents(
        model, packed, [grid], [torch.arange(frames)], sizes
    )
    back = unpatchify(patches, grid, patch, channels, height, width)
    assert np.array_equal(back, unpacked[0][0].numpy())
    assert np.array_equal(back, latents)


def test_patches_keep_dtype_and_are_contiguous() -> None:
    latents = np.ones((48, 2, 5, 8), ml_dtypes.bfloat16)
    patches, grid = patchify(latents, 2)
    assert patches.shape == (24, 192)
    assert grid == (2, 3, 4)
    assert patches.dtype == latents.dtype
    assert patches.flags.c_contiguous
    back = unpatchify(patches, grid, 2, 48, 5, 8)
    assert back.dtype == latents.dtype
    assert back.flags.c_contiguous


def test_patch_order_is_row_column_channel() -> None:
    latents = np.zeros((3, 1, 2, 2), np.float32)
    latents[2, 0, 1, 0] = 1  # channel 2, second row, first column
    assert patchify(latents, 2)[0][0].argmax() == (1 * 2 + 0) * 3 + 2

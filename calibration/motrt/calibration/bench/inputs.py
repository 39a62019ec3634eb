"""Prompts and latents, the same for both sides and for every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from motrt.calibration.bench.sizes import Size
    from motrt.engines.tensors import Array

TIMESTEP = 731.0
FPS = 24.0


def prompt_ids(size: Size, count: int) -> Array:
    """Return int64 ``[count]``."""
    random = np.random.RandomState(count)
    return random.randint(0, size.config["vocab_size"], count).astype(np.int64)


def noise(size: Size, grid: tuple[int, int, int]) -> Array:
    """Return latents of a grid, float32 ``[C, T, H, W]``."""
    random = np.random.RandomState(sum(grid))
    return random.standard_normal((size.config["latent_channel"], *grid)).astype(np.float32)


def num_patches(size: Size, grid: tuple[int, int, int]) -> int:
    """Return N, the generator's tokens of a grid."""
    patch: int = size.config["latent_patch_size"]
    frames, height, width = grid
    return frames * (height // patch) * (width // patch)

"""Latents to patches and back: what the generator's vision tokens are made of.

Tokens are ordered time, row, column; within a patch the order is row, column, channel.

Source: diffusers ``Cosmos3OmniTransformer._patchify_and_pack_latents`` and its inverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Grid = tuple[int, int, int]


def patch_grid(frames: int, height: int, width: int, patch: int) -> Grid:
    """Return how many patches there are in time, from top to bottom, from left to right."""
    return frames, -(-height // patch), -(-width // patch)


def patchify(latents: npt.NDArray[Any], patch: int) -> tuple[npt.NDArray[Any], Grid]:
    """Cut latents into square patches; zeros fill up the last row and column.

    Args:
        latents: ``[C, T, H, W]`` of any dtype; not modified.
        patch: Side of a patch in latent pixels.

    Returns:
        Patches ``[T·h·w, patch·patch·C]``, and the grid ``(T, h, w)``.
    """
    channels, frames, height, width = latents.shape
    grid = patch_grid(frames, height, width, patch)
    _, rows, columns = grid
    margins = ((0, 0), (0, 0), (0, rows * patch - height), (0, columns * patch - width))
    split = np.pad(latents, margins).reshape(channels, frames, rows, patch, columns, patch)
    patches = split.transpose(1, 2, 4, 3, 5, 0)  # [T, h, w, p, p, C]
    return patches.reshape(frames * rows * columns, patch * patch * channels), grid


def unpatchify(
    patches: npt.NDArray[Any], grid: Grid, patch: int, channels: int, height: int, width: int
) -> npt.NDArray[Any]:
    """Put patches together again and cut the filling off.

    Args:
        patches: ``[T·h·w, patch·patch·C]``; not modified.
        grid: What :func:`patchify` returned.
        patch: Side of a patch in latent pixels.
        channels: Latent channels C.
        height: Latent pixels from top to bottom, at most ``h·patch``.
        width: Latent pixels from left to right, at most ``w·patch``.

    Returns:
        Latents ``[C, T, height, width]``, contiguous.
    """
    frames, rows, columns = grid
    split = patches.reshape(frames, rows, columns, patch, patch, channels)
    latents = split.transpose(5, 0, 1, 3, 2, 4)  # [C, T, h, p, w, p]
    latents = latents.reshape(channels, frames, rows * patch, columns * patch)
    return np.ascontiguousarray(latents[:, :, :height, :width])

"""Separable resampling of float32 pictures, as PyTorch's ``interpolate`` does it.

With ``antialias=True`` PyTorch widens the kernel by the factor of reduction, as Pillow does, but
computes in float32. The same arithmetic in the same order, tap by tap, gives the same bits; what
follows (rounding to the grid of 8-bit levels) would turn another last bit into another level.

Source: PyTorch ``aten/src/ATen/native/cpu/UpSampleKernel.cpp``
(``_compute_indices_min_size_weights_aa``, ``separable_upsample_generic_Nd_kernel_impl``).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Indices = npt.NDArray[np.int64]

Kernel = Literal["bilinear", "bicubic"]


def resample(image: Floats, height: int, width: int, kernel: Kernel) -> Floats:
    """Return a picture in another size, antialiased; equals ``interpolate(..., antialias=True)``.

    Args:
        image: ``[H, W, C]`` float32; not modified.
        height: Rows of the result.
        width: Columns of the result.
        kernel: ``bilinear`` (a triangle) or ``bicubic`` (a = -0.5: it may overshoot).

    Returns:
        ``[height, width, C]`` float32.
    """
    columns = np.ascontiguousarray(image.transpose(1, 0, 2))  # columns first: the widths
    narrowed = _along_first(columns, width, kernel)
    return _along_first(np.ascontiguousarray(narrowed.transpose(1, 0, 2)), height, kernel)


def nearest(image: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[Any]:
    """Return a picture in another size as ``interpolate`` without a mode does: pixels are picked.

    Args:
        image: ``[H, W, C]``.
        height: Rows of the result.
        width: Columns of the result.
    """
    rows = _nearest_indices(image.shape[0], height)
    columns = _nearest_indices(image.shape[1], width)
    return image[rows[:, None], columns]


def _nearest_indices(source: int, target: int) -> Indices:
    scale = np.float32(source) / np.float32(target)
    picked = np.floor(np.arange(target, dtype=np.float32) * scale).astype(np.int64)
    indices: Indices = np.minimum(picked, source - 1)
    return indices


def _along_first(image: Floats, size: int, kernel: Kernel) -> Floats:
    """Resample the first axis."""
    first, weights = _taps(image.shape[0], size, kernel)
    shape = (size, *(1 for _ in image.shape[1:]))
    last = image.shape[0] - 1
    total: Floats = image[first] * weights[0].reshape(shape)
    for tap, weight in enumerate(weights[1:], 1):
        # Beyond a row's last tap the weight is 0: which pixel is read there has no influence.
        total = _fused(image[np.minimum(first + tap, last)], weight.reshape(shape), total)
    return total


def _fused(x: Floats, y: Floats | np.float32, z: Floats | np.float32) -> Floats:
    """Return ``x * y + z`` rounded once, as a compiler with fused multiply-add makes of it."""
    total = np.multiply(x, y, dtype=np.float64)  # exact: 24 + 24 bits
    total += z
    return total.astype(np.float32)


@lru_cache(maxsize=16)
def _taps(source: int, target: int, kernel: Kernel) -> tuple[Indices, Floats]:
    """Return each output's first input ``[target]`` and its weights ``[taps, target]``."""
    reach, curve = _KERNELS[kernel]
    scale = np.float32(source) / np.float32(target)
    support = np.float32(reach * float(scale)) if scale >= 1 else np.float32(reach)
    inverse = np.float32(1.0 / float(scale)) if scale >= 1 else np.float32(1.0)
    most = math.ceil(support) * 2 + 1
    # The C++ mixes double literals with float variables; so do these lines.
    centers = (float(scale) * (np.arange(target) + 0.5)).astype(np.float32)
    first = np.maximum(((centers - support).astype(np.float64) + 0.5).astype(np.int64), 0)
    end = np.minimum(((centers + support).astype(np.float64) + 0.5).astype(np.int64), source)
    counts = np.clip(end - first, 0, most)
    weights = np.zeros((most, target), np.float32)
    total = np.zeros(target, np.float32)
    for tap in range(most):
        inside = tap < counts
        offsets = (tap + first).astype(np.float32) - centers
        places = ((offsets.astype(np.float64) + 0.5) * float(inverse)).astype(np.float32)
        weights[tap] = np.where(inside, curve(np.abs(places)), np.float32(0))
        total += weights[tap]
    weights /= np.where(total == 0, np.float32(1), total)
    return first, weights[: max(int(counts.max()), 1)]


def _triangle(x: Floats) -> Floats:
    return np.where(x < 1, np.float32(1) - x, np.float32(0))


def _cubic(x: Floats) -> Floats:
    a = np.float32(-0.5)
    two, three, four, five, eight = (np.float32(n) for n in (2, 3, 4, 5, 8))
    near = _fused(_fused(x, a + two, -(a + three)) * x, x, np.float32(1))
    far = _fused(_fused(_fused(x, a, -five * a), x, eight * a), x, -four * a)
    return np.where(x < 1, near, np.where(x < two, far, np.float32(0)))


_KERNELS: dict[Kernel, tuple[float, Callable[[Floats], Floats]]] = {
    "bilinear": (1.0, _triangle),
    "bicubic": (2.0, _cubic),
}

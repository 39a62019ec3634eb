"""The reasoner's attention bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import MASK_VALUE

if TYPE_CHECKING:
    from motrt.engines.dtypes import DType
    from motrt.engines.tensors import Array


def causal_bias(start: int, count: int, total: int, dtype: DType) -> Array:
    """Return ``[1, 1, count, total]``: 0 up to each query's own index, the mask value beyond."""
    visible = np.arange(total) <= np.arange(start, start + count)[:, None]
    return np.where(visible, 0.0, MASK_VALUE).astype(dtype.numpy)[None, None]


def padded_causal_bias(start: int, count: int, rows: int, dtype: DType) -> Array:
    """Return ``[1, 1, count, rows + count]`` for a past of ``rows`` of which ``start`` are real."""
    past = np.broadcast_to(np.arange(rows) < start, (count, rows))
    own = np.tri(count, dtype=bool)
    visible = np.concatenate([past, own], axis=1)
    return np.where(visible, 0.0, MASK_VALUE).astype(dtype.numpy)[None, None]

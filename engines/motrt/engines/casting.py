"""Weights in another element type, as export and refit write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.dtypes import DType
from motrt.engines.errors import ExportError

if TYPE_CHECKING:
    from motrt.engines.tensors import Array

# The largest finite value, and what to export with instead if it is exceeded.
_LARGEST = {
    DType.FLOAT16: (65504.0, "bf16 or fp32"),
    DType.BFLOAT16: (3.3895313892515355e38, "fp32"),
}


def cast_piece(name: str, piece: Array, dtype: DType) -> Array:
    """Return a piece of a tensor in another type.

    Args:
        name: The tensor, for the message.
        piece: Its values, finite.
        dtype: The new type.

    Raises:
        ExportError: A value is larger than the type's largest.
    """
    wide = piece.astype(np.float32)
    if dtype in _LARGEST:
        largest, wider = _LARGEST[dtype]
        peak = float(np.abs(wide).max(initial=0.0))
        if peak > largest:
            raise ExportError(
                f"a value of {name} does not fit {dtype.label}",
                got=f"{peak:g}",
                expected=f"at most {largest:g}",
                fix=f"Export with --precision {wider}.",
            )
    return wide.astype(dtype.numpy)

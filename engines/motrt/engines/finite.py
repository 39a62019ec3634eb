"""Looking for NaN and infinity in weights, piece by piece, so that memory does not grow with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.dtypes import DType
from motrt.engines.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from motrt.engines.store import WeightStore
    from motrt.engines.tensors import Array

_ZEROS = np.zeros(1 << 16, np.float32)
_CHUNK = 1 << 22  # elements of a piece: 16 MiB of float32

# The bits of each type that are all set in NaN, and in infinity where the type has one. Integer
# arithmetic, because ml_dtypes' isfinite is ten times slower.
_EXPONENT = {
    DType.FLOAT64.numpy: (np.uint64, 0x7FF0000000000000),
    DType.FLOAT32.numpy: (np.uint32, 0x7F800000),
    DType.FLOAT16.numpy: (np.uint16, 0x7C00),
    DType.BFLOAT16.numpy: (np.uint16, 0x7F80),
    DType.FLOAT8_E4M3.numpy: (np.uint8, 0x7F),  # NaN alone: 0x7E is the finite 448
    DType.FLOAT8_E5M2.numpy: (np.uint8, 0x7C),
}


def check_finite(store: WeightStore, advance: Callable[[int], None]) -> None:
    """Read every byte of a store and look at every value.

    Args:
        store: The tensors.
        advance: Called with the number of bytes done since the last call.

    Raises:
        CheckpointError: A tensor holds NaN or infinity; the first such one is named.
    """
    for name in store:
        for piece in pieces(store[name]):
            refuse_nonfinite(name, piece)
            advance(piece.nbytes)


def refuse_nonfinite(name: str, piece: Array) -> None:
    """Look at every value of a piece of a tensor; integers pass.

    Raises:
        CheckpointError: There is NaN or infinity.
    """
    if piece.dtype not in _EXPONENT:
        piece.view(np.uint8).max(initial=0)  # nothing to find, but "read" is promised
        return
    if piece.dtype == np.float32 and piece.ndim == 1 and _is_finite(piece):
        return
    integer, mask = _EXPONENT[piece.dtype]
    bits = piece.view(integer) & integer(mask)
    if bool((bits == mask).any()):
        raise CheckpointError(
            f"tensor {name} holds NaN or infinity",
            got=f"{int((bits == mask).sum())} such values",
            expected="finite weights",
            fix="Repair or replace the checkpoint.",
        )


def _is_finite(piece: Array) -> bool:
    """Whether all are finite, at the speed of memory: 0 · NaN and 0 · ∞ are NaN, in any sum."""
    with np.errstate(invalid="ignore"):
        return all(
            float(np.dot(part, _ZEROS[: part.size])) == 0.0
            for part in (piece[i : i + _ZEROS.size] for i in range(0, piece.size, _ZEROS.size))
        )


def pieces(array: Array) -> Iterator[Array]:
    """Yield an array's elements in order, as flat views of bounded size."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]

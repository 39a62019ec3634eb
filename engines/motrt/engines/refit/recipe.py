"""What a bundle's tensors shall be: the pristine base, a new checkpoint's, adapters on top.

A recipe computes every tensor from the base, never from what an earlier refit left, so the way back
is exact. It yields pieces, so memory does not grow with a tensor, and always the same bits: the
matrix products are made of blocks of rows whose size depends on the shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.casting import cast_piece
from motrt.engines.errors import CheckpointError, ExportError, RefitError
from motrt.engines.finite import pieces, refuse_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from motrt.engines.refit.lora import LowRank
    from motrt.engines.store import WeightStore
    from motrt.engines.tensors import Array

_BLOCK = 1 << 20  # elements of a block of rows: 8 MiB of float64
_FIRST_LOOK = 1 << 12  # bytes: a trained tensor differs somewhere in its first thousand values
_LOOK = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """A recipe for a bundle's transformer.

    Attributes:
        base: The tensors as exported.
        source: A new checkpoint's, of the same names and shapes; or None.
        updates: Low-rank updates by tensor name.
        sources: What a manifest records: one object for each checkpoint and adapter.
    """

    base: WeightStore
    source: WeightStore | None = None
    updates: Mapping[str, tuple[LowRank, ...]] = field(default_factory=dict)
    sources: tuple[dict[str, object], ...] = ()

    def is_verbatim(self, name: str) -> bool:
        """Whether a tensor is the source's (or the base's) own bytes."""
        entry, given = self.base.entries[name], self._given.entries[name]
        return name not in self.updates and entry.dtype is given.dtype

    def stored(self, name: str) -> Array:
        """Return the checkpoint's view of a tensor that :meth:`is_verbatim`."""
        return self._given[name]

    def pieces(self, name: str) -> Iterator[Array]:
        """Yield a tensor's elements in order, flat, in the type in which the bundle stores it.

        Raises:
            RefitError: A value is not finite, or does not fit the type.
        """
        dtype = self.base.entries[name].dtype
        try:
            if self.is_verbatim(name):
                yield from pieces(self.stored(name))
                return
            wide = self._updated(name) if name in self.updates else pieces(self._given[name])
            for piece in wide:
                refuse_nonfinite(name, piece)
                yield cast_piece(name, piece, dtype)
        except (CheckpointError, ExportError) as err:
            raise RefitError(
                f"the new weights are not usable: {err.message}",
                got=err.got,
                expected=err.expected,
                fix="Repair or replace them; the old weights are in place.",
            ) from err

    def check_finite(self, names: Iterable[str], advance: Callable[[int], None]) -> None:
        """Look at every value of tensors that are taken over as they are.

        Raises:
            RefitError: There is NaN or infinity.
        """
        for name in names:
            for piece in self.pieces(name):
                try:
                    refuse_nonfinite(name, piece)
                except CheckpointError as err:
                    raise RefitError(
                        f"the new weights are not usable: {err.message}",
                        got=err.got,
                        expected=err.expected,
                        fix="Repair or replace them; the old weights are in place.",
                    ) from err
                advance(piece.nbytes)

    def differs(self, name: str, store: WeightStore) -> bool:
        """Whether a tensor is another one, bit for bit, than a store's of that name."""
        other = store[name].reshape(-1)
        if self.is_verbatim(name):
            return not same_bytes(self.stored(name), other)
        start = 0
        for piece in self.pieces(name):
            if not same_bytes(piece, other[start : start + piece.size]):
                return True
            start += piece.size
        return False

    @property
    def _given(self) -> WeightStore:
        return self.base if self.source is None else self.source

    def _updated(self, name: str) -> Iterator[Array]:
        """Yield W + Σ factor · up @ down, summed in float64 and rounded to float32 once."""
        matrix, updates = self._given[name], self.updates[name]
        rows = max(1, _BLOCK // matrix.shape[1])
        down = [np.asarray(update.down, np.float64) for update in updates]
        for start in range(0, matrix.shape[0], rows):
            block = matrix[start : start + rows].astype(np.float32).astype(np.float64)
            for update, factor in zip(updates, down, strict=True):
                up = np.asarray(update.up[start : start + rows], np.float64)
                block += update.factor * (up @ factor)
            with np.errstate(over="ignore"):  # what is too large is refused as infinite
                yield block.astype(np.float32).reshape(-1)


def same_bytes(one: Array, other: Array) -> bool:
    """Whether two arrays of one size hold the same bits; quick where they do not."""
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (one, other))
    if a.size != b.size:
        return False
    if a.ctypes.data == b.ctypes.data:
        return True
    start, step = 0, _FIRST_LOOK
    while start < a.size:
        if not np.array_equal(a[start : start + step], b[start : start + step]):
            return False
        start, step = start + step, _LOOK
    return True


def combine(adapters: Iterable[Mapping[str, LowRank]]) -> dict[str, tuple[LowRank, ...]]:
    """Put several adapters' updates of each tensor together; those of factor 0 are none."""
    together: dict[str, tuple[LowRank, ...]] = {}
    for updates in adapters:
        for name, update in updates.items():
            if update.factor:
                together[name] = (*together.get(name, ()), update)
    return together

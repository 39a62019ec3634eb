"""Bringing a checkpoint's weights into a bundle: by link, by copy, or cast into one new file."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from motrt.engines.casting import cast_piece
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import ExportError
from motrt.engines.finite import pieces, refuse_nonfinite
from motrt.engines.safetensors_header import read_header
from motrt.engines.safetensors_writer import write_safetensors
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.weight_names import TIME_EMBEDDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from motrt.engines.tensors import Array

    Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What will happen to a component's tensors.

    Attributes:
        part: Name of the component; its files go to ``weights/<part>/``.
        source: The checkpoint's store, reduced to the tensors in use.
        casts: New type of each tensor that cannot stay as it is.
    """

    part: str
    source: WeightStore
    casts: dict[str, DType]

    @property
    def linked_files(self) -> list[str]:
        """Files of which at least one tensor stays as it is."""
        kept = set(self.source.entries) - set(self.casts)
        return self.source.subset(kept).files

    @property
    def cast_nbytes(self) -> int:
        """Bytes that the casts will write."""
        return sum(
            WeightEntry("", 0, dtype, self.source.entries[name].shape).nbytes
            for name, dtype in self.casts.items()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as the bundle holds them."""
        kept = set(self.source.entries) - set(self.casts)
        return self.source.subset(kept).nbytes + self.cast_nbytes

    @property
    def linked_nbytes(self) -> int:
        """Bytes of the files that are linked (or, if the user says so, copied)."""
        return sum((self.source.root / file).stat().st_size for file in self.linked_files)


def plan_transformer(source: WeightStore, precision: Precision) -> WeightPlan:
    """Decide which tensors must be cast to serve at ``precision``.

    The time embedder computes in float32 whatever the precision, so it keeps float32 weights (as
    diffusers' ``_keep_in_fp32_modules``), and 16-bit ones are cast inside the graph.

    Of a file whose tensors are mostly cast the others move along, so that a bundle never carries
    a file for the few that could stay as they are.
    """
    casts: dict[str, DType] = {}
    for name, entry in source.entries.items():
        is_time = name.startswith(TIME_EMBEDDER)
        keeps = {precision.dtype, DType.FLOAT32} if is_time else {precision.dtype}
        if entry.dtype not in keeps:
            casts[name] = DType.FLOAT32 if is_time else precision.dtype
    balance: dict[str, int] = {}
    for name, entry in source.entries.items():
        balance[entry.file] = balance.get(entry.file, 0) + entry.nbytes * (
            -1 if name in casts else 1
        )
    for name, entry in source.entries.items():
        if balance[entry.file] < 0:
            casts.setdefault(name, entry.dtype)
    return WeightPlan("transformer", source, casts)


def place_weights(
    plan: WeightPlan,
    folder: Path,
    *,
    copy: bool,
    cast_name: str,
    advance: Advance,
    copy_nbytes: int,
) -> dict[str, WeightEntry]:
    """Put a component's tensors under ``folder/weights/<part>/``.

    Args:
        plan: What to do.
        folder: The bundle in the making.
        copy: Copy files instead of linking them.
        cast_name: File name for the cast tensors, if no linked file has it.
        advance: Called with the number of bytes done.
        copy_nbytes: Bytes that copying would take in all components together, for the message
            where linking is refused.

    Returns:
        Each tensor's place in the bundle.

    Raises:
        ExportError: The file system refuses a link, or a value does not fit the new type.
        CheckpointError: A tensor that was read holds NaN or infinity.
    """
    place = PurePosixPath("weights") / plan.part
    target = folder / place
    target.mkdir(parents=True)
    entries: dict[str, WeightEntry] = {}
    for file in plan.linked_files:
        _link(plan.source.root / file, target / file, copy=copy, total=copy_nbytes)
        advance((target / file).stat().st_size)
    for name, entry in plan.source.entries.items():
        if name not in plan.casts:
            file = str(place / entry.file)
            entries[name] = WeightEntry(file, entry.offset, entry.dtype, entry.shape)
    if plan.casts:
        while cast_name in plan.linked_files:
            cast_name = f"cast-{cast_name}"
        _write_casts(plan, target / cast_name, advance)
        for name, item in read_header(target / cast_name).tensors.items():
            file = str(place / cast_name)
            entries[name] = WeightEntry(file, item.offset, item.dtype, item.shape)
    return {name: entries[name] for name in plan.source.entries}


def check_space(folder: Path, needed: int) -> None:
    """Refuse before the work if the disk cannot hold the result.

    Raises:
        ExportError: Too little space.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            "the disk is too full for this bundle",
            got=f"{free:,} bytes free at {folder}",
            expected=f"{needed:,} bytes",
            fix="Free space, or choose another -o.",
        )


def _link(source: Path, target: Path, *, copy: bool, total: int) -> None:
    real = source.resolve()  # hubs' caches are symlinks; a link to a symlink would dangle
    if copy:
        shutil.copyfile(real, target)
        return
    try:
        os.link(real, target)
    except OSError as err:
        raise ExportError(
            "the file system refuses to hard-link the checkpoint's weights",
            got=f"{err.strerror} for {real.name}",
            expected="checkpoint and bundle on one file system that allows links",
            fix=f"Pass --copy-weights to copy {total:,} bytes instead, or choose another -o.",
        ) from err


def _write_casts(plan: WeightPlan, path: Path, advance: Advance) -> None:
    def chunks(name: str) -> Iterator[Array]:
        for piece in pieces(plan.source[name]):
            refuse_nonfinite(name, piece)
            yield cast_piece(name, piece, plan.casts[name])
            advance(piece.size * plan.casts[name].itemsize)

    tensors = {
        name: (dtype, plan.source.entries[name].shape) for name, dtype in plan.casts.items()
    }
    write_safetensors(path, tensors, chunks)

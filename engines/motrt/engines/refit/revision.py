"""A revision on disk: the transformer's graphs and weight files in a folder of their own.

The graphs are links, and find weights where they found them before: relative to their own folder,
at the same offsets of files of the same names. Files without a touched tensor are links to the
base's, a new checkpoint's file of the very same header is linked too, and the rest is written.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.atomic import sync_folder
from motrt.engines.bundle import GRAPHS, MANIFEST, REVISIONS, Bundle, read_manifest
from motrt.engines.errors import BundleError, RefitError
from motrt.engines.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from motrt.engines.refit.recipe import Recipe
    from motrt.engines.safetensors_header import Header

    Advance = Callable[[int], None]

_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Written:
    """What a revision cost.

    Attributes:
        id: Its name.
        written_bytes: Bytes of weight files that were written.
        linked_bytes: Bytes of weight files that were linked.
    """

    id: str
    written_bytes: int
    linked_bytes: int


@contextmanager
def new_revision(bundle: Bundle) -> Iterator[str]:
    """Yield the name of an empty revision folder that is removed unless the block succeeds.

    Raises:
        RefitError: The disk refuses; the bundle is as it was.
    """
    name = secrets.token_hex(6)
    folder = bundle.root / REVISIONS / name
    try:
        folder.mkdir(parents=True)
        yield name
    except OSError as err:
        _drop_unless_in_force(bundle.root, name)
        raise RefitError(
            "cannot write the new weights; the bundle is unchanged",
            got=err.strerror or err,
            expected=f"room and permission to write in {bundle.root}",
            fix="Free space or check permissions, and refit again.",
        ) from err
    except BaseException:
        _drop_unless_in_force(bundle.root, name)
        raise


def write_revision(
    bundle: Bundle, name: str, recipe: Recipe, touched: frozenset[str], advance: Advance
) -> Written:
    """Fill a revision's folder, and wait until it is on the disk.

    Args:
        bundle: The bundle.
        name: The revision's.
        recipe: What the tensors shall be.
        touched: Names of those that differ from the base.
        advance: Called with the number of bytes written since the last call.

    Raises:
        OSError: The disk refuses.
        RefitError: The disk is too small, or links are refused.
    """
    base, folder = bundle.base(), bundle.root / REVISIONS / name
    names: dict[str, list[str]] = {}
    for tensor, entry in recipe.base.entries.items():
        names.setdefault(entry.file, []).append(tensor)
    linked, written = 0, 0
    sources: dict[str, Path | None] = {}
    for file, tensors in names.items():
        if touched.isdisjoint(tensors):
            sources[file] = base.path(file)
        else:
            sources[file] = _same_file(base.path(file), recipe, tensors)
    _check_space(folder, sum(base.path(f).stat().st_size for f, s in sources.items() if s is None))
    for graph in GRAPHS:
        _link(base.path(graph), folder / graph)
    for file, source in sources.items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if source is not None and _link(source, target, may_fail=source != base.path(file)):
            linked += target.stat().st_size
        else:
            _write(base.path(file), target, recipe, frozenset(names[file]), advance)
            written += target.stat().st_size
    with suppress(OSError):  # some file systems cannot sync a folder
        for path in (*{(folder / file).parent for file in names}, folder, folder.parent):
            sync_folder(path)
    return Written(name, written, linked)


def clean(bundle: Bundle) -> None:
    """Remove what refits have left that were killed, or have been replaced.

    Raises:
        BundleError: The revisions' folder is a link: what it points at is none of ours.
    """
    revisions = bundle.root / REVISIONS
    if revisions.is_symlink():
        raise BundleError(
            f"{REVISIONS} is a link", got=revisions, expected="a folder of the bundle's own"
        )
    with suppress(OSError):  # they cost room and nothing else; the write itself will say why
        for path in bundle.root.glob(f".{MANIFEST}.*"):
            path.unlink(missing_ok=True)
    if not revisions.is_dir():
        return
    revision = bundle.manifest.revision
    for path in revisions.iterdir():
        if revision is None or path.name != revision.id:
            drop(path)
    with suppress(OSError):  # one is in force
        revisions.rmdir()


def drop(path: Path) -> None:
    """Remove a revision, whole or not; the folder of revisions too if it was the last."""
    with suppress(OSError):  # what stays is removed by the next refit
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.rmdir()


def _drop_unless_in_force(root: Path, name: str) -> None:
    """Remove a revision that did not come to be: Ctrl-C may have come just after its commit."""
    with suppress(BundleError):  # an unreadable manifest: the next refit cleans up
        revision = read_manifest(root).revision
        if revision is None or revision.id != name:
            drop(root / REVISIONS / name)


def _same_file(base: Path, recipe: Recipe, tensors: list[str]) -> Path | None:
    """Return the new checkpoint's file that can stand for a base file byte by byte, or None."""
    if recipe.source is None or not all(map(recipe.is_verbatim, tensors)):
        return None
    files = {recipe.source.entries[name].file for name in tensors}
    if len(files) != 1:
        return None
    path = (recipe.source.root / files.pop()).resolve()
    return path if read_header(path).sha256 == read_header(base).sha256 else None


def _link(source: Path, target: Path, *, may_fail: bool = False) -> bool:
    """Link a file, through symlinks; one of the bundle's own must be linkable."""
    try:
        os.link(source.resolve(), target)
    except OSError as err:
        if may_fail:  # the checkpoint is on another disk: then it is copied
            return False
        raise RefitError(
            "the file system refuses to hard-link the bundle's own files; it is unchanged",
            got=err.strerror,
            expected="a file system that allows links",
            fix="Move the bundle to one, or export the new weights.",
        ) from err
    return True


def _write(
    base: Path, target: Path, recipe: Recipe, names: frozenset[str], advance: Advance
) -> None:
    """Write a file of a base file's very layout."""
    header = read_header(base)
    with base.open("rb") as old, target.open("xb") as new:
        new.write(old.read(_data_start(header)))
        for name, item in sorted(header.tensors.items(), key=lambda pair: pair[1].offset):
            if name in names:
                for piece in recipe.pieces(name):
                    new.write(np.ascontiguousarray(piece).view(np.uint8).data)
                    advance(piece.nbytes)
            else:  # a tensor that no engine of this bundle has
                old.seek(item.offset)
                _copy(old, new, item.nbytes)
        new.flush()
        os.fsync(new.fileno())


def _copy(old: object, new: object, nbytes: int) -> None:
    while nbytes > 0:
        chunk = old.read(min(_CHUNK, nbytes))  # type: ignore[attr-defined]  # binary files
        new.write(chunk)  # type: ignore[attr-defined]  # see above
        nbytes -= len(chunk)


def _data_start(header: Header) -> int:
    return header.file_bytes - sum(item.nbytes for item in header.tensors.values())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RefitError(
            "the disk is too full for the new weights; the bundle is unchanged",
            got=f"{free:,} bytes free at {folder.parent.parent}",
            expected=f"{needed:,} bytes",
            fix="Free space, and refit again.",
        )

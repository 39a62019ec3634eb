"""A new bundle in the making: beside its place until it is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.engines.bundle import MANIFEST
from motrt.engines.errors import ExportError
from motrt.engines.manifest import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def new_bundle(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder beside ``target`` that becomes ``target`` if the block succeeds.

    Nothing is left behind if it does not, whatever stopped it.

    Raises:
        ExportError: ``target`` exists and may not be replaced, or the disk refuses.
    """
    target = Path(os.path.abspath(target))  # "." has no name, and no place beside it
    if os.path.lexists(target) and not _is_empty_folder(target):
        if not overwrite:
            raise ExportError(
                "the output exists already",
                got=target,
                expected="a new name",
                fix="Choose another -o, or pass --overwrite.",
            )
        if not _is_bundle(target):
            raise ExportError(
                "the output is not a bundle, so it is not replaced",
                got=target,
                expected=f"a folder with a {MANIFEST} of motrt's",
                fix="Choose another -o.",
            )
    absent = [parent for parent in target.parents if not os.path.lexists(parent)]
    folder = None
    try:
        with uninterrupted():
            folder = _make_folder(target)
        yield folder
        folder.chmod(0o755)  # mkdtemp makes 0700
        with uninterrupted():
            _swap(folder, target, overwrite=overwrite)
            absent = []
    except OSError as err:
        if err.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise ExportError(
                "somebody else has written the output meanwhile; theirs was kept",
                got=target,
                expected="one export to a name at a time",
                fix="Choose another -o.",
            ) from err
        raise ExportError(
            "cannot write the bundle; nothing was kept",
            got=err.strerror or err,
            expected=f"room for it in {target.parent}",
            fix="Check free space and permissions there, or choose another -o.",
        ) from err
    finally:
        with uninterrupted():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # somebody else may have put something there by now
                for parent in absent:
                    parent.rmdir()


def _is_empty_folder(path: Path) -> bool:
    with suppress(OSError):  # one that cannot be listed is not known to be empty
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    return False


def _is_bundle(folder: Path) -> bool:
    """Whether motrt, of whatever version, wrote it: any other manifest.json is none of ours."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes()) if os.path.isfile(path) else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def _make_folder(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as err:
        raise ExportError(
            f"cannot write beside {target}",
            got=err.strerror or err,
            expected=f"a folder {target.parent} that can be written to",
            fix="Choose another -o.",
        ) from err


def _swap(folder: Path, target: Path, *, overwrite: bool) -> None:
    if not (overwrite and os.path.lexists(target)):
        folder.rename(target)  # refuses what somebody else has put there meanwhile
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        target.rename(old / "bundle")
        try:
            folder.rename(target)
        except OSError:
            (old / "bundle").rename(target)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C and ``kill`` off to the end of a block that must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    caught: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: caught.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if caught:
            signal.raise_signal(caught[0])

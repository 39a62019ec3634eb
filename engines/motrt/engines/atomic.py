"""Replacing what others read: by one rename, under one lock, and on the disk before it counts."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.engines.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old bytes or the new ones."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp makes 0600
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a rename alone is in memory."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing_alone(root: Path) -> Iterator[None]:
    """Keep other writers off a bundle; the lock goes with the process, however it ends.

    Raises:
        BundleError: Somebody else writes to the bundle now.
    """
    import fcntl  # POSIX alone has it, and opening a bundle must not need it

    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise BundleError(
                "the bundle cannot be locked for writing",
                got=err.strerror,
                expected="one refit or validate at a time",
                fix="Wait for the other one to end.",
            ) from err
        yield
    finally:
        os.close(handle)

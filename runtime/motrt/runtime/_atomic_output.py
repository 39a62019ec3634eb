"""Files and folders that appear under their names only when they are whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAME_NAME = "frame_{:05d}.png"
_FRAME = re.compile(r"frame_\d{5,}\.png")


class AtomicOutput:
    """A temporary name beside the final one, until :meth:`commit`.

    What is never committed goes away: at :meth:`discard`, with the object, or with the process if
    Python ends it.

    Args:
        path: The final name. A link is followed; a file of that name stays as it is until commit.
        folder: Make a folder of numbered frames, not a file.

    Raises:
        ConfigError: Something that must not be replaced bears the name.
        ExportError: The place cannot be written to.
    """

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        self.target = Path(os.path.realpath(path))
        self.folder = folder
        _check_replaceable(self.target, folder=folder)
        name = f".motrt-{secrets.token_hex(6)}{'' if folder else self.target.suffix}"
        self.temporary = self.target.parent / name
        self._removal = weakref.finalize(self, _remove, self.temporary)
        with refusals(self.target):
            if folder:
                self.temporary.mkdir()
            else:
                self.temporary.open("xb").close()

    def commit(self) -> None:
        """Give it its name. OSErrors pass; :func:`refusals` turns them into typed ones."""
        if not self.folder:
            with self.temporary.open("rb") as file:
                os.fsync(file.fileno())
            self.temporary.replace(self.target)
        elif not self.target.exists():
            self.temporary.rename(self.target)
        else:
            _swap(self.temporary, self.target)

    def discard(self) -> None:
        """Remove what was not committed; nothing happens after a commit."""
        self._removal()


@contextmanager
def refusals(target: Path) -> Iterator[None]:
    """Turn the operating system's errors into an :class:`ExportError` that names the output."""
    try:
        yield
    except OSError as err:
        raise ExportError(
            f"cannot write {target}; nothing was kept",
            got=err.strerror or err,
            expected=f"a folder {target.parent} with room for it",
            fix="Check free space and permissions there, or choose another name.",
        ) from err


def _check_replaceable(target: Path, *, folder: bool) -> None:
    if not os.path.lexists(target):
        return
    if not folder:
        if not target.is_file():  # a folder; or a device, which a rename would remove
            raise ConfigError(
                "the output is no file", got=target, expected="a new name, or a file to replace"
            )
        return
    foreign = ["not a folder"]
    if target.is_dir():
        foreign = [name for name in os.listdir(target) if not _FRAME.fullmatch(name)]
    if foreign:
        raise ConfigError(
            f"the output {target} is not replaced",
            got=foreign[0],
            expected=f"a new name, or a folder of frames like {FRAME_NAME.format(0)} alone",
            fix="Choose another name.",
        )


def _swap(new: Path, target: Path) -> None:
    old = new.with_name(f"{new.name}.old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

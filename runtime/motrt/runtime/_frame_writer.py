"""What all writers of frames have in common: checks, the temporary name, the end."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime._atomic_output import AtomicOutput, refusals
from motrt.runtime.images import to_uint8

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from typing_extensions import Self

    from motrt.engines.tensors import Array

_MAX_FPS = 1000


class FrameWriter:
    """What all writers have in common: checks, the temporary name, the end.

    Args:
        path: The final name.
        folder: Whether it is a folder.

    Raises:
        ConfigError: Something that must not be replaced bears the name.
        ExportError: The place cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], *, folder: bool = False) -> None:
        self._output = AtomicOutput(Path(path), folder=folder)
        self._open = ExitStack()  # whatever must be closed before the rename or the removal
        self._shape: tuple[int, ...] = ()
        self.num_frames = 0

    @property
    def path(self) -> Path:
        """The final name."""
        return self._output.target

    def __enter__(self) -> Self:
        return self

    def write(self, frames: Array) -> None:
        """Append frames.

        Args:
            frames: ``[n, H, W, 3]`` or ``[H, W, 3]``: uint8, or floats in [0, 1]; not modified.

        Raises:
            ConfigError: They are no such array, or of another size than those before, or too many.
            ExportError: The disk refuses.
        """
        frames = frames[None] if frames.ndim == 3 else frames
        shape = frames.shape[1:]
        if (
            frames.ndim != 4
            or shape[2] != 3
            or frames.size == 0
            or shape != (self._shape or shape)
        ):
            raise ConfigError(
                f"frames for {self.path.name} have the wrong shape",
                got=list(frames.shape),
                expected=f"[n, {', '.join(map(str, self._shape)) or 'H, W, 3'}]",
            )
        with refusals(self.path):
            if not self._shape:
                self._shape = shape
                self._begin(shape[0], shape[1])
            for frame in frames:
                self._append(self._convert(frame))
                self.num_frames += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the file its name, or remove it if the block failed."""
        try:
            if kind is None:
                self._commit()
        finally:
            try:
                # After a commit nothing is open; after a failure, that failure is what counts.
                with suppress(Exception):
                    self._open.close()
            finally:
                self._output.discard()

    def _commit(self) -> None:
        if self.num_frames == 0:
            raise ConfigError(f"nothing was written to {self.path.name}", got="0 frames")
        with refusals(self.path):
            self._finish()
            self._open.close()
            self._output.commit()

    def _begin(self, height: int, width: int) -> None:
        """Prepare for frames of a size."""

    def _convert(self, frame: Array) -> Array:
        return np.ascontiguousarray(to_uint8(frame))

    def _append(self, frame: Array) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Write what comes after the last frame."""

    def _file(self) -> IO[bytes]:
        return self._open.enter_context(self._output.temporary.open("r+b"))


def as_fps(fps: float | Fraction) -> Fraction:
    """Return frames per second as the ratio that files state; 29.97 becomes 2997/100.

    Raises:
        ConfigError: It is no positive number, or too large.
    """
    try:
        exact = Fraction(fps)
    except (OverflowError, TypeError, ValueError):  # infinity, NaN, no number
        exact = Fraction(0)
    if not 0 < exact <= _MAX_FPS:
        raise ConfigError(
            "frames per second are out of range", got=fps, expected=f"above 0, up to {_MAX_FPS}"
        )
    # MPEG-4 has 16 bits for the clock.
    ratio = exact.limit_denominator(min(1001, int(65535 / exact)))
    return ratio if ratio > 0 else Fraction(1, 1001)

"""Clips and pictures out: frames are written as they come, and the file appears when it is whole.

A writer is a context manager. Until its block ends well there is only a temporary name beside the
final one; an error, Ctrl-C or a full disk removes it, and an older file of the final name stays.

    with open_writer("clip.mp4", fps=24) as writer:
        for frames in vae.decode(latents):
            writer.write(frames)
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime._atomic_output import FRAME_NAME
from motrt.runtime._frame_writer import FrameWriter, as_fps
from motrt.runtime._gif_stream import GifStream
from motrt.runtime._media_libraries import pillow
from motrt.runtime._mp4_stream import Mp4Stream
from motrt.runtime._npz import copy_member, write_member

if TYPE_CHECKING:
    from fractions import Fraction

    from motrt.engines.tensors import Array

_MAX_GIF_FPS = 50  # programs show a delay of less than 1/50 s as 1/10 s


def open_writer(
    path: str | os.PathLike[str],
    *,
    fps: float | Fraction = 24,
    num_frames: int | None = None,
    crf: int | None = None,
) -> FrameWriter:
    """Return the writer for a name: ``.png``, ``.mp4``, ``.gif``, ``.npz``, or a folder of PNGs.

    Args:
        path: The final name. What ends in ``/``, or is a folder already, is a folder.
        fps: Frames per second; pictures have none.
        num_frames: How many will be written, if it is known: too many for one PNG is then an
            error now, not after the work.
        crf: Quality of an MP4; see :class:`Mp4Writer`.

    Raises:
        ConfigError: Unknown suffix, a setting out of range, or something that must not be
            replaced bears the name.
        ExportError: The place cannot be written to.
        MissingDependencyError: The extra ``media`` is not installed.
    """
    name = os.fspath(path)
    suffix = Path(name).suffix.lower()
    if crf is not None and suffix != ".mp4":
        raise ConfigError("only an MP4 has a crf", got=name, expected="a name that ends in .mp4")
    if name and (name.endswith(("/", os.sep)) or Path(name).is_dir()):
        return PngWriter(name, folder=True)
    if suffix == ".png":
        if num_frames is not None and num_frames > 1:
            raise one_picture(Path(name))
        return PngWriter(name)
    if suffix == ".mp4":
        return Mp4Writer(name, fps=fps, crf=18 if crf is None else crf)
    if suffix == ".gif":
        return GifWriter(name, fps=fps)
    if suffix == ".npz":
        return NpzWriter(name, fps=fps)
    raise ConfigError(
        "the output's kind is unknown",
        got=repr(suffix or name),
        expected=".png, .mp4, .gif, .npz, or a folder (a name that ends in /)",
        fix="Choose another name.",
    )


def save_png(image: Array, path: str | os.PathLike[str]) -> None:
    """Write a picture ``[H, W, 3]``, uint8 or floats in [0, 1]; whole or not at all.

    Raises:
        ConfigError: It is no such array.
        ExportError: The disk refuses.
        MissingDependencyError: Pillow is not installed.
    """
    with PngWriter(path, folder=False) as writer:
        writer.write(image)


def one_picture(path: Path) -> ConfigError:
    """Return the error of a clip that shall become one PNG."""
    return ConfigError(
        "a PNG holds one picture",
        got=f"more than one frame for {path.name}",
        expected="one frame",
        fix=f"Name a folder, {path.stem}/, or a clip, {path.stem}.mp4.",
    )


class PngWriter(FrameWriter):
    """One PNG, or a folder of PNGs ``frame_00000.png``, ``frame_00001.png``, and so on.

    Args:
        path: The final name.
        folder: Make a folder; None: if the name does not end in ``.png``. A folder that exists is
            replaced if there is nothing but such frames in it.

    Raises:
        ConfigError: Something that must not be replaced bears the name.
        ExportError: The place cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], *, folder: bool | None = None) -> None:
        pillow()
        is_folder = Path(path).suffix.lower() != ".png" if folder is None else folder
        super().__init__(path, folder=is_folder)

    def _append(self, frame: Array) -> None:
        place = self._output.temporary
        if self._output.folder:
            place /= FRAME_NAME.format(self.num_frames)
        elif self.num_frames:
            raise one_picture(self.path)
        pillow().fromarray(frame).save(place, format="PNG")


class Mp4Writer(FrameWriter):
    """H.264 (libx264, or MPEG-4 where PyAV lacks it), 8 bits, 4:2:0, BT.709.

    Args:
        path: The final name.
        fps: Frames per second.
        crf: 0 (largest) to 51 (smallest); 18 looks like the original.
        codec: ``libx264`` or ``mpeg4``; None chooses.

    An odd height or width, which 4:2:0 does not have, is made even by repeating the last row or
    column.

    Raises:
        ConfigError: A setting is out of range, or something that must not be replaced is there.
        ExportError: The place cannot be written to.
        MissingDependencyError: PyAV is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fps: float | Fraction,
        crf: int = 18,
        codec: str | None = None,
    ) -> None:
        self._stream = Mp4Stream(as_fps(fps), crf=crf, codec=codec)
        super().__init__(path)

    def _begin(self, height: int, width: int) -> None:
        self._stream.open(self._file(), height, width)
        self._open.callback(self._stream.close)

    def _append(self, frame: Array) -> None:
        self._stream.append(frame)

    def _finish(self) -> None:
        self._stream.finish()


class GifWriter(FrameWriter):
    """An animated GIF that repeats for ever, 256 colours a frame.

    Args:
        path: The final name.
        fps: Frames per second, at most 50; delays are whole hundredths of a second, and sum up
            to the right duration.

    Raises:
        ConfigError: ``fps`` is out of range, or something that must not be replaced is there.
        ExportError: The place cannot be written to.
        MissingDependencyError: Pillow is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, fps: float | Fraction) -> None:
        pillow()
        self._fps = as_fps(fps)
        if self._fps > _MAX_GIF_FPS:
            raise ConfigError(
                "a GIF cannot be that fast", got=f"{fps} fps", expected=f"at most {_MAX_GIF_FPS}"
            )
        self._stream: GifStream | None = None
        super().__init__(path)

    def _begin(self, height: int, width: int) -> None:
        self._stream = GifStream(self._file(), height, width)

    def _append(self, frame: Array) -> None:
        assert self._stream is not None
        start, end = (round(100 * i / self._fps) for i in (self.num_frames, self.num_frames + 1))
        self._stream.append(frame, end - start)

    def _finish(self) -> None:
        assert self._stream is not None
        self._stream.finish()


class NpzWriter(FrameWriter):
    """An NPZ with ``frames`` ``[F, H, W, 3]`` as they were written, and ``fps``.

    The frames wait in an unnamed file of the same folder, for an NPZ states F before them.

    Args:
        path: The final name.
        fps: Frames per second, or None.
        arrays: More arrays to write, by name, such as ``Latents.arrays()``.

    Raises:
        ConfigError: Something that must not be replaced bears the name.
        ExportError: The place cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fps: float | Fraction | None = None,
        arrays: dict[str, Array] | None = None,
    ) -> None:
        self._arrays = dict(arrays or {})
        if fps is not None:
            self._arrays["fps"] = np.array(float(as_fps(fps)))
        self._raw: IO[bytes] | None = None
        self._dtype: Any = None
        super().__init__(path)

    def _convert(self, frame: Array) -> Array:
        self._dtype = self._dtype or frame.dtype
        if frame.dtype != self._dtype:
            raise ConfigError("frames are of two types", got=frame.dtype, expected=self._dtype)
        return np.ascontiguousarray(frame)

    def _begin(self, height: int, width: int) -> None:
        del height, width
        self._raw = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 (closed by _open)
        self._open.enter_context(self._raw)

    def _append(self, frame: Array) -> None:
        assert self._raw is not None
        self._raw.write(frame.data)

    def _finish(self) -> None:
        assert self._raw is not None
        self._raw.seek(0)
        shape = (self.num_frames, *self._shape)
        with zipfile.ZipFile(self._file(), "w") as archive:
            copy_member(archive, "frames", shape, self._dtype, self._raw)
            for name, array in self._arrays.items():
                write_member(archive, name, array)

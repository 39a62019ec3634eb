"""Encoding to MP4 through PyAV."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError, ExportError
from motrt.runtime._media_libraries import pyav

if TYPE_CHECKING:
    from fractions import Fraction

    import numpy.typing as npt

_MAX_CRF = 51
_BT709 = 1  # the number of colour space, primaries and transfer curve in ISO/IEC 23091-2
_LIMITED_RANGE = 1  # FFmpeg's AVCOL_RANGE_MPEG


class Mp4Stream:
    """One video stream.

    Args:
        fps: Frames per second.
        crf: Quality, 0 to 51.
        codec: ``libx264`` or ``mpeg4``; None chooses the former if PyAV has it.

    Raises:
        ConfigError: A setting is out of range, or PyAV lacks the codec.
        MissingDependencyError: PyAV is not installed.
    """

    def __init__(self, fps: Fraction, *, crf: int, codec: str | None) -> None:
        self._av = pyav()
        there = [name for name in ("libx264", "mpeg4") if name in self._av.codecs_available]
        if codec not in (None, *there) or not there:
            raise ConfigError("PyAV has no such codec", got=codec, expected=" or ".join(there))
        if not 0 <= crf <= _MAX_CRF:
            raise ConfigError("crf is out of range", got=crf, expected=f"0 to {_MAX_CRF}")
        self._codec = codec or there[0]
        self._fps = fps
        self._crf = crf
        self._count = 0
        self._file: _Recorder | None = None
        self._container: Any = None
        self._stream: Any = None

    def open(self, file: IO[bytes], height: int, width: int) -> None:
        """Begin.

        Raises:
            ExportError: The encoder does not take pictures of that size.
        """
        self._file = _Recorder(file)
        try:
            self._container = self._av.open(self._file, "w", format="mp4")
            stream = self._container.add_stream(self._codec, rate=self._fps)
            stream.height, stream.width = height + height % 2, width + width % 2
            stream.pix_fmt = "yuv420p"
            stream.options = self._options()
            context = stream.codec_context
            context.time_base = 1 / self._fps
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.color_range = _LIMITED_RANGE
            context.open()
        except self._av.FFmpegError as err:
            raise self._refused(err) from err
        self._stream = stream

    def append(self, frame: npt.NDArray[np.uint8]) -> None:
        """Encode a frame ``[H, W, 3]``.

        Raises:
            OSError: The file refuses.
            ExportError: The encoder does.
        """
        height, width, _ = frame.shape
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        picture = self._av.VideoFrame.from_ndarray(frame, format="rgb24")
        picture = picture.reformat(format="yuv420p", dst_colorspace="ITU709")
        picture.pts, picture.time_base = self._count, 1 / self._fps
        self._count += 1
        self._mux(picture)

    def finish(self) -> None:
        """Write what the encoder still holds, and the index.

        Raises:
            OSError: The file refuses.
            ExportError: The encoder does.
        """
        self._mux(None)
        self.close()

    def close(self) -> None:
        """Let go of the encoder; the file stays open.

        Raises:
            OSError: The file refuses.
            ExportError: The encoder does.
        """
        container, self._container = self._container, None
        if container is not None:
            try:
                container.close()
            except self._av.FFmpegError as err:
                raise self._refused(err) from err
        self._raise_recorded()

    def _mux(self, picture: Any) -> None:
        try:
            self._container.mux(self._stream.encode(picture))
        except self._av.FFmpegError as err:
            raise self._refused(err) from err
        self._raise_recorded()

    def _options(self) -> dict[str, str]:
        if self._codec == "libx264":
            return {"crf": str(self._crf)}
        # MPEG-4's scale goes from 2 to 31; about the same look at a third of crf's number.
        scale = str(max(2, round(self._crf / 3)))
        return {"qmin": scale, "qmax": scale}

    def _refused(self, err: Exception) -> Exception:
        self._raise_recorded()
        return ExportError(
            f"{self._codec} could not encode the clip",
            got=getattr(err, "strerror", None) or err,
            fix="Choose another size, or another kind of file.",
        )

    def _raise_recorded(self) -> None:
        if self._file is not None and self._file.error is not None:
            raise self._file.error


class _Recorder:
    """A file that remembers why it refused: FFmpeg forgets it here and there."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None
        self.seek, self.tell, self.read = file.seek, file.tell, file.read

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as err:
            self.error = self.error or err
            raise

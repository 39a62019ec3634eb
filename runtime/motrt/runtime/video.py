"""Clips in: frames one by one from files, folders, Pillow images or arrays; conditioning frames.

Only the frames that are asked for are decoded, and one at a time is held.

Source: diffusers ``VideoProcessor.preprocess_video``, and ``Cosmos3OmniPipeline.prepare_latents``
(video-to-video).
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime._media_libraries import pillow, pyav
from motrt.runtime.images import open_image
from motrt.runtime.resampling import nearest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import numpy.typing as npt
    from PIL.Image import Image

    from motrt.engines.tensors import Array

    Floats = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)

ClipSource: TypeAlias = "str | os.PathLike[str] | Array | Iterable[Image | Array]"
Frame: TypeAlias = "Image | Floats"
Frames: TypeAlias = "Generator[Frame, None, None]"
Keep = Literal["first", "last"]
_T = TypeVar("_T")


def read_clip(source: ClipSource) -> Frames:
    """Return the frames of a clip, one at a time.

    Args:
        source: A video file, a GIF, a folder of PNGs (in the order of the numbers in their
            names), Pillow images or uint8 arrays ``[H, W, 3]``, or an array ``[F, H, W, 3]``:
            uint8, or floats in [0, 1] or [-1, 1] (if one is negative).

    Returns:
        A generator, which to close closes the file: of RGB Pillow images, or of float32 arrays in
        [-1, 1] where the source is an array of floats.

    Raises:
        ConfigError: Nothing there (at once), or damaged, or no clip (when it is found out).
        MissingDependencyError: Pillow or PyAV is not installed.
    """
    if isinstance(source, (str, os.PathLike)):
        return _read_path(Path(source))
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[3] != 3 or source.size == 0:
            raise ConfigError(
                "the clip has the wrong shape", got=list(source.shape), expected="[F, H, W, 3]"
            )
        if source.dtype.kind == "f":
            return _read_floats(source)
    if not isinstance(source, Iterable):
        raise ConfigError(
            "the clip is of another kind",
            got=type(source).__name__,
            expected="a path, an array, or Pillow images",
        )
    return (_as_image(frame) for frame in source)


def preprocess_frame(frame: Frame, height: int, width: int) -> Floats:
    """Return a frame as the VAE takes it, its aspect not kept.

    Pillow images are resized bilinearly, antialiased, on 8-bit levels; arrays of floats by picking
    the nearest pixels: the pipeline does so.

    Returns:
        ``[height, width, 3]`` float32 in [-1, 1].
    """
    if isinstance(frame, np.ndarray):
        return nearest(frame, height, width)
    resized = frame.resize((width, height), resample=pillow().Resampling.BILINEAR)
    levels = np.array(resized, np.float32)
    return np.float32(2) * (levels / np.float32(255)) - np.float32(1)


def conditioning_frames(
    source: ClipSource,
    *,
    height: int,
    width: int,
    num_frames: int,
    latent_indexes: Sequence[int] = (0, 1),
    keep: Keep = "first",
    temporal_factor: int = 4,
) -> Iterator[Floats]:
    """Return the frames from which a video-to-video clip starts, then the last of them repeated.

    Args:
        source: See :func:`read_clip`.
        height: Rows of the result.
        width: Columns of the result.
        num_frames: Frames of the result. Latents of the chosen ones need no more of them than
            ``frames_needed(latent_indexes, temporal_factor)``.
        latent_indexes: Latent frames that the clip determines; the largest says how many frames
            are taken.
        keep: Take them from the clip's start or from its end.
        temporal_factor: The VAE's.

    Returns:
        ``num_frames`` frames ``[height, width, 3]`` float32 in [-1, 1].

    Raises:
        ConfigError: An index lies outside the clip, or ``keep`` is unknown (at once), or the
            clip is damaged or empty (when it is read).
    """
    latent_frames = (num_frames - 1) // temporal_factor + 1
    if not latent_indexes or not all(0 <= index < latent_frames for index in latent_indexes):
        raise ConfigError(
            "the conditioning latent frames lie outside the clip",
            got=list(latent_indexes),
            expected=f"numbers from 0 to {latent_frames - 1}, for {num_frames} frames",
            fix="Choose others (--condition-frames), or make a longer clip (--num-frames).",
        )
    if keep not in ("first", "last"):
        raise ConfigError("unknown part of a clip to keep", got=keep, expected="first or last")
    frames = read_clip(source)
    count = frames_needed(latent_indexes, temporal_factor)
    return _conditioning(frames, count, keep, num_frames, (height, width))


def frames_needed(latent_indexes: Sequence[int], temporal_factor: int = 4) -> int:
    """Return how many frames the latent frames up to the largest index depend on."""
    return max(latent_indexes) * temporal_factor + 1


def repeat_last(frames: Iterable[_T], num_frames: int) -> Iterator[_T]:
    """Yield ``num_frames`` frames: the first ones, then the last of them again and again.

    Raises:
        ConfigError: There is none.
    """
    last = None
    count = 0
    for last in islice(frames, num_frames):
        count += 1
        yield last
    if last is None:
        raise ConfigError("the clip is empty", got="0 frames", expected="at least 1")
    for _ in range(num_frames - count):
        yield last


def _conditioning(
    frames: Frames, count: int, keep: Keep, num_frames: int, size: tuple[int, int]
) -> Iterator[Floats]:
    with closing(frames):
        chosen = islice(frames, count) if keep == "first" else deque(frames, maxlen=count)
        rest = frames if count == num_frames else iter(())
        yield from repeat_last(
            (preprocess_frame(frame, *size) for frame in _told(chosen, count, rest)), num_frames
        )


def _told(chosen: Iterable[_T], count: int, rest: Iterator[object]) -> Iterator[_T]:
    """Pass frames on, and say so if there are fewer than ``count``, or if any is left over.

    A clip that is to be gone on from may be longer: ``rest`` is then empty, and nothing beyond the
    conditioning frames is decoded.
    """
    passed = 0
    for frame in chosen:
        passed += 1
        if passed == count and next(rest, None) is not None:
            logger.warning("the clip has more frames than %d; the rest is left out", count)
        yield frame
    if passed < count:
        logger.warning("the clip has %d frames of %d; its last is repeated", passed, count)


def _read_path(path: Path) -> Frames:
    if path.is_dir():
        files = sorted(path.glob("*.png"), key=_natural)
        if not files:
            raise ConfigError("the folder holds no frames", got=path, expected="PNG files")
        return (open_image(file) for file in files)
    if not path.is_file():
        raise ConfigError("there is no clip", got=path, expected="a video file or a folder")
    return _read_gif(path) if path.suffix.lower() == ".gif" else _read_video(path)


def _natural(path: Path) -> tuple[list[int], str]:
    """Order ``frame2`` before ``frame10``."""
    return [int(number) for number in re.findall(r"\d+", path.stem)], path.name


def _read_gif(path: Path) -> Frames:
    try:
        with pillow().open(path) as image:
            for frame in pillow("ImageSequence").Iterator(image):
                yield frame.convert("RGB")  # a palette cannot be resized smoothly
    except (OSError, ValueError, SyntaxError, EOFError) as err:
        raise _unreadable(path, err) from err


def _read_video(path: Path) -> Frames:
    av = pyav()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ConfigError("the file has no video", got=path, expected="a video stream")
            container.streams.video[0].thread_type = "AUTO"
            for frame in container.decode(video=0):
                levels = frame.to_ndarray(format="rgb24")
                # Phones write what the sensor saw and say by how much to turn it.
                turns = round(getattr(frame, "rotation", 0) / 90) % 4
                yield _image_of(np.rot90(levels, turns))
    except (av.FFmpegError, OSError) as err:
        raise _unreadable(path, err) from err


def _unreadable(path: Path, err: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read the clip {path}",
        got=getattr(err, "strerror", None) or err,
        expected="a whole video file",
    )


def _read_floats(clip: Array) -> Frames:
    low, high = clip.min(), clip.max()
    if not (low >= -1 and high <= 1):  # NaN is in no range
        raise ConfigError(
            "the clip's values are out of range",
            got=f"{low:g} to {high:g}",
            expected="floats in [0, 1] or [-1, 1], or uint8",
        )
    signed = low < 0
    frames = (frame.astype(np.float32) for frame in clip)
    return (frame if signed else np.float32(2) * frame - np.float32(1) for frame in frames)


def _as_image(frame: Any) -> Image:
    if isinstance(frame, np.ndarray):
        if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
            return _image_of(frame)
        got = f"array {frame.dtype} {list(frame.shape)}"
    elif isinstance(frame, pillow().Image):
        return cast("Image", frame.convert("RGB"))
    else:
        got = type(frame).__name__
    raise ConfigError(
        "a frame of the clip is of another kind",
        got=got,
        expected="a Pillow image or an array uint8 [H, W, 3]",
    )


def _image_of(levels: Array) -> Image:
    image: Image = pillow().fromarray(np.ascontiguousarray(levels))
    return image

"""Still pictures: reading, the conditioning image of a clip, PNG.

Source: diffusers ``pipelines/cosmos/pipeline_cosmos3_omni.py``
(``_preprocess_conditioning_image``), ``utils/loading_utils.py`` (``load_image``).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime._media_libraries import pillow
from motrt.runtime.resampling import resample

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image

    from motrt.engines.tensors import Array

    Floats = npt.NDArray[np.float32]

ImageSource: TypeAlias = "str | os.PathLike[str] | Image | Array"


def open_image(source: str | os.PathLike[str]) -> Image:
    """Read a picture file: upright as its EXIF tag says, RGB.

    Raises:
        ConfigError: There is no such file, or it is damaged, too large, or no picture.
        MissingDependencyError: Pillow is not installed.
    """
    module = pillow()
    path = Path(source)
    try:
        with module.open(path) as image:
            upright: Image = pillow("ImageOps").exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, module.DecompressionBombError) as err:
        raise ConfigError(
            f"cannot read the image {path}",
            got=getattr(err, "strerror", None) or err,
            expected="a picture that Pillow reads, such as a PNG or a JPEG",
        ) from err
    return upright


def conditioning_image(source: ImageSource, height: int, width: int) -> Floats:
    """Return the first frame of a clip that starts from an image.

    The picture keeps its aspect: it is resized to cover the frame (antialiased) and what stands
    over is cut off on both sides; then it is rounded to 8-bit levels.

    Args:
        source: A file, a Pillow image, or an array ``[H, W, 3]`` or ``[1, H, W, 3]``: integers
            0-255, or floats in [0, 1], [-1, 1] or 0-255, told apart by their smallest and largest
            value as the pipeline does; not modified.
        height: Rows of the frame.
        width: Columns of the frame.

    Returns:
        ``[height, width, 3]`` float32 in [-1, 1].

    Raises:
        ConfigError: The file is no picture, or the array no RGB picture.
    """
    if height < 1 or width < 1:
        raise ConfigError("a frame has no pixels", got=f"{height} x {width}")
    levels = _levels(source)
    rows, columns = levels.shape[:2]
    scale = max(width / columns, height / rows)
    covering = math.ceil(scale * rows), math.ceil(scale * columns)
    resized = resample(levels, *covering, "bilinear")
    top, left = round((covering[0] - height) / 2), round((covering[1] - width) / 2)
    cut = resized[top : top + height, left : left + width]
    pixels: Floats = np.rint(cut).clip(np.float32(0), np.float32(255))
    return _unit(pixels)


def clip_pixels(clip: Array) -> Floats:
    """Return frames uint8 ``[F, H, W, 3]`` as float32 in [-1, 1].

    Raises:
        ConfigError: They are of another type or shape.
    """
    shape, dtype = np.shape(clip), getattr(clip, "dtype", type(clip).__name__)
    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
        raise ConfigError(
            "only frames can be encoded",
            got=f"{dtype} {list(shape)}",
            expected="uint8 [frames, height, width, 3]",
        )
    return _unit(clip.astype(np.float32))


def _unit(levels: Floats) -> Floats:
    """Scale levels 0-255 to [-1, 1]."""
    pixels: Floats = levels / np.float32(127.5) - np.float32(1)
    return pixels


def to_uint8(frame: Array) -> npt.NDArray[np.uint8]:
    """Return 8-bit levels of pixels: uint8 as they are, floats in [0, 1] rounded.

    Raises:
        ConfigError: Another type, or floats outside [0, 1], or NaN.
    """
    if frame.dtype == np.uint8:
        return frame
    if frame.dtype.kind != "f":
        raise ConfigError("a picture is of another type", got=frame.dtype, expected="uint8, float")
    low, high = frame.min(initial=0), frame.max(initial=0)
    if not (low >= 0 and high <= 1):
        raise ConfigError(
            "a picture's values are out of range",
            got=f"{low:g} to {high:g}",
            expected="floats in [0, 1], or uint8",
        )
    levels: npt.NDArray[np.uint8] = np.rint(frame * frame.dtype.type(255)).astype(np.uint8)
    return levels


def _levels(source: ImageSource) -> Floats:
    """Return ``[H, W, 3]`` float32 in 0-255."""
    if isinstance(source, (str, os.PathLike)):
        source = open_image(source)
    if not isinstance(source, np.ndarray):
        return np.array(_rgb(source), np.float32)
    image = source[0] if source.ndim == 4 and len(source) == 1 else source
    if image.ndim != 3 or image.shape[2] != 3 or image.size == 0 or image.dtype.kind not in "uif":
        raise ConfigError(
            "the image is no RGB picture",
            got=f"{source.dtype} {list(source.shape)}",
            expected="numbers [H, W, 3]",
        )
    levels: Floats = image.astype(np.float32)
    if not np.isfinite(levels).all():
        raise ConfigError("the image holds NaN or infinity", expected="finite numbers")
    if image.dtype.kind == "f":
        if levels.min() < 0:
            levels = (levels + np.float32(1)) * np.float32(127.5)
        elif levels.max() <= 1:
            levels = levels * np.float32(255)
    return levels


def _rgb(source: Any) -> Image:
    if not isinstance(source, pillow().Image):
        raise ConfigError(
            "the image is of another kind",
            got=type(source).__name__,
            expected="a path, a Pillow image or an array",
        )
    image: Image = source.convert("RGB")
    return image

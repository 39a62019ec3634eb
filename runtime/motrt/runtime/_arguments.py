"""Arguments of the wrong kind, refused where they come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from motrt.engines.tensors import Array

_T = TypeVar("_T")


def of_kind(kind: type[_T], name: str, value: object) -> _T:
    """Return a value that is of a kind.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is of the wrong kind", got=type(value).__name__, expected=kind.__name__
        )
    return value


def clip_pixels(clip: Array) -> Array:
    """Return frames uint8 ``[F, H, W, 3]`` as float32 in -1 to 1.

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
    return clip.astype(np.float32) / np.float32(127.5) - 1

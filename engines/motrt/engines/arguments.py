"""Arguments of the wrong kind, refused where they come in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from motrt.engines.errors import ConfigError

_T = TypeVar("_T")


def as_path(name: str, value: object) -> Path:
    """Return a path, from one or from text.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} is no path", got=type(value).__name__, expected="str or Path")
    return Path(value)


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

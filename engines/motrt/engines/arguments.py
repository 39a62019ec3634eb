"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path

from motrt.engines.errors import ConfigError


def as_path(name: str, value: object) -> Path:
    """Return a path, from one or from text.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} is no path", got=type(value).__name__, expected="str or Path")
    return Path(value)

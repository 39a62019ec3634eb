"""The only place that imports Pillow and PyAV."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from motrt.engines.errors import MissingDependencyError


@cache
def pillow(module: str = "Image") -> Any:
    """Return a module of Pillow, such as ``PIL.Image``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    return _load(f"PIL.{module}", "Pillow", "pillow")


@cache
def pyav() -> Any:
    """Return PyAV's module ``av``.

    Raises:
        MissingDependencyError: It is not installed.
    """
    return _load("av", "PyAV", "av")


def _load(module: str, title: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise MissingDependencyError(
            f"{title} is not installed",
            got=str(err),
            expected=distribution,
            fix="Install it with: pip install 'motrt[media]'",
        ) from err

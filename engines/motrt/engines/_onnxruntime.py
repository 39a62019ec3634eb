"""The only place that imports ONNX Runtime."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from motrt.engines.errors import MissingDependencyError


@cache
def onnxruntime() -> Any:
    """Return the module.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        module = importlib.import_module("onnxruntime")
    except ImportError as err:
        raise MissingDependencyError(
            "ONNX Runtime is not installed",
            got=str(err),
            expected="onnxruntime or onnxruntime-gpu",
            fix="Install it with: pip install 'motrt[cpu]' (or 'motrt[gpu]').",
        ) from err
    module.set_default_logger_severity(3)  # errors only; warnings come back as exceptions or not
    return module

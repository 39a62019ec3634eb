"""Parity (and, to come, quantization)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motrt.calibration.parity.compare import validate
    from motrt.calibration.parity.report import ParityReport, Row

__all__ = ["ParityReport", "Row", "validate"]

_HOMES = {
    "ParityReport": "motrt.calibration.parity.report",
    "Row": "motrt.calibration.parity.report",
    "validate": "motrt.calibration.parity.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

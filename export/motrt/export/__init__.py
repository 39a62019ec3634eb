"""From a checkpoint to a bundle, and the command line.

Names are looked up when first used, so that importing the package costs neither torch nor onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motrt.engines.dtypes import Precision
    from motrt.export.pipeline import export_checkpoint
    from motrt.export.result import ExportOptions, ExportResult
    from motrt.export.torch_generator import Generator
    from motrt.export.torch_loading import load_generator, load_reasoner
    from motrt.export.torch_reasoner import Reasoner

__all__ = [
    # Export
    "ExportOptions",
    "ExportResult",
    "Precision",
    "export_checkpoint",
    # The model in PyTorch
    "Generator",
    "Reasoner",
    "load_generator",
    "load_reasoner",
]

_HOMES = {
    "ExportOptions": "motrt.export.result",
    "ExportResult": "motrt.export.result",
    "Generator": "motrt.export.torch_generator",
    "Precision": "motrt.engines.dtypes",
    "Reasoner": "motrt.export.torch_reasoner",
    "export_checkpoint": "motrt.export.pipeline",
    "load_generator": "motrt.export.torch_loading",
    "load_reasoner": "motrt.export.torch_loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""The only place that imports TensorRT: the classic package or TensorRT-RTX.

Both have one API under two names. Everything else asks here for the module that it was told to
use, and asks that module (``hasattr``) for what only one of them has.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import InvalidVersion, Version

from motrt.engines.errors import ConfigError, MissingDependencyError
from motrt.engines.jetson import probe_jetson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.dtypes import DType

Flavour = Literal["tensorrt", "tensorrt-rtx"]

# Module, name for people, lowest version that motrt supports (JetPack 6 has 10.3), extra.
_FLAVOURS: Mapping[Flavour, tuple[str, str, str, str]] = {
    "tensorrt": ("tensorrt", "TensorRT", "10.3", "tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "TensorRT-RTX", "1.7", "rtx"),
}

# By safetensors' code.
_DATA_TYPES: Mapping[str, str] = {
    "F32": "FLOAT",
    "F16": "HALF",
    "BF16": "BF16",
    "F8_E4M3": "FP8",
    "I64": "INT64",
    "I32": "INT32",
    "I8": "INT8",
    "U8": "UINT8",
    "BOOL": "BOOL",
}


@cache
def tensorrt(flavour: Flavour) -> Any:
    """Return the module of a flavour.

    Raises:
        MissingDependencyError: It is not installed, does not load, or is too old.
    """
    module_name, label, floor, _ = _FLAVOURS[flavour]
    try:
        module = importlib.import_module(module_name)
    # A wheel without its libraries raises OSError, one for another CUDA sometimes RuntimeError.
    except (ImportError, OSError, RuntimeError) as err:
        raise MissingDependencyError(
            f"{label} cannot be imported", got=err, fix=_hint(flavour)
        ) from err
    version = str(getattr(module, "__version__", ""))
    if not _at_least(version, floor):
        raise MissingDependencyError(
            f"{label} is too old",
            got=version or "no version",
            expected=f"{floor} or newer",
            fix=_hint(flavour),
        )
    return module


def has_attention(trt: Any) -> bool:
    """Whether networks may hold fused attention: from 10.14 on, and TensorRT-RTX."""
    return hasattr(trt.LayerType, "ATTENTION_INPUT")


def builds_ahead_of_time(trt: Any) -> bool:
    """Whether a GPU architecture can be chosen that is not here: TensorRT-RTX alone."""
    return hasattr(trt.IBuilderConfig, "set_compute_capability")


def knows_aliases(trt: Any) -> bool:
    """Whether an engine says which outputs are written in place: from 10.15 on, and TensorRT-RTX."""
    return hasattr(trt.ICudaEngine, "get_aliased_input_tensor")


def asks_before_capture(trt: Any) -> bool:
    """Whether a context says if a run may be captured: TensorRT-RTX, which compiles as it runs."""
    return hasattr(trt.IExecutionContext, "is_stream_capturable")


def compute_capability(trt: Any, capability: tuple[int, int]) -> Any:
    """Return the value of ``ComputeCapability``; only where it builds ahead of time.

    Raises:
        ConfigError: This version has no such target.
    """
    name = "SM{}{}".format(*capability)
    members = trt.ComputeCapability.__members__
    if name not in members:
        raise ConfigError(
            "this TensorRT has no such target", got=name, expected=", ".join(members)
        )
    return members[name]


def data_type(trt: Any, dtype: DType) -> Any:
    """Return TensorRT's name of an element type.

    Raises:
        ConfigError: It has none.
    """
    name = _DATA_TYPES.get(dtype.value)
    if name is None or not hasattr(trt.DataType, name):
        raise ConfigError(
            "TensorRT has no such element type", got=dtype.label, expected="one of its DataType"
        )
    return getattr(trt.DataType, name)


def module_of(flavour: Flavour) -> str:
    """Return the name of a flavour's Python module."""
    return _FLAVOURS[flavour][0]


def install_hint(flavour: Flavour, *, on_jetson: bool) -> str:
    """Return the command that brings a flavour, or what to do where none does."""
    _, label, _, extra = _FLAVOURS[flavour]
    if not on_jetson:
        return f"pip install 'motrt[{extra}]'"
    if flavour == "tensorrt":
        return (
            f"{label} comes with JetPack: sudo apt install nvidia-jetpack, and make the virtual "
            "environment with --system-site-packages"
        )
    return f"there is no {label} for Jetson: use TensorRT, which comes with JetPack"


def _hint(flavour: Flavour) -> str:
    return f"To install it: {install_hint(flavour, on_jetson=probe_jetson() is not None)}"


def _at_least(version: str, floor: str) -> bool:
    try:
        return Version(version) >= Version(floor)
    except InvalidVersion:
        return False

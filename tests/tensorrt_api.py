"""The part of TensorRT's Python API that motrt calls, and which release has it.

Read off the bindings' sources at the tags v10.3.0, v10.13.3, v10.16 and v11.1 of NVIDIA/TensorRT
(``python/src``), and off the module ``tensorrt_rtx`` 1.7.1. ``tests/engines/plans/test_api.py``
holds the table against the code and against the real module.
"""

from __future__ import annotations

from typing import Any

RELEASES = ("10.3", "10.13", "10.16", "11.x", "rtx")
_ALL = RELEASES
_ATTENTION = ("10.16", "11.x", "rtx")
_AHEAD = ("rtx",)

# What every release has, by class; "" is the module itself.
EVERYWHERE: dict[str, tuple[str, ...]] = {
    "": (
        "Builder",
        "BuilderFlag",
        "DataType",
        "ExecutionContextAllocationStrategy",
        "IBuilderConfig",
        "ICudaEngine",
        "IExecutionContext",
        "ILogger",
        "IProgressMonitor",
        "LayerType",
        "MemoryPoolType",
        "NetworkDefinitionCreationFlag",
        "OnnxParser",
        "ProfilingVerbosity",
        "Refitter",
        "Runtime",
        "TensorIOMode",
        "TensorLocation",
        "Weights",
        "__version__",
    ),
    "Builder": (
        "build_serialized_network",
        "create_builder_config",
        "create_network",
        "create_optimization_profile",
    ),
    "BuilderFlag": ("REFIT_INDIVIDUAL", "STRIP_PLAN", "TF32"),
    "DataType": ("BF16", "BOOL", "FLOAT", "FP8", "HALF", "INT32", "INT64", "INT8", "UINT8"),
    "IBuilderConfig": (
        "add_optimization_profile",
        "builder_optimization_level",
        "clear_flag",
        "profiling_verbosity",
        "progress_monitor",
        "set_flag",
        "set_memory_pool_limit",
    ),
    "IConstantLayer": ("get_output", "weights"),
    "ExecutionContextAllocationStrategy": ("USER_MANAGED",),
    "ICudaEngine": (
        "create_execution_context",
        "get_tensor_dtype",
        "get_tensor_location",
        "get_tensor_mode",
        "get_tensor_name",
        "is_shape_inference_io",
        "num_io_tensors",
        "num_optimization_profiles",
        "refittable",
    ),
    "IExecutionContext": (
        "execute_async_v3",
        "get_tensor_shape",
        "infer_shapes",
        "set_device_memory",
        "set_input_shape",
        "set_optimization_profile_async",
        "set_tensor_address",
        "update_device_memory_size_for_shapes",
    ),
    "ILayer": ("get_input", "num_inputs", "set_input", "type"),
    "ILogger": ("Severity",),
    "INetworkDefinition": (
        "add_constant",
        "get_input",
        "get_layer",
        "mark_weights_refittable",
        "num_inputs",
        "num_layers",
        "remove_tensor",
        "set_weights_name",
    ),
    "IOptimizationProfile": ("set_shape",),
    "ITensor": ("dtype", "name"),
    "LayerType": ("MATRIX_MULTIPLY",),
    "MemoryPoolType": ("TACTIC_DRAM", "WORKSPACE"),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "OnnxParser": ("get_error", "num_errors", "parse"),
    "ParserError": ("desc", "node_name"),
    "ProfilingVerbosity": ("LAYER_NAMES_ONLY",),
    "Refitter": (
        "get_all_weights",
        "get_missing_weights",
        "get_weights_prototype",
        "refit_cuda_engine_async",
        "set_named_weights",
    ),
    "Runtime": ("deserialize_cuda_engine",),
    "Severity": ("ERROR", "INFO", "INTERNAL_ERROR", "VERBOSE", "WARNING"),
    "TensorIOMode": ("INPUT", "OUTPUT"),
    "TensorLocation": ("DEVICE",),
    "Weights": ("dtype", "size"),
}

# What only some have: which, and the function of ``_tensorrt.py`` that asks for it before it is used.
DETECTED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("", "IAttentionInputLayer"): (_ATTENTION, "has_attention"),
    ("LayerType", "ATTENTION_INPUT"): (_ATTENTION, "has_attention"),
    ("IAttentionInputLayer", "attention"): (_ATTENTION, "has_attention"),
    ("IAttention", "name"): (_ATTENTION, "has_attention"),
    ("IAttention", "decomposable"): (_ATTENTION, "has_attention"),
    ("", "ComputeCapability"): (_AHEAD, "builds_ahead_of_time"),
    ("IBuilderConfig", "num_compute_capabilities"): (_AHEAD, "builds_ahead_of_time"),
    ("IBuilderConfig", "set_compute_capability"): (_AHEAD, "builds_ahead_of_time"),
    ("ICudaEngine", "get_aliased_input_tensor"): (_ATTENTION, "knows_aliases"),
    ("IExecutionContext", "is_stream_capturable"): (_AHEAD, "asks_before_capture"),
}


def api_table() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the releases that have each class's attribute."""
    table = {(cls, name): _ALL for cls, names in EVERYWHERE.items() for name in names}
    return table | {key: releases for key, (releases, _) in DETECTED.items()}


def has(release: str, cls: str, name: str) -> bool:
    """Whether a release has an attribute, by the table."""
    return release in api_table().get((cls, name), ())


class Strict:
    """An object of the scripted TensorRT: what its release lacks does not exist, for reading or writing."""

    def __init__(self, release: str, cls: str, **values: Any) -> None:
        object.__setattr__(self, "_release", release)
        object.__setattr__(self, "_cls", cls)
        for name, value in values.items():
            if has(release, cls, name):
                object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"TensorRT {self.__dict__['_release']}: no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        release, cls = self.__dict__["_release"], self.__dict__["_cls"]
        if name != "__class__" and not has(release, cls, name):
            raise AttributeError(f"TensorRT {release}: {cls} has no {name}")
        object.__setattr__(self, name, value)

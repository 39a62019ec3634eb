"""Which graphs and which precisions a backend or a device can serve, and why.

Tables only; what the machine has is found by ``motrt.engines.platform``. Sources: header
comparison of TensorRT 10.3 to 11.4 for the operators, ahead-of-time builds with TensorRT-RTX 1.7
and NVIDIA's support matrix for the precisions, runs on ONNX Runtime 1.32 for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

# The release from which a backend imports opset 24's Attention, RotaryEmbedding,
# RMSNormalization and TensorScatter (for TensorRT-RTX: the first that was tried).
_NATIVE_SINCE = {"onnxruntime": "1.32", "tensorrt": "10.15", "tensorrt-rtx": "1.7"}

ComputeCapability = tuple[int, int]

# Precision, compute capability from which hardware has it, why not below.
_GPU_PRECISIONS: tuple[tuple[str, ComputeCapability, str], ...] = (
    ("fp32", (0, 0), ""),
    ("fp16", (7, 5), "TensorRT 10 and later start at SM 7.5"),
    ("bf16", (8, 0), "bfloat16 arithmetic starts at SM 8.0 (Ampere)"),
    ("int8", (7, 5), "TensorRT 10 and later start at SM 7.5"),
    ("int4", (7, 5), "TensorRT 10 and later start at SM 7.5"),
    ("fp8", (8, 9), "FP8 hardware starts at SM 8.9 (Ada)"),
    ("nvfp4", (10, 0), "FP4 hardware starts at SM 10.0 (Blackwell)"),
)
_CPU_PRECISIONS: tuple[tuple[str, str], ...] = (
    ("fp32", ""),
    ("fp16", ""),
    ("bf16", "ONNX Runtime's CPU provider has no bfloat16 Gemm"),
)
# TensorRT-RTX has kernels for these alone: no SM 8.7 (Orin), 9.0 or 10.x, 11.x (Thor).
_RTX_TARGETS = frozenset({(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)})


@dataclass(frozen=True, slots=True)
class LoweringFit:
    """The lowering to export with for a backend.

    Attributes:
        backend: ``onnxruntime``, ``tensorrt`` or ``tensorrt-rtx``.
        version: Of the backend.
        lowering: ``native`` or ``portable``.
        reason: Why this one.
    """

    backend: str
    version: str
    lowering: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionFit:
    """Whether a device computes in a precision.

    Attributes:
        device: ``cpu``, or the name of a GPU.
        precision: Such as ``fp8``.
        fits: Whether it does; None if nobody can tell.
        reason: Why not, or why nobody can tell; empty if it does.
    """

    device: str
    precision: str
    fits: bool | None
    reason: str


def lowering_fit(backend: str, version: str) -> LoweringFit:
    """Return the lowering that an installed backend can read."""
    since = _NATIVE_SINCE[backend]
    try:
        is_native = Version(version) >= Version(since)
    except InvalidVersion:
        return LoweringFit(backend, version, "portable", f"unreadable version {version!r}")
    if is_native:
        return LoweringFit(backend, version, "native", f"{since} or newer")
    return LoweringFit(
        backend, version, "portable", f"the operators of the native lowering need {since}"
    )


def cpu_precisions() -> tuple[PrecisionFit, ...]:
    """Return what ONNX Runtime computes on a CPU."""
    return tuple(
        PrecisionFit("cpu", precision, not reason, reason) for precision, reason in _CPU_PRECISIONS
    )


def gpu_precisions(device: str, capability: ComputeCapability | None) -> tuple[PrecisionFit, ...]:
    """Return what a GPU computes, by its compute capability."""
    if capability is None:
        why = "compute capability unknown"
        return tuple(PrecisionFit(device, name, None, why) for name, _, _ in _GPU_PRECISIONS)
    return tuple(
        PrecisionFit(device, name, capability >= since, "" if capability >= since else why)
        for name, since, why in _GPU_PRECISIONS
    )


def rtx_refusal(capability: ComputeCapability | None) -> str | None:
    """Return why TensorRT-RTX does not serve a GPU, or None if it does."""
    if capability is None:
        return "compute capability unknown"
    if capability in _RTX_TARGETS:
        return None
    targets = ", ".join(f"{major}.{minor}" for major, minor in sorted(_RTX_TARGETS))
    return f"TensorRT-RTX has kernels for SM {targets}, not for {capability[0]}.{capability[1]}"

"""What this machine is, what is installed on it, and what of motrt that can serve.

Nothing heavy is imported into this process. Every probe reports why it found nothing instead of
failing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from motrt.engines._tensorrt import Flavour, install_hint
from motrt.engines.backend_probe import ABSENT, Backend, probe_onnxruntime, probe_tensorrt
from motrt.engines.capabilities import (
    LoweringFit,
    PrecisionFit,
    cpu_precisions,
    gpu_precisions,
    lowering_fit,
    rtx_refusal,
)
from motrt.engines.host import Cpu, Gpu, Memory, probe_cpu, probe_gpus, probe_memory
from motrt.engines.jetson import Jetson, probe_jetson

# The packages of the extra `export` that a verb cannot do without, and those verbs.
_EXPORT_PACKAGES = {
    "torch": "motrt export, motrt validate",
    "onnx": "motrt export; graphs in motrt inspect --verify",
    "onnx-ir": "motrt export",
    "diffusers": "motrt validate",
    "transformers": "motrt validate",
}
_EXPORT_PYTHON = (
    3,
    11,
)  # lower, no ONNX Runtime, diffusers or transformers that it is tested with


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that is not there.

    Attributes:
        what: The package.
        needed_for: What it would make possible.
        fix: The command that brings it.
    """

    what: str
    needed_for: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A machine, as motrt sees it.

    Attributes:
        motrt: Version of motrt.
        python: Version of Python.
        system: Operating system and its release.
        machine: Processor architecture, such as ``x86_64``.
        cpu: Cores.
        memory: Main memory.
        gpus: NVIDIA GPUs.
        gpu_reason: Why there are none, or None.
        jetson: The board, if this is one.
        onnxruntime: ONNX Runtime.
        tensorrt: The classic TensorRT.
        tensorrt_rtx: TensorRT-RTX.
        packages: Version of each package that exporting and validating need, or None.
        lowerings: What to export for each backend that is installed.
        precisions: What the CPU and each GPU compute in.
        missing: What is not there, with the remedy.
    """

    motrt: str
    python: str
    system: str
    machine: str
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]
    gpu_reason: str | None
    jetson: Jetson | None
    onnxruntime: Backend
    tensorrt: Backend
    tensorrt_rtx: Backend
    packages: dict[str, str | None]
    lowerings: tuple[LoweringFit, ...]
    precisions: tuple[PrecisionFit, ...]
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``motrt doctor --json`` prints: one key for each attribute."""
        return dataclasses.asdict(self)


def probe_platform(root: Path = Path("/")) -> Platform:
    """Look at this machine; never raises for what is absent or broken.

    Args:
        root: Where ``proc/``, ``sys/`` and ``etc/`` are.
    """
    jetson = probe_jetson(root)
    gpus, gpu_reason = probe_gpus()
    if jetson is not None:
        gpus, gpu_reason = _board_gpu(jetson, gpus), None
    backends = {
        "onnxruntime": probe_onnxruntime(),
        "tensorrt": probe_tensorrt("tensorrt"),
        "tensorrt-rtx": probe_tensorrt("tensorrt-rtx"),
    }
    packages = {name: package_version(name) for name in _EXPORT_PACKAGES}
    return Platform(
        motrt=package_version("motrt") or ABSENT,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu=probe_cpu(),
        memory=probe_memory(root),
        gpus=gpus,
        gpu_reason=gpu_reason,
        jetson=jetson,
        onnxruntime=backends["onnxruntime"],
        tensorrt=backends["tensorrt"],
        tensorrt_rtx=backends["tensorrt-rtx"],
        packages=packages,
        lowerings=tuple(
            lowering_fit(name, backend.version)
            for name, backend in backends.items()
            if backend.version is not None
        ),
        precisions=cpu_precisions()
        + tuple(fit for gpu in gpus for fit in gpu_precisions(gpu.name, gpu.compute_capability)),
        missing=tuple(
            _missing_backends(backends, has_gpu=bool(gpus), on_jetson=jetson is not None)
            + _missing_packages(packages)
        ),
    )


def package_version(name: str) -> str | None:
    """Return an installed distribution's version without importing it, or None."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError):
        return None  # the last three: damaged metadata


def _board_gpu(jetson: Jetson, seen: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Fill in what a board's nvidia-smi does not know; older JetPacks have none at all."""
    capability = jetson.compute_capability
    gpus = seen or (Gpu(jetson.model or "Jetson", None, None, None, None),)
    return tuple(
        dataclasses.replace(
            gpu,
            compute_capability=gpu.compute_capability or capability,
            rtx_refusal=rtx_refusal(gpu.compute_capability or capability),
        )
        for gpu in gpus
    )


def _missing_backends(
    backends: dict[str, Backend], *, has_gpu: bool, on_jetson: bool
) -> list[Missing]:
    missing: list[Missing] = []
    extra = "gpu" if has_gpu and not on_jetson else "cpu"
    providers = backends["onnxruntime"].providers
    if backends["onnxruntime"].version is None:
        needed = "bundles on ONNX Runtime; the probe at the end of motrt export; motrt validate"
        missing.append(Missing("onnxruntime", needed, f"pip install 'motrt[{extra}]'"))
    elif extra == "gpu" and "CUDAExecutionProvider" not in providers:
        # Both packages fill one module, so the CPU's has to go first.
        fix = "pip uninstall onnxruntime, then pip install 'motrt[gpu]'"
        missing.append(Missing("onnxruntime-gpu", "ONNX Runtime on the GPU", fix))
    flavours: tuple[Flavour, ...] = ("tensorrt",) if on_jetson else ("tensorrt", "tensorrt-rtx")
    for flavour in flavours:
        if backends[flavour].version is None:
            needed = "TensorRT engines" if has_gpu else "TensorRT engines (on an NVIDIA GPU)"
            fix = install_hint(flavour, on_jetson=on_jetson)
            missing.append(Missing(flavour, needed, fix))
    return missing


def _missing_packages(packages: dict[str, str | None]) -> list[Missing]:
    missing: list[Missing] = []
    floors = _floors("export")
    for name, have in packages.items():
        floor = floors.get(name, SpecifierSet())
        if have is None or not floor.contains(have, prereleases=True):
            what = name if have is None else f"{name}{floor} (have {have})"
            fix = (
                "pip install --upgrade 'motrt[export]'" if have else "pip install 'motrt[export]'"
            )
            missing.append(Missing(what, _EXPORT_PACKAGES[name], fix))
    if sys.version_info < _EXPORT_PYTHON:
        version = ".".join(map(str, _EXPORT_PYTHON))
        needed = "motrt export, motrt validate"
        missing.append(Missing(f"Python {version}", needed, f"use Python {version} to 3.13"))
    return missing


def _floors(extra: str) -> dict[str, SpecifierSet]:
    """Return the versions that motrt's own metadata asks for; none if it is not installed."""
    try:
        lines = importlib.metadata.requires("motrt") or []
        needs = [Requirement(line) for line in lines]
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement, OSError):
        return {}
    return {
        need.name: need.specifier
        for need in needs
        if need.marker is not None and need.marker.evaluate({"extra": extra})
    }

"""What ``motrt doctor`` shows of a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.backend_probe import Backend
from motrt.engines.commands.console import human_bytes, print_json, print_table
from motrt.engines.commands.tables import plain_table
from motrt.engines.platform import Platform, probe_platform

if TYPE_CHECKING:
    from collections.abc import Iterator


def show(*, as_json: bool) -> None:
    """Print what this machine is; what is missing is a result, not an error."""
    machine = probe_platform()
    if as_json:
        print_json(machine.to_dict())
        return
    print_table(plain_table("This machine", ("", ""), _machine(machine)))
    print_table(
        plain_table(
            "\nLowering to export with",
            ("backend", "version", "lowering", "why"),
            [(fit.backend, fit.version, fit.lowering, fit.reason) for fit in machine.lowerings],
        )
    )
    print_table(plain_table("\nPrecisions", ("device", "fits", "does not"), _precisions(machine)))
    if machine.missing:
        print_table(
            plain_table(
                "\nMissing",
                ("what", "needed for", "how to get it"),
                [(item.what, item.needed_for, item.fix) for item in machine.missing],
            )
        )


def _machine(machine: Platform) -> Iterator[tuple[str, str]]:
    yield "motrt", f"{machine.motrt}, Python {machine.python}"
    yield "system", f"{machine.system}, {machine.machine}"
    yield "CPU", f"{machine.cpu.count} cores, {machine.cpu.usable} usable"
    yield "memory", _memory(machine)
    if machine.jetson is not None:
        board = machine.jetson
        release = f"L4T {board.l4t or 'unknown'}, JetPack {board.jetpack or 'unknown'}"
        yield "Jetson", f"{board.model or 'unknown board'}, {release}"
    for gpu in machine.gpus:
        capability = "SM unknown"
        if gpu.compute_capability is not None:
            capability = "SM {}.{}".format(*gpu.compute_capability)
        memory = "shared memory" if gpu.memory_bytes is None else human_bytes(gpu.memory_bytes)
        yield "GPU", f"{gpu.name}, {capability}, {memory}, driver {gpu.driver or 'unknown'}"
        if gpu.rtx_refusal is not None:
            yield "", gpu.rtx_refusal
    if not machine.gpus:
        yield "GPU", f"none ({machine.gpu_reason})"
    yield "ONNX Runtime", _backend(machine.onnxruntime)
    yield "TensorRT", _backend(machine.tensorrt)
    yield "TensorRT-RTX", _backend(machine.tensorrt_rtx)
    for name, version in machine.packages.items():
        yield name, version or "not installed"


def _memory(machine: Platform) -> str:
    memory = machine.memory
    parts = [
        f"{human_bytes(count)} {word}"
        for count, word in (
            (memory.total_bytes, "total"),
            (memory.available_bytes, "available"),
            (memory.limit_bytes, "allowed to this container"),
        )
        if count is not None
    ]
    return ", ".join(parts + ([memory.reason] if memory.reason else []))


def _backend(backend: Backend) -> str:
    if backend.version is None:
        return str(backend.reason)
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in backend.providers)
    return backend.version + (f" ({providers})" if providers else "")


def _precisions(machine: Platform) -> Iterator[tuple[str, str, str]]:
    for device in dict.fromkeys(fit.device for fit in machine.precisions):
        fits = [fit for fit in machine.precisions if fit.device == device]
        yes = ", ".join(fit.precision for fit in fits if fit.fits)
        no = "; ".join(f"{fit.precision}: {fit.reason}" for fit in fits if not fit.fits)
        yield device, yes or "none known", no

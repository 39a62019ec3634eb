# ruff: noqa: N802, N815 - the names are CUDA's
"""A CUDA without a GPU: memory with owners, a stream whose work waits, graphs with baked addresses.

It is stricter than the real one. Device addresses are never used twice, so every use after a free is
seen; what nobody wrote is NaN; and copies from page-locked memory read it when the stream runs, not
when they are asked for.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
CAPABILITY = (8, 9)
ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, OUT_OF_MEMORY, INVALID = 700, 900, 2, 1


class FaultError(Exception):
    """An access that a GPU would answer with an illegal address."""


class Executable:
    """A graph in runnable form."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work: list[Callable[[], None]] | None = list(work)


class ScriptedCuda:
    """Stands for the module ``cuda.bindings.runtime``.

    Attributes:
        faults: Error to return from a function, once each.
        violations: What a careful program does not do.
        calls: Number of calls by function.
    """

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down", cudaMemcpyDeviceToDevice="on"
    )
    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrComputeCapabilityMajor=0, cudaDevAttrComputeCapabilityMinor=1
    )
    cudaError_t = enum.IntEnum("cudaError_t", {"cudaErrorMemoryAllocation": 2})
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")

    def __init__(self, device_bytes: int = 1 << 32) -> None:
        self.device: dict[int, Bytes] = {}
        self.pinned: dict[int, Any] = {}
        self.total = device_bytes
        self.waiting: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.faults: dict[str, int] = {}
        self.violations: list[str] = []
        self.calls: dict[str, int] = {}
        self.executables: list[Executable] = []
        self._next = 0x7000_0000_0000
        self._sticky = 0

    @property
    def used(self) -> int:
        """Bytes of device memory that somebody owns."""
        return sum(memory.nbytes for memory in self.device.values())

    def view(self, address: int, nbytes: int) -> Bytes:
        """Return device memory that is owned, all of it by one allocation."""
        for base, memory in self.device.items():
            if base <= address and address + nbytes <= base + memory.nbytes:
                return memory[address - base : address - base + nbytes]
        raise FaultError(f"{nbytes} bytes at {address:#x}")

    def submit(self, work: Callable[[], None]) -> None:
        """Put work into the stream, or into the recording."""
        (self.waiting if self.recording is None else self.recording).append(work)

    def cudaSetDevice(self, index: int) -> tuple[int]:
        return (self._enter("cudaSetDevice"),)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return self._enter("cudaStreamCreateWithFlags"), 77

    def cudaDeviceGetAttribute(self, which: int, device: int) -> tuple[int, int]:
        return self._enter("cudaDeviceGetAttribute"), CAPABILITY[which]

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return self._enter("cudaMemGetInfo"), self.total - self.used, self.total

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, f"scripted error {int(error)}".encode()

    def cudaGetLastError(self) -> tuple[int]:
        return (0,)

    def cudaMalloc(self, nbytes: int) -> tuple[int, int | None]:
        error = self._enter("cudaMalloc")
        if self.recording is not None:
            return CAPTURE_UNSUPPORTED, None
        if error or self.used + nbytes > self.total:
            return error or OUT_OF_MEMORY, None
        base = self._next
        self._next += -(-nbytes // 512) * 512 + 512
        # What nobody has written is not zero.
        self.device[base] = np.full(nbytes, 0xFF, np.uint8)
        return 0, base

    def cudaFree(self, address: int) -> tuple[int]:
        self._enter("cudaFree")
        if self.recording is not None:
            self.violations.append("device memory freed in a recording")
        else:
            self.cudaStreamSynchronize(0)  # as the real one does
        if self.device.pop(address, None) is None:
            self.violations.append("device memory freed twice")
            return (INVALID,)
        return (0,)

    def cudaMallocHost(self, nbytes: int) -> tuple[int, int | None]:
        error = self._enter("cudaMallocHost")
        if error:
            return error, None
        memory = (ctypes.c_uint8 * nbytes)()
        address = ctypes.addressof(memory)
        self.pinned[address] = memory
        return 0, address

    def cudaFreeHost(self, address: int) -> tuple[int]:
        self._enter("cudaFreeHost")
        if self.recording is not None:
            self.violations.append("page-locked memory freed in a recording")
        else:
            self.cudaStreamSynchronize(0)
        del self.pinned[address]
        return (0,)

    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: str, stream: int
    ) -> tuple[int]:
        error = self._enter("cudaMemcpyAsync")
        if error:
            return (error,)
        if kind == "up":
            is_pinned = any(a <= source < a + len(m) for a, m in self.pinned.items())
            early = None if is_pinned else ctypes.string_at(source, nbytes)

            def up() -> None:
                data = ctypes.string_at(source, nbytes) if early is None else early
                self.view(target, nbytes)[:] = np.frombuffer(data, np.uint8)

            self.submit(up)
        else:
            self.submit(
                lambda: ctypes.memmove(target, self.view(source, nbytes).tobytes(), nbytes)  # type: ignore[arg-type]
            )
        return (0,)

    def cudaMemcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: str,
        stream: int,
    ) -> tuple[int]:
        error = self._enter("cudaMemcpy2DAsync")
        if width > target_pitch or width > source_pitch or kind != "on":
            error = error or INVALID

        def copy() -> None:
            for row in range(height):
                piece = self.view(source + row * source_pitch, width).copy()
                self.view(target + row * target_pitch, width)[:] = piece

        if not error:
            self.submit(copy)
        return (error,)

    def cudaMemsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        error = self._enter("cudaMemsetAsync")
        self.submit(lambda: self.view(target, nbytes).fill(value))
        return (error,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        error = self._enter("cudaStreamSynchronize")
        if self.recording is not None:
            return (CAPTURE_UNSUPPORTED,)
        work, self.waiting = self.waiting, []
        if error or self._sticky:
            return (error or self._sticky,)
        try:
            for each in work:
                each()
        except FaultError:
            self._sticky = ILLEGAL_ADDRESS  # as on a GPU, nothing works any more
        return (self._sticky,)

    def cudaStreamBeginCapture(self, stream: int, mode: str) -> tuple[int]:
        error = self._enter("cudaStreamBeginCapture")
        if self.recording is not None or error:
            return (error or CAPTURE_UNSUPPORTED,)
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, object]:
        error = self._enter("cudaStreamEndCapture")
        work, self.recording = self.recording, None
        return (error or (INVALID if work is None else 0)), work

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, object]:
        error = self._enter("cudaGraphInstantiate")
        executable = Executable(graph)
        if not error:
            self.executables.append(executable)
        return error, executable

    def cudaGraphDestroy(self, graph: object) -> tuple[int]:
        return (self._enter("cudaGraphDestroy"),)

    def cudaGraphLaunch(self, executable: Executable, stream: int) -> tuple[int]:
        error = self._enter("cudaGraphLaunch")
        if executable.work is None:
            return (INVALID,)
        if not error:
            self.waiting += executable.work
        return (error,)

    def cudaGraphExecDestroy(self, executable: Executable) -> tuple[int]:
        self._enter("cudaGraphExecDestroy")
        executable.work = None
        self.executables.remove(executable)
        return (0,)

    def _enter(self, name: str) -> int:
        self.calls[name] = self.calls.get(name, 0) + 1
        return self.faults.pop(name, 0)

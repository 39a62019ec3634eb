"""The only place that imports CUDA: NVIDIA's Python bindings, every return code looked at.

The runtime API works in the device's primary context, so that memory may come from here, from
ONNX Runtime or from PyTorch alike. The device is the first that ``CUDA_VISIBLE_DEVICES`` shows.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ExecutionError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

# The second is the name before CUDA 12.8, which JetPack 6 has.
_MODULES = ("cuda.bindings.runtime", "cuda.cudart")
_LEVERS = (
    "Use residency='swap', a smaller capacity, or plans built with a smaller --max-context and "
    "--max-tokens."
)


@cache
def cuda_runtime() -> Any:
    """Return the module of CUDA's runtime API.

    Raises:
        MissingDependencyError: It is not installed, or does not load.
    """
    found = [_import(name) for name in _MODULES]
    for module in found:
        if not isinstance(module, Exception):
            return module
    raise MissingDependencyError(
        "CUDA's Python bindings cannot be imported",
        got=found[0],
        fix="pip install cuda-bindings, of the CUDA release that the machine has (on JetPack 6: "
        "'cuda-python==12.6.*').",
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as err:  # as with TensorRT
        return err


class Cuda:
    """One stream of one device, and its memory, by address.

    Args:
        api: The module; :func:`cuda_runtime`'s if None.

    Raises:
        ExecutionError: There is no GPU, or no driver for it.
        MissingDependencyError: The bindings are not installed.
    """

    def __init__(self, api: Any = None) -> None:
        self.api = cuda_runtime() if api is None else api
        self._kinds = self.api.cudaMemcpyKind
        self._check("cudaSetDevice", 0)
        # Captures need a stream of their own.
        self.stream = self._check("cudaStreamCreateWithFlags", int(self.api.cudaStreamNonBlocking))

    @property
    def handle(self) -> int:
        """The stream as TensorRT takes it."""
        return int(self.stream)

    def capability(self) -> tuple[int, int]:
        """Return the device's compute capability."""
        attributes = self.api.cudaDeviceAttr
        major = self._check(
            "cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, 0
        )
        minor = self._check(
            "cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, 0
        )
        return int(major), int(minor)

    def free_bytes(self) -> tuple[int, int]:
        """Return the device's free and whole memory."""
        free, total = self._check("cudaMemGetInfo")
        return int(free), int(total)

    def malloc(self, nbytes: int) -> int:
        """Return the address of device memory.

        Raises:
            ExecutionError: There is not that much.
        """
        return self._allocate("cudaMalloc", nbytes)

    def malloc_host(self, nbytes: int) -> int:
        """Return the address of page-locked memory, from which copies need no detour.

        Raises:
            ExecutionError: There is not that much.
        """
        return self._allocate("cudaMallocHost", nbytes)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the host, in the stream's order."""
        self._copy(target, source, nbytes, self._kinds.cudaMemcpyHostToDevice)

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy to the host, in the stream's order."""
        self._copy(target, source, nbytes, self._kinds.cudaMemcpyDeviceToHost)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        """Copy ``height`` pieces of ``width`` bytes within the device, in the stream's order.

        Args:
            target: Address of the first piece's place.
            target_pitch: Bytes from one piece's place to the next.
            source: Address of the first piece.
            source_pitch: Bytes from one piece to the next.
            width: Bytes of a piece.
            height: Number of pieces.
        """
        if width and height:
            self._check(
                "cudaMemcpy2DAsync",
                target,
                target_pitch,
                source,
                source_pitch,
                width,
                height,
                self._kinds.cudaMemcpyDeviceToDevice,
                self.stream,
            )

    def zero(self, target: int, nbytes: int) -> None:
        """Fill with zeros, in the stream's order."""
        if nbytes:
            self._check("cudaMemsetAsync", target, 0, nbytes, self.stream)

    def synchronize(self) -> None:
        """Wait for the stream.

        Raises:
            ExecutionError: Something that it did went wrong.
        """
        self._check("cudaStreamSynchronize", self.stream)

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Leave nothing in the stream behind, whatever happens within.

        Buffers may be filled or freed again only when nobody copies from them any more.
        """
        try:
            yield
        except BaseException:
            self.api.cudaStreamSynchronize(self.stream)  # the first error says more than this one
            raise
        self.synchronize()

    def begin_capture(self) -> None:
        """Record what this thread puts into the stream instead of running it."""
        mode = self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check("cudaStreamBeginCapture", self.stream, mode)

    def end_capture(self) -> Any:
        """Return what was recorded.

        Raises:
            ExecutionError: Something cannot be recorded.
        """
        return self._check("cudaStreamEndCapture", self.stream)

    def abandon_capture(self) -> None:
        """Stop recording, and keep nothing."""
        error, graph = self.api.cudaStreamEndCapture(self.stream)
        if not int(error):
            self.api.cudaGraphDestroy(graph)

    def instantiate(self, graph: Any) -> Any:
        """Return a recording in runnable form, and let go of the recording."""
        try:
            return self._check("cudaGraphInstantiate", graph, 0)
        finally:
            self.api.cudaGraphDestroy(graph)

    def launch(self, executable: Any) -> None:
        """Run a recording, in the stream's order."""
        self._check("cudaGraphLaunch", executable, self.stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: Any) -> None:
        if nbytes:
            self._check("cudaMemcpyAsync", target, source, nbytes, kind, self.stream)

    def _allocate(self, name: str, nbytes: int) -> int:
        error, address = getattr(self.api, name)(nbytes)
        if int(error) == int(self.api.cudaError_t.cudaErrorMemoryAllocation):
            self.api.cudaGetLastError()  # or the next call reports it once more
            where = "GPU" if name == "cudaMalloc" else "host"
            known = self.api.cudaMemGetInfo()
            room = f"{known[1]} of {known[2]} free" if not int(known[0]) else "an unknown rest"
            raise ExecutionError(
                f"the {where} has not enough memory left",
                got=f"{nbytes} bytes wanted, {room} on the GPU",
                fix=_LEVERS,
            )
        self._raise_on(name, error)
        return int(address)

    def _check(self, name: str, *args: Any) -> Any:
        error, *results = getattr(self.api, name)(*args)
        self._raise_on(name, error)
        return results[0] if len(results) == 1 else results

    def _raise_on(self, name: str, error: Any) -> None:
        if not int(error):
            return
        known, text = self.api.cudaGetErrorString(error)
        said = text.decode(errors="replace") if not int(known) else "unknown"
        raise ExecutionError(
            f"CUDA refused {name}",
            got=f"error {int(error)}, {said}",
            expected="success",
            fix="Run motrt doctor: it says which GPU and driver are there.",
        )

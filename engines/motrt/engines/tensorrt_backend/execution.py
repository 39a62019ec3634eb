"""One execution context: shapes and addresses set where they differ, runs checked and captured."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

from motrt.engines._tensorrt import asks_before_capture
from motrt.engines.errors import ExecutionError
from motrt.engines.tensorrt_backend.memory import DeviceBuffer, HostBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.engines.plans.profiles import Profile
    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensorrt_backend.loaded import Loaded
    from motrt.engines.tensors import Array, TensorSpec

Shape = tuple[int, ...]


def choose_profile(engine: str, profiles: Sequence[Profile], dims: Mapping[str, int]) -> int:
    """Return the profile that takes these sizes; of several, the one tuned for the nearest.

    Raises:
        ExecutionError: None does.
    """
    fitting = {
        index: sum(abs(math.log((best or 1) / (dims[name] or 1))) for name, best in tuned)
        for index, profile in enumerate(profiles)
        if _takes(profile, dims)
        for tuned in [[(name, dim[1]) for name, dim in profile.dims.items() if name in dims]]
    }
    if fitting:
        return min(fitting, key=fitting.__getitem__)
    asked = ", ".join(f"{name} {value}" for name, value in dims.items())
    ranges = "; or ".join(
        ", ".join(f"{name} {low} to {high}" for name, (low, _, high) in profile.dims.items())
        for profile in profiles
    )
    raise ExecutionError(
        f"the {engine}'s plan was not built for these sizes",
        got=asked,
        expected=ranges,
        fix="Build it with motrt build --max-context, --max-tokens or --size.",
    )


class Execution:
    """A context of one profile, the buffers of its inputs and outputs, and its captured graph.

    Args:
        device: Where.
        loaded: The engine.
        profile: Index of the profile, for life.
        weights: Addresses of inputs that are weights; empty if weights are constants.
        uses_graph: Whether a run that repeats is captured.

    Raises:
        ExecutionError: TensorRT refuses.
    """

    def __init__(
        self,
        device: Device,
        loaded: Loaded,
        profile: int,
        weights: Mapping[str, int],
        *,
        uses_graph: bool,
    ) -> None:
        self._device, self._loaded = device, loaded
        trt, cuda = device.trt, device.cuda
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = loaded.engine.create_execution_context(strategy)
        if context is None:
            raise device.refused(f"TensorRT makes no context for the {loaded.name}")
        self._context = context
        with cuda.drained():
            if not context.set_optimization_profile_async(profile, cuda.handle):
                raise device.refused(f"TensorRT has no profile {profile} of the {loaded.name}")
        self._uses_graph = uses_graph and device.uses_graphs
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._arena: tuple[int, int] = (0, 0)
        self._needed = 0
        self._has_run = False
        self._graph: _Graph | None = None
        self._on_device: dict[str, DeviceBuffer] = {}
        self._on_host: dict[str, HostBuffer] = {}
        for name, address in weights.items():
            self._set_address(name, address)

    @property
    def is_captured(self) -> bool:
        """Whether the next run of the same shapes and addresses is the launch of a graph."""
        return self._graph is not None

    def buffer(self, name: str, nbytes: int) -> DeviceBuffer:
        """Return an input's or output's own memory, grown if need be; its address may change."""
        have = self._on_device.get(name)
        if have is None or have.nbytes < nbytes:
            self._on_device[name] = have = DeviceBuffer(self._device.cuda, _rounded(nbytes))
        return have

    def put(self, name: str, array: Array) -> int:
        """Copy an array into an input's memory, in the stream's order; return the address."""
        host = self._host(name, array.nbytes)
        host.write(array)
        address = self.buffer(name, array.nbytes).address
        self._device.cuda.upload(address, host.address, array.nbytes)
        return address

    def run(
        self,
        shapes: Mapping[str, Shape],
        addresses: Mapping[str, int],
        outputs: Mapping[TensorSpec, Shape],
    ) -> None:
        """Run once, in the stream's order; the caller holds the arena until the stream is drained.

        Args:
            shapes: Of each input but weights.
            addresses: Of each input but weights, and of each output.
            outputs: The outputs' shapes as the caller expects them.

        Raises:
            ExecutionError: TensorRT refuses, or gives other shapes.
        """
        if self._bind(shapes, addresses, outputs):
            self._forget_graph()
        cuda = self._device.cuda
        if self._graph is None and self._has_run and self._may_capture():
            self._graph = self._capture()
        if self._graph is not None:
            cuda.launch(self._graph.executable)
            return
        # TensorRT prepares itself in the first run: that one must not be captured.
        self._enqueue()
        self._has_run = True

    def fetch(self, name: str, nbytes: int) -> HostBuffer:
        """Copy an output to the host, in the stream's order; it is there once that is drained."""
        host = self._host(name, nbytes)
        self._device.cuda.download(host.address, self._on_device[name].address, nbytes)
        return host

    def weights_changed(self) -> None:
        """Forget the graph: TensorRT does not promise that a refit leaves addresses alone."""
        self._forget_graph()

    def _host(self, name: str, nbytes: int) -> HostBuffer:
        have = self._on_host.get(name)
        if have is None or have.nbytes < nbytes:
            self._on_host[name] = have = HostBuffer(self._device.cuda, _rounded(nbytes))
        return have

    def _bind(
        self,
        shapes: Mapping[str, Shape],
        addresses: Mapping[str, int],
        outputs: Mapping[TensorSpec, Shape],
    ) -> bool:
        """Tell the context what differs from the last run; return whether anything did."""
        context, arena = self._context, self._device.arena
        differs = False
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                self._set_address(name, address)
                differs = True
        if shapes != self._shapes:
            self._shapes = {}  # unknown, should anything be refused
            for name, shape in shapes.items():
                if not context.set_input_shape(name, shape):
                    raise self._device.refused(f"TensorRT does not take {name} {list(shape)}")
            unknown = context.infer_shapes()
            if unknown:
                raise self._device.refused(f"TensorRT lacks shapes of {', '.join(unknown[:3])}")
            for spec, shape in outputs.items():
                have = tuple(context.get_tensor_shape(spec.name))
                if have != shape:
                    raise ExecutionError(
                        f"the {self._loaded.name}'s engine gives another {spec.name}",
                        got=list(have),
                        expected=list(shape),
                        fix="Build the plan again with: motrt build",
                    )
            self._needed = int(context.update_device_memory_size_for_shapes())
            self._shapes = dict(shapes)
            self._arena = (0, 0)
            differs = True
        arena.reserve(self._needed)
        if self._arena != (arena.address, arena.nbytes):
            context.set_device_memory(arena.address, arena.nbytes)
            self._arena = (arena.address, arena.nbytes)
            differs = True
        return differs

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise self._device.refused(f"TensorRT does not take the address of {name}")
        self._addresses[name] = address

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._device.cuda.handle):
            raise self._device.refused(f"TensorRT did not run the {self._loaded.name}")

    def _may_capture(self) -> bool:
        if not self._uses_graph:
            return False
        if asks_before_capture(
            self._device.trt
        ):  # kernels may still be compiled in the background
            return bool(self._context.is_stream_capturable(self._device.cuda.handle))
        return True

    def _capture(self) -> _Graph:
        cuda = self._device.cuda
        cuda.synchronize()  # the inputs' copies belong to this run alone
        cuda.begin_capture()
        try:
            self._enqueue()
        except BaseException:
            cuda.abandon_capture()
            raise
        return _Graph(self._device, cuda.instantiate(cuda.end_capture()))

    def _forget_graph(self) -> None:
        self._graph, self._has_run = None, False


class _Graph:
    """A captured run, destroyed with this object."""

    def __init__(self, device: Device, executable: object) -> None:
        self.executable = executable
        weakref.finalize(self, device.cuda.api.cudaGraphExecDestroy, executable)


def _takes(profile: Profile, dims: Mapping[str, int]) -> bool:
    return all(
        low <= dims[name] <= high for name, (low, _, high) in profile.dims.items() if name in dims
    )


def _rounded(nbytes: int) -> int:
    """Powers of two: buffers that grow with a prompt settle after a few calls."""
    return 1 << max(nbytes - 1, 1).bit_length()

"""The denoiser on TensorRT: a context and a captured graph for each guidance branch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ExecutionError
from motrt.engines.tensorrt_backend.execution import Execution, choose_profile
from motrt.engines.tensorrt_backend.memory import DeviceBuffer, DeviceTensor
from motrt.engines.tensors import check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensorrt_backend.loaded import Loaded
    from motrt.engines.tensors import Array


class TensorRtGenerator:
    """The denoiser.

    Contexts and their buffers are kept for the next generation: only the first one allocates.

    Args:
        device: Where.
        loaded: The engine, with its weights.
        weights: Addresses of inputs that are weights.
    """

    def __init__(self, device: Device, loaded: Loaded, weights: Mapping[str, int]) -> None:
        self.contract = loaded.contract
        self.loaded = loaded
        self.device = device
        self._weights = weights
        self._idle: dict[int, list[Execution]] = {}
        self.revision = 0  # of the weights

    def branch(
        self, context: Mapping[str, Array | DeviceTensor], constants: Mapping[str, Array]
    ) -> TensorRtBranch:
        """Bind what stays the same over all steps of one guidance branch.

        Args:
            context: ``context.{i}.key|value`` of the prompt: a cache's, or arrays.
            constants: Other inputs that do not change: rotary tables, noise masks, domain.

        Raises:
            ContractError: Something has the wrong type or shape.
            ExecutionError: The memory does not hold it.
        """
        return TensorRtBranch(self, context, constants)

    def take(self, profile: int) -> Execution:
        """Return a context that no other branch uses."""
        idle = self._idle.setdefault(profile, [])
        if idle:
            return idle.pop()
        return Execution(self.device, self.loaded, profile, self._weights, uses_graph=True)

    def give_back(self, profile: int, execution: Execution) -> None:
        """Take a context back from a branch that is no more."""
        self._idle[profile].append(execution)

    def weights_changed(self) -> None:
        """Forget captured graphs, and refuse the branches of the weights that are gone."""
        self.revision += 1
        for executions in self._idle.values():
            for execution in executions:
                execution.weights_changed()


class TensorRtBranch:
    """One guidance branch: call it with what changes from step to step."""

    def __init__(
        self,
        generator: TensorRtGenerator,
        context: Mapping[str, Array | DeviceTensor],
        constants: Mapping[str, Array],
    ) -> None:
        self._generator = generator
        self._revision = generator.revision
        self._fixed = {**context, **constants}
        inputs = generator.contract.inputs
        fixed = tuple(spec for spec in inputs if spec.name in self._fixed)
        check_arrays(fixed, self._fixed, engine="generator")
        # Memory of their own: a context's buffers belong to whichever branch holds it.
        self._buffers: dict[str, DeviceBuffer] = {}
        self._addresses: dict[str, int] = {}
        cuda = generator.device.cuda
        with cuda.drained():
            for name, value in self._fixed.items():
                if isinstance(value, DeviceTensor):
                    self._addresses[name] = value.address
                    continue
                array = np.ascontiguousarray(value)
                self._buffers[name] = buffer = DeviceBuffer(cuda, array.nbytes)
                cuda.upload(buffer.address, int(array.ctypes.data), array.nbytes)
                self._addresses[name] = buffer.address
        self._profile: int | None = None
        self._execution: Execution | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the next step is the launch of a graph."""
        return self._execution is not None and self._execution.is_captured

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Predict the velocities; the arrays belong to the caller.

        Raises:
            ContractError: A feed has the wrong type or shape.
            ExecutionError: TensorRT refused, the plan does not take these sizes, or the weights
                are others than those with which the branch began.
        """
        generator = self._generator
        if self._revision != generator.revision:
            raise ExecutionError(
                "the generator has other weights than when this branch began",
                expected="a branch of the present weights",
                fix="Start the generation again.",
            )
        both = {**self._fixed, **feeds}
        dims = check_arrays(generator.contract.inputs, both, engine="generator")
        execution = self._held(choose_profile("generator", generator.loaded.profiles, dims))
        outputs = {spec: spec.sizes(dims) for spec in generator.contract.outputs}
        shapes = {name: tuple(value.shape) for name, value in both.items()}
        with generator.device.arena.used_by("generator"), generator.device.cuda.drained():
            addresses = dict(self._addresses)
            for name, array in feeds.items():
                addresses[name] = execution.put(name, np.ascontiguousarray(array))
            for spec, shape in outputs.items():
                nbytes = spec.nbytes(shape)
                addresses[spec.name] = execution.buffer(spec.name, nbytes).address
            execution.run(shapes, addresses, outputs)
            fetched = {
                spec: execution.fetch(spec.name, spec.nbytes(shape))
                for spec, shape in outputs.items()
            }
        return {
            spec.name: host.read(outputs[spec], spec.dtype.numpy) for spec, host in fetched.items()
        }

    def _held(self, profile: int) -> Execution:
        if self._execution is None or self._profile != profile:
            execution = self._generator.take(profile)
            weakref.finalize(self, self._generator.give_back, profile, execution)
            self._profile, self._execution = profile, execution
        return self._execution

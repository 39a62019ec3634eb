"""Weights into engines: refitted constants, or inputs that both engines read from one allocation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from motrt.engines._tensorrt import data_type
from motrt.engines.errors import ExecutionError
from motrt.engines.tensorrt_backend.memory import DeviceBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.store import WeightStore
    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensorrt_backend.loaded import Loaded


class Refit:
    """A refit of one engine: checked when it is made, done when it is called.

    Args:
        device: Where.
        loaded: The engine.
        store: Its weights; it must live until the call has returned.
        changed: Names of the tensors that the engine does not have yet; None for all.

    Raises:
        ExecutionError: The engine's weights are not the store's, in name, type or size.
    """

    def __init__(
        self,
        device: Device,
        loaded: Loaded,
        store: WeightStore,
        changed: Iterable[str] | None = None,
    ) -> None:
        self._device, self._loaded, self._store = device, loaded, store
        self._refitter: Any = device.trt.Refitter(loaded.engine, device.logger)
        # TensorRT-RTX does not report unset weights as missing: the list is compared instead.
        have, want = set(self._refitter.get_all_weights()), set(loaded.weight_names)
        if have != want or not want <= store.entries.keys():
            odd = sorted((have ^ want) | (want - store.entries.keys()))
            raise self._unfit(f"{len(odd)} others ({', '.join(odd[:3])})", f"{len(want)} weights")
        for name in sorted(want):
            prototype, entry = self._refitter.get_weights_prototype(name), store.entries[name]
            count = math.prod(entry.shape)
            if (prototype.dtype, prototype.size) != (data_type(device.trt, entry.dtype), count):
                raise self._unfit(
                    f"{name}: {prototype.size} x {prototype.dtype}",
                    f"{count} x {entry.dtype.label}",
                )
        self._names = want if changed is None else want & set(changed)

    def __call__(self) -> None:
        """Fill the engine; one that refuses midway must not be used any more.

        Raises:
            ExecutionError: TensorRT refuses.
        """
        for name in sorted(self._names):
            self._set(name)
        # Weights that the builder fused with those that were set.
        for name in sorted(set(self._refitter.get_missing_weights())):
            self._set(name)
        missing = self._refitter.get_missing_weights()
        if missing:
            raise self._unfit(f"still missing: {', '.join(missing[:3])}", "all weights")
        with self._device.cuda.drained():
            if not self._refitter.refit_cuda_engine_async(self._device.cuda.handle):
                raise self._device.refused(f"TensorRT does not refit the {self._loaded.name}")

    def _set(self, name: str) -> None:
        trt, entry = self._device.trt, self._store.entries.get(name)
        if entry is None:
            raise self._unfit(f"no tensor {name}", "one in the store")
        address = int(self._store[name].ctypes.data)
        dtype = data_type(trt, entry.dtype)
        weights = trt.Weights(dtype, address, math.prod(entry.shape))
        if not self._refitter.set_named_weights(name, weights):
            raise self._device.refused(f"TensorRT does not take {name} for the refit")

    def _unfit(self, got: str, expected: str) -> ExecutionError:
        return ExecutionError(
            f"the {self._loaded.name}'s engine does not have the store's weights",
            got=got,
            expected=expected,
            fix="Build the plan again with: motrt build",
        )


class DeviceWeights:
    """Tensors of a store on the device, each once, whoever reads it.

    Args:
        device: Where.
        store: What they are copied from.
    """

    def __init__(self, device: Device, store: WeightStore) -> None:
        self._device = device
        self.store = store
        self._buffers: dict[str, DeviceBuffer] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Return where tensors are; what is not there yet is copied there.

        Raises:
            ExecutionError: They do not fit into the memory, or a copy failed.
        """
        names = tuple(names)
        with self._device.cuda.drained():
            for name in names:
                if name not in self._buffers:
                    buffer = DeviceBuffer(self._device.cuda, self.store.entries[name].nbytes)
                    self._copy(name, self.store, buffer)
                    self._buffers[name] = buffer
        return {name: self._buffers[name].address for name in names}

    def overwrite(self, names: Iterable[str], store: WeightStore) -> None:
        """Copy other values into the tensors that are there.

        Raises:
            ExecutionError: A copy failed; which values are there is not known then.
        """
        with self._device.cuda.drained():
            for name in names:
                if name in self._buffers:
                    self._copy(name, store, self._buffers[name])

    def _copy(self, name: str, store: WeightStore, buffer: DeviceBuffer) -> None:
        array = store[name]
        self._device.cuda.upload(buffer.address, int(array.ctypes.data), array.nbytes)

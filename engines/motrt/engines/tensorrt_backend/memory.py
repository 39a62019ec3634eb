"""Memory with an owner: on the device, page-locked on the host, and the block for activations."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from motrt.engines._cuda import Cuda
    from motrt.engines.tensors import Array

# What TensorRT wants; also the least that is allocated: a tensor without elements needs an address.
ALIGNMENT = 256


class DeviceBuffer:
    """Device memory that is freed with this object.

    Args:
        cuda: The device.
        nbytes: How much; at least :data:`ALIGNMENT` is taken.
    """

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.nbytes = max(nbytes, ALIGNMENT)
        self.address = cuda.malloc(self.nbytes)
        weakref.finalize(self, cuda.api.cudaFree, self.address)


class HostBuffer:
    """Page-locked memory that is freed with this object, as bytes.

    Views keep this object alive through their base.

    Args:
        cuda: The device that copies from it.
        nbytes: How much.
    """

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.nbytes = max(nbytes, ALIGNMENT)
        self.address = cuda.malloc_host(self.nbytes)
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        self._bytes = np.ctypeslib.as_array(memory)
        weakref.finalize(self, cuda.api.cudaFreeHost, self.address)

    def write(self, array: Array) -> None:
        """Put a contiguous array at the start."""
        self._bytes[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def read(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return a copy of the start as an array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._bytes[:nbytes].copy().view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A contiguous tensor on the device.

    Attributes:
        buffer: What it lies in, and is kept alive by.
        offset: Bytes from the buffer's start.
        shape: Its shape.
        dtype: Element type, as NumPy has it.
    """

    buffer: DeviceBuffer
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def address(self) -> int:
        """Where its first element is."""
        return self.buffer.address + self.offset

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Arena:
    """One block of activations for every context of both engines: they never run at once.

    Args:
        cuda: The device.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffer: DeviceBuffer | None = None
        self._user: str | None = None

    @property
    def address(self) -> int:
        """Where it is; 0 before the first :meth:`reserve`."""
        return 0 if self._buffer is None else self._buffer.address

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def reserve(self, nbytes: int) -> None:
        """Grow to at least ``nbytes``; what was in it is gone."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None  # first: both at once might not fit
            self._buffer = DeviceBuffer(self._cuda, nbytes)

    @contextmanager
    def used_by(self, user: str) -> Iterator[None]:
        """Hold the block.

        Raises:
            ExecutionError: Somebody else holds it: their activations would be overwritten.
        """
        if self._user is not None:
            raise ExecutionError(
                f"the {user} cannot run now: both engines use one block of activations",
                got=f"the {self._user} at work",
                expected="one engine at a time",
                fix="Make calls from one thread at a time.",
            )
        self._user = user
        try:
            yield
        finally:
            self._user = None

    def release(self) -> None:
        """Free the block."""
        self._buffer = None

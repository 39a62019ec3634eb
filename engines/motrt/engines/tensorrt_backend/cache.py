"""The reasoner's K/V cache on the device: keys and values never leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.cache_limits import cache_names, require_room
from motrt.engines.contract import Cache
from motrt.engines.errors import ConfigError
from motrt.engines.tensorrt_backend.memory import ALIGNMENT, DeviceBuffer, DeviceTensor

if TYPE_CHECKING:
    from motrt.engines._cuda import Cuda
    from motrt.engines.dtypes import DType
    from motrt.engines.model_config import ModelConfig

_FIRST_ROWS = 128


class TensorRtCache:
    """Keys and values of one sequence, ``[1, K, rows, D]`` a layer.

    A static cache has the rows that its plan was built with, for TensorRT writes into it in place.
    An appended one starts small and doubles; the graph sees whole buffers, with a bias over what is
    not written yet, so that shapes and addresses stay the same from token to token.

    Args:
        cuda: The device.
        config: The architecture.
        dtype: Compute type.
        kind: How the graph updates it.
        capacity: Most tokens that it may ever hold.
        plan_capacity: Most that the plan takes.

    Raises:
        ConfigError: ``capacity`` is more than the plan takes.
    """

    def __init__(
        self,
        cuda: Cuda,
        config: ModelConfig,
        dtype: DType,
        kind: Cache,
        capacity: int,
        plan_capacity: int,
    ) -> None:
        if capacity > plan_capacity:
            raise ConfigError(
                "the plan's K/V cache holds fewer tokens",
                got=f"capacity {capacity}",
                expected=f"at most {plan_capacity}",
                fix="Open the runtime with a smaller capacity (--capacity), or build the plan with "
                "a larger --max-context.",
            )
        self.kind = kind
        self.capacity = capacity
        self.length = 0
        self.rows = 0
        self._cuda = cuda
        self._config = config
        self._dtype = dtype
        self._fixed_rows = plan_capacity if kind is Cache.STATIC else None
        self._names, self._context_names = cache_names(config)
        self._buffers: dict[str, DeviceBuffer] = {}
        self._context: dict[str, DeviceBuffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for group in (self._buffers, self._context) for b in group.values())

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens.

        Raises:
            ExecutionError: They exceed the capacity, or the memory.
        """
        needed = self.length + count
        require_room(needed, self.capacity)
        if needed <= self.rows:
            return
        rows = self._fixed_rows or min(self.capacity, max(needed, 2 * self.rows, _FIRST_ROWS))
        with self._cuda.drained():
            buffers = self._grown(self._names, self._buffers, rows)
            context = self._grown(self._context_names, self._context, rows)
        self._buffers, self._context, self.rows = buffers, context, rows

    @property
    def past_rows(self) -> int:
        """Rows of the past that the graph sees in the next call."""
        return self.rows if self.kind is Cache.STATIC or self.length else 0

    @property
    def past_shape(self) -> tuple[int, ...]:
        """Shape of a ``past_key_values`` input in the next call."""
        return 1, self._config.num_key_value_heads, self.past_rows, self._config.head_dim

    def past(self) -> dict[str, int]:
        """Return the address of each ``past_key_values`` input."""
        return {f"past_key_values.{name}": self._buffers[name].address for name in self._names}

    def absorb(self, outputs: dict[str, DeviceBuffer], count: int) -> None:
        """Take over the new rows of a run of ``count`` tokens, in the stream's order.

        Args:
            outputs: ``present.{i}.key|value`` of an appended cache and ``context.{i}.key``,
                ``[1, K, count, D]``; a static cache was written in place.
            count: New tokens.
        """
        row = self._row_nbytes
        for group, prefix, names in (
            (self._buffers, "present", self._names if self.kind is Cache.APPEND else []),
            (self._context, "context", self._context_names),
        ):
            for name in names:
                self._cuda.copy_rows(
                    group[name].address + self.length * row,
                    self.rows * row,
                    outputs[f"{prefix}.{name}"].address,
                    count * row,
                    count * row,
                    self._config.num_key_value_heads,
                )

    def advance(self, count: int) -> None:
        """Count the tokens whose run is over."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)

    def context(self) -> dict[str, DeviceTensor]:
        """Return the generator's ``context.{i}.key|value``: one compacted copy, on the device.

        Raises:
            ExecutionError: It does not fit into the memory, or a copy failed.
        """
        heads, row = self._config.num_key_value_heads, self._row_nbytes
        shape = (1, heads, self.length, self._config.head_dim)
        each = -(-heads * self.length * row // ALIGNMENT) * ALIGNMENT
        block = DeviceBuffer(self._cuda, each * len(self._names))
        context: dict[str, DeviceTensor] = {}
        with self._cuda.drained():
            for index, name in enumerate(self._names):
                tensor = DeviceTensor(block, index * each, shape, self._dtype.numpy)
                context[f"context.{name}"] = tensor
                if self.length:
                    source = self._context.get(name, self._buffers[name])
                    width = self.length * row
                    self._cuda.copy_rows(
                        tensor.address, width, source.address, self.rows * row, width, heads
                    )
        return context

    @property
    def _row_nbytes(self) -> int:
        return self._config.head_dim * self._dtype.itemsize

    def _grown(
        self, names: list[str], have: dict[str, DeviceBuffer], rows: int
    ) -> dict[str, DeviceBuffer]:
        heads, row = self._config.num_key_value_heads, self._row_nbytes
        grown: dict[str, DeviceBuffer] = {}
        for name in names:
            grown[name] = buffer = DeviceBuffer(self._cuda, heads * rows * row)
            self._cuda.zero(buffer.address, buffer.nbytes)  # what is masked must be finite
            if self.length:
                self._cuda.copy_rows(
                    buffer.address,
                    rows * row,
                    have[name].address,
                    self.rows * row,
                    self.length * row,
                    heads,
                )
        return grown

"""The reasoner's K/V cache in ONNX Runtime's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.cache_limits import cache_names, require_room
from motrt.engines.contract import Cache

if TYPE_CHECKING:
    from motrt.engines.dtypes import DType
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.tensors import Array

_FIRST_ROWS = 128


class OnnxRuntimeCache:
    """Keys and values of one sequence, ``[1, K, rows, D]`` a layer.

    Attention with a static cache costs what the buffers hold, not what they could hold, so they
    start small and double up to the capacity.

    Args:
        config: The architecture.
        dtype: Compute type.
        kind: How the graph updates it.
        capacity: Most tokens that it may ever hold.
        ort: The ONNX Runtime module.
    """

    def __init__(
        self, config: ModelConfig, dtype: DType, kind: Cache, capacity: int, ort: Any
    ) -> None:
        self.kind = kind
        self.capacity = capacity
        self.length = 0
        self.rows = 0
        self._config = config
        self._dtype = dtype
        self._ort = ort
        self._names, self._context_names = cache_names(config)
        self._buffers: dict[str, Array] = {}
        self._context: dict[str, Array] = {}
        self._values: dict[str, Any] = {}
        # A bound OrtValue does not keep the array alive that it is a view of.
        self._bound: list[Array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(a.nbytes for group in (self._buffers, self._context) for a in group.values())

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens.

        Raises:
            ExecutionError: They exceed the capacity.
        """
        needed = self.length + count
        require_room(needed, self.capacity)
        if needed <= self.rows:
            return
        self.rows = min(self.capacity, max(needed, 2 * self.rows, _FIRST_ROWS))
        for group, names in ((self._buffers, self._names), (self._context, self._context_names)):
            for name in names:
                shape = (1, self._config.num_key_value_heads, self.rows, self._config.head_dim)
                grown = np.zeros(shape, self._dtype.numpy)  # zeros: what is masked must be finite
                if self.length:
                    grown[:, :, : self.length] = group[name][:, :, : self.length]
                group[name] = grown
        self._values = {
            name: self._ort.OrtValue.ortvalue_from_numpy(buffer)
            for name, buffer in self._buffers.items()
        }

    def bind_buffers(self, binding: Any) -> list[str]:
        """Bind what stays until :meth:`reserve` grows the buffers: past and present of a static cache.

        Returns:
            Names of the bound outputs, in order.
        """
        if self.kind is not Cache.STATIC:
            return []
        for name in self._names:
            binding.bind_ortvalue_input(f"past_key_values.{name}", self._values[name])
            binding.bind_ortvalue_output(f"present.{name}", self._values[name])
        return [f"present.{name}" for name in self._names]

    def bind_rows(self, binding: Any) -> list[str]:
        """Bind what differs from call to call: an appended past, and outputs of the new rows.

        Returns:
            Names of the bound outputs, in order.
        """
        outputs = [f"context.{name}" for name in self._context_names]
        if self.kind is Cache.APPEND:
            self._bound = []
            for name in self._names:
                past = np.ascontiguousarray(self._buffers[name][:, :, : self.length])
                self._bound.append(past)
                value = self._ort.OrtValue.ortvalue_from_numpy(past)
                binding.bind_ortvalue_input(f"past_key_values.{name}", value)
                outputs.append(f"present.{name}")
        for name in outputs:
            binding.bind_output(name)
        return outputs

    def absorb(self, outputs: dict[str, Any], count: int) -> None:
        """Take over what a run of ``count`` tokens returned."""
        rows = slice(self.length, self.length + count)
        if self.kind is Cache.APPEND:
            for name in self._names:
                self._buffers[name][:, :, rows] = outputs[f"present.{name}"].numpy()
        for name in self._context_names:
            self._context[name][:, :, rows] = outputs[f"context.{name}"].numpy()
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)

    def context(self) -> dict[str, Array]:
        """Return the generator's ``context.{i}.key|value``: one compacted copy ``[1, K, U, D]``."""
        context: dict[str, Array] = {}
        for name in self._names:
            source = self._context.get(name, self._buffers[name])
            context[f"context.{name}"] = source[:, :, : self.length].copy()
        return context

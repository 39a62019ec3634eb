"""The two transformers on ONNX Runtime, bound so that a step copies nothing that stays."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.causal_mask import causal_bias
from motrt.engines.contract import Cache
from motrt.engines.onnxruntime_cache import OnnxRuntimeCache
from motrt.engines.onnxruntime_engine import run_binding
from motrt.engines.tensors import check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.contract import EngineContract
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.tensors import Array


class OnnxRuntimeReasoner:
    """The causal engine over a session."""

    def __init__(
        self, session: Any, contract: EngineContract, cache: Cache, config: ModelConfig, ort: Any
    ) -> None:
        self.contract = contract
        self._session = session
        self._cache = cache
        self._config = config
        self._ort = ort
        self._dtype = next(s.dtype for s in contract.inputs if s.name == "inputs_embeds")
        self._binding: Any = None
        self._kept: list[str] = []
        self._bound_to: object = None

    def new_cache(self, capacity: int) -> OnnxRuntimeCache:
        """Return an empty cache for one sequence of at most ``capacity`` tokens."""
        return OnnxRuntimeCache(self._config, self._dtype, self._cache, capacity, self._ort)

    def forward(
        self,
        cache: OnnxRuntimeCache,
        inputs_embeds: Array,
        rotary_cos: Array,
        rotary_sin: Array,
        logit_indices: Array,
    ) -> Array:
        """Append tokens to a sequence.

        Args:
            cache: The sequence so far; it grows by S tokens.
            inputs_embeds: ``[1, S, E]``, compute type.
            rotary_cos: ``[1, S, D/2]``, compute type.
            rotary_sin: Likewise.
            logit_indices: int64 ``[1, M]``, among the S tokens.

        Returns:
            Logits, float32 ``[1, M, V]``.

        Raises:
            ContractError: An array has the wrong type or shape.
            ExecutionError: The cache is full, or ONNX Runtime refused.
        """
        count = inputs_embeds.shape[1]
        cache.reserve(count)
        static = self._cache is Cache.STATIC
        start, total = cache.length, cache.rows if static else cache.length + count
        feeds: dict[str, Array] = {
            "inputs_embeds": inputs_embeds,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "attention_bias": causal_bias(start, count, total, self._dtype),
            "logit_indices": logit_indices,
        }
        if static:
            feeds["write_indices"] = np.array([start], np.int64)
        specs = tuple(spec for spec in self.contract.inputs if spec.name in feeds)
        check_arrays(specs, feeds, engine="reasoner")
        binding = self._bound(cache)
        # A binding does not keep arrays alive: the copies must live until the run is over.
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        shape = (*logit_indices.shape, self._config.vocab_size)
        logits: Array = np.empty(shape, np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, shape, logits.ctypes.data)
        rows = cache.bind_rows(binding)
        names = [*self._kept, "logits", *rows] if rows else []
        cache.absorb(run_binding(self._session, binding, names, "reasoner"), count)
        return logits

    def _bound(self, cache: OnnxRuntimeCache) -> Any:
        """Return a binding that knows the cache's buffers; a new one where they are others."""
        bound_to = (weakref.ref(cache), cache.rows)
        if self._bound_to != bound_to:
            self._binding = self._session.io_binding()
            self._kept = cache.bind_buffers(self._binding)
            self._bound_to = bound_to
        return self._binding


class OnnxRuntimeGenerator:
    """The denoiser over a session."""

    def __init__(self, session: Any, contract: EngineContract, ort: Any) -> None:
        self.contract = contract
        self._session = session
        self._ort = ort

    def branch(
        self, context: Mapping[str, Array], constants: Mapping[str, Array]
    ) -> OnnxRuntimeBranch:
        """Bind what stays the same over all steps of one guidance branch.

        Args:
            context: ``context.{i}.key|value`` of the prompt.
            constants: Other inputs that do not change: rotary tables, noise masks, domain.
        """
        return OnnxRuntimeBranch(self._session, self.contract, self._ort, {**context, **constants})


class OnnxRuntimeBranch:
    """One guidance branch: call it with what changes from step to step."""

    def __init__(
        self, session: Any, contract: EngineContract, ort: Any, fixed: Mapping[str, Array]
    ) -> None:
        self._session = session
        self._contract = contract
        self._fixed = {name: np.ascontiguousarray(array) for name, array in fixed.items()}
        self._binding = session.io_binding()
        for name, array in self._fixed.items():
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        self._outputs = [spec.name for spec in contract.outputs]
        for name in self._outputs:
            self._binding.bind_output(name)

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Predict the velocities; the arrays belong to the caller.

        Raises:
            ContractError: A feed has the wrong type or shape.
            ExecutionError: ONNX Runtime refused.
        """
        check_arrays(self._contract.inputs, {**self._fixed, **feeds}, engine="generator")
        held = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        for name, array in held.items():
            self._binding.bind_cpu_input(name, array)
        outputs = run_binding(self._session, self._binding, self._outputs, "generator")
        return {name: value.numpy().copy() for name, value in outputs.items()}

"""The causal engine on TensorRT: a context for prefill and one for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.causal_mask import causal_bias, padded_causal_bias
from motrt.engines.contract import Cache
from motrt.engines.tensorrt_backend.cache import TensorRtCache
from motrt.engines.tensorrt_backend.execution import Execution, choose_profile
from motrt.engines.tensors import check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.model_config import ModelConfig
    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensorrt_backend.loaded import Loaded
    from motrt.engines.tensors import Array

DECODE = 1  # index of the profile whose runs repeat


class TensorRtReasoner:
    """The causal engine.

    Args:
        device: Where.
        loaded: The engine, with its weights.
        cache: How the graph updates its cache.
        config: The architecture.
        weights: Addresses of inputs that are weights.
    """

    def __init__(
        self,
        device: Device,
        loaded: Loaded,
        cache: Cache,
        config: ModelConfig,
        weights: Mapping[str, int],
    ) -> None:
        self.contract = loaded.contract
        self._device, self._loaded = device, loaded
        self._cache, self._config, self._weights = cache, config, weights
        self._dtype = next(s.dtype for s in self.contract.inputs if s.name == "inputs_embeds")
        self._executions: dict[int, Execution] = {}
        dims = loaded.profiles[0].dims
        self._plan_capacity = dims["capacity" if cache is Cache.STATIC else "past"][2]

    @property
    def captured(self) -> int:
        """Number of profiles whose next run is the launch of a graph."""
        return sum(each.is_captured for each in self._executions.values())

    def new_cache(self, capacity: int) -> TensorRtCache:
        """Return an empty cache for one sequence of at most ``capacity`` tokens.

        Raises:
            ConfigError: The plan takes fewer.
        """
        return TensorRtCache(
            self._device.cuda,
            self._config,
            self._dtype,
            self._cache,
            capacity,
            self._plan_capacity,
        )

    def forward(
        self,
        cache: TensorRtCache,
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
            ExecutionError: The cache is full, the plan does not take so many tokens, or TensorRT
                refused.
        """
        count = inputs_embeds.shape[1]
        cache.reserve(count)
        static, start = self._cache is Cache.STATIC, cache.length
        rows = cache.past_rows
        bias = causal_bias if static else padded_causal_bias
        feeds: dict[str, Array] = {
            "inputs_embeds": inputs_embeds,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "attention_bias": bias(start, count, rows, self._dtype),
            "logit_indices": logit_indices,
        }
        dims = {"batch": 1, "tokens": count, "logits": logit_indices.shape[1]}
        if static:
            feeds["write_indices"] = np.array([start], np.int64)
            dims["capacity"] = rows
        else:
            dims |= {"past": rows, "total": rows + count}
        specs = tuple(spec for spec in self.contract.inputs if spec.name in feeds)
        check_arrays(specs, feeds, engine="reasoner")
        execution = self._execution(choose_profile("reasoner", self._loaded.profiles, dims))
        past = cache.past()
        shapes = {name: array.shape for name, array in feeds.items()}
        shapes |= dict.fromkeys(past, cache.past_shape)
        outputs = {spec: spec.sizes(dims) for spec in self.contract.outputs}
        cuda = self._device.cuda
        with self._device.arena.used_by("reasoner"), cuda.drained():
            addresses = dict(past)
            for name, array in feeds.items():
                addresses[name] = execution.put(name, np.ascontiguousarray(array))
            new = {}
            for spec, shape in outputs.items():
                source = self._loaded.aliases.get(spec.name)
                if source is not None:
                    addresses[spec.name] = past[source]
                    continue
                nbytes = spec.nbytes(shape)
                new[spec.name] = execution.buffer(spec.name, nbytes)
                addresses[spec.name] = new[spec.name].address
            execution.run(shapes, addresses, outputs)
            cache.absorb(new, count)
            logits = self.contract.outputs[0]
            shape = outputs[logits]
            host = execution.fetch(logits.name, logits.nbytes(shape))
        cache.advance(count)
        return host.read(shape, logits.dtype.numpy)

    def weights_changed(self) -> None:
        """Forget captured graphs."""
        for execution in self._executions.values():
            execution.weights_changed()

    def _execution(self, profile: int) -> Execution:
        if profile not in self._executions:
            self._executions[profile] = Execution(
                self._device,
                self._loaded,
                profile,
                self._weights,
                uses_graph=profile == DECODE,
            )
        return self._executions[profile]

"""The PyTorch modules behind the runtime's protocols: the same loops over the readable model.

For comparing networks inside one loop, and for trying a change of the model before it is exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from motrt.engines.cache_limits import require_room
from motrt.engines.causal_mask import causal_bias
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.export.torch_loading import load_generator, load_reasoner, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.tensors import Array
    from motrt.export.torch_generator import Generator
    from motrt.export.torch_layers import KeyValue


class TorchBackend:
    """A bundle's weights in PyTorch, on the CPU, in the bundle's precision."""

    name = "torch"

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._reasoner: TorchReasoner | None = None
        self._generator: TorchGenerator | None = None

    def reasoner(self) -> TorchReasoner:
        """Return the causal tower."""
        if self._reasoner is None:
            self._reasoner = TorchReasoner(self.bundle)
        return self._reasoner

    def generator(self) -> TorchGenerator:
        """Return the denoising tower."""
        if self._generator is None:
            self._generator = TorchGenerator(self.bundle)
        return self._generator

    def step_nbytes(self, tokens: int, context: int) -> int:  # noqa: ARG002  the protocol's
        """Return 0: torch's fused attention never writes its scores."""
        return 0

    def component(self, contract: EngineContract, file: str) -> OnnxRuntimeEngine:
        """Open another graph; there is no PyTorch form of it here."""
        return OnnxRuntimeEngine(contract, self.bundle.path(file))

    def close(self) -> None:
        """Drop both towers; they are loaded again if they are used again."""
        self._reasoner = self._generator = None


class TorchCache:
    """Keys and values of one sequence."""

    def __init__(self, capacity: int, layers: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.pairs: list[KeyValue] = []
        self.context_keys: list[Tensor] = []
        self._layers = layers

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for pair in self.pairs for x in pair) + sum(
            x.nbytes for x in self.context_keys
        )

    def append(self, new: list[KeyValue], context_keys: list[Tensor]) -> None:
        """Take over the keys and values of new tokens."""
        if self.pairs:
            new = [
                (torch.cat([k, a], 2), torch.cat([v, b], 2))
                for (k, v), (a, b) in zip(self.pairs, new, strict=True)
            ]
            context_keys = [
                torch.cat(pair, 2) for pair in zip(self.context_keys, context_keys, strict=True)
            ]
        self.pairs, self.context_keys = new, context_keys
        self.length = new[0][0].shape[2]

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)
        self.pairs = [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in self.pairs]
        self.context_keys = [k[:, :, : self.length] for k in self.context_keys]

    def context(self) -> dict[str, Array]:
        """Return ``context.{i}.key|value``."""
        context = {}
        for i, (key, value) in enumerate(self.pairs):
            handed = self.context_keys[i] if self.context_keys else key
            context[f"context.{i}.key"] = _numpy(handed)
            context[f"context.{i}.value"] = _numpy(value)
        return context


class TorchReasoner:
    """See :class:`motrt.runtime.protocols.ReasonerEngine`."""

    def __init__(self, bundle: Bundle) -> None:
        self._config = bundle.manifest.model
        self._dtype = bundle.dtype
        self._module = load_reasoner(self._config, bundle.weights(), torch_dtype(bundle.dtype))

    def new_cache(self, capacity: int) -> TorchCache:
        """Return an empty cache."""
        return TorchCache(capacity, self._config.num_hidden_layers)

    def forward(
        self,
        cache: TorchCache,
        inputs_embeds: Array,
        rotary_cos: Array,
        rotary_sin: Array,
        logit_indices: Array,
    ) -> Array:
        """Append tokens and return logits."""
        count = inputs_embeds.shape[1]
        total = cache.length + count
        require_room(total, cache.capacity)
        output = self._module(
            _torch(inputs_embeds),
            _torch(rotary_cos),
            _torch(rotary_sin),
            _torch(causal_bias(cache.length, count, total, self._dtype)),
            _torch(logit_indices),
            cache.pairs or None,
        )
        cache.append(list(output.present), list(output.context_keys))
        return _numpy(output.logits)


class TorchGenerator:
    """See :class:`motrt.runtime.protocols.GeneratorEngine`."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._layers = manifest.model.num_hidden_layers
        self._module = load_generator(
            manifest.model, bundle.weights(), torch_dtype(bundle.dtype), manifest.modalities
        )

    def branch(self, context: Mapping[str, Array], constants: Mapping[str, Array]) -> TorchBranch:
        """Bind a prompt's context and what no step changes."""
        pairs = [
            (_torch(context[f"context.{i}.key"]), _torch(context[f"context.{i}.value"]))
            for i in range(self._layers)
        ]
        fixed = {name: _torch(array) for name, array in constants.items()}
        return TorchBranch(self._module, pairs, fixed)


class TorchBranch:
    """One guidance branch."""

    def __init__(
        self, module: Generator, context: list[KeyValue], fixed: Mapping[str, Tensor]
    ) -> None:
        self._module = module
        self._context = context
        self._fixed = fixed

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Predict the velocities."""
        given = {name: _torch(array) for name, array in feeds.items()}
        outputs = self._module(**self._fixed, **given, context=self._context)
        return {name: _numpy(tensor) for name, tensor in outputs.items()}


def _torch(array: Array) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))  # a copy: torch cannot know a read-only array


def _numpy(tensor: Tensor) -> Array:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()

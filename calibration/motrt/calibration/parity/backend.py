"""A candidate's own sessions as the runtime's backend: nothing is loaded twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.onnxruntime_towers import OnnxRuntimeGenerator, OnnxRuntimeReasoner

if TYPE_CHECKING:
    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.onnxruntime_cache import OnnxRuntimeCache
    from motrt.engines.tensors import Array


class OpenedBackend:
    """The runtime's ``Backend`` over two engines that are open already.

    Args:
        bundle: The bundle, of the precision in which the engines compute.
        reasoner: Its causal engine.
        generator: Its denoiser.
    """

    name = "parity"

    def __init__(
        self, bundle: Bundle, reasoner: OnnxRuntimeEngine, generator: OnnxRuntimeEngine
    ) -> None:
        self._bundle = bundle
        manifest, ort = bundle.manifest, onnxruntime()
        self._reasoner = WideningReasoner(
            reasoner.session, reasoner.contract, manifest.cache, manifest.model, ort
        )
        self._generator = OnnxRuntimeGenerator(generator.session, generator.contract, ort)

    def reasoner(self) -> WideningReasoner:
        """Return the causal engine."""
        return self._reasoner

    def generator(self) -> OnnxRuntimeGenerator:
        """Return the denoiser."""
        return self._generator

    def step_nbytes(self, tokens: int, context: int) -> int:  # noqa: ARG002  the protocol's
        """Return 0: parity's clips are tiny."""
        return 0

    def component(self, contract: EngineContract, file: str) -> OnnxRuntimeEngine:
        """Open another graph of the bundle."""
        return OnnxRuntimeEngine(contract, self._bundle.path(file))

    def close(self) -> None:
        """Leave the engines to whoever has opened them."""


class WideningReasoner(OnnxRuntimeReasoner):
    """A causal engine whose embeddings may be narrower: a float32 twin reads 16-bit rows."""

    def forward(
        self,
        cache: OnnxRuntimeCache,
        inputs_embeds: Array,
        rotary_cos: Array,
        rotary_sin: Array,
        logit_indices: Array,
    ) -> Array:
        """Append tokens to a sequence; see :class:`OnnxRuntimeReasoner`."""
        wide = inputs_embeds.astype(rotary_cos.dtype, copy=False)
        return super().forward(cache, wide, rotary_cos, rotary_sin, logit_indices)

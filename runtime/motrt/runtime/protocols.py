"""What the runtime's loops need of a backend.

The loops know these five shapes and nothing else, so that PyTorch, ONNX Runtime and TensorRT run
the same loops, and a comparison compares networks, not loops. Arrays are NumPy's; who returns an
array gives it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from motrt.engines.tensors import Shaped

if TYPE_CHECKING:
    from motrt.engines.contract import EngineContract
    from motrt.engines.tensors import Array


Context = Mapping[str, Shaped]
"""Keys and values of a prompt, arrays or a device's."""


class KeyValueCache(Protocol):
    """Keys and values of one sequence; the memory is the backend's."""

    capacity: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""

    def context(self) -> Context:
        """Return ``context.{i}.key|value`` ``[1, K, U, D]`` of all tokens, compacted.

        The backend's generator takes it as it is; of its memory others know the shapes alone.
        """


class ReasonerEngine(Protocol):
    """The causal tower."""

    def new_cache(self, capacity: int) -> Any:
        """Return an empty :class:`KeyValueCache`."""

    def forward(
        self,
        cache: Any,
        inputs_embeds: Array,
        rotary_cos: Array,
        rotary_sin: Array,
        logit_indices: Array,
    ) -> Array:
        """Append S tokens ``[1, S, E]`` and return logits ``[1, M, V]`` of the chosen ones."""


class Branch(Protocol):
    """One guidance branch of the denoiser, its context bound."""

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Predict velocities from what changes: latents and timestep."""


class GeneratorEngine(Protocol):
    """The denoiser."""

    def branch(self, context: Any, constants: Mapping[str, Array]) -> Branch:
        """Bind a prompt's :data:`Context` and the inputs that no step changes."""


class Graph(Protocol):
    """Any other graph: arrays in, arrays out."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once."""


class Backend(Protocol):
    """Where a bundle's engines run."""

    name: str

    def reasoner(self) -> ReasonerEngine:
        """Return the causal engine, opened if need be."""

    def generator(self) -> GeneratorEngine:
        """Return the denoiser, opened if need be."""

    def step_nbytes(self, tokens: int, context: int) -> int:
        """Return the least bytes of a denoise step's activations in main memory; 0 if unknown.

        Args:
            tokens: Tokens that are denoised, of all modalities.
            context: Prompt tokens.
        """

    def component(self, contract: EngineContract, file: str) -> Graph:
        """Open another graph of the bundle."""

    def close(self) -> None:
        """Let go of everything."""

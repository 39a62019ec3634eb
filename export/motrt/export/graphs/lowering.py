"""The seam between the model's mathematics and the ONNX operators that spell it.

A tower asks a lowering for norms, rotary turns, attention and the cache; everything else is plain
operators that every opset has. Two lowerings exist; CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from motrt.engines.errors import ConfigError
from motrt.engines.manifest import LOWERINGS

if TYPE_CHECKING:
    import onnx_ir as ir

    from motrt.engines.contract import Cache
    from motrt.engines.model_config import ModelConfig
    from motrt.export.graphs.builder import GraphBuilder


class Lowering(Protocol):
    """How the five operations that ONNX spells in several ways are written."""

    opset: int
    cache: Cache

    def rms_norm(
        self, graph: GraphBuilder, x: ir.Value, weight: str, config: ModelConfig
    ) -> ir.Value:
        """Normalize the last axis; statistics in float32, the weight as the family rounds it."""

    def rotary_tables(
        self, graph: GraphBuilder, cos: ir.Value, sin: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Prepare ``[B, S, D/2]`` tables once for all layers."""

    def rotary(
        self, graph: GraphBuilder, x: ir.Value, tables: tuple[ir.Value, ir.Value]
    ) -> ir.Value:
        """Turn the halves of ``x`` ``[B, heads, S, D]``."""

    def query_blocks(
        self, graph: GraphBuilder, cos: ir.Value, config: ModelConfig
    ) -> ir.Value | None:
        """Prepare, once for all layers, the shape in which unmasked attention takes its queries.

        Returns:
            int64 ``[4]`` for the S tokens of ``cos`` ``[B, S, D/2]``, or None: as they are.
        """

    def attention(
        self,
        graph: GraphBuilder,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        bias: ir.Value | None,
        blocks: ir.Value | None,
        config: ModelConfig,
    ) -> ir.Value:
        """Attend: ``[B, H, S, D]`` over ``[B, K, T, D]`` plus ``[B, 1, S, T]``; see above."""

    def update_cache(
        self, graph: GraphBuilder, past: ir.Value, new: ir.Value, write_indices: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Return what attention reads, and what the graph gives back as ``present``."""


def lowering_named(name: str) -> Lowering:
    """Return a lowering.

    Raises:
        ConfigError: There is none of that name.
    """
    from motrt.export.graphs.native import Native
    from motrt.export.graphs.portable import Portable

    if name == "native":
        return Native()
    if name == "portable":
        return Portable()
    raise ConfigError("unknown lowering", got=name, expected=" or ".join(LOWERINGS))

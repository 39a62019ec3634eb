"""Opset 24: Attention, RotaryEmbedding, RMSNormalization and TensorScatter.

For ONNX Runtime 1.32 and later, TensorRT 10.15 and later, TensorRT-RTX. The cache is static: each
``present`` has its ``past``'s shape and is meant to be bound to the same memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from motrt.engines.contract import Cache
from motrt.engines.dtypes import DType

if TYPE_CHECKING:
    import onnx_ir as ir

    from motrt.engines.model_config import ModelConfig
    from motrt.export.graphs.builder import GraphBuilder


class Native:
    """One operator for each operation; see :class:`~motrt.export.graphs.lowering.Lowering`."""

    opset = 24
    cache = Cache.STATIC

    def rms_norm(
        self, graph: GraphBuilder, x: ir.Value, weight: str, config: ModelConfig
    ) -> ir.Value:
        """RMSNormalization; stash_type 1 keeps the statistics in float32."""
        low = graph.dtype is not DType.FLOAT32
        eps = config.rms_norm_eps
        if low and config.norm_multiplies_in_float32:
            # The operator multiplies the scale in the model's type; Nemotron's norm does so in
            # float32, hence the detour.
            scale = graph.weight(weight, DType.FLOAT32)
            wide = graph.cast(x, DType.FLOAT32)
            wide = graph.op("RMSNormalization", wide, scale, axis=-1, epsilon=eps, stash_type=1)
            return graph.cast(wide, graph.dtype)
        return graph.op(
            "RMSNormalization", x, graph.weight(weight), axis=-1, epsilon=eps, stash_type=1
        )

    def rotary_tables(
        self,
        graph: GraphBuilder,
        cos: ir.Value,
        sin: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        """Nothing to prepare."""
        return cos, sin

    def rotary(
        self, graph: GraphBuilder, x: ir.Value, tables: tuple[ir.Value, ir.Value]
    ) -> ir.Value:
        """RotaryEmbedding, split halves, tables per token instead of position ids."""
        return graph.op("RotaryEmbedding", x, *tables)

    def attention(
        self,
        graph: GraphBuilder,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        bias: ir.Value | None,
        config: ModelConfig,
    ) -> ir.Value:
        """Attention with an additive mask; never is_causal, which TensorRT aligns top-left."""
        inputs = [query, key, value] if bias is None else [query, key, value, bias]
        return graph.op("Attention", *inputs, scale=1 / math.sqrt(config.head_dim))

    def update_cache(
        self, graph: GraphBuilder, past: ir.Value, new: ir.Value, write_indices: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """TensorScatter: attention reads the whole capacity, the mask hides what is unwritten."""
        present = graph.op("TensorScatter", past, new, write_indices, axis=2, mode="linear")
        return present, present

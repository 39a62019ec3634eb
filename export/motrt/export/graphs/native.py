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

_BLOCKS = 8
_BLOCKS_FROM = 2048  # tokens; with fewer, smaller matrix products cost what the caches save


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

    def query_blocks(
        self, graph: GraphBuilder, cos: ir.Value, config: ModelConfig
    ) -> ir.Value | None:
        """``[B, 8H, S/8, D]`` for a multiple of 8 from 2048 on, else ``[B, H, S, D]``.

        The blocks of a head follow each other as heads do that share a K/V head, so the operator
        computes the same. ONNX Runtime's CPU kernel writes each head's ``[S, T]`` scores in full:
        in blocks they stay in reach of the caches, and a clip's step takes less
        (docs/performance.md). Graphs of 16 bits are TensorRT's, which makes its own blocks.
        """
        if graph.dtype is not DType.FLOAT32:
            return None
        tokens = graph.dims(cos, 1, 2)
        one, most = graph.constant([1]), graph.constant([_BLOCKS])
        rest = graph.op("Sub", tokens, graph.op("Mul", graph.op("Div", tokens, most), most))
        enough = graph.op("Div", tokens, graph.constant([_BLOCKS_FROM]))
        # 1 or 0 each: S is a multiple; S is large.
        zero, top = graph.constant(0), graph.constant(1)
        divides = graph.op("Clip", graph.op("Sub", one, rest), zero, top)
        split = graph.op("Mul", divides, graph.op("Clip", enough, zero, top))
        blocks = graph.op("Add", one, graph.op("Mul", split, graph.constant([_BLOCKS - 1])))
        heads = graph.op("Mul", blocks, graph.constant([config.num_attention_heads]))
        return graph.op(
            "Concat", graph.constant([0]), heads, graph.constant([-1, config.head_dim]), axis=0
        )

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
        """Attention with an additive mask; never is_causal, which TensorRT aligns top-left."""
        scale = 1 / math.sqrt(config.head_dim)
        if bias is not None:
            return graph.op("Attention", query, key, value, bias, scale=scale)
        if blocks is None:
            return graph.op("Attention", query, key, value, scale=scale)
        query = graph.op("Reshape", query, blocks)
        heads = graph.op("Attention", query, key, value, scale=scale)
        whole = graph.constant([0, config.num_attention_heads, -1, config.head_dim])
        return graph.op("Reshape", heads, whole)

    def update_cache(
        self, graph: GraphBuilder, past: ir.Value, new: ir.Value, write_indices: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """TensorScatter: attention reads the whole capacity, the mask hides what is unwritten."""
        present = graph.op("TensorScatter", past, new, write_indices, axis=2, mode="linear")
        return present, present

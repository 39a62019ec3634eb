"""Opset 18: primitive operators only.

For TensorRT 10.3 on JetPack 6, 10.13 on JetPack 7.0 and 7.1, and older ONNX Runtime. The cache is
appended: the graph takes the past and returns the new keys and values alone.
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


class Portable:
    """Operations spelled out; see :class:`~motrt.export.graphs.lowering.Lowering`."""

    opset = 18
    cache = Cache.APPEND

    def rms_norm(
        self, graph: GraphBuilder, x: ir.Value, weight: str, config: ModelConfig
    ) -> ir.Value:
        """``x / sqrt(mean(x²) + eps)`` in float32, times the weight as the family rounds it."""
        low = graph.dtype is not DType.FLOAT32
        wide = graph.cast(x, DType.FLOAT32) if low else x
        mean = graph.op(
            "ReduceMean", graph.op("Mul", wide, wide), graph.constant([-1]), keepdims=1
        )
        eps = graph.constant(config.rms_norm_eps, DType.FLOAT32)
        normal = graph.op("Div", wide, graph.op("Sqrt", graph.op("Add", mean, eps)))
        if low and config.norm_multiplies_in_float32:
            product = graph.op("Mul", normal, graph.weight(weight, DType.FLOAT32))
            return graph.cast(product, graph.dtype)
        normal = graph.cast(normal, graph.dtype) if low else normal
        return graph.op("Mul", normal, graph.weight(weight))

    def rotary_tables(
        self, graph: GraphBuilder, cos: ir.Value, sin: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Add the axis of the heads."""
        axis = graph.constant([1])
        return graph.op("Unsqueeze", cos, axis), graph.op("Unsqueeze", sin, axis)

    def rotary(
        self, graph: GraphBuilder, x: ir.Value, tables: tuple[ir.Value, ir.Value]
    ) -> ir.Value:
        """``[a·cos - b·sin, b·cos + a·sin]`` for the halves a, b of ``x``."""
        cos, sin = tables
        a, b = graph.op_n("Split", [x], 2, axis=-1, num_outputs=2)
        left = graph.op("Sub", graph.op("Mul", a, cos), graph.op("Mul", b, sin))
        right = graph.op("Add", graph.op("Mul", b, cos), graph.op("Mul", a, sin))
        return graph.op("Concat", left, right, axis=-1)

    def query_blocks(
        self, graph: GraphBuilder, cos: ir.Value, config: ModelConfig
    ) -> ir.Value | None:
        """Nothing to prepare."""
        return None

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
        """Scaled dot product; scores and softmax in float32."""
        low = graph.dtype is not DType.FLOAT32
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        key, value = (_repeat(graph, x, heads // groups, heads, config) for x in (key, value))
        # Scale the query first: float16 scores of long heads would overflow unscaled.
        query = graph.op("Mul", query, graph.scalar(1 / math.sqrt(config.head_dim)))
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.cast(scores, DType.FLOAT32) if low else scores
        if bias is not None:
            scores = graph.op("Add", scores, graph.cast(bias, DType.FLOAT32) if low else bias)
        weights = graph.op("Softmax", scores, axis=-1)
        weights = graph.cast(weights, graph.dtype) if low else weights
        return graph.op("MatMul", weights, value)

    def update_cache(
        self,
        graph: GraphBuilder,
        past: ir.Value,
        new: ir.Value,
        write_indices: ir.Value | None,
    ) -> tuple[ir.Value, ir.Value]:
        """Concat for attention; the new rows alone go back to the caller."""
        return graph.op("Concat", past, new, axis=2), new


def _repeat(
    graph: GraphBuilder, x: ir.Value, times: int, heads: int, config: ModelConfig
) -> ir.Value:
    """Repeat K/V heads for grouped queries: query head j reads K/V head j // times."""
    if times == 1:
        return x
    wide = graph.op(
        "Expand",
        graph.op("Unsqueeze", x, graph.constant([2])),
        graph.constant([1, 1, times, 1, 1]),
    )
    return graph.op("Reshape", wide, graph.constant([0, heads, -1, config.head_dim]))

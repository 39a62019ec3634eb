"""The parts that both towers are made of; tokens travel as one ``[B·S, E]`` stream.

The stream stays two-dimensional so that every linear is ``Gemm(transB=1)`` on the checkpoint's own
``[out, in]`` matrix: no transposed copy, and TensorRT refuses a 3-D Gemm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from motrt.engines.model_config import ModelConfig
    from motrt.engines.weight_names import LayerNames
    from motrt.export.graphs.builder import GraphBuilder
    from motrt.export.graphs.lowering import Lowering


@dataclass(frozen=True, slots=True)
class Tower:
    """What every layer of a tower needs; the reshape targets are computed once per graph."""

    graph: GraphBuilder
    lowering: Lowering
    config: ModelConfig
    query_shape: ir.Value  # [B, S, H, D]
    key_shape: ir.Value  # [B, S, K, D]
    tables: tuple[ir.Value, ir.Value]
    blocks: ir.Value | None

    @classmethod
    def begin(
        cls,
        graph: GraphBuilder,
        lowering: Lowering,
        config: ModelConfig,
        cos: ir.Value,
        sin: ir.Value,
        *,
        is_masked: bool,
    ) -> Tower:
        """Prepare a tower over the tokens that ``cos`` and ``sin`` ``[B, S, D/2]`` describe."""
        with graph.scope("shapes"):
            batch_tokens = graph.dims(cos, 0, 2)
            shapes = [
                graph.op("Concat", batch_tokens, graph.constant([heads, config.head_dim]), axis=0)
                for heads in (config.num_attention_heads, config.num_key_value_heads)
            ]
            tables = lowering.rotary_tables(graph, cos, sin)
            blocks = None if is_masked else lowering.query_blocks(graph, cos, config)
        return cls(graph, lowering, config, shapes[0], shapes[1], tables, blocks)

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        """RMSNorm by the weight ``name``.weight."""
        return self.lowering.rms_norm(self.graph, x, f"{name}.weight", self.config)

    def qkv(self, x: ir.Value, names: LayerNames) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Project to heads, ``[B, heads, S, D]`` each; normed where the checkpoint norms, unturned."""
        return (
            self._heads(x, names.query, names.query_norm, self.query_shape),
            self._heads(x, names.key, names.key_norm, self.key_shape),
            self._heads(x, names.value, None, self.key_shape),
        )

    def rotary(self, x: ir.Value) -> ir.Value:
        """Turn ``[B, heads, S, D]`` by the tokens' positions."""
        return self.lowering.rotary(self.graph, x, self.tables)

    def finish_layer(
        self,
        x: ir.Value,
        names: LayerNames,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        bias: ir.Value | None,
    ) -> ir.Value:
        """Attend, project, and add the MLP; ``x`` is the layer's input ``[B·S, E]``."""
        graph, config = self.graph, self.config
        heads = self.lowering.attention(graph, query, key, value, bias, self.blocks, config)
        rows = graph.op(
            "Reshape",
            graph.op("Transpose", heads, perm=[0, 2, 1, 3]),
            graph.constant([-1, config.num_attention_heads * config.head_dim]),
        )
        x = graph.op("Add", x, linear(graph, rows, names.output))
        return graph.op("Add", x, self._mlp(self.norm(x, names.post_norm), names.mlp))

    def _heads(self, x: ir.Value, name: str, norm: str | None, shape: ir.Value) -> ir.Value:
        graph = self.graph
        # allowzero: a target built from sizes may hold a true zero, which must not mean "copy".
        y = graph.op("Reshape", linear(graph, x, name), shape, allowzero=1)
        if norm is not None and graph.has_weight(f"{norm}.weight"):
            y = self.norm(y, norm)
        return graph.op("Transpose", y, perm=[0, 2, 1, 3])

    def _mlp(self, x: ir.Value, name: str) -> ir.Value:
        graph = self.graph
        up = linear(graph, x, f"{name}.up_proj")
        if self.config.is_gated:
            # Sigmoid and Mul, not Swish: TensorRT parses that from version 11 on only.
            gate = linear(graph, x, f"{name}.gate_proj")
            inner = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
        else:
            rectified = graph.op("Relu", up)
            inner = graph.op("Mul", rectified, rectified)
        return linear(graph, inner, f"{name}.down_proj")


def linear(graph: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """``x Wᵀ + b`` on ``[rows, in]``; the bias only if the checkpoint has one."""
    weights = [graph.weight(f"{name}.weight")]
    if graph.has_weight(f"{name}.bias"):
        weights.append(graph.weight(f"{name}.bias"))
    return graph.op("Gemm", x, *weights, transB=1)

"""The causal graph: embeddings in, logits and K/V out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.contract import reasoner_contract
from motrt.engines.dtypes import DType
from motrt.engines.weight_names import reasoner_layer
from motrt.export.graphs.builder import GraphBuilder
from motrt.export.graphs.tower import Tower, linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from motrt.engines.model_config import ModelConfig
    from motrt.engines.store import WeightEntry
    from motrt.export.graphs.lowering import Lowering


def author_reasoner(
    config: ModelConfig,
    weights: Mapping[str, WeightEntry],
    dtype: DType,
    lowering: Lowering,
) -> ir.Model:
    """Write ``reasoner.onnx``.

    Args:
        config: The architecture.
        weights: Place of each tensor in the bundle.
        dtype: Compute type.
        lowering: Which operators to use.

    Returns:
        A model of the contract ``reasoner_contract(config, dtype, lowering.cache)``.

    Source: diffusers ``Cosmos3AttnProcessor``, ``Cosmos3VLTextMoTDecoderLayer`` (the und half).
    """
    contract = reasoner_contract(config, dtype, lowering.cache)
    graph = GraphBuilder("reasoner", opset=lowering.opset, dtype=dtype, weights=weights)
    inputs = {spec.name: graph.add_input(spec) for spec in contract.inputs}
    outputs = {spec.name: spec for spec in contract.outputs}
    embeds, bias = inputs["inputs_embeds"], inputs["attention_bias"]
    write_indices = inputs.get("write_indices")

    tower = Tower.begin(
        graph, lowering, config, inputs["rotary_cos"], inputs["rotary_sin"], is_masked=True
    )
    x = graph.op("Reshape", embeds, graph.constant([-1, config.hidden_size]))
    results: dict[str, ir.Value] = {}
    for index in range(config.num_hidden_layers):
        names = reasoner_layer(index)
        with graph.scope(f"layers.{index}"):
            query, raw_key, value = tower.qkv(tower.norm(x, names.input_norm), names)
            query, key = tower.rotary(query), tower.rotary(raw_key)
            if config.has_context_key_norm:
                # Only the generator reads this key; the tower itself attends to the plain one.
                normed = tower.norm(raw_key, names.context_key_norm)
                results[f"context.{index}.key"] = tower.rotary(normed)
            past = f"past_key_values.{index}"
            present = f"present.{index}"
            keys, results[f"{present}.key"] = lowering.update_cache(
                graph, inputs[f"{past}.key"], key, write_indices
            )
            values, results[f"{present}.value"] = lowering.update_cache(
                graph, inputs[f"{past}.value"], value, write_indices
            )
            x = tower.finish_layer(x, names, query, keys, values, bias)
    with graph.scope("head"):
        results["logits"] = _logits(tower, x, embeds, inputs["logit_indices"])
    for name, spec in outputs.items():
        graph.add_output(results[name], spec)
    return graph.model()


def _logits(tower: Tower, x: ir.Value, embeds: ir.Value, indices: ir.Value) -> ir.Value:
    """Logits of the chosen tokens alone: ``[B, M, V]`` float32, never ``[B, S, V]``."""
    graph, config = tower.graph, tower.config
    tokens = graph.op("Reshape", x, graph.op("Shape", embeds), allowzero=1)
    chosen = graph.op(
        "GatherND", tokens, graph.op("Unsqueeze", indices, graph.constant([2])), batch_dims=1
    )
    rows = graph.op("Reshape", chosen, graph.constant([-1, config.hidden_size]))
    logits = linear(graph, tower.norm(rows, "norm"), "lm_head")
    shape = graph.op(
        "Concat", graph.dims(indices, 0, 2), graph.constant([config.vocab_size]), axis=0
    )
    logits = graph.op("Reshape", logits, shape, allowzero=1)
    return logits if graph.dtype is DType.FLOAT32 else graph.cast(logits, DType.FLOAT32)

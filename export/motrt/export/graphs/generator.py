"""The bidirectional graph: noisy latents and the prompt's K/V in, velocities out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import Modality, generator_contract
from motrt.engines.dtypes import DType
from motrt.engines.weight_names import (
    TIME_EMBEDDER,
    TIME_PROJ_CHANNELS,
    generator_layer,
    generator_norm,
)
from motrt.export.graphs.builder import GraphBuilder
from motrt.export.graphs.tower import Tower, linear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from motrt.engines.model_config import ModelConfig
    from motrt.engines.store import WeightEntry
    from motrt.export.graphs.lowering import Lowering


def author_generator(
    config: ModelConfig,
    weights: Mapping[str, WeightEntry],
    dtype: DType,
    lowering: Lowering,
    modalities: Sequence[Modality],
) -> ir.Model:
    """Write ``generator.onnx``.

    Args:
        config: The architecture.
        weights: Place of each tensor in the bundle.
        dtype: Compute type.
        lowering: Which operators to use.
        modalities: What the graph denoises; vision is always among them.

    Returns:
        A model of the contract ``generator_contract(config, dtype, modalities)``.

    Source: diffusers ``Cosmos3OmniTransformer.forward`` (the gen half).
    """
    contract = generator_contract(config, dtype, modalities)
    graph = GraphBuilder("generator", opset=lowering.opset, dtype=dtype, weights=weights)
    inputs = {spec.name: graph.add_input(spec) for spec in contract.inputs}
    heads = _Heads(graph, config, inputs)

    time = _time_embedding(graph, config, inputs["timestep"])
    with graph.scope("embed"):
        parts = [heads.embed(modality, time) for modality in modalities]
        x = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)
        tower = Tower.begin(
            graph,
            lowering,
            config,
            inputs["rotary_cos"],
            inputs["rotary_sin"],
            is_masked=False,
        )
        shape = graph.op("Shape", x)
        x = graph.op("Reshape", x, graph.constant([-1, config.hidden_size]))
    for index in range(config.num_hidden_layers):
        names = generator_layer(config, index)
        with graph.scope(f"layers.{index}"):
            query, key, value = tower.qkv(tower.norm(x, names.input_norm), names)
            context = f"context.{index}"
            # The prompt comes first, as in the reference; attention is full, so no mask.
            keys = graph.op("Concat", inputs[f"{context}.key"], tower.rotary(key), axis=2)
            values = graph.op("Concat", inputs[f"{context}.value"], value, axis=2)
            x = tower.finish_layer(x, names, tower.rotary(query), keys, values, None)
    with graph.scope("head"):
        x = tower.norm(x, generator_norm(config))
        x = graph.op("Reshape", x, shape, allowzero=1)
        results = heads.velocities(x, modalities)
    for spec in contract.outputs:
        graph.add_output(results[spec.name], spec)
    return graph.model()


def _time_embedding(graph: GraphBuilder, config: ModelConfig, timestep: ir.Value) -> ir.Value:
    """``W2 silu(W1 [cos(τf), sin(τf)] + b1) + b2``, float32 inside, ``[B, 1, E]`` out.

    Source: diffusers ``get_timestep_embedding`` (flip_sin_to_cos, no shift), ``TimestepEmbedding``.
    """
    half = TIME_PROJ_CHANNELS // 2
    exponent = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000)) / np.float32(half)
    with graph.scope("time"):
        scaled = graph.op("Mul", timestep, graph.constant(config.timestep_scale, DType.FLOAT32))
        angles = graph.op(
            "Mul",
            graph.op("Unsqueeze", scaled, graph.constant([1])),
            graph.constant(np.exp(exponent)[None], DType.FLOAT32),
        )
        e = graph.op("Concat", graph.op("Cos", angles), graph.op("Sin", angles), axis=-1)
        e = _linear_float32(graph, e, f"{TIME_EMBEDDER}linear_1")
        e = graph.op("Mul", e, graph.op("Sigmoid", e))
        e = _linear_float32(graph, e, f"{TIME_EMBEDDER}linear_2")
        e = e if graph.dtype is DType.FLOAT32 else graph.cast(e, graph.dtype)
        return graph.op("Unsqueeze", e, graph.constant([1]))


def _linear_float32(graph: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    weight = graph.weight(f"{name}.weight", DType.FLOAT32)
    return graph.op("Gemm", x, weight, graph.weight(f"{name}.bias", DType.FLOAT32), transB=1)


class _Heads:
    """Projections between each modality's own space and the token stream."""

    def __init__(
        self, graph: GraphBuilder, config: ModelConfig, inputs: Mapping[str, ir.Value]
    ) -> None:
        self.graph = graph
        self.config = config
        self.inputs = inputs

    def embed(self, modality: Modality, time: ir.Value) -> ir.Value:
        """Return tokens ``[B, n, E]``; noisy ones carry the time, clean ones do not."""
        graph, hidden = self.graph, self.config.hidden_size
        latents = self.inputs[_LATENTS[modality]]
        low = graph.dtype is not DType.FLOAT32
        x = graph.cast(latents, graph.dtype) if low else latents
        if modality is Modality.ACTION:
            tokens = self._domain_linear(x, "action_proj_in", self.config.action_dim or 0, hidden)
        else:
            width = (
                self.config.patch_latent_dim
                if modality is Modality.VISION
                else self.config.sound_dim
            )
            name = "proj_in" if modality is Modality.VISION else "audio_proj_in"
            rows = graph.op("Reshape", x, graph.constant([-1, width]))
            tokens = self._unflatten(linear(graph, rows, name), latents, hidden)
        if modality is Modality.SOUND:
            tokens = graph.op("Add", tokens, graph.weight("audio_modality_embed"))
        if modality is Modality.ACTION:
            tokens = graph.op("Add", tokens, graph.weight("action_modality_embed"))
        mask = self._mask(modality)
        mask = graph.cast(mask, graph.dtype) if low else mask
        return graph.op("Add", tokens, graph.op("Mul", mask, time))

    def velocities(self, x: ir.Value, modalities: Sequence[Modality]) -> dict[str, ir.Value]:
        """Return each modality's velocity, float32, zero at clean tokens; ``x`` is ``[B, N, E]``."""
        graph, hidden = self.graph, self.config.hidden_size
        results: dict[str, ir.Value] = {}
        start = graph.constant([0])
        for modality in modalities:
            latents = self.inputs[_LATENTS[modality]]
            tokens = x
            if len(modalities) > 1:
                end = graph.op("Add", start, graph.dims(latents, 1, 2))
                tokens = graph.op("Slice", x, start, end, graph.constant([1]))
                start = end
            if modality is Modality.ACTION:
                width = self.config.action_dim or 0
                velocity = self._domain_linear(tokens, "action_proj_out", hidden, width)
            else:
                vision = modality is Modality.VISION
                rows = graph.op("Reshape", tokens, graph.constant([-1, hidden]))
                rows = linear(graph, rows, "proj_out" if vision else "audio_proj_out")
                width = self.config.patch_latent_dim if vision else self.config.sound_dim or 0
                velocity = self._unflatten(rows, latents, width)
            if graph.dtype is not DType.FLOAT32:
                velocity = graph.cast(velocity, DType.FLOAT32)
            results[_VELOCITY[modality]] = graph.op("Mul", velocity, self._mask(modality))
        return results

    def _mask(self, modality: Modality) -> ir.Value:
        mask = self.inputs[_NOISE_MASK[modality]]
        return self.graph.op("Unsqueeze", mask, self.graph.constant([2]))

    def _unflatten(self, rows: ir.Value, like: ir.Value, width: int) -> ir.Value:
        """``[B·n, width]`` to ``[B, n, width]``; n may be zero, hence allowzero."""
        graph = self.graph
        shape = graph.op("Concat", graph.dims(like, 0, 2), graph.constant([width]), axis=0)
        return graph.op("Reshape", rows, shape, allowzero=1)

    def _domain_linear(self, x: ir.Value, name: str, width_in: int, width_out: int) -> ir.Value:
        """``x W_d + b_d``: each row of the table is an ``[in, out]`` matrix of one embodiment.

        Source: diffusers ``DomainAwareLinear``.
        """
        graph, domain = self.graph, self.inputs["domain_id"]
        matrix = graph.op("Gather", graph.weight(f"{name}.fc.weight"), domain, axis=0)
        matrix = graph.op("Reshape", matrix, graph.constant([-1, width_in, width_out]))
        bias = graph.op("Gather", graph.weight(f"{name}.bias.weight"), domain, axis=0)
        bias = graph.op("Unsqueeze", bias, graph.constant([1]))
        return graph.op("Add", graph.op("MatMul", x, matrix), bias)


_LATENTS = {
    Modality.VISION: "latent_patches",
    Modality.SOUND: "sound_latents",
    Modality.ACTION: "action_latents",
}
_NOISE_MASK = {
    Modality.VISION: "vision_noise_mask",
    Modality.SOUND: "sound_noise_mask",
    Modality.ACTION: "action_noise_mask",
}
_VELOCITY = {
    Modality.VISION: "velocity",
    Modality.SOUND: "sound_velocity",
    Modality.ACTION: "action_velocity",
}

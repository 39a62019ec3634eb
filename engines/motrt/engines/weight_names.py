"""The names and shapes of a transformer's tensors, derived from its config.

Names are the checkpoint's own (diffusers' ``Cosmos3OmniTransformer.state_dict``); they are also
the graphs' initializer names and the keys by which a refit finds its weights. This module is the
only place that knows which name plays which part in which engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motrt.engines.model_config import ModelConfig

EMBED_TOKENS = "embed_tokens.weight"
TIME_EMBEDDER = "time_embedder."
TIME_PROJ_CHANNELS = 256  # diffusers Cosmos3OmniTransformer: Timesteps(num_channels=256)


class Part(enum.Enum):
    """Who reads a tensor: the host (embedding rows), one engine, or (shared layout) both."""

    HOST = "host"
    REASONER = "reasoner"
    GENERATOR = "generator"
    BOTH = "both"


ENGINES: dict[str, tuple[Part, Part]] = {
    "reasoner": (Part.REASONER, Part.BOTH),
    "generator": (Part.GENERATOR, Part.BOTH),
}
"""The two engines, and whose tensors each reads."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The tensor-name prefixes of one layer in one tower; append ``.weight`` or ``.bias``."""

    input_norm: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    context_key_norm: str
    post_norm: str
    mlp: str


def reasoner_layer(index: int) -> LayerNames:
    """Return the causal tower's names in layer ``index``."""
    layer = f"layers.{index}."
    attention = f"{layer}self_attn."
    return LayerNames(
        input_norm=f"{layer}input_layernorm",
        query=f"{attention}to_q",
        key=f"{attention}to_k",
        value=f"{attention}to_v",
        output=f"{attention}to_out",
        query_norm=f"{attention}norm_q",
        key_norm=f"{attention}norm_k",
        context_key_norm=f"{attention}k_norm_und_for_gen",
        post_norm=f"{layer}post_attention_layernorm",
        mlp=f"{layer}mlp",
    )


def generator_layer(config: ModelConfig, index: int) -> LayerNames:
    """Return the denoiser's names in layer ``index``: its own, or (shared) the reasoner's."""
    if config.weight_layout == "shared":
        return reasoner_layer(index)
    layer = f"layers.{index}."
    attention = f"{layer}self_attn."
    return LayerNames(
        input_norm=f"{layer}input_layernorm_moe_gen",
        query=f"{attention}add_q_proj",
        key=f"{attention}add_k_proj",
        value=f"{attention}add_v_proj",
        output=f"{attention}to_add_out",
        query_norm=f"{attention}norm_added_q",
        key_norm=f"{attention}norm_added_k",
        context_key_norm=f"{attention}k_norm_und_for_gen",
        post_norm=f"{layer}post_attention_layernorm_moe_gen",
        mlp=f"{layer}mlp_moe_gen",
    )


def generator_norm(config: ModelConfig) -> str:
    """Return the prefix of the denoiser's final norm."""
    return "norm" if config.weight_layout == "shared" else "norm_moe_gen"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor that a checkpoint of this config must hold."""

    shape: tuple[int, ...]
    part: Part


def weight_table(config: ModelConfig) -> dict[str, WeightSpec]:
    """Return every tensor of the transformer, by checkpoint name.

    Source: diffusers ``models/transformers/transformer_cosmos3.py``.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    shared = config.weight_layout == "shared"
    table: dict[str, WeightSpec] = {
        EMBED_TOKENS: WeightSpec((vocab, hidden), Part.HOST),
        "lm_head.weight": WeightSpec((vocab, hidden), Part.REASONER),
        "norm.weight": WeightSpec((hidden,), Part.BOTH if shared else Part.REASONER),
    }
    for index in range(config.num_hidden_layers):
        own = reasoner_layer(index)
        part = Part.BOTH if shared else Part.REASONER
        table.update(_layer_table(config, own, part, has_qk_norm=config.qk_norm_for_text))
        if config.has_context_key_norm:
            # It acts on the prompt's keys, so it runs where they are made: in the reasoner.
            name = f"{own.context_key_norm}.weight"
            table[name] = WeightSpec((config.head_dim,), Part.REASONER)
        if not shared:
            names = generator_layer(config, index)
            table.update(_layer_table(config, names, Part.GENERATOR, has_qk_norm=True))
    if not shared:
        table[f"{generator_norm(config)}.weight"] = WeightSpec((hidden,), Part.GENERATOR)
    table.update(_head_table(config))
    return table


def read_by(config: ModelConfig, engine: str) -> frozenset[str]:
    """Return the names of the tensors that an engine's graph may read."""
    return frozenset(n for n, spec in weight_table(config).items() if spec.part in ENGINES[engine])


def _layer_table(
    config: ModelConfig, names: LayerNames, part: Part, *, has_qk_norm: bool
) -> dict[str, WeightSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.input_norm}.weight": (hidden,),
        f"{names.post_norm}.weight": (hidden,),
        f"{names.query}.weight": (query, hidden),
        f"{names.key}.weight": (key, hidden),
        f"{names.value}.weight": (key, hidden),
        f"{names.output}.weight": (hidden, query),
        f"{names.mlp}.up_proj.weight": (inner, hidden),
        f"{names.mlp}.down_proj.weight": (hidden, inner),
    }
    if config.is_gated:
        shapes[f"{names.mlp}.gate_proj.weight"] = (inner, hidden)
    if config.attention_bias:
        shapes[f"{names.query}.bias"] = (query,)
        shapes[f"{names.key}.bias"] = (key,)
        shapes[f"{names.value}.bias"] = (key,)
        shapes[f"{names.output}.bias"] = (hidden,)
    if has_qk_norm:
        shapes[f"{names.query_norm}.weight"] = (config.head_dim,)
        shapes[f"{names.key_norm}.weight"] = (config.head_dim,)
    return {name: WeightSpec(shape, part) for name, shape in shapes.items()}


def _head_table(config: ModelConfig) -> dict[str, WeightSpec]:
    hidden, patch = config.hidden_size, config.patch_latent_dim
    shapes: dict[str, tuple[int, ...]] = {
        "proj_in.weight": (hidden, patch),
        "proj_in.bias": (hidden,),
        "proj_out.weight": (patch, hidden),
        "proj_out.bias": (patch,),
        f"{TIME_EMBEDDER}linear_1.weight": (hidden, TIME_PROJ_CHANNELS),
        f"{TIME_EMBEDDER}linear_1.bias": (hidden,),
        f"{TIME_EMBEDDER}linear_2.weight": (hidden, hidden),
        f"{TIME_EMBEDDER}linear_2.bias": (hidden,),
    }
    if config.action_gen and config.action_dim:
        domains, width = config.num_embodiment_domains, config.action_dim
        shapes["action_proj_in.fc.weight"] = (domains, width * hidden)
        shapes["action_proj_in.bias.weight"] = (domains, hidden)
        shapes["action_proj_out.fc.weight"] = (domains, hidden * width)
        shapes["action_proj_out.bias.weight"] = (domains, width)
        shapes["action_modality_embed"] = (hidden,)
    if config.sound_gen and config.sound_dim:
        width = config.sound_dim
        shapes["audio_proj_in.weight"] = (hidden, width)
        shapes["audio_proj_in.bias"] = (hidden,)
        shapes["audio_proj_out.weight"] = (width, hidden)
        shapes["audio_proj_out.bias"] = (width,)
        shapes["audio_modality_embed"] = (hidden,)
    return {name: WeightSpec(shape, Part.GENERATOR) for name, shape in shapes.items()}

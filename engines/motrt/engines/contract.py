"""The contract: names, shapes and dtypes of both engines' inputs and outputs.

Exporter, runtime and checks read them from here, and ``docs/contract.md`` states them for others.
Dimension names: ``batch`` B, ``tokens`` S, ``past`` P, ``total`` T, ``capacity`` C, ``context`` U,
``vision`` Nv, ``sound`` Ns, ``action`` Na, ``generated`` N = Nv + Ns + Na, ``logits`` M.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.model_config import ModelConfig

CONTRACT_VERSION = 1

# Exactly this value in every precision, rounded to the compute type (bfloat16: -9984). Finite, so
# that a row that sees nothing still has a softmax; in range for float16.
MASK_VALUE = -10000.0


class Modality(enum.Enum):
    """What a token of a sequence stands for; drives packing, positions and reports."""

    TEXT = "text"
    VISION = "vision"
    SOUND = "sound"
    ACTION = "action"


# The order of the generator's tokens.
GENERATED = (Modality.VISION, Modality.SOUND, Modality.ACTION)


class Cache(enum.Enum):
    """How the reasoner's K/V cache is updated."""

    STATIC = "static"  # written in place at write_indices
    APPEND = "append"  # the graph returns the new keys and values; the caller stores them


@dataclass(frozen=True, slots=True)
class EngineContract:
    """What one engine takes and gives."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def reasoner_contract(config: ModelConfig, dtype: DType, cache: Cache) -> EngineContract:
    """Return the causal engine's contract; ``dtype`` is the compute type."""
    half, heads = config.head_dim // 2, config.num_key_value_heads
    static = cache is Cache.STATIC
    total = "capacity" if static else "total"
    past = ("batch", heads, "capacity" if static else "past", config.head_dim)
    new = ("batch", heads, "tokens", config.head_dim)
    present = past if static else new
    inputs = [
        TensorSpec("inputs_embeds", dtype, ("batch", "tokens", config.hidden_size)),
        TensorSpec("rotary_cos", dtype, ("batch", "tokens", half)),
        TensorSpec("rotary_sin", dtype, ("batch", "tokens", half)),
        TensorSpec("attention_bias", dtype, ("batch", 1, "tokens", total)),
        TensorSpec("logit_indices", DType.INT64, ("batch", "logits")),
    ]
    if static:
        inputs.append(TensorSpec("write_indices", DType.INT64, ("batch",)))
    outputs = [TensorSpec("logits", DType.FLOAT32, ("batch", "logits", config.vocab_size))]
    for layer in range(config.num_hidden_layers):
        inputs.append(TensorSpec(f"past_key_values.{layer}.key", dtype, past))
        inputs.append(TensorSpec(f"past_key_values.{layer}.value", dtype, past))
        outputs.append(TensorSpec(f"present.{layer}.key", dtype, present))
        outputs.append(TensorSpec(f"present.{layer}.value", dtype, present))
        if config.has_context_key_norm:
            outputs.append(TensorSpec(f"context.{layer}.key", dtype, new))
    return EngineContract("reasoner", tuple(inputs), tuple(outputs))


def generator_contract(
    config: ModelConfig, dtype: DType, modalities: Iterable[Modality]
) -> EngineContract:
    """Return the denoiser's contract for a graph with these modalities."""
    float32 = DType.FLOAT32
    chosen = check_modalities(config, modalities)
    patch = config.patch_latent_dim
    inputs = [
        TensorSpec("latent_patches", float32, ("batch", "vision", patch)),
        TensorSpec("vision_noise_mask", float32, ("batch", "vision")),
    ]
    outputs = [TensorSpec("velocity", float32, ("batch", "vision", patch))]
    if Modality.SOUND in chosen and config.sound_dim:
        shape = ("batch", "sound", config.sound_dim)
        inputs.append(TensorSpec("sound_latents", float32, shape))
        inputs.append(TensorSpec("sound_noise_mask", float32, ("batch", "sound")))
        outputs.append(TensorSpec("sound_velocity", float32, shape))
    if Modality.ACTION in chosen and config.action_dim:
        shape = ("batch", "action", config.action_dim)
        inputs.append(TensorSpec("action_latents", float32, shape))
        inputs.append(TensorSpec("action_noise_mask", float32, ("batch", "action")))
        inputs.append(TensorSpec("domain_id", DType.INT64, ("batch",)))
        outputs.append(TensorSpec("action_velocity", float32, shape))
    generated = "vision" if chosen == (Modality.VISION,) else "generated"
    half = config.head_dim // 2
    inputs += [
        TensorSpec("timestep", float32, ("batch",)),
        TensorSpec("rotary_cos", dtype, ("batch", generated, half)),
        TensorSpec("rotary_sin", dtype, ("batch", generated, half)),
    ]
    context = ("batch", config.num_key_value_heads, "context", config.head_dim)
    for layer in range(config.num_hidden_layers):
        inputs.append(TensorSpec(f"context.{layer}.key", dtype, context))
        inputs.append(TensorSpec(f"context.{layer}.value", dtype, context))
    return EngineContract("generator", tuple(inputs), tuple(outputs))


def check_modalities(config: ModelConfig, modalities: Iterable[Modality]) -> tuple[Modality, ...]:
    """Return the generator's modalities in token order.

    Raises:
        ConfigError: The checkpoint lacks one that is asked for, or vision is not among them.
    """
    asked = set(modalities)
    has = available_modalities(config)
    if Modality.VISION not in asked or not asked <= set(has):
        raise ConfigError(
            "the generator cannot have these modalities",
            got=", ".join(sorted(m.value for m in asked)) or "none",
            expected=f"vision, alone or with others of: {', '.join(m.value for m in has)}",
            fix="Leave --modalities out to export all that the checkpoint has.",
        )
    return tuple(modality for modality in GENERATED if modality in asked)


def available_modalities(config: ModelConfig) -> tuple[Modality, ...]:
    """Return what the checkpoint's generator can denoise, in token order."""
    has = {
        Modality.VISION: True,
        Modality.SOUND: config.sound_gen,
        Modality.ACTION: config.action_gen,
    }
    return tuple(modality for modality in GENERATED if has[modality])

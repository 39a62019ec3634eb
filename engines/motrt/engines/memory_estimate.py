"""How much memory a bundle's tensors take at given shapes.

Counted is what every backend must hold, and apart from it the one activation that decides whether
a clip fits on a CPU: attention's scores. Other activations and workspace depend on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.weight_names import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What memory is estimated for.

    Attributes:
        batch: Sequences at a time.
        context: Prompt tokens whose K/V one guidance branch of the generator reads.
        capacity: Tokens that the reasoner's cache holds.
        tokens: Vision tokens; the default is a clip of 189 frames of 320x192.
        guidance_branches: Branches whose context is kept: 2 with classifier-free guidance.

    Raises:
        ConfigError: A number below 1.
    """

    batch: int = 1
    context: int = 512
    capacity: int = 4096
    tokens: int = 2880
    guidance_branches: int = 2

    def __post_init__(self) -> None:
        """Check every number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ConfigError(
                    f"the shape {field.name} cannot be right", got=value, expected="1 or more"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of everything that stays in memory.

    Attributes:
        shapes: What the numbers hold for.
        host_weights: Embedding rows: a memory map, of which only rows in use are read.
        reasoner_weights: What the reasoner reads.
        generator_weights: What the generator reads.
        shared_weights: What both read, and both of the above count.
        other_weights: The VAE and other parts.
        kv_cache: The reasoner's cache.
        context_key_cache: The second key cache of checkpoints with an extra key norm (Edge).
        context: Prompt K/V of one guidance branch.
        context_all: Prompt K/V of all guidance branches.
        latents: One copy of the vision latents, float32; a solver keeps two to four.
        attention_scores: One layer's scores while a step runs on ONNX Runtime's CPU; in no total,
            for other backends never write them.
        total: All of it, with weights of its own in each engine.
        total_one_copy: All of it, with shared weights in memory once.
    """

    shapes: Shapes
    host_weights: int
    reasoner_weights: int
    generator_weights: int
    shared_weights: int
    other_weights: int
    kv_cache: int
    context_key_cache: int
    context: int
    context_all: int
    latents: int
    attention_scores: int
    total: int
    total_one_copy: int


def attention_scores_nbytes(config: ModelConfig, dtype: DType, tokens: int, context: int) -> int:
    """Return the bytes of one layer's scores of the generator, ``[H, N, U + N]``.

    Args:
        config: The architecture.
        dtype: Compute type.
        tokens: Tokens that are denoised, of all modalities (N).
        context: Prompt tokens (U).
    """
    return config.num_attention_heads * tokens * (context + tokens) * dtype.itemsize


def estimate_memory(
    config: ModelConfig, dtype: DType, shapes: Shapes, *, weights: Mapping[Part, int], other: int
) -> MemoryEstimate:
    """Add up.

    Args:
        config: The architecture.
        dtype: Compute type, which the caches have too.
        shapes: Sizes of a run.
        weights: Bytes of the tensors that each reader alone, or both, read.
        other: Bytes of the weights of everything but the transformer.
    """
    # One token's keys in all layers; values take as much.
    token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    keys = shapes.batch * token * dtype.itemsize
    shared = weights[Part.BOTH]
    reasoner, generator = (weights[part] + shared for part in (Part.REASONER, Part.GENERATOR))
    kv_cache = 2 * keys * shapes.capacity
    key_cache = keys * shapes.capacity if config.has_context_key_norm else 0
    context = 2 * keys * shapes.context
    context_all = context * shapes.guidance_branches
    patch = config.patch_latent_dim * DType.FLOAT32.itemsize
    latents = shapes.batch * shapes.tokens * patch
    run = kv_cache + key_cache + context_all + latents
    total = weights[Part.HOST] + reasoner + generator + other + run
    return MemoryEstimate(
        shapes=shapes,
        host_weights=weights[Part.HOST],
        reasoner_weights=reasoner,
        generator_weights=generator,
        shared_weights=shared,
        other_weights=other,
        kv_cache=kv_cache,
        context_key_cache=key_cache,
        context=context,
        context_all=context_all,
        latents=latents,
        attention_scores=shapes.batch
        * attention_scores_nbytes(config, dtype, shapes.tokens, shapes.context),
        total=total,
        total_one_copy=total - shared,
    )

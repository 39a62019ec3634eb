"""How much memory a bundle's tensors take at given shapes.

Counted is what every backend must hold. Apart from it stands what ONNX Runtime's CPU needs at least
for a denoise step and for a chunk of the VAE's decoder. Both are lower bounds, so that nothing is
refused that would fit: from 512 tokens on, tiny models' peak memory grew by 1.1 to 2 times as much.
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
    from motrt.engines.vae_config import VaeConfig

# A clip of 189 frames of 1280x720, what is made if nothing else is asked for.
FULL_CLIP_TOKENS = 44_160


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
        denoise_step: Least activations of a step on ONNX Runtime's CPU; in no total, for other
            backends never write attention's scores.
        denoise_step_full: The same for a clip of 189 frames of 1280x720.
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
    denoise_step: int
    denoise_step_full: int
    total: int
    total_one_copy: int


def denoise_step_nbytes(
    config: ModelConfig, dtype: DType, lowering: str, tokens: int, context: int
) -> int:
    """Return the least bytes of activations of a generator's step on ONNX Runtime's CPU.

    Counted are one layer's scores ``[H, N, U + N]`` and seven states of each token. The kernels
    write all heads' scores at once, in blocks of queries too, and in float32: once (native), with a
    copy in 16 bits (native), or before and after the softmax (portable).

    Args:
        config: The architecture.
        dtype: Compute type.
        lowering: ``native`` or ``portable``.
        tokens: Tokens that are denoised, of all modalities (N).
        context: Prompt tokens (U).
    """
    copies_nbytes = 8 if lowering == "portable" else 4
    if lowering == "native" and dtype is not DType.FLOAT32:
        copies_nbytes += dtype.itemsize
    heads = config.num_attention_heads
    scores = heads * tokens * (context + tokens) * copies_nbytes
    # Residual, normed, output; query thrice and its result. The MLP comes when scores are free.
    states = tokens * (3 * config.hidden_size + 4 * heads * config.head_dim) * dtype.itemsize
    return scores + states


def decode_chunk_nbytes(config: VaeConfig, num_frames: int, height: int, width: int) -> int:
    """Return the least bytes of activations of the VAE's decoder on ONNX Runtime's CPU.

    Its last stage unfolds each 3x3x3 neighbourhood of a chunk's frames. Measured on the 2.2 form.
    """
    frames = config.temporal_factor if num_frames > 1 else 1
    channels = (config.decoder_base_dim or config.base_dim) * config.dim_mult[0]
    taps = 27
    places = frames * (height // config.patch) * (width // config.patch)
    return taps * channels * places * DType.FLOAT32.itemsize


def estimate_memory(
    config: ModelConfig,
    dtype: DType,
    shapes: Shapes,
    *,
    lowering: str,
    weights: Mapping[Part, int],
    other: int,
) -> MemoryEstimate:
    """Add up.

    Args:
        config: The architecture.
        dtype: Compute type, which the caches have too.
        shapes: Sizes of a run.
        lowering: ``native`` or ``portable``.
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
    step, full = (
        shapes.batch * denoise_step_nbytes(config, dtype, lowering, tokens, shapes.context)
        for tokens in (shapes.tokens, FULL_CLIP_TOKENS)
    )
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
        denoise_step=step,
        denoise_step_full=full,
        total=total,
        total_one_copy=total - shared,
    )

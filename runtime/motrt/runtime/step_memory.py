"""Refusing, before anything is computed, a clip that cannot fit into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError
from motrt.engines.host import probe_memory
from motrt.engines.memory_estimate import decode_chunk_nbytes

if TYPE_CHECKING:
    from motrt.engines.vae_config import VaeConfig
    from motrt.runtime.protocols import Backend


def check_step_memory(backend: Backend, tokens: int, context: int) -> None:
    """Compare a step's activations with the memory that is free.

    Args:
        backend: Knows what it allocates.
        tokens: Tokens that are denoised.
        context: Prompt tokens.

    Raises:
        ConfigError: They alone are larger. Where the system does not tell, nothing is refused.
    """
    _check(
        "one denoise step of this size",
        backend.step_nbytes(tokens, context),
        f"{tokens} tokens",
        "Ask for a smaller height and width or fewer frames: half the tokens take a quarter.",
    )


def check_decode_memory(config: VaeConfig, num_frames: int, height: int, width: int) -> None:
    """Compare what the VAE's decoder needs in main memory with what is free.

    Raises:
        ConfigError: See :func:`check_step_memory`.
    """
    _check(
        "decoding pictures of this size",
        decode_chunk_nbytes(config, num_frames, height, width),
        f"{height} x {width} pixels",
        "Ask for a smaller height and width, or write the latents: a .npz output.",
    )


def _check(what: str, needed: int, size: str, fix: str) -> None:
    memory = probe_memory()
    bounds = [free for free in (memory.available_bytes, memory.limit_bytes) if free is not None]
    if bounds and needed > min(bounds):
        raise ConfigError(
            f"{what} does not fit into memory",
            got=f"{size}, which take {needed / 2**30:.1f} GiB or more",
            expected=f"at most the {min(bounds) / 2**30:.1f} GiB that are free",
            fix=fix,
        )

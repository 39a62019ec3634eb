"""Refusing, before anything is computed, a clip whose denoise step cannot fit into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError
from motrt.engines.host import probe_memory

if TYPE_CHECKING:
    from motrt.runtime.protocols import Backend


def check_step_memory(backend: Backend, tokens: int, context: int) -> None:
    """Compare a step's largest buffer with the memory that is free.

    Args:
        backend: Knows what it allocates.
        tokens: Tokens that are denoised.
        context: Prompt tokens.

    Raises:
        ConfigError: The buffer alone is larger. Where the system does not tell, nothing is refused.
    """
    needed = backend.step_nbytes(tokens, context)
    memory = probe_memory()
    bounds = [size for size in (memory.available_bytes, memory.limit_bytes) if size is not None]
    if bounds and needed > min(bounds):
        raise ConfigError(
            "one denoise step of this size does not fit into memory",
            got=f"{tokens} tokens, whose attention scores take {needed / 2**30:.1f} GiB",
            expected=f"at most the {min(bounds) / 2**30:.1f} GiB that are free",
            fix="Ask for a smaller height and width or fewer frames: half the tokens take a quarter.",
        )

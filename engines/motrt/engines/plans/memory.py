"""How much memory a build takes, and how to tell that it had too little.

TensorRT reports an exhausted memory in a dozen ways, and on a board the kernel ends the process
without a word. All of them become one error, with the numbers and what can be done.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from motrt.engines.errors import BuildMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.engines.host import Memory

# A lower bound, so that nothing is refused that would fit. TensorRT-RTX 1.7 on placeholders took
# 0.58 GB for Edge's generator and 2.06 GB for its reasoner, whose lm_head has 0.54 GB.
_BASE_BYTES = 250 << 20
_BYTES_PER_LAYER_AND_PROFILE = 4 << 20
# What TensorRT says, in lower case.
_SIGNS = (
    "out of memory",
    "outofmemory",
    "out_of_memory",
    "memoryallocation",
    "bad_alloc",
    "memoryerror",
    "cannot allocate memory",
    "failed to allocate",
    "could not allocate",
    "insufficient memory",
    "insufficient workspace",
    "nvmapmemalloc",
    "requested amount of gpu memory",
)
_LEVERS = (
    "Close other programs or add swap; lower --workspace-mib, --optimization-level, --max-context "
    "or --max-tokens; or build without values (--placeholders always)."
)


def needed_bytes(
    *,
    weight_bytes: int,
    largest_bytes: int,
    num_layers: int,
    num_profiles: int,
    workspace_bytes: int | None,
) -> int:
    """Return the least memory that building one engine takes.

    Args:
        weight_bytes: Of the values that the builder gets: 0 with placeholders.
        largest_bytes: Of the largest constant, with or without values.
        num_layers: Of the model.
        num_profiles: Of the engine.
        workspace_bytes: Scratch memory that shares the main memory (boards), or None.
    """
    code = num_layers * num_profiles * _BYTES_PER_LAYER_AND_PROFILE
    # The builder's copy beside the mapped file.
    return _BASE_BYTES + code + 2 * (weight_bytes + largest_bytes) + (workspace_bytes or 0)


def available_bytes(memory: Memory) -> int | None:
    """Return what can be had, or None if nobody knows."""
    counts = [c for c in (memory.available_bytes, memory.limit_bytes) if c is not None]
    return min(counts, default=None)


def check_memory(engine: str, needed: int, available: int | None) -> None:
    """Refuse a build that cannot fit.

    Raises:
        BuildMemoryError: Less is available than is needed at least.
    """
    if available is not None and available < needed:
        raise BuildMemoryError(
            f"building the {engine} needs more memory than is free",
            needed_bytes=needed,
            available_bytes=available,
            got=f"{_mib(available)} available",
            expected=f"at least {_mib(needed)}",
            fix=_LEVERS,
        )


def is_out_of_memory(exit_code: int, words: Sequence[str]) -> bool:
    """Whether a build ended for want of memory.

    Args:
        exit_code: Of the builder's process; negative for a signal, as ``subprocess`` has it.
        words: What it said, in any channel.
    """
    killed = exit_code in {-signal.SIGKILL, 128 + signal.SIGKILL}
    return killed or any(sign in text.lower() for text in words for sign in _SIGNS)


def out_of_memory(
    engine: str, exit_code: int, words: Sequence[str], needed: int, available: int | None
) -> BuildMemoryError:
    """Return the error of a build that ended so."""
    said = next((t for t in reversed(words) if is_out_of_memory(0, [t])), "")
    how = said or "the kernel ended the build (SIGKILL)"
    have = "unknown" if available is None else _mib(available)
    return BuildMemoryError(
        f"building the {engine} ran out of memory",
        needed_bytes=needed,
        available_bytes=available,
        got=f"{how}, exit code {exit_code}; {have} were available at its start",
        expected=f"more than the {_mib(needed)} of the lower bound",
        fix=_LEVERS,
        messages=list(words),
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"

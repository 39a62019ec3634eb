"""What every K/V cache refuses, and how its tensors are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from motrt.engines.model_config import ModelConfig


def require_room(needed: int, capacity: int) -> None:
    """Refuse more tokens than a cache may hold.

    Raises:
        ExecutionError: ``needed`` exceeds ``capacity``.
    """
    if needed > capacity:
        raise ExecutionError(
            "the K/V cache is full",
            got=f"{needed} tokens",
            expected=f"at most {capacity}",
            fix="Open the runtime with a larger capacity (--capacity), or shorten the prompt.",
        )


def cache_names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return ``{i}.key|value`` of all layers, and those that the generator gets otherwise.

    Edge hands the generator keys that were normed once more; values are the reasoner's own.
    """
    layers = range(config.num_hidden_layers)
    names = [f"{i}.{kind}" for i in layers for kind in ("key", "value")]
    return names, [f"{i}.key" for i in layers] if config.has_context_key_norm else []

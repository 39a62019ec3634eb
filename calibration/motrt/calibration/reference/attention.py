"""What diffusers' joint attention was given: the prompt's keys and values, layer by layer.

The tensors are recorded at the call of the attention kernel, so nothing of the model is computed twice.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers.models.transformers.transformer_cosmos3 as cosmos3

from motrt.calibration.reference.arithmetic import to_float32

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """Keys and values ``[K, S, D]`` of one layer, after qk-norm and rope.

    ``key`` is what the reasoner attends to, ``context_key`` what the generator attends to; they differ where
    the checkpoint has the extra key norm.
    """

    key: NDArray[np.float32]
    value: NDArray[np.float32]
    context_key: NDArray[np.float32]


@contextmanager
def record_prompt_keys() -> Iterator[list[PromptKeys]]:
    """Collect the prompt's keys and values of every layer that runs inside the block, in order."""
    layers: list[PromptKeys] = []
    causal: list[tuple[torch.Tensor, torch.Tensor]] = []
    attend = cosmos3.dispatch_attention_fn

    def recording(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        # A layer calls twice: the prompt on itself, then the generator on prompt and generator.
        if options["is_causal"]:
            causal.append((key, value))
        else:
            prompt_key, prompt_value = causal.pop()
            length = prompt_key.shape[1]
            layers.append(
                PromptKeys(
                    key=_by_head(prompt_key),
                    value=_by_head(prompt_value),
                    context_key=_by_head(key[:, :length]),
                )
            )
        output: torch.Tensor = attend(query, key, value, **options)
        return output

    cosmos3.dispatch_attention_fn = recording
    try:
        yield layers
    finally:
        cosmos3.dispatch_attention_fn = attend


def _by_head(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Turn ``[1, S, K, D]`` into ``[K, S, D]``."""
    return to_float32(tensor[0].transpose(0, 1))

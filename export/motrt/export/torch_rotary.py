"""The rotary frequencies as the reference computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from motrt.engines.model_config import ModelConfig


def reference_inv_freq(config: ModelConfig) -> npt.NDArray[np.float32]:
    """Return ``1 / theta^(2j / D)`` for j below D/2, float32 ``[D/2]``.

    By torch, because NumPy's float32 power rounds differently; the manifest carries the result to the
    runtime, which has no torch.

    Source: diffusers ``Cosmos3VLTextRotaryEmbedding.__init__``.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies: npt.NDArray[np.float32] = (1.0 / (config.rope_theta**exponents)).numpy()
    return frequencies

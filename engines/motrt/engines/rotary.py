"""The rotary tables that both engines take as inputs; NumPy only.

Positions have three axes (time, height, width) and each frequency turns with one of them. Positions
themselves are made by ``motrt.runtime.positions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from motrt.engines.model_config import ModelConfig

    Floats = npt.NDArray[np.float32]

TIME, HEIGHT, WIDTH = range(3)


def rotary_axes(config: ModelConfig) -> tuple[int, ...]:
    """Return which position axis drives each of the D/2 frequencies.

    Height owns every third frequency from 1 and width every third from 2, as far as their shares
    reach; time owns the rest. A share that runs past D/2 is cut off there.

    Source: diffusers ``Cosmos3VLTextRotaryEmbedding.apply_interleaved_mrope``.
    """
    axes = [TIME] * (config.head_dim // 2)
    for axis in (HEIGHT, WIDTH):
        for frequency in range(axis, min(3 * config.rope_axes_dim[axis], len(axes)), 3):
            axes[frequency] = axis
    return tuple(axes)


def rotary_tables(
    inv_freq: Floats, axes: tuple[int, ...], position_ids: Floats
) -> tuple[Floats, Floats]:
    """Return cos and sin of every token's angles, float32 ``[S, D/2]`` each.

    The angle is one float32 product, bit for bit the reference's: at time 15000 its rounding is
    worth 1e-3 rad, so a better angle would be another model. Its cos and sin are rounded once, from
    float64: within 1 ulp of torch's (float32 sin of NumPy is up to 2 away), and the same on
    every machine.

    Args:
        inv_freq: The checkpoint's frequencies, float32 ``[D/2]``.
        axes: What :func:`rotary_axes` returns.
        position_ids: Time, height and width of each token, float32 ``[3, S]``.

    Source: diffusers ``Cosmos3VLTextRotaryEmbedding.forward``, before its cast.
    """
    positions = np.asarray(position_ids, np.float32).T[:, list(axes)]
    angles = (positions * np.asarray(inv_freq, np.float32)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

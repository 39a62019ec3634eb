"""Where every token lies in time, height and width: float32 ``[3, n]``, for the rotary tables.

Text counts up on all three axes. Every generated modality starts at the same ``offset`` in time
(:func:`generator_offset`), for they run side by side; rates differ, and the weights know them so.
All arithmetic is float32, in the reference's order.

Source: diffusers ``pipelines/cosmos/pipeline_cosmos3_omni.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from motrt.engines.model_config import ModelConfig

    Floats = npt.NDArray[np.float32]

# Frames of video in one latent frame of the Wan 2.2 VAE (``scale_factor_temporal``).
TEMPORAL_COMPRESSION = 4


def text_positions(start: int, count: int) -> Floats:
    """Return ``count`` positions from ``start`` on, float32 ``[3, count]``.

    Source: ``get_3d_mrope_ids_text_tokens``.
    """
    counted = np.arange(count, dtype=np.float32) + np.float32(start)
    return np.tile(counted, (3, 1))


def generator_offset(config: ModelConfig, num_prompt_tokens: int) -> int:
    """Return the time at which every generated modality starts, after a prompt.

    Source: ``Cosmos3OmniPipeline._prepare_text_segment``.
    """
    return num_prompt_tokens + config.unified_3d_mrope_temporal_modality_margin


def vision_positions(
    config: ModelConfig,
    offset: int,
    frames: int,
    rows: int,
    columns: int,
    fps: float,
    *,
    compression: int = TEMPORAL_COMPRESSION,
) -> Floats:
    """Return the positions of a clip's patches in token order, float32 ``[3, frames·rows·columns]``.

    Args:
        config: The architecture.
        offset: What :func:`generator_offset` returns.
        frames: Latent frames.
        rows: Patches from top to bottom.
        columns: Patches from left to right.
        fps: Frames per second of the decoded video.
        compression: Frames of video in one latent frame.

    Source: ``Cosmos3OmniPipeline._prepare_vision_segment``.
    """
    time = _time(config, offset, frames, fps / compression, base=config.base_fps / compression)
    corner = 0 if config.unified_3d_mrope_reset_spatial_ids else offset
    height = np.arange(rows, dtype=np.float32) + np.float32(corner)
    width = np.arange(columns, dtype=np.float32) + np.float32(corner)
    grid = np.meshgrid(time, height, width, indexing="ij")
    return np.stack(grid).reshape(3, -1)


def sound_positions(config: ModelConfig, offset: int, frames: int) -> Floats:
    """Return the positions of sound latents, float32 ``[3, frames]``.

    Sound is not divided by the temporal compression: it advances ``base_fps`` a second, vision a
    quarter of that. It looks like a slip and is what the weights were trained with.

    Source: ``Cosmos3OmniPipeline._prepare_sound_segment``.
    """
    rate = config.sound_latent_fps
    return _line(config, offset, _time(config, offset, frames, rate, base=config.base_fps))


def action_positions(
    config: ModelConfig,
    offset: int,
    steps: int,
    fps: float,
    *,
    compression: int = TEMPORAL_COMPRESSION,
) -> Floats:
    """Return the positions of action steps, float32 ``[3, steps]``; step j lies at video frame j + 1.

    Source: ``Cosmos3OmniPipeline._prepare_action_segment``.
    """
    base = config.base_fps / compression
    return _line(config, offset, _time(config, offset, steps, fps, base=base, first=1))


def _time(
    config: ModelConfig, offset: int, count: int, rate: float, *, base: float, first: int = 0
) -> Floats:
    """Time of steps that come ``rate`` times a second, in units of which a second has ``base``.

    Source: ``get_3d_mrope_ids_vae_tokens``.
    """
    steps = np.arange(count, dtype=np.float32) + np.float32(first)
    if config.enable_fps_modulation and count > 1:  # a lone step is counted, not timed
        steps = steps / np.float32(rate) * np.float32(base)
    return steps + np.float32(offset)


def _line(config: ModelConfig, offset: int, time: Floats) -> Floats:
    """Add the height and width that a modality without space has."""
    corner = 0 if config.unified_3d_mrope_reset_spatial_ids else offset
    space = np.full_like(time, corner)
    return np.stack([time, space, space])

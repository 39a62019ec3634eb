"""Positions equal those of diffusers' pipeline, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.model_config import ModelConfig
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    text_positions,
    vision_positions,
)

CONFIGS = st.builds(
    ModelConfig,
    base_fps=st.sampled_from([16, 24, 30]),
    enable_fps_modulation=st.booleans(),
    unified_3d_mrope_reset_spatial_ids=st.booleans(),
    unified_3d_mrope_temporal_modality_margin=st.sampled_from([0, 1, 15000]),
    sound_latent_fps=st.sampled_from([25.0, 12.5, 43.07]),
)
FPS = st.one_of(st.sampled_from([24.0, 16.0, 10.0, 29.97, 23.976, 60.0]), st.floats(1, 240))
PROMPT = st.integers(1, 3000)
SETTINGS = settings(deadline=None, max_examples=150)


def _segment(config: ModelConfig, modality: str, **arguments: Any) -> np.ndarray:
    """Positions by the pipeline's own method, which needs only a config of it."""
    pipeline = SimpleNamespace(
        transformer=SimpleNamespace(config=config),
        vae_scale_factor_temporal=arguments.pop("compression", 4),
    )
    method = getattr(diffusers.Cosmos3OmniPipeline, f"_prepare_{modality}_segment")
    segment = method(pipeline, **arguments, device="cpu")
    ids = segment[f"{modality}_mrope_ids"]
    return np.asarray(ids.float().numpy())


def _equal(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == np.float32
    assert np.array_equal(got, want)


@given(config=CONFIGS, prompt=PROMPT)
@SETTINGS
def test_text_equals_diffusers(config: ModelConfig, prompt: int) -> None:
    _equal(text_positions(0, prompt), _segment(config, "text", input_ids=[0] * prompt))
    assert text_positions(prompt, 1).tolist() == [[prompt]] * 3


@given(config=CONFIGS, prompt=PROMPT)
@SETTINGS
def test_offset_equals_diffusers(config: ModelConfig, prompt: int) -> None:
    pipeline = SimpleNamespace(transformer=SimpleNamespace(config=config))
    method = diffusers.Cosmos3OmniPipeline._prepare_text_segment
    offset = method(pipeline, [0] * prompt, "cpu")["vision_start_temporal_offset"]
    assert generator_offset(config, prompt) == offset


@given(
    config=CONFIGS,
    prompt=PROMPT,
    fps=FPS,
    frames=st.integers(1, 80),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    compression=st.sampled_from([4, 4, 8, 1]),
)
@SETTINGS
def test_vision_equals_diffusers(
    config: ModelConfig,
    prompt: int,
    fps: float,
    frames: int,
    height: int,
    width: int,
    compression: int,
) -> None:
    offset = generator_offset(config, prompt)
    want = _segment(
        config,
        "vision",
        input_vision_tokens=torch.empty(1, 48, frames, height, width),
        has_image_condition=False,
        mrope_offset=offset,
        vision_fps=fps,
        curr=prompt,
        compression=compression,
    )
    rows, columns = -(-height // 2), -(-width // 2)
    got = vision_positions(config, offset, frames, rows, columns, fps, compression=compression)
    _equal(got, want)


@given(config=CONFIGS, prompt=PROMPT, frames=st.integers(1, 600))
@SETTINGS
def test_sound_equals_diffusers(config: ModelConfig, prompt: int, frames: int) -> None:
    offset = generator_offset(config, prompt)
    want = _segment(
        config,
        "sound",
        input_sound_tokens=torch.empty(64, frames),
        mrope_offset=offset,
        sound_fps=float(config.sound_latent_fps),
        curr=prompt,
    )
    _equal(sound_positions(config, offset, frames), want)


@given(
    config=CONFIGS,
    prompt=PROMPT,
    fps=FPS,
    steps=st.integers(1, 200),
    compression=st.sampled_from([4, 4, 8, 1]),
)
@SETTINGS
def test_action_equals_diffusers(
    config: ModelConfig, prompt: int, fps: float, steps: int, compression: int
) -> None:
    offset = generator_offset(config, prompt)
    want = _segment(
        config,
        "action",
        input_action_tokens=torch.empty(steps, 64),
        condition_frame_indexes=[],
        mrope_offset=offset,
        action_fps=fps,
        curr=prompt,
        compression=compression,
    )
    _equal(action_positions(config, offset, steps, fps, compression=compression), want)


def test_rates_of_the_published_models() -> None:
    config = ModelConfig()
    offset = generator_offset(config, 12)
    assert offset == 15012
    vision = vision_positions(config, offset, 3, 2, 2, 24.0)
    assert vision[0].tolist() == [15012.0] * 4 + [15013.0] * 4 + [15014.0] * 4
    assert vision[1, :4].tolist() == [0, 0, 1, 1]
    assert vision[2, :4].tolist() == [0, 1, 0, 1]
    # An action lies at its video frame, a quarter of a latent frame further each.
    assert action_positions(config, offset, 4, 24.0)[0].tolist() == [
        15012.25,
        15012.5,
        15012.75,
        15013.0,
    ]
    assert action_positions(config, offset, 1, 24.0)[0].tolist() == [15013.0]
    # A second of sound is 24 positions, a second of vision 6.
    assert sound_positions(config, offset, 26)[0, 25] == offset + 24
    assert sound_positions(config, offset, 0).shape == (3, 0)

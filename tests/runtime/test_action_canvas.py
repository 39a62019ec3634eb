"""The action canvas equals the pipeline's own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
cosmos = pytest.importorskip("diffusers.pipelines.cosmos.pipeline_cosmos3_omni")
Image = pytest.importorskip("PIL.Image")

from diffusers.video_processor import VideoProcessor
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError
from motrt.runtime.action_canvas import RESOLUTION_TIERS, ActionCanvas, action_frames

PIPELINE = SimpleNamespace(
    video_processor=VideoProcessor(vae_scale_factor=16, resample="bilinear"),
    vae_scale_factor_spatial=16,
)


def _reference(clip: Any, tier: int, num_frames: int) -> tuple[Any, tuple[int, ...], Any]:
    method = cosmos.Cosmos3OmniPipeline._prepare_action_video_conditioning
    frames, size, height, width = method(PIPELINE, clip, tier, num_frames, "cpu", torch.float32)
    return frames[0].permute(1, 2, 3, 0).numpy(), (height, width), size


def _images(frames: int, height: int, width: int) -> list[Any]:
    rng = np.random.default_rng(height * width)
    shape = (frames, height, width, 3)
    return [Image.fromarray(frame) for frame in rng.integers(0, 256, shape, dtype=np.uint8)]


def _sizes(canvas: ActionCanvas) -> list[int]:
    return [canvas.height, canvas.width, canvas.content_height, canvas.content_width]


@pytest.mark.parametrize(
    ("tier", "height", "width"),
    [
        (256, 256, 320),  # fits
        (256, 480, 640),  # shrunk
        (256, 300, 170),  # upright
        (256, 180, 320),  # floored to 176, then a margin below
        (256, 48, 64),  # never enlarged: margins wider than the picture
        (256, 208, 200),  # margins narrower than the picture
        (480, 480, 640),
        (480, 700, 1280),
        (720, 96, 112),
    ],
)
def test_frames_equal_the_pipeline(tier: int, height: int, width: int) -> None:
    clip = _images(2, height, width)
    want, (rows, columns), size = _reference(clip, tier, 3)
    canvas, frames = action_frames(clip, tier=tier, num_frames=3)
    got = np.stack(list(frames))
    assert _sizes(canvas) == size.int().tolist()
    assert (canvas.height, canvas.width) == (rows, columns)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-6


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_array_equals_the_pipeline() -> None:
    clip = np.random.default_rng(0).random((4, 300, 410, 3), np.float32)
    want, _, _ = _reference([clip], 256, 2)
    _, frames = action_frames(clip, tier=256, num_frames=2)
    assert np.abs(np.stack(list(frames)) - want).max() <= 1e-6


@given(
    tier=st.sampled_from(RESOLUTION_TIERS),
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
)
@settings(deadline=None, max_examples=400)
def test_sizes_equal_the_pipeline(tier: int, height: int, width: int) -> None:
    bins = cosmos._ACTION_RESOLUTION_BINS[str(tier)]
    rows, columns = VideoProcessor.classify_height_width_bin(height, width, ratios=bins)
    scale = min(columns / width, rows / height, 1.0)
    content = [max(1, int(scale * side + 0.5)) for side in (height, width)]
    canvas = ActionCanvas.of(height, width, tier)
    assert _sizes(canvas) == [rows, columns, *content]


def test_tiers_are_the_pipeline_s() -> None:
    assert set(map(str, RESOLUTION_TIERS)) == cosmos._ACTION_RESOLUTION_BINS.keys()


@pytest.mark.parametrize("size", [(480, 640), (48, 64), (180, 320), (16, 16)])
def test_cropped_latents_equal_the_pipeline(size: tuple[int, int]) -> None:
    canvas = ActionCanvas.of(*size, 256)
    shape = (1, 4, 3, canvas.height // 16, canvas.width // 16)
    latents = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    method = cosmos.Cosmos3OmniPipeline._remove_action_video_padding_from_latent
    sizes = torch.tensor(_sizes(canvas), dtype=torch.float32)
    want = method(PIPELINE, torch.from_numpy(latents), sizes).numpy()
    got = canvas.crop_latents(latents)
    assert np.array_equal(got, want)
    assert got.flags.c_contiguous


def test_only_asked_frames_are_computed() -> None:
    asked = []

    def source() -> Any:
        for index, image in enumerate(_images(9, 32, 32)):
            asked.append(index)
            yield image

    canvas, frames = action_frames(source(), tier=256, num_frames=3)
    assert asked == [0]
    assert len(list(frames)) == 3
    assert asked == [0, 1, 2]
    assert _sizes(canvas) == [256, 256, 32, 32]


def test_what_has_no_canvas_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 512; expected one of \[256, 480, 704, 720\]"):
        action_frames(_images(1, 32, 32), tier=512, num_frames=1)
    with pytest.raises(ConfigError, match="got 15 x 32; expected at least 16 x 16"):
        action_frames(_images(1, 15, 32), tier=256, num_frames=1)
    with pytest.raises(ConfigError, match="empty"):
        action_frames([], tier=256, num_frames=1)
    with pytest.raises(ConfigError, match="no pixels"):
        ActionCanvas.of(0, 5, 256)

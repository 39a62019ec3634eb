"""The VAE's loop equals diffusers' VAE and pipeline, and holds one chunk at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motrt.engines.bundle import Bundle
from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts
from motrt.runtime.vae import EngineName, Vae

CONFIG = VaeConfig(z_dim=2, latents_mean=(0.5, -0.25), latents_std=(2.0, 0.7))
HEIGHT, WIDTH = 32, 48


class FakeEngine:
    """Stands in for a graph: one latent is the mean of its pixels, with a cache to carry."""

    def __init__(self, name: str, *, bad: bool = False) -> None:
        self.name = name
        self.bad = bad

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        first = self.name.endswith("first")
        assert ("past_cache.0" in feeds) is not first
        cache = {"present_cache.0": np.zeros((1, 64, 64), np.float32)}
        if self.name.startswith("decoder"):
            _, _, _, h, w = feeds["latents"].shape
            frames = 1 if first else 4
            sample = np.full((1, 3, frames, 8 * h, 8 * w), feeds["latents"].mean(), np.float32)
            return {"sample": sample * np.nan if self.bad else sample} | cache
        _, _, _, height, width = feeds["video"].shape
        mean = feeds["video"].mean(dtype=np.float32)
        latents = np.full((1, 2, 1, height // 8, width // 8), mean, np.float32)
        return {"latents": latents * np.nan if self.bad else latents} | cache


def _fake(**options: Any) -> Vae:
    return Vae(CONFIG, lambda name: FakeEngine(name, **options))


@pytest.fixture(scope="module")
def vae(bundle: Callable[..., Path]) -> Vae:
    opened = Bundle.open(bundle("nano-like"))
    component = opened.manifest.components["vae"]
    config = VaeConfig.from_dict(component["config"])
    contracts = vae_contracts(config)

    def open_engine(name: EngineName) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(
            contracts[name], opened.path(component["graphs"][name]), threads=2
        )

    return Vae(config, open_engine)


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[..., Path]) -> Any:
    """The pipeline's methods, which need little of a pipeline."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    model = diffusers.AutoencoderKLWan.from_pretrained(checkpoint("nano-like"), subfolder="vae")
    model.eval()
    mean = torch.tensor(model.config.latents_mean, dtype=torch.float32)
    inverse = 1.0 / torch.tensor(model.config.latents_std, dtype=torch.float32)
    pipeline = SimpleNamespace(vae=model, _vae_latents_mean=mean, _vae_latents_inv_std=inverse)
    processor = diffusers.video_processor.VideoProcessor(vae_scale_factor=16, resample="bilinear")
    shape = (1, -1, 1, 1, 1)

    def encode(video: Any) -> Any:
        with torch.no_grad():
            method = diffusers.Cosmos3OmniPipeline._encode_video
            return method(pipeline, torch.from_numpy(video)).numpy()

    def decode(latents: Any, output: str) -> Any:
        with torch.no_grad():
            raw = torch.from_numpy(latents) / inverse.view(shape) + mean.view(shape)
            return processor.postprocess_video(model.decode(raw).sample, output_type=output)[0]

    return SimpleNamespace(encode=encode, decode=decode)


def _video(frames: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (1, 3, frames, HEIGHT, WIDTH)).astype(np.float32)


def _latents(frames: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, 48, frames, HEIGHT // 16, WIDTH // 16)).astype(np.float32)


@pytest.mark.parametrize("frames", [1, 4])
def test_decode_equals_the_pipeline(vae: Vae, reference: Any, frames: int) -> None:
    latents = _latents(frames)
    chunks = list(vae.decode(latents, output="float32"))
    assert [len(chunk) for chunk in chunks] == [1] + [4] * (frames - 1)
    got, want = np.concatenate(chunks), reference.decode(latents, "np")
    assert got.dtype == np.float32
    assert got.shape == (vae.frames_of(frames), HEIGHT, WIDTH, 3)
    assert np.abs(got - want).max() <= 1e-5

    levels = np.concatenate(list(vae.decode(latents)))
    assert levels.dtype == np.uint8
    wanted = np.stack([np.asarray(image) for image in reference.decode(latents, "pil")])
    apart = np.abs(levels.astype(int) - wanted)
    assert apart.max() <= 1  # a last bit beside the border between two levels
    assert (apart > 0).mean() <= 1e-3
    assert levels.std() > 5  # the comparison has something to compare


@pytest.mark.parametrize("frames", [1, 9])
def test_encode_equals_the_pipeline(vae: Vae, reference: Any, frames: int) -> None:
    video = _video(frames)
    want = reference.encode(video)
    got = vae.encode(video)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    channels_last = video[0].transpose(1, 2, 3, 0)
    assert np.array_equal(vae.encode(channels_last), got)
    assert np.array_equal(vae.encode(iter(channels_last)), got)


def test_a_prefix_of_a_clip_gives_a_prefix_of_its_latents(vae: Vae) -> None:
    video = _video(13)
    whole = vae.encode(video)
    assert np.array_equal(vae.encode(video[:, :, :5]), whole[:, :, :2])


def test_normalisation_is_undone(vae: Vae) -> None:
    latents = _latents(1)
    seen = []

    class Spy:
        def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
            seen.append(feeds["latents"])
            return {"sample": np.zeros((1, 3, 1, HEIGHT, WIDTH), np.float32)}

    next(Vae(vae.config, lambda _: Spy()).decode(latents))
    mean, std = np.array(vae.config.latents_mean), np.array(vae.config.latents_std)
    want = latents * std[:, None, None, None] + mean[:, None, None, None]
    assert np.abs(seen[0] - want).max() < 1e-6


def test_engines_are_opened_when_first_used() -> None:
    opened: list[str] = []

    def open_engine(name: EngineName) -> FakeEngine:
        opened.append(name)
        return FakeEngine(name)

    vae = Vae(CONFIG, open_engine)
    chunks = vae.decode(np.zeros((1, 2, 3, 2, 2), np.float32))
    assert opened == []
    next(chunks)
    assert opened == ["decoder_first"]
    list(chunks)
    list(vae.decode(np.zeros((1, 2, 2, 2, 2), np.float32)))
    assert opened == ["decoder_first", "decoder_next"]
    vae.close()
    vae.encode(np.zeros((1, 8, 8, 3), np.float32))
    assert opened[2:] == ["encoder_first"]


def _peak(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_clip() -> None:
    vae = _fake()

    def decode(frames: int) -> None:
        latents = np.zeros((1, 2, frames, 8, 8), np.float32)
        for chunk in vae.decode(latents):
            assert len(chunk) in (1, 4)

    def encode(frames: int) -> None:
        vae.encode(np.zeros((64, 64, 3), np.float32) for _ in range(frames))

    for work, few, many in ((decode, 3, 60), (encode, 9, 241)):
        assert _peak(lambda: work(many)) < 1.3 * _peak(lambda: work(few))  # noqa: B023


@pytest.mark.parametrize(
    ("frames", "near"), [(0, 1), (-3, 1), (2, 1), (3, 5), (16, 17), (18, 17), (190, 189)]
)
def test_a_number_of_frames_that_does_not_fit_is_refused(frames: int, near: int) -> None:
    with pytest.raises(ConfigError, match=f"got {frames}; .* is {near}\\."):
        _fake().latent_frames_of(frames)


def test_frames_and_latent_frames() -> None:
    vae = _fake()
    for latent_frames in (1, 2, 48):
        assert vae.latent_frames_of(vae.frames_of(latent_frames)) == latent_frames
    assert vae.frames_of(48) == 189


@pytest.mark.parametrize(
    ("height", "width", "near"), [(12, 16, "16 x 16"), (8, 3, "8 x 8"), (0, 8, "8 x 8")]
)
def test_a_size_that_does_not_fit_is_refused(height: int, width: int, near: str) -> None:
    with pytest.raises(ConfigError, match=f"got {height} x {width}; .* is {near}\\."):
        _fake().check_size(height, width)


def _wrong_clips() -> Iterator[Any]:
    good = np.zeros((5, 8, 8, 3), np.float32)
    yield good[:4], "got 4; expected a multiple of 4, plus 1"
    yield iter(good[:3]), "got 3; expected a multiple of 4, plus 1"
    yield [], "got 0"
    yield iter(()), "got 0 frames"
    yield good[:, :7], "got 7 x 8; expected multiples of 8"
    yield good.astype(np.float64), "got float64"
    yield (good * 0).astype(np.uint8), "got uint8"
    yield good[..., :1], r"\[8, 8, 1\]"
    yield good[0], "wrong shape"
    yield good + 255, "values up to 255"
    yield good * np.nan, "values up to nan"
    yield [*good[:4], np.zeros((16, 8, 3), np.float32)], "like the first"
    yield [1, 2, 3, 4, 5], "got int"


@pytest.mark.parametrize(("clip", "message"), list(_wrong_clips()))
def test_a_wrong_clip_is_refused(clip: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _fake().encode(clip)


def test_an_announced_length_is_checked_first_and_last() -> None:
    frame = np.zeros((8, 8, 3), np.float32)
    with pytest.raises(ConfigError, match="got 6"):
        _fake().encode(iter([frame] * 6), num_frames=6)
    with pytest.raises(ConfigError, match="got 5 frames; expected 9"):
        _fake().encode(iter([frame] * 5), num_frames=9)


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.zeros((1, 3, 1, 2, 2), np.float32), r"expected float32 \[1, 2, T, h, w\]"),
        (np.zeros((2, 2, 1, 2, 2), np.float32), "expected float32"),
        (np.zeros((1, 2, 2, 2), np.float32), "expected float32"),
        (np.zeros((1, 2, 1, 2, 2)), "got float64"),
        (np.zeros((1, 2, 0, 2, 2), np.float32), "empty"),
        (np.full((1, 2, 1, 2, 2), np.inf, np.float32), "infinity"),
    ],
)
def test_wrong_latents_are_refused_at_once(latents: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _fake().decode(latents)


def test_what_is_not_finite_is_no_result() -> None:
    vae = _fake(bad=True)
    with pytest.raises(ExecutionError, match="decoder gave NaN"):
        next(vae.decode(np.zeros((1, 2, 1, 2, 2), np.float32)))
    with pytest.raises(ExecutionError, match="encoder gave NaN"):
        vae.encode(np.zeros((1, 8, 8, 3), np.float32))

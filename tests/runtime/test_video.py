"""Clips from every source give the frames that the pipeline's VideoProcessor would give."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError
from motrt.runtime.video import (
    conditioning_frames,
    frames_needed,
    preprocess_frame,
    read_clip,
    repeat_last,
)
from motrt.runtime.writers import open_writer

Image = pytest.importorskip("PIL.Image")
av = pytest.importorskip("av")


def _clip(frames: int, height: int = 40, width: int = 56, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def _images(clip: Any) -> list[Any]:
    return [Image.fromarray(frame) for frame in clip]


def _arrays(frames: Any) -> Any:
    return np.stack([np.asarray(frame) for frame in frames])


def _write(path: str, clip: Any) -> None:
    with open_writer(path, fps=10) as writer:
        writer.write(clip)


def _processor() -> Any:
    module = pytest.importorskip("diffusers.video_processor")
    return module.VideoProcessor(vae_scale_factor=16, resample="bilinear")


def _reference(clip: Any, height: int, width: int) -> Any:
    pixels = _processor().preprocess_video(clip, height=height, width=width)
    return pixels[0].permute(1, 2, 3, 0).numpy()


def _pipeline_conditioning(
    video: Any, num_frames: int, indexes: tuple[int, ...], keep: str, size: tuple[int, int]
) -> Any:
    """The lines of ``Cosmos3OmniPipeline.prepare_latents`` about ``video``, in NumPy's order."""
    frames = _reference(video, *size)
    count = max(indexes) * 4 + 1
    frames = frames[:count] if keep == "first" else frames[-count:]
    fill = min(len(frames), num_frames)
    tail = np.repeat(frames[fill - 1 : fill], num_frames - fill, axis=0)
    return np.concatenate([frames[:fill], tail])


@pytest.mark.parametrize("size", [(32, 48), (40, 56), (16, 16), (64, 112)])
def test_pillow_frames_equal_the_processor(size: tuple[int, int]) -> None:
    images = _images(_clip(3))
    got = np.stack([preprocess_frame(frame, *size) for frame in read_clip(images)])
    height, width = (side - side % 16 for side in size)  # the processor's own flooring
    if (height, width) == size:
        assert np.array_equal(got, _reference(images, *size))
    assert got.dtype == np.float32


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_other_modes_are_pictures_too(mode: str) -> None:
    """The processor does not convert them, and the VAE then refuses them."""
    images = [image.convert(mode) for image in _images(_clip(2))]
    got = np.stack([preprocess_frame(frame, 32, 48) for frame in read_clip(images)])
    colours = [image.convert("RGB") for image in images]
    assert np.array_equal(got, _reference(colours, 32, 48))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("signed", [False, True])
def test_floats_equal_the_processor(signed: bool) -> None:
    clip = _clip(3).astype(np.float32) / 255
    clip = clip * 2 - 1 if signed else clip
    got = np.stack([preprocess_frame(frame, 32, 32) for frame in read_clip(clip)])
    assert np.array_equal(got, _reference([clip], 32, 32))


def test_bytes_are_pictures() -> None:
    clip = _clip(3)
    assert np.array_equal(_arrays(read_clip(clip)), clip)
    assert np.array_equal(_arrays(read_clip(list(clip))), clip)
    assert np.array_equal(_arrays(read_clip(iter(clip))), clip)


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize(
    ("length", "num_frames", "indexes"),
    [(12, 17, (0, 1)), (3, 9, (0, 1)), (20, 9, (0, 2)), (20, 5, (0,)), (5, 5, (1,))],
)
def test_conditioning_equals_the_pipeline(
    keep: Any, length: int, num_frames: int, indexes: tuple[int, ...]
) -> None:
    images = _images(_clip(length))
    frames = conditioning_frames(
        images, height=32, width=48, num_frames=num_frames, latent_indexes=indexes, keep=keep
    )
    got = np.stack(list(frames))
    want = _pipeline_conditioning(images, num_frames, indexes, keep, (32, 48))
    assert np.array_equal(got, want)


def test_only_needed_frames_are_decoded() -> None:
    asked = []

    def source() -> Iterator[Any]:
        for index, image in enumerate(_images(_clip(40))):
            asked.append(index)
            yield image

    list(conditioning_frames(source(), height=16, width=16, num_frames=33))
    assert asked == list(range(frames_needed((0, 1))))


def test_the_end_of_a_long_clip_is_found_in_bounded_memory() -> None:
    def source(count: int) -> Iterator[Any]:
        return (np.full((64, 64, 3), i % 256, np.uint8) for i in range(count))

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            frames = conditioning_frames(
                source(count), height=16, width=16, num_frames=5, keep="last"
            )
            levels = [round((float(frame[0, 0, 0]) + 1) * 127.5) for frame in frames]
            assert levels == [(count - 5 + i) % 256 for i in range(5)]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(2000) < 1.3 * peak(20)


def test_the_last_frame_is_repeated() -> None:
    assert list(repeat_last([1, 2], 5)) == [1, 2, 2, 2, 2]
    assert list(repeat_last(iter([1, 2, 3]), 2)) == [1, 2]
    with pytest.raises(ConfigError, match="empty"):
        list(repeat_last([], 3))


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    clip = _clip(12)
    for index, image in enumerate(_images(clip)):
        image.save(tmp_path / f"shot{index}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    assert np.array_equal(_arrays(read_clip(tmp_path)), clip)


def test_a_gif_is_read(tmp_path: Path) -> None:
    clip = _clip(4) // 128 * 128  # eight colours
    _write(str(tmp_path / "clip.gif"), clip)
    assert np.array_equal(_arrays(read_clip(tmp_path / "clip.gif")), clip)


def test_a_video_is_read(tmp_path: Path) -> None:
    clip = np.repeat(np.linspace(0, 255, 9).astype(np.uint8), 32 * 48 * 3).reshape(9, 32, 48, 3)
    _write(str(tmp_path / "clip.mp4"), clip)
    got = _arrays(read_clip(str(tmp_path / "clip.mp4")))
    assert got.shape == clip.shape
    assert np.abs(got.astype(int) - clip).max() <= 3


def test_a_video_is_turned_upright(tmp_path: Path) -> None:
    """A display matrix of -90 degrees, as phones write it, in the track's header."""
    clip = np.zeros((2, 32, 48, 3), np.uint8)
    clip[:, :, :24] = 200
    path = tmp_path / "clip.mp4"
    _write(str(path), clip)
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # to the matrix of version 0
    one, minus_one = (1 << 16).to_bytes(4, "big"), (-1 << 16 & 0xFFFFFFFF).to_bytes(4, "big")
    zero, last = bytes(4), (1 << 30).to_bytes(4, "big")
    data[place : place + 36] = zero + one + zero + minus_one + zero + zero + zero + zero + last
    path.write_bytes(data)
    frame = np.asarray(next(read_clip(path)))
    assert frame.shape == (48, 32, 3)  # a quarter clockwise: what was left is on top
    assert frame[:20].mean() > 180
    assert frame[28:].mean() < 20


def test_a_variable_rate_and_many_frames_need_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.mp4"
    with open_writer(path, fps=Fraction(30000, 1001)) as writer:
        for index in range(300):
            writer.write(np.full((32, 32, 3), index % 256, np.uint8))
    frames = read_clip(path)
    assert sum(1 for _ in frames) == 300


def test_what_is_no_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no clip"):
        read_clip(tmp_path / "absent.mp4")
    with pytest.raises(ConfigError, match="holds no frames"):
        read_clip(tmp_path)
    for name in ("noise.mp4", "noise.gif"):
        (tmp_path / name).write_bytes(b"no clip" * 100)
        with pytest.raises(ConfigError, match="cannot read the clip"):
            list(read_clip(tmp_path / name))
    _write(str(tmp_path / "clip.mp4"), _clip(9, 32, 32))
    data = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cannot read the clip"):
        list(read_clip(tmp_path / "half.mp4"))
    for array in (_clip(1)[0], _clip(1)[..., :1], _clip(1)[:0]):
        with pytest.raises(ConfigError, match="wrong shape"):
            read_clip(array)
    for array in (_clip(1) * 1.0, np.full((1, 4, 4, 3), np.nan)):
        with pytest.raises(ConfigError, match="out of range"):
            next(read_clip(array))
    frames: list[Any] = [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), "name"]
    for frame in frames:
        with pytest.raises(ConfigError, match="another kind"):
            next(read_clip([frame]))


def test_wrong_conditioning_is_refused_at_once() -> None:
    images = _images(_clip(5))
    size: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 5}
    for indexes in ((), (2,), (-1,)):
        with pytest.raises(ConfigError, match="numbers from 0 to 1"):
            conditioning_frames(images, **size, latent_indexes=indexes)
    with pytest.raises(ConfigError, match="first or last"):
        conditioning_frames(images, **size, keep="middle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="empty"):
        list(conditioning_frames([], **size))

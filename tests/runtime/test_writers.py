"""Writers: what was written is there, whole, or nothing is and the old file stays."""

from __future__ import annotations

import os
import tracemalloc
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError
from motrt.runtime._frame_writer import FrameWriter
from motrt.runtime.writers import (
    Mp4Writer,
    NpzWriter,
    open_writer,
    save_png,
)

Image = pytest.importorskip("PIL.Image")
av = pytest.importorskip("av")

KINDS = ("clip.mp4", "clip.gif", "clip.npz", "frames/")


def _clip(frames: int = 9, height: int = 64, width: int = 96) -> Any:
    """A coloured square that moves over a gradient: what a codec is made for."""
    y, x = np.mgrid[:height, :width]
    ground = np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 90)], axis=-1)
    clip = np.repeat(ground[None].astype(np.uint8), frames, axis=0)
    for index, frame in enumerate(clip):
        left = 4 + 5 * index % (width - 24)
        frame[20:40, left : left + 20] = (230, 40, 30)
    return clip


def _noise(frames: int, height: int, width: int) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def _write(writer: FrameWriter, clip: Any, chunk: int = 4) -> None:
    with writer:
        for start in range(0, len(clip), chunk):
            writer.write(clip[start : start + chunk])


def _read_mp4(path: Path) -> tuple[Any, SimpleNamespace]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        facts = SimpleNamespace(  # a closed container's stream is memory of somebody else
            fps=float(stream.average_rate),
            seconds=float(stream.duration * stream.time_base),
            pixels=stream.codec_context.pix_fmt,
            colorspace=stream.codec_context.colorspace,
        )
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), facts


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("fps", [24, 29.97, Fraction(30000, 1001), 0.5, 120])
def test_mp4_round_trip(tmp_path: Path, codec: str, fps: Any) -> None:
    clip = _clip()
    _write(Mp4Writer(tmp_path / "clip.mp4", fps=fps, codec=codec), clip)
    got, facts = _read_mp4(tmp_path / "clip.mp4")
    assert got.shape == clip.shape
    assert facts.fps == pytest.approx(float(fps), rel=1e-6)
    assert facts.pixels == "yuv420p"
    apart = np.abs(got.astype(float) - clip)
    assert apart.mean() < 4
    assert apart[0].mean() < 4
    assert apart[-1].mean() < 4
    assert facts.seconds == pytest.approx(
        9 / float(fps), abs=1e-3
    )  # the file's clock has milliseconds


def test_mp4_colours_are_right(tmp_path: Path) -> None:
    """A shift between BT.601 and BT.709 is 20 levels and more in saturated colours."""
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (12, 200, 90)):
        clip = np.full((3, 32, 32, 3), colour, np.uint8)
        _write(Mp4Writer(tmp_path / "clip.mp4", fps=24), clip)
        got, facts = _read_mp4(tmp_path / "clip.mp4")
        assert np.abs(got.astype(int) - clip).max() <= 4
        assert facts.colorspace == 1


def test_crf_is_quality(tmp_path: Path) -> None:
    sizes = []
    for crf in (5, 40):
        for codec in ("libx264", "mpeg4"):
            _write(Mp4Writer(tmp_path / "a.mp4", fps=24, crf=crf, codec=codec), _noise(3, 64, 64))
            sizes.append((tmp_path / "a.mp4").stat().st_size)
    assert sizes[0] > 2 * sizes[2]
    assert sizes[1] > 2 * sizes[3]


def test_an_odd_size_is_made_even(tmp_path: Path) -> None:
    clip = _clip(5, 63, 97)
    _write(open_writer(tmp_path / "clip.mp4"), clip)
    got, _ = _read_mp4(tmp_path / "clip.mp4")
    assert got.shape == (5, 64, 98, 3)
    assert np.abs(got[:, :63, :97].astype(float) - clip).mean() < 4


def test_gif_round_trip(tmp_path: Path) -> None:
    clip = _clip(7) // 64 * 64
    _write(open_writer(tmp_path / "clip.gif", fps=15), clip)
    with Image.open(tmp_path / "clip.gif") as image:
        assert image.n_frames == 7
        assert image.info["loop"] == 0
        delays = []
        for index in range(7):
            image.seek(index)
            delays.append(image.info["duration"])
            assert np.array_equal(np.asarray(image.convert("RGB")), clip[index])
    assert sum(delays) == 470  # 7/15 s, in hundredths
    assert set(delays) == {60, 70}


def test_gif_of_many_colours_is_close(tmp_path: Path) -> None:
    clip = _clip(2)
    _write(open_writer(tmp_path / "clip.gif"), clip)
    with Image.open(tmp_path / "clip.gif") as image:
        assert np.abs(np.asarray(image.convert("RGB")).astype(float) - clip[0]).mean() < 6


def test_npz_round_trip(tmp_path: Path) -> None:
    latents = np.ones((1, 2, 3, 4, 5), np.float32)
    clips = (_clip(), (_clip() / 255).astype(np.float32))
    for clip in clips:
        _write(NpzWriter(tmp_path / "clip.npz", fps=24, arrays={"latents": latents}), clip)
        with np.load(tmp_path / "clip.npz", allow_pickle=False) as archive:
            assert archive["frames"].dtype == clip.dtype
            assert np.array_equal(archive["frames"], clip)
            assert np.array_equal(archive["latents"], latents)
            assert archive["fps"] == 24


def test_png_folder_round_trip(tmp_path: Path) -> None:
    for count in (9, 4):  # the second replaces the first: no frame of it is left
        clip = _clip(count)
        _write(open_writer(f"{tmp_path}/frames/"), clip)
        files = sorted((tmp_path / "frames").iterdir())
        assert [file.name for file in files] == [f"frame_{i:05d}.png" for i in range(count)]
        got = np.stack([np.asarray(Image.open(file)) for file in files])
        assert np.array_equal(got, clip)
    assert os.listdir(tmp_path) == ["frames"]


def test_a_png_holds_one_picture(tmp_path: Path) -> None:
    clip = _clip(2)
    _write(open_writer(tmp_path / "one.PNG"), clip[:1])
    with pytest.raises(ConfigError, match="a PNG holds one picture"):
        _write(open_writer(tmp_path / "two.png"), clip)
    with pytest.raises(ConfigError, match=r"two/, or a clip, two\.mp4"):
        open_writer(tmp_path / "two.png", num_frames=2)
    assert os.listdir(tmp_path) == ["one.PNG"]


@pytest.mark.parametrize("kind", KINDS)
def test_single_frames_and_floats_are_taken(tmp_path: Path, kind: str) -> None:
    clip = (_clip(3) / 255).astype(np.float32)
    with open_writer(f"{tmp_path}/{kind}") as writer:
        for frame in clip:
            writer.write(frame)
    assert writer.num_frames == 3
    assert writer.path.exists()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "clip.gif").symlink_to(tmp_path / "real" / "clip.gif")
    _write(open_writer(tmp_path / "clip.gif"), _clip(1))
    assert (tmp_path / "clip.gif").is_symlink()
    assert os.listdir(tmp_path / "real") == ["clip.gif"]


def test_the_file_has_usual_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save_png(_clip(1)[0], tmp_path / "a.png")
        _write(open_writer(f"{tmp_path}/frames/"), _clip(1))
    finally:
        os.umask(old)
    assert (tmp_path / "a.png").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "frames").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_clip(tmp_path: Path, kind: str) -> None:
    frame = _clip(1)[0]

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            with open_writer(f"{tmp_path}/{kind}") as writer:
                for _ in range(count):
                    writer.write(frame)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)  # modules are imported
    assert peak(60) < 1.5 * peak(6) + 40_000

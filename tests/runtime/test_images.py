"""Conditioning images equal the pipeline's, level by level; files are read and written whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError, MissingDependencyError
from motrt.runtime import _media_libraries
from motrt.runtime.images import conditioning_image, open_image, to_uint8
from motrt.runtime.resampling import Kernel, nearest, resample
from motrt.runtime.writers import save_png

Image = pytest.importorskip("PIL.Image")


def _picture(height: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _reference(image: Any, height: int, width: int) -> Any:
    pytest.importorskip("transformers")
    pipeline = pytest.importorskip("diffusers.pipelines.cosmos.pipeline_cosmos3_omni")
    pixels = pipeline._preprocess_conditioning_image(image, height, width)
    return pixels[0].permute(1, 2, 0).numpy()


def _forms(picture: Any) -> dict[str, Any]:
    unit = picture.astype(np.float32) / 255
    return {
        "pillow": Image.fromarray(picture),
        "grey": Image.fromarray(picture[..., 0]),
        "alpha": Image.fromarray(np.dstack([picture, picture[..., :1]])),
        "uint8": picture,
        "batch": picture[None],
        "[0, 1]": unit,
        "[-1, 1]": unit * 2 - 1,
        "0-255": picture.astype(np.float32),
        "float64": unit.astype(np.float64),
    }


@pytest.mark.parametrize("form", _forms(_picture(1, 1)))
def test_every_form_equals_the_pipeline(form: str) -> None:
    image = _forms(_picture(90, 131))[form]
    got = conditioning_image(image, 64, 48)
    assert got.dtype == np.float32
    assert np.array_equal(got, _reference(image, 64, 48))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((480, 640), (480, 640)),
        ((1080, 1920), (720, 1280)),
        ((720, 1280), (480, 832)),
        ((600, 400), (704, 1280)),
        ((33, 47), (192, 320)),
        ((301, 299), (256, 256)),
        ((1, 1), (16, 16)),
    ],
)
def test_sizes_equal_the_pipeline(source: tuple[int, int], target: tuple[int, int]) -> None:
    picture = _picture(*source)
    assert np.array_equal(conditioning_image(picture, *target), _reference(picture, *target))


def test_strong_reduction_is_at_most_one_level_apart() -> None:
    """PyTorch's compiler sums many taps in another order; ties between two levels show it."""
    differing = total = 0
    for seed in range(4):
        picture = _picture(1024 + 7 * seed, 1300, seed)
        got = conditioning_image(picture, 96, 160)
        apart = np.abs(got - _reference(picture, 96, 160)) * 127.5
        assert apart.max() < 1.01
        differing += int((apart > 0.5).sum())
        total += apart.size
    assert differing <= 1e-4 * total


def test_a_wrong_crop_would_show() -> None:
    picture = _picture(90, 131)
    shifted = np.roll(picture, 1, axis=1)
    assert np.abs(conditioning_image(shifted, 64, 48) - _reference(picture, 64, 48)).max() > 0.5


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
def test_resampling_equals_pytorch(kernel: Kernel) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    for _ in range(60):
        height, width, rows = map(int, rng.integers(1, 90, 3))
        columns = int(rng.integers(2, 90))  # for one column PyTorch 2.13 takes wrong pixels
        image = rng.uniform(-1, 1, (height, width, 3)).astype(np.float32)
        tensor = torch.from_numpy(image).permute(2, 0, 1)[None]
        size = (rows, columns)
        interpolate = torch.nn.functional.interpolate
        want = interpolate(tensor, size=size, mode=kernel, align_corners=False, antialias=True)
        got = resample(image, rows, columns, kernel)
        assert np.abs(got - want[0].permute(1, 2, 0).numpy()).max() <= 1e-6
        picked = interpolate(tensor, size=size)[0].permute(1, 2, 0).numpy()
        assert np.array_equal(nearest(image, rows, columns), picked)


def test_a_file_is_read_upright(tmp_path: Path) -> None:
    picture = _picture(20, 30)
    tags = Image.Exif()
    tags[0x0112] = 6  # turned by a quarter
    Image.fromarray(picture).save(tmp_path / "photo.png", exif=tags)
    assert open_image(tmp_path / "photo.png").size == (20, 30)
    upright = np.rot90(picture, -1)
    got = conditioning_image(str(tmp_path / "photo.png"), 30, 20)
    assert np.array_equal(got, _reference(np.ascontiguousarray(upright), 30, 20))


def test_png_round_trip(tmp_path: Path) -> None:
    picture = _picture(17, 31)
    save_png(picture, tmp_path / "picture.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "picture.png")), picture)
    save_png(picture.astype(np.float32) / 255, tmp_path / "picture.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "picture.png")), picture)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_damaged_and_absent_files_are_refused(tmp_path: Path) -> None:
    save_png(_picture(40, 40), tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    for name in ("half.png", "text.png", "empty.png", "absent.png", "."):
        with pytest.raises(ConfigError, match="cannot read the image"):
            conditioning_image(tmp_path / name, 16, 16)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), bool),
        np.full((4, 4, 3), np.nan, np.float32),
        None,
        [[1, 2, 3]],
    ],
)
def test_what_is_no_picture_is_refused(image: Any) -> None:
    with pytest.raises(ConfigError):
        conditioning_image(image, 16, 16)


def test_levels_of_floats() -> None:
    floats = np.array([[[0.0, 1.0, 0.5]]], np.float32)
    assert to_uint8(floats).tolist() == [[[0, 255, 128]]]
    for bad in (floats - 1, floats * 255, floats * np.nan, floats.astype(np.int32)):
        with pytest.raises(ConfigError):
            to_uint8(bad)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependencyError, match=r"PIL\.Nothing.*motrt\[media\]"):
        _media_libraries.pillow("Nothing")
    monkeypatch.setitem(sys.modules, "av", None)
    _media_libraries.pyav.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"PyAV .* pip install 'motrt\[media\]'"):
        _media_libraries.pyav()


def test_nothing_is_imported_before_it_is_needed() -> None:
    modules = "images, video, writers, latents_file, action_canvas, vae"
    code = (
        f"import sys\nfrom motrt.runtime import {modules}\n"
        "assert not {'PIL', 'av', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

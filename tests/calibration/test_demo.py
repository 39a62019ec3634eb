"""The demo tells the truth about what it shows, and the checkpoint that it shows is whole."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from motrt.calibration.demo.sheet import save_sheet
from motrt.calibration.demo.tiny_omni import LAYOUTS, PACKAGED, write_checkpoint
from motrt.calibration.demo.tour import Scenery, moves_of, tour
from motrt.calibration.score.world import is_held_out
from motrt.engines.errors import ConfigError, ExportError
from motrt.export.cli import run
from oracle import Oracle


def _toured(subject: Oracle, seed: int = 0) -> tuple[list[Scenery], list[str]]:
    heard: list[str] = []
    return list(tour(subject, seed, ask=heard.append, tell=heard.append)), heard


@pytest.mark.parametrize("seed", range(8))
def test_who_does_everything_right_passes_every_check(seed: int) -> None:
    shown, heard = _toured(Oracle(), seed)
    assert [scenery.name for scenery in shown] == [
        "plan",
        "text_to_video",
        "image_to_video",
        "policy",
    ]
    for scenery in shown[:3]:
        assert all(scenery.checks.values()), scenery.title
        assert scenery.clip.shape == (17, 64, 64, 3)
    assert shown[3].checks == {"goal reached": True}
    question, *pieces = heard
    assert "Plan its way" in question
    assert shown[0].title.endswith(f"{question} -> {''.join(pieces)}")
    colour, shape, direction = shown[1].title.split()[4:6] + shown[1].title.split()[7:8]
    assert is_held_out(colour, shape, direction)


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ({"colour": "white"}, {"object kept", "colour"}),
        ({"turn": -1.0}, {"goal reached", "direction"}),
        ({"turn": 0.5}, {"goal reached"}),
    ],
    ids=str,
)
def test_each_fault_fails_its_check(
    fault: dict[str, Any], failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from motrt.calibration.score import world

    monkeypatch.setitem(world.COLOURS, "white", (255, 255, 255))
    oracle = Oracle()
    for name, value in fault.items():
        setattr(oracle, name, value)
    shown, _ = _toured(oracle)
    bad = {name for scenery in shown for name, good in scenery.checks.items() if not good}
    assert failed <= bad
    assert "right answer" not in bad


@pytest.mark.parametrize("answer", ["", "I do not know.", "right, " * 40, "right\x00, up."])
def test_an_answer_that_is_no_plan_moves_nothing(answer: str) -> None:
    class Lost(Oracle):
        def ask_aloud(self, prompt: str, tell: Any) -> str:
            return answer

    shown, _ = _toured(Lost())
    assert shown[0].checks == {"right answer": False, "object kept": True, "goal reached": False}


@pytest.mark.parametrize(
    ("answer", "moves"),
    [
        ("right, right, up.", ["right", "right", "up"]),
        ("left.", ["left"]),
        (" stay. ", ["stay"]),
        ("right, right, right, right, right.", []),
        ("right up.", []),
        ("", []),
    ],
)
def test_moves_are_read_off_an_answer(answer: str, moves: list[str]) -> None:
    assert moves_of(answer) == moves


def test_the_sheet_holds_every_row_and_the_right_frames(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    clips = [random.integers(256, size=(n, 64, 64, 3), dtype=np.uint8) for n in (17, 1)]
    path = save_sheet(
        tmp_path / "sheet.png", [("first -> é", clips[0]), ("a title " * 60, clips[1])]
    )
    sheet = np.asarray(Image.open(path).convert("RGB"))
    assert sheet.shape == (4 + 2 * (128 + 26), 4 + 9 * 132, 3)
    first, last, picture = sheet[22:150, 4:132], sheet[22:150, -132:-4], sheet[176:304, 4:132]
    for shown, frame in ((first, clips[0][0]), (last, clips[0][-1]), (picture, clips[1][0])):
        assert np.array_equal(shown[::2, ::2], frame)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_packaged_checkpoint_is_whole(layout: str, tmp_path: Path) -> None:
    folder = write_checkpoint(layout, tmp_path / "a" / "checkpoint")
    names = {path.name for path in folder.iterdir()}
    assert names == {"model_index.json", "scheduler", "text_tokenizer", "transformer", "vae"}
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert config.get("weight_layout", "separate") == layout
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["checkpoint"]


def test_the_packaged_checkpoints_are_small() -> None:
    assert sum(path.stat().st_size for path in PACKAGED.rglob("*") if path.is_file()) <= 12e6


def test_a_checkpoint_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="unknown layout; got fused; expected separate or shared"
    ):
        write_checkpoint("fused", tmp_path / "new")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    with pytest.raises(ConfigError, match="folder is in use"):
        write_checkpoint("shared", tmp_path / "used")
    with pytest.raises(ConfigError, match="folder is in use"):
        write_checkpoint("shared", tmp_path / "used" / "mine")
    with pytest.raises(ExportError, match="cannot be written"):
        write_checkpoint("shared", tmp_path / "used" / "mine" / "below")
    real = shutil.copytree

    def full_at_the_second(source: Path, *arguments: Any, **options: Any) -> Any:
        if source == PACKAGED / "shared":
            raise OSError(28, "No space left on device")
        return real(source, *arguments, **options)

    monkeypatch.setattr(shutil, "copytree", full_at_the_second)
    with pytest.raises(ExportError, match="No space left on device"):
        write_checkpoint("shared", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_the_demo_from_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "motrt.export", "demo", "-o", str(tmp_path / "out")]
    options = ["--samples", "1", "--seed", "1"]
    done = subprocess.run(
        [*command, *options, "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["loaded"] == []
    assert set(report["checks"]) == {"plan", "text_to_video", "image_to_video", "policy"}
    assert all(report["checks"]["plan"].values()), done.stderr
    assert len(report["score"]["skills"]) == 10
    assert len(report["files"]) == 9
    assert all(Path(path).stat().st_size > 0 for path in report["files"])
    # Again, in words: the bundle is there already.
    bundle = Path(report["bundle"])
    written = (bundle / "manifest.json").stat().st_mtime_ns
    again = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert report["text"] in again.stdout
    assert "reasoner_exact_match" in again.stdout
    assert "has loaded none" in again.stderr
    assert (bundle / "manifest.json").stat().st_mtime_ns == written


def test_without_the_exporter_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnx" else real(name)
    )
    assert run(["demo", "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: the packaged checkpoint cannot be exported; got no module onnx;"
    )
    assert "motrt[export]" in error
    assert not (tmp_path / "out").exists()


def test_a_failed_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "separate" / "checkpoint").mkdir(parents=True)
    assert run(["demo", "-o", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the packaged checkpoint could not be exported; got ")
    assert not (tmp_path / "separate" / "bundle").exists()


@pytest.mark.parametrize("option", ["--question", "--caption"])
def test_the_tiny_models_task_is_drawn(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "-o", str(tmp_path / "out"), option, "A cup."]) == 1
    assert f"got {option}; expected --seed, or a BUNDLE" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

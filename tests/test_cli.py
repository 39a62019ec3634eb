"""The program: help, exit codes, errors in one line, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from motrt.export.cli import VERBS, run

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_a_page(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert f"Example: motrt {verb}" in " ".join(shown.split())
    assert f"\n## {verb}\n" in (ROOT / "docs" / "cli.md").read_text()


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_help_is_quick() -> None:
    command = [sys.executable, "-m", "motrt.export", "--help"]
    best = min(_seconds(command) for _ in range(3))
    assert best < 3.0  # 0.3 s on a quiet machine; torch alone would take longer than this


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


@pytest.mark.parametrize(
    "arguments",
    [["expor"], ["export"], ["export", "a", "-o", "b", "--precision", "fp64"], ["validate", "a"]],
)
def test_usage_errors_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "absent", "-o", "out"],
        ["export", "absent", "-o", "out", "--lowering", "exotic"],
        ["export", "absent", "-o", "out", "--modalities", "smell"],
        ["export", "absent", "-o", "out", "--probe", "maybe"],
        ["validate", "absent", "--against", "absent"],
        ["inspect", "absent"],
    ],
)
def test_errors_are_one_line_and_1(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 1
    plain = capsys.readouterr()
    assert plain.out == ""
    assert plain.err.startswith("error: ")
    assert len(plain.err.strip().splitlines()) == 1

    assert run([*arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.keys() == {"type", "message", "got", "expected", "fix"}
    assert error["type"].endswith("Error")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tmp_path), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_export_says_what_it_did(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bundle"
    source = checkpoint("edge-like")
    assert run(["export", str(source), "-o", str(target), "--json", "--precision", "bf16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "bundle", "seconds", "peak_rss_bytes", "graphs", "weights", "absent", "probe",
    }  # fmt: skip
    assert report["bundle"] == str(target)
    assert report["graphs"].keys() >= {"reasoner.onnx", "generator.onnx", "vae_decoder_next.onnx"}
    assert report["weights"]["cast_bytes"] > 0
    assert report["probe"]["status"] == "passed"
    assert report["absent"] == {
        "sound_tokenizer": "not in the checkpoint",
        "vision_encoder": "not in the checkpoint",
    }

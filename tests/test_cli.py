"""The program: help, exit codes, errors in one line, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from motrt.export.cli import VERBS, run

ROOT = Path(__file__).parent.parent


SUBVERBS = ["run reasoner", "run generator"]


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "run"), *SUBVERBS])
def test_every_verb_has_help_with_an_example_and_a_page(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert f"Example: motrt {verb}" in " ".join(shown.split())
    assert f"\n## {verb}\n" in (ROOT / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "run"), *SUBVERBS])
def test_every_option_is_documented(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run([*verb.split(), "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (ROOT / "docs" / "cli.md").read_text()
    common, section = page.split("\n## ")[0], page.split(f"\n## {verb}\n")[1].split("\n## ")[0]
    assert "--json" in options
    assert [o for o in options if f"`{o}" not in common and o not in section] == []


def test_a_group_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb.split()[1] in shown for verb in SUBVERBS)


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
    [
        ["expor"],
        ["export"],
        ["export", "a", "-o", "b", "--precision", "fp64"],
        ["export", "a", "-o", "b", "--lowering", "foo"],
        ["export", "a", "-o", "b", "--probe", "maybe"],
        ["run", "generator", "a", "--prompt", "p", "-o", "b.npz", "--keep", "middle"],
        ["export", "a", "-o", "b", "--modalities", "smell"],
        ["run", "generator", "a", "--prompt", "p", "-o", "b.npz", "--guidance-interval", "1"],
        ["run", "generator", "a", "--prompt", "p", "-o", "b.npz", "--condition-frames", "one"],
        ["run", "generator", "a", "--prompt", "p", "-o", "b.npz", "--num-frames", "0"],
        ["validate", "a"],
        ["refit", "a"],
        ["refit", "a", "--weights", "b", "--restore"],
        ["refit", "a", "--lora", "b", "--lora-scale", "1", "--lora-scale", "2"],
        ["refit", "a", "--lora", "b", "--lora-scale", "much"],
        ["refit", "a", "--restore", "--probe", "maybe"],
    ],
)
def test_usage_errors_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "absent", "-o", "out"],
        ["validate", "absent", "--against", "absent"],
        ["inspect", "absent"],
        ["demo", "absent"],
        ["refit", "absent", "--restore"],
        ["refit", "absent", "--weights", "absent"],
        ["refit", "absent", "--lora", "absent", "--lora-scale", "nan"],
        ["run", "reasoner", "absent", "--prompt", "x"],
        ["run", "reasoner", "absent"],
        ["run", "reasoner", "absent", "--messages", "absent.json"],
        ["run", "generator", "absent", "--prompt", "x", "-o", "a.mp4"],
        ["run", "generator", "absent", "--prompt", "x", "-o", "a.txt"],
        ["run", "generator", "absent", "--prompt", "x", "-o", "a.json"],
        ["run", "generator", "absent", "--prompt", "x", "-o", "a.mp4", "--actions", "a.json"],
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


def test_run_reasoner_answers(
    bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "reasoner", str(bundle("nano-like")), "--prompt", "Hello"]
    assert run([*command, "--max-new-tokens", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"text", "token_ids", "finish_reason", "prompt_tokens", "timings"}
    assert len(report["token_ids"]) == 5
    assert report["finish_reason"] == "length"
    assert run([*command, "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == report["text"] + "\n"


def test_run_generator_writes_files(
    bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "clip.mp4", tmp_path / "clip.gif", tmp_path / "clip.npz"]
    outputs = [word for file in files for word in ("-o", str(file))]
    command = ["run", "generator", str(bundle("nano-like")), "--prompt", "A square", *outputs]
    size = ["--num-frames", "5", "--height", "32", "--width", "48", "--num-inference-steps", "2"]
    assert run([*command, *size, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"files", "shape", "latents_shape", "seed", "timings"}
    assert report["files"] == [str(file) for file in files]
    assert report["shape"] == [5, 32, 48, 3]
    assert all(file.stat().st_size > 0 for file in files)

    again = ["--latents", str(files[2]), "-o", str(tmp_path / "again.npz")]
    assert run([*command[:-6], *again, *size, "--json"]) == 0


def test_run_generator_reads_and_writes_actions(
    bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (48, 32), (200, 30, 30)).save(tmp_path / "frame.png")
    command = [
        "run", "generator", str(bundle("nano-like")), "--prompt", "Move", "--domain", "3",
        "--image", str(tmp_path / "frame.png"), "--chunk-size", "4", "--height", "32",
        "--width", "48", "--num-inference-steps", "2", "--guidance-scale", "1", "--json",
    ]  # fmt: skip
    out = tmp_path / "actions.json"
    assert run([*command, "--action-mode", "policy", "-o", str(out)]) == 0
    actions = json.loads(out.read_text())
    assert len(actions) == 4
    capsys.readouterr()
    forward = ["--action-mode", "forward_dynamics", "--actions", str(out)]
    assert run([*command, *forward, "-o", str(tmp_path / "clip.gif")]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [5, 32, 48, 3]


def test_demo_loads_no_torch(bundle: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "motrt.export", "demo", str(bundle("edge-like"))]
    size = ["--num-frames", "5", "--num-inference-steps", "2", "--json"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path), *size], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["loaded"] == []
    assert (tmp_path / "clip.mp4").stat().st_size > 0


@pytest.mark.parametrize("module", ["typer", "numpy", "motrt.runtime.session"])
def test_ctrl_c_while_the_program_loads_is_an_exit_code(module: str) -> None:
    # A real signal: numpy's import makes an ImportError of a KeyboardInterrupt.
    code = (
        "import builtins, signal, sys\n"
        "from motrt.export.entry import main\n"
        "real = builtins.__import__\n"
        "def stop(name, *rest):\n"
        f"    if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = stop\n"
        "sys.argv = ['motrt', 'run', 'reasoner', 'absent', '--prompt', 'x']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted; nothing was begun\n")


def test_ctrl_c_is_heard_once_a_verb_is_at_work() -> None:
    code = (
        "import signal, sys\n"
        "from motrt.export import cli\n"
        "from motrt.export.entry import main\n"
        "import motrt.engines.commands.doctor as doctor\n"
        "doctor.probe_platform = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "sys.argv = ['motrt', 'doctor']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == "interrupted; nothing half-done was left behind\n"

"""The files for Polygraphy: its own program runs the emitted ONNX Runtime command on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from motrt.calibration.polygraphy import emit_polygraphy
from motrt.calibration.polygraphy.data import save_outputs
from motrt.engines.errors import ConfigError, ExportError, MissingDependencyError
from motrt.export.cli import run
from tiny_checkpoints import tree

polygraphy = pytest.importorskip("polygraphy")


def _sh(folder: Path, file: str = "onnxruntime.sh") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["sh", str(folder / file)],
        env={**os.environ, "PATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("kind", "precision", "lowering"),
    [
        ("nano-like", "fp32", "native"),
        ("edge-like", "fp16", "native"),
        ("shared", "fp32", "portable"),
    ],
)
def test_the_emitted_command_passes_and_sees_a_wrong_value(
    kind: str, precision: str, lowering: str, bundle: Callable[..., Path]
) -> None:
    root = bundle(kind, precision, lowering)
    folder = root.parent / f"for polygraphy {kind}"  # a space, for the quoting
    emit_polygraphy(root, folder)
    done = _sh(folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("Pass Rate: 100.00%") == 2
    # One value of one output, by twice what its tolerance allows.
    from polygraphy.comparator import RunResults

    golden = folder / "generator.golden.json"
    outputs = dict(RunResults.load(str(golden))[0][1][0])
    velocity = np.array(outputs["velocity"])
    allowed = {"fp32": 1e-4, "fp16": 2e-2}[precision] * np.abs(velocity).max()
    velocity[0, 1, 2] += 2 * allowed
    save_outputs(golden, "pytorch", {**outputs, "velocity": velocity})
    done = _sh(folder)
    assert done.returncode != 0
    assert "FAILED | Output: 'velocity'" in done.stdout


def test_commands_name_every_input_and_output_once(bundle: Callable[..., Path]) -> None:
    root = bundle("edge-like", "fp16")
    folder = root.parent / "named"
    emit_polygraphy(root, folder)
    text = (folder / "tensorrt.sh").read_text()
    assert subprocess.run(["sh", "-n", str(folder / "tensorrt.sh")], check=False).returncode == 0
    for which in ("min", "opt", "max"):
        lines = [line for line in text.splitlines() if f"--trt-{which}-shapes" in line]
        assert [line.count("inputs_embeds:[1,") for line in lines] == [1, 0]
        assert [line.count("latent_patches:[1,") for line in lines] == [0, 1]
    assert text.count("context.0.key:") == 3 + 1  # profiles of one engine, tolerance of the other
    assert (
        "POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run" in (folder / "tensorrt-rtx.sh").read_text()
    )


def test_what_cannot_be_emitted_is_refused_and_leaves_nothing(
    bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="got a bf16 bundle; expected fp32 or fp16"):
        emit_polygraphy(bundle("nano-like", "bf16"), tmp_path / "no")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("kept")
    before = tree(tmp_path)
    with pytest.raises(ExportError, match="exists already"):
        emit_polygraphy(bundle("nano-like", "fp32"), full)
    monkeypatch.setitem(sys.modules, "polygraphy.json", None)
    with pytest.raises(MissingDependencyError, match=r"motrt\[calibration\]"):
        emit_polygraphy(bundle("nano-like", "fp32"), tmp_path / "no")
    assert tree(tmp_path) == before


def test_another_file_system_is_refused(
    bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ExportError, match="cannot be linked into the folder"):
        emit_polygraphy(bundle("nano-like", "fp32"), tmp_path / "no")
    assert list(tmp_path.iterdir()) == []


def test_the_program_emits(
    bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = bundle("shared", "fp32")
    folder = root.parent / "by the program"
    assert run(["validate", str(root), "--emit-polygraphy", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["polygraphy"]
    assert told["folder"] == str(folder)
    assert {"onnxruntime.sh", "reasoner.onnx", "generator.golden.json"} <= set(told["files"])
    assert run(["validate", str(root)]) == 2
    assert "--against" in capsys.readouterr().err

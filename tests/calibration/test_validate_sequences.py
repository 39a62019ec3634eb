"""Tokens, schedules, prompts and whole runs: what is wrong fails, and what cannot be is said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.calibration.parity import compare, reference_process
from motrt.calibration.parity.cases import Cases
from motrt.calibration.parity.compare import validate
from motrt.calibration.parity.report import ParityReport
from motrt.calibration.parity.sequence_cases import TextCase
from motrt.calibration.parity.sequence_rows import SequenceRows
from motrt.engines.bundle import Bundle, record_small
from motrt.export.cli import run
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from motrt.runtime.denoise import Guidance
from motrt.runtime.text_model import TextModel
from omni_fixtures.checkpoints import build_pipeline
from omni_fixtures.files import write_json

pytestmark = pytest.mark.usefixtures("one_reference_per_checkpoint")

REAL_RUN_REFERENCE = reference_process.run_reference


def _failed(report: ParityReport) -> set[str]:
    return {row.engine for row in report.rows if not row.ok}


def _edit_manifest(part: str, **values: Any) -> Callable[[Path], None]:
    def breaker(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest[part] |= values
        write_json(folder / "manifest.json", manifest)

    return breaker


def _swap_two_ids(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    vocab["e"], vocab["a"] = vocab["a"], vocab["e"]
    path.unlink()  # it may be a link to the checkpoint's
    write_json(path, data)
    record = record_small(path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["tokenizer/tokenizer.json"] = {
        "bytes": record.nbytes,
        "sha256": record.sha256,
    }
    write_json(folder / "manifest.json", manifest)
    Bundle.open(folder)


def _without_native_schedule(folder: Path) -> None:
    _edit_manifest("scheduler", _class_name="UniPCMultistepScheduler")(folder)
    _edit_manifest("pipeline", use_native_flow_schedule=False)(folder)


# A damage, the checkpoint that it means something to, and the rows that must tell.
BREAKERS: dict[str, tuple[str, Callable[[Path], None], set[str]]] = {
    "another flow shift": (
        "edge-like",
        _edit_manifest("scheduler", flow_shift=3.01),
        {"scheduler", "trajectory"},
    ),
    "another largest sigma": (
        "nano-like",
        _edit_manifest("scheduler", sigma_max=201.0),
        {"scheduler", "trajectory"},
    ),
    "another order": (
        "nano-like",
        _edit_manifest("scheduler", solver_order=3),
        {"scheduler", "trajectory"},
    ),
    "not the native schedule": (
        "edge-like",
        _without_native_schedule,
        {"scheduler", "trajectory"},
    ),
    "no such scheduler": (
        "nano-like",
        _edit_manifest("scheduler", _class_name="NoScheduler"),
        {"scheduler", "trajectory"},
    ),
    "two ids swapped": ("nano-like", _swap_two_ids, {"prompt", "trajectory"}),
    "the other system prompt default": (
        "edge-like",
        _edit_manifest("pipeline", default_use_system_prompt=True),
        {"prompt", "trajectory"},
    ),
    "another sentence": (
        "nano-like",
        _edit_manifest("prompt_templates", image_resolution_template="It is {height}x{width}."),
        {"prompt", "trajectory"},
    ),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_a_wrong_manifest_fails(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    kind, breaker, engines = BREAKERS[name]
    export_checkpoint(checkpoint(kind), tmp_path / "bundle", ExportOptions())
    breaker(tmp_path / "bundle")
    report = validate(tmp_path / "bundle", checkpoint(kind))
    assert _failed(report) == engines
    refused = [note for note in report.outcome.notes if "unknown class" in note]
    assert bool(refused) is (name == "no such scheduler")


def test_a_guidance_scale_off_by_a_hundredth_fails(
    checkpoint: Callable[..., Path], bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Guidance.combine
    monkeypatch.setattr(
        Guidance,
        "combine",
        lambda self, *branches: real(Guidance(self.scale + 0.01), *branches),
    )
    assert _failed(validate(bundle("nano-like"), checkpoint("nano-like"))) == {"trajectory"}


def test_a_position_that_skips_at_decode_fails(
    checkpoint: Callable[..., Path], bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TextModel.text_rotary
    monkeypatch.setattr(
        TextModel,
        "text_rotary",
        lambda self, start, count: real(self, start + 3 * (start > 0), count),
    )
    assert _failed(validate(bundle("nano-like"), checkpoint("nano-like"))) == {"text"}


def test_two_bundles_run_all_sequences(bundle: Callable[..., Path], tmp_path: Path) -> None:
    report = validate(bundle("nano-like", "fp32", "portable"), bundle("nano-like"))
    assert report.ok
    assert not report.outcome.skipped
    assert {row.engine for row in report.rows} == set(reference_process.ENGINES)


def test_what_is_skipped_is_printed(
    checkpoint: Callable[..., Path],
    bundle: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["validate", str(bundle("shared")), "--against", str(checkpoint("shared"))]
    assert run([*command, "--no-record", "--quiet"]) == 0
    assert "skipped trajectory: the checkpoint has no text_tokenizer/" in capsys.readouterr().out
    assert run([*command, "--no-record", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"engine": "scheduler", "reason": "the checkpoint has no scheduler/"} in printed[
        "skipped"
    ]
    assert printed["notes"] == []


def test_a_template_that_transformers_refuses_skips_prompts_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reference in a process of its own, as outside of tests."""
    source = build_pipeline(tmp_path / "checkpoint", "nano-like")
    config = source / "text_tokenizer" / "tokenizer_config.json"
    data = json.loads(config.read_text(encoding="utf-8"))
    target = tmp_path / "made by a template"
    write_json(
        config,
        {
            **data,
            "chat_template": "{{ cycler.__init__.__globals__.os.mkdir('" + str(target) + "') }}",
            "auto_map": {"AutoTokenizer": ["stranger.Tokenizer", "stranger.Tokenizer"]},
        },
    )
    (source / "text_tokenizer" / "stranger.py").write_text(
        f"from pathlib import Path\nPath({str(target)!r}).mkdir()\n"
    )
    export_checkpoint(source, tmp_path / "bundle", ExportOptions())
    monkeypatch.setattr(compare, "run_reference", REAL_RUN_REFERENCE)
    monkeypatch.setattr(reference_process, "subprocess", subprocess)
    report = validate(tmp_path / "bundle", source)
    assert report.ok
    reasons = {item.engine: item.reason for item in report.outcome.skipped}
    assert reasons.keys() == {"prompt", "trajectory"}
    assert "transformers cannot use the tokenizer" in reasons["prompt"]
    assert not target.exists()


WANT = np.array([5, 6, 7, 8])
TOP = np.array([[4.0, 1.0], [4.0, 3.9999], [4.0, 1.0], [4.0, 1.0]], np.float32)
TOP_IDS = np.array([[5, 0], [6, 9], [7, 0], [8, 0]])


@pytest.mark.parametrize(
    ("have", "noise", "differing"),
    [
        ([5, 6, 7, 8], 0.0, 0),
        ([5, 9, 1, 2], 1e-4, 0),  # the two best tokens of step 1 within noise: a tie
        ([5, 9, 1, 2], 1e-6, 3),  # not within noise
        ([5, 3, 1, 2], 1e-4, 3),  # neither of the two best
        ([5, 6, 1, 2], 1e-4, 2),  # nowhere near a tie
        ([5, 6, 7], 1e-4, 1),
    ],
)
def test_a_near_tie_is_no_difference(have: list[int], noise: float, differing: int) -> None:
    cases = Cases({}, [], [], text=[TextCase("greedy", "prompt", 4)])
    reference = {"greedy/ids": WANT, "greedy/top": TOP, "greedy/top_ids": TOP_IDS}
    rows = SequenceRows({"greedy/ids": np.array(have)}, reference, {}, noise)
    (row,) = rows.rows(cases)
    assert row.difference.max_abs == differing
    assert row.ok is (differing == 0)
    assert len(rows.notes) == (differing == 0 and have != WANT.tolist())


def test_a_case_without_a_result_fails() -> None:
    cases = Cases({}, [], [], text=[TextCase("greedy", "prompt", 4)])
    (row,) = SequenceRows({}, {"greedy/ids": WANT}, {}, 0.0).rows(cases)
    assert not row.ok

"""``motrt refit``: what it says, and that others follow the revision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import contract_runner
from motrt.engines.bundle import Bundle
from motrt.engines.probe_inputs import probe_feeds
from motrt.export.cli import run
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from refit_cases import factors, linears, same, tensors_of, write_diffusers, write_peft

Checkpoint = Callable[..., Path]


@pytest.fixture
def root(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    options = ExportOptions(probe="never")
    return export_checkpoint(checkpoint("edge-like"), tmp_path / "bundle", options).bundle


def test_refit_says_what_it_did(
    root: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    new = str(checkpoint("edge-like", seed=1))
    base = tensors_of(root)
    assert run(["refit", str(root), "--weights", new, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "bundle", "changed", "revision", "tensors", "moved", "sources", "probe", "seconds",
        "written_bytes", "linked_bytes",
    }  # fmt: skip
    assert report["changed"]
    assert report["probe"]["status"] == "passed"
    assert run(["refit", str(root), "--weights", new]) == 0
    assert "nothing changed" in capsys.readouterr().err
    assert run(["refit", str(root), "--restore"]) == 0
    assert "as exported" in capsys.readouterr().err
    assert same(tensors_of(root), base)


def test_adapters_and_their_scales_come_in_pairs(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = factors(root, linears(root))
    one = write_peft(tmp_path / "one", made)
    two = write_diffusers(tmp_path / "two.safetensors", made)
    words = ["--lora", str(one), "--lora", str(two), "--lora-scale", "0.5", "--lora-scale", "-1"]
    base = tensors_of(root)
    assert run(["refit", str(root), *words, "--probe", "never", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [source["scale"] for source in report["sources"]] == [0.5, -1.0]
    # 0.5 · 4 / 2 of the one and -1 of the other cancel: to the bit, being summed in float64.
    assert not report["changed"]
    assert report["probe"]["status"] == "skipped"
    assert same(tensors_of(root), base)


def test_everything_follows_the_revision(
    root: Path, checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = checkpoint("edge-like")
    new = tmp_path / "new"  # the VAE is no part of a refit
    shutil.copytree(old, new)
    shutil.rmtree(new / "transformer")
    shutil.copytree(checkpoint("edge-like", seed=1) / "transformer", new / "transformer")
    assert run(["validate", str(root), "--against", str(old), "--json"]) == 0
    assert (root / "parity.json").exists()
    assert run(["refit", str(root), "--weights", str(new), "--quiet"]) == 0
    assert not (root / "parity.json").exists()  # it was about other weights
    opened = Bundle.open(root)
    assert opened.manifest.parity is None
    assert opened.manifest.revision is not None
    capsys.readouterr()
    assert run(["inspect", str(root), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["revision"]["id"] == opened.manifest.revision.id
    assert report["verification"]["graphs"]["generator.onnx"] > 20
    assert run(["inspect", str(root)]) == 0
    assert f"revision {opened.manifest.revision.id}" in capsys.readouterr().out
    assert run(["validate", str(root), "--against", str(new), "--json"]) == 0
    capsys.readouterr()
    assert run(["validate", str(root), "--against", str(old), "--no-record", "--json"]) == 3
    fresh = export_checkpoint(new, tmp_path / "fresh", ExportOptions(probe="never")).bundle
    capsys.readouterr()
    answers = []
    for bundle in (root, fresh):
        words = ["--prompt", "Hello", "--max-new-tokens", "5", "--json"]
        assert run(["run", "reasoner", str(bundle), *words]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1]


def test_a_stranger_who_has_read_the_contract_follows_the_revision(
    root: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    new = checkpoint("edge-like", seed=1)
    assert run(["refit", str(root), "--weights", str(new), "--quiet"]) == 0
    fresh = export_checkpoint(new, tmp_path / "fresh", ExportOptions(probe="never")).bundle
    strangers = [contract_runner.Bundle(folder) for folder in (root, fresh)]
    assert strangers[0].path("generator.onnx").parent.name == Bundle.open(root).content.name
    contract = Bundle.open(fresh).generator_contract()
    have, want = (stranger.run("generator.onnx", probe_feeds(contract)) for stranger in strangers)
    assert same(have, want)
    ids = np.array([[1, 2, 3]])
    assert strangers[0].embed(ids).tobytes() == strangers[1].embed(ids).tobytes()


def test_validate_does_not_undo_a_refit_that_came_between(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from motrt.calibration.parity import evidence
    from motrt.engines.refit.disk import refit_bundle

    old, new = (checkpoint("edge-like", seed=seed) for seed in (0, 1))
    write = evidence.record_evidence

    def late(*arguments: object) -> object:
        refit_bundle(root, new)
        return write(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr("motrt.calibration.commands.validate.record_evidence", late)
    assert run(["validate", str(root), "--against", str(old), "--json"]) == 1
    assert Bundle.open(root).manifest.revision is not None
    assert Bundle.open(root).manifest.parity is None

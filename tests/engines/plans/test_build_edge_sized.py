"""Plans of a model of Edge's size, from weights that are holes on disk: a build reads none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motrt.engines.bundle import Bundle
from motrt.engines.plans import PlanHost, read_plan
from motrt.export.cli import run
from omni_fixtures.sparse import build_sparse

trt = pytest.importorskip("tensorrt_rtx")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["refit", "inputs"])
def test_edge_builds_here_and_its_plans_are_small(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = build_sparse("edge", tmp_path / "edge")
    root = tmp_path / "b"
    assert run(["export", str(checkpoint), "-o", str(root), "--precision", "bf16", "--quiet"]) == 0
    words = ["build", str(root), "--backend", "tensorrt-rtx", "--target", "sm89", "--json"]
    capsys.readouterr()
    assert run([*words, "--weights", mode]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    opened = Bundle.open(root)
    record = read_plan(opened, PlanHost.here("tensorrt-rtx", trt.__version__, (8, 9)))
    entries = opened.weights().entries
    for name, engine in plan["engines"].items():
        layers, profiles = opened.manifest.model.num_hidden_layers, len(engine["profiles"])
        names = record.weight_names(name)
        assert engine["audit"]["weights"] == len(names)
        assert engine["bytes"] <= 2_000_000 * layers * profiles + 4_000_000
        assert engine["bytes"] < 0.05 * sum(entries[weight].nbytes for weight in names)

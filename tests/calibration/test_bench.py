"""``bench`` measures what it says, yields every key, and times nothing that is wrong."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from motrt.calibration.bench.checkpoints import (
    write_checkpoint,
    write_shared_checkpoint,
    write_sparse_checkpoint,
)
from motrt.calibration.bench.processes import pss_bytes
from motrt.calibration.bench.rows import ROWS, Bench, Row
from motrt.calibration.bench.sizes import PUBLISHED, QUICK
from motrt.calibration.bench.timing import alternate, require_equal
from motrt.engines.errors import ParityError
from motrt.export.cli import run
from motrt.export.pipeline import export_checkpoint
from omni_fixtures import configs
from tiny_checkpoints import FILE, edit_tensors

RATIOS = {
    "denoise_image", "denoise_clip", "prefill", "decode", "decode_genai", "cold_start",
    "rss_shared", "refit_reopen", "refit_export",
}  # fmt: skip
SECONDS = {"runtime_import", "export_nano", "export_super"}


def test_a_quick_run_yields_every_key() -> None:
    command = [sys.executable, "-m", "motrt.export", "bench", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    report = json.loads(done.stdout)
    assert report.keys() == {"ratios", "seconds", "detail"}
    assert report["ratios"].keys() == RATIOS
    assert report["seconds"].keys() == SECONDS
    absent = set()
    if importlib.util.find_spec("onnxruntime_genai") is None:
        absent.add("decode_genai")
    if pss_bytes() is None:
        absent.add("rss_shared")
    for name, value in {**report["ratios"], **report["seconds"]}.items():
        assert (value is None) == (name in absent), name
        assert value is None or (math.isfinite(value) and value > 0), name
    detail = report["detail"]
    assert detail["rows"].keys() == RATIOS | SECONDS
    for name in ("denoise_image", "denoise_clip", "prefill", "cold_start"):
        assert 0 <= detail["rows"][name]["error"] <= 1e-5
    for name in absent:
        assert detail["rows"][name]["why"]
    timing = detail["rows"]["denoise_clip"]["ours"]
    assert 0 < timing["min_s"] <= timing["median_s"]
    assert detail["threads"] == 2
    assert {"versions", "load_average", "notes", "config"} <= detail.keys()


def test_the_table_has_the_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--quick", "--rows", "runtime_import,export_nano"]) == 0
    shown = capsys.readouterr().out
    assert "runtime_import" in shown
    assert "≤ 30 s" in shown
    assert "denoise_clip" not in shown


def test_an_unknown_row_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--rows", "decode,spee"]) == 1
    assert "got spee; expected among denoise_image" in capsys.readouterr().err


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bundle of other weights than the reference loads: one matrix of either tower is off."""
    folder = tmp_path_factory.mktemp("broken")
    bench = Bench(folder, QUICK, 1)
    other = write_checkpoint(folder / "other", QUICK.config)
    shape = (QUICK.config["hidden_size"], QUICK.config["intermediate_size"])
    wrong = np.random.RandomState(9).standard_normal(shape).astype(np.float32) / 8
    edit_tensors(
        other / "transformer" / FILE,
        layers__1__mlp__down_proj__weight=wrong,
        layers__1__mlp_moe_gen__down_proj__weight=wrong,
    )
    export_checkpoint(other, folder / "bundle")
    bench.bundle = folder / "bundle"
    return bench


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row", ["denoise_image", "denoise_clip", "prefill", "decode", "cold_start"]
)
def test_a_row_with_a_wrong_weight_is_not_timed(row: str, broken: Bench) -> None:
    with pytest.raises(ParityError, match=f"row {row} was not timed"):
        ROWS[row].measure(broken)


def test_a_wrong_row_ends_the_program_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Bench) -> tuple[float | None, dict[str, object]]:
        require_equal("prefill", np.ones(3), np.array([1, 1, 1.001]))
        return 1.0, {}

    monkeypatch.setitem(ROWS, "prefill", Row("ratios", refuse))
    assert run(["bench", "--rows", "prefill", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ParityError"


def test_sides_take_turns() -> None:
    calls: list[str] = []
    comparison = alternate(lambda: calls.append("ours"), lambda: calls.append("theirs"), 3)
    assert calls == ["ours", "theirs"] * 3
    assert len(comparison.ours.seconds) == len(comparison.theirs.cpu_seconds) == 3


@pytest.mark.parametrize("name", PUBLISHED)
def test_sparse_checkpoints_have_the_published_dimensions(name: str, tmp_path: Path) -> None:
    published = configs.transformer_kwargs(configs.PUBLISHED[name])
    ours = PUBLISHED[name]
    assert {k: published[k] for k in published if k in ours} == {
        k: v for k, v in ours.items() if k in published
    }
    folder = write_sparse_checkpoint(tmp_path / name, ours)
    stat = (folder / "transformer" / FILE).stat()
    assert stat.st_size > 30e9
    assert stat.st_blocks * 512 < 1e6


def test_shared_checkpoints_export(tmp_path: Path) -> None:
    source = write_shared_checkpoint(tmp_path / "shared", QUICK.shared_config)
    result = export_checkpoint(source, tmp_path / "bundle")
    assert result.probe["status"] == "passed"

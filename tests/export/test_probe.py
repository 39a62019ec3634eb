"""The probe passes what equals the PyTorch modules and refuses what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from motrt.engines.bundle import Bundle
from motrt.engines.errors import ContractError
from motrt.export import probe
from motrt.export.probe import run_probe


@pytest.mark.parametrize("kind", ["nano-like", "edge-like", "shared"])
def test_a_sound_bundle_passes(kind: str, bundle: Callable[..., Path]) -> None:
    report = run_probe(Bundle.open(bundle(kind, "bf16", "native")), "always")
    assert report["status"] == "passed"
    assert isinstance(report["max_relative"], float)
    assert report["max_relative"] < 1e-5


@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_a_graph_of_another_model_is_refused(
    engine: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """A norm's epsilon of the wrong size: finite, plausible, wrong."""
    import onnx

    folder = tmp_path / "bundle"
    shutil.copytree(bundle("nano-like", "fp32", "native"), folder)
    path = folder / f"{engine}.onnx"
    model = onnx.load(path, load_external_data=False)
    norm = next(n for n in model.graph.node if n.op_type == "RMSNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 0.01
    path.write_bytes(model.SerializeToString())
    opened = Bundle(folder, Bundle.open(bundle("nano-like", "fp32", "native")).manifest)
    with pytest.raises(ContractError, match=f"the probe of the {engine} failed"):
        run_probe(opened, "always")


def test_nan_is_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Weights that turned to NaN after they were checked."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("super-like", "fp32", "native"), folder)
    opened = Bundle.open(folder)
    entry = opened.manifest.weights["transformer"]["proj_in.bias"]
    data = np.memmap(folder / entry.file, np.float32, "r+", entry.offset, entry.shape)
    data[0] = np.nan
    data.flush()
    with pytest.raises(ContractError, match=r"generator.*NaN"):
        run_probe(opened, "always")


def test_a_skip_says_why(bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Bundle.open(bundle("super-like", "fp32", "native"))
    assert run_probe(opened, "never") == {"status": "skipped", "reason": "--probe never"}
    monkeypatch.setattr(probe, "_LIMIT_BYTES", 1000)
    report = run_probe(opened, "auto")
    assert report["status"] == "skipped"
    assert "over the limit" in str(report["reason"])

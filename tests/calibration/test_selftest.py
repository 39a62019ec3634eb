"""The selftest: green here, and red where an engine, a refit or an answer is wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import motrt.calibration.selftest.gpu as gpu_trial
import motrt.engines._cuda as cuda_accessor
import motrt.engines.plans.build as plans_build
import motrt.engines.tensorrt_backend.device as device_module
from motrt.calibration.selftest import checks, run_selftest
from motrt.calibration.selftest.checks import SkippedError, Workplace
from motrt.engines.bundle import Bundle
from motrt.engines.errors import BundleError, ParityError
from motrt.engines.host import Gpu
from motrt.engines.plans import BuildOptions, build_plans
from motrt.engines.plans.targets import Builder
from motrt.engines.refit.probe import by_file
from motrt.export.cli import run
from scripted_cuda import ScriptedCuda
from scripted_tensorrt import VERSION, Engine, ScriptedTensorRt, plan_of
from stub_plans import stub_run
from tiny_checkpoints import tree


@pytest.fixture
def place(bundle: Callable[..., Path], tmp_path: Path) -> Workplace:
    return Workplace(bundle("shared", "fp32"), tmp_path, is_packaged=False)


def test_everything_is_tried_with_the_model_that_comes_with_motrt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "--selftest", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    status = {check["name"]: check["status"] for check in told["checks"]}
    assert told["ok"]
    assert status.pop("TensorRT engines on the GPU") == "skipped"
    assert set(status.values()) == {"ok"}, told["checks"]
    assert len(status) == 7
    by_name = {check["name"]: check["detail"] for check in told["checks"]}
    assert "12 of 12 answers, 4 of 4 colours" in by_name["answers that are known"]
    assert "6 plans for sm86, sm89, sm120" in by_name["TensorRT-RTX builds"]


def test_a_bundle_is_tried_and_left_as_it_is(
    bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(bundle("edge-like", "fp16"), tmp_path / "b"))
    before = tree(root)
    assert run(["doctor", "--selftest", "--bundle", str(root), "--quiet"]) == 0
    assert tree(root) == before
    out = capsys.readouterr().out
    assert "float32 is compared" in out
    assert "come back to the bit" in out
    assert max(len(line) for line in out.splitlines()) < 160
    assert run(["doctor", "--bundle", str(root)]) == 2
    assert run(["doctor", "--selftest", "--bundle", str(tmp_path / "none")]) == 1


def _outputs(place: Workplace, engine: str) -> dict[str, Any]:
    return dict(by_file(Bundle.open(place.bundle), engine))


@pytest.mark.parametrize("check", [checks.weights_by_name, checks.pytorch])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_output_fails_and_a_rounding_does_not(
    check: Callable[[Workplace], str],
    factor: float,
    place: Workplace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = _outputs(place, "generator")
    velocity = changed["velocity"]
    velocity[0, 0, 0] += factor * 1e-4 * np.abs(velocity).max()
    monkeypatch.setattr(
        checks, "by_file", lambda b, e: changed if e == "generator" else by_file(b, e)
    )
    if factor < 1:
        check(place)
        return
    with pytest.raises(ParityError, match="the generator computes something else at velocity"):
        check(place)


def test_not_a_number_is_not_near(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = _outputs(place, "reasoner")
    changed["logits"] = np.full_like(changed["logits"], np.nan)
    monkeypatch.setattr(checks, "by_file", lambda b, e: changed)
    with pytest.raises(ParityError, match="logits; got nan"):
        checks.weights_by_name(place)


@pytest.fixture
def latents(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the three clips of the refit check what a test wants them to be."""

    def give(*clips: float) -> None:
        given: Iterator[float] = iter(clips)
        monkeypatch.setattr(checks, "_latents", lambda _: np.full((1, 2), next(given)))

    return give


def test_a_refit_that_does_nothing_or_does_not_come_back_fails(
    place: Workplace, latents: Callable[..., None]
) -> None:
    latents(1.0, 1.0, 1.0)
    with pytest.raises(ParityError, match="changed nothing"):
        checks.refit(place)
    latents(1.0, 2.0, 1.0 + 1e-7)
    with pytest.raises(ParityError, match="did not come back"):
        checks.refit(place)
    latents(1.0, 2.0, 1.0)
    checks.refit(place)


def test_a_failure_is_exit_code_3_and_the_rest_is_tried(
    bundle: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = bundle("shared", "fp32")
    monkeypatch.setattr(checks, "by_name", lambda b, e: _zeros(b, e))
    assert run(["doctor", "--selftest", "--bundle", str(root), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    status = {check["name"]: check["status"] for check in told["checks"]}
    assert not told["ok"]
    assert status["ONNX Runtime, weights by name"] == "failed"
    assert status["ONNX Runtime against PyTorch"] == "ok"
    assert status["answers that are known"] == "skipped"


def _zeros(bundle: Bundle, engine: str) -> dict[str, Any]:
    return {name: np.zeros_like(a) for name, a in by_file(bundle, engine).items()}


def test_what_is_not_installed_is_skipped_with_the_reason(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    for module, check in (("torch", checks.pytorch), ("onnxruntime", checks.weights_by_name)):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda n, m=module: None if n == m else real(n)
            )
            with pytest.raises(SkippedError, match="is not installed"):
                check(place)


def test_a_damaged_bundle_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        run_selftest(tmp_path)


@pytest.fixture
def scripted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Workplace, ScriptedTensorRt]]:
    """A machine that seems to have a GPU, and what TensorRT is there."""
    cuda = ScriptedCuda()
    trt = ScriptedTensorRt(cuda)
    nobody = Builder((), None)
    there = SimpleNamespace(version=VERSION, reason=None)
    card = Gpu("a card", (8, 9), None, None, None)

    def build(root: Path, targets: list[str], options: BuildOptions, backend: Any) -> None:
        run = stub_run(plan_of)
        build_plans(root, ["sm89"], options, backend=backend, builder=nobody, run=run)

    monkeypatch.setattr(plans_build, "_version", lambda *_: VERSION)
    monkeypatch.setattr(device_module, "tensorrt", lambda _: trt.module)
    monkeypatch.setattr(cuda_accessor, "cuda_runtime", lambda: cuda)
    monkeypatch.setattr(gpu_trial, "probe_tensorrt", lambda _: there)
    monkeypatch.setattr(gpu_trial, "build_plans", build)
    monkeypatch.setattr(gpu_trial, "FLAVOURS", ("tensorrt-rtx",))
    monkeypatch.setattr(checks, "FLAVOURS", ("tensorrt-rtx",))
    monkeypatch.setattr(gpu_trial, "_EXPORTED", ("fp32", "fp16"))  # what the script computes
    monkeypatch.setattr(checks, "probe_gpus", lambda: ((card,), None))
    yield Workplace(tmp_path, tmp_path, is_packaged=True), trt
    assert cuda.violations == []


def test_the_gpu_part_tries_every_precision(
    scripted: tuple[Workplace, ScriptedTensorRt],
) -> None:
    place, trt = scripted
    told = checks.gpu(place)
    assert "fp32 portable" in told
    assert "fp16 native" in told
    assert trt.cuda.calls["cudaGraphLaunch"] > 4


@pytest.mark.parametrize("wrong", ["weights", "graphs", "refit", "nan"])
def test_the_gpu_part_sees_wrong_engines(
    scripted: tuple[Workplace, ScriptedTensorRt], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, trt = scripted
    monkeypatch.setattr(gpu_trial, "_EXPORTED", ("fp32",))
    compute = Engine.compute

    def other(self: Engine, *args: Any) -> Any:
        outputs = compute(self, *args)
        launched = trt.cuda.calls.get("cudaGraphLaunch", 0)
        is_wrong = {
            "weights": True,
            "nan": True,
            "graphs": launched > 0 and trt.cuda.calls["cudaGraphLaunch"] % 2 == 1,
            "refit": self.version > 2,
        }[wrong]
        factor = np.nan if wrong == "nan" else 1.5
        return {name: a * factor if is_wrong else a for name, a in outputs.items()}

    monkeypatch.setattr(Engine, "compute", other)
    with pytest.raises(ParityError):
        checks.gpu(place)

"""A stripped plan holds no weight: it outlives every refit of its bundle, and a refit outlives it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from motrt.engines.atomic import writing_alone
from motrt.engines.bundle import Bundle
from motrt.engines.errors import BundleError
from motrt.engines.plans import PlanHost, build_plans, check_plan, read_engine, read_plan
from motrt.engines.plans.targets import Builder
from motrt.engines.refit.disk import refit_bundle
from motrt.engines.verification import verify_bundle

trt = pytest.importorskip("tensorrt_rtx")
from stub_plans import stub_run

HOST = PlanHost.here("tensorrt-rtx", trt.__version__, (8, 9))


@pytest.fixture
def root(tmp_path: Path, bundle: Callable[..., Path]) -> Path:
    return Path(shutil.copytree(bundle("nano-like", "fp16"), tmp_path / "b"))


def _build(root: Path, target: str = "sm89") -> None:
    nobody = Builder((), None)
    build_plans(root, [target], backend="tensorrt-rtx", builder=nobody, run=stub_run())


def _load(root: Path) -> bytes:
    opened = Bundle.open(root)
    record = read_plan(opened, HOST)
    check_plan(record, opened, HOST)
    return read_engine(opened, record, HOST, "generator")


def test_a_plan_outlives_a_refit_and_its_undoing(
    root: Path, checkpoint: Callable[..., Path]
) -> None:
    _build(root)
    plan, recorded = _load(root), Bundle.open(root).manifest.plans
    assert refit_bundle(root, checkpoint("nano-like", seed=1)).changed
    assert _load(root) == plan
    assert Bundle.open(root).manifest.plans == recorded
    verify_bundle(Bundle.open(root))
    assert refit_bundle(root, restore=True).changed
    assert _load(root) == plan


def test_a_refit_outlives_a_build(root: Path, checkpoint: Callable[..., Path]) -> None:
    _build(root)
    key = read_plan(Bundle.open(root), HOST).key
    refit_bundle(root, checkpoint("nano-like", seed=1))
    revision = Bundle.open(root).manifest.revision
    _build(root)
    _build(root, "sm86")
    opened = Bundle.open(root)
    assert opened.manifest.revision == revision is not None
    assert len(opened.manifest.plans) == 2
    # The same plan serves either weights.
    assert read_plan(opened, HOST).key == key


def test_a_plan_is_not_entered_while_somebody_else_writes(root: Path) -> None:
    _build(root)
    before = Bundle.open(root).manifest
    with writing_alone(root), pytest.raises(BundleError, match="cannot be locked"):
        _build(root, "sm86")
    assert Bundle.open(root).manifest == before
    assert [path.name for path in (root / "plans").glob("*/*")] == ["sm89"]

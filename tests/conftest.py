"""Checkpoints and bundles that several tests look at, built once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CheckpointFactory = Callable[..., Path]
BundleFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """Return ``checkpoint(kind, seed=0, dtype="float32")``; nobody may write to what it returns."""
    from omni_fixtures.checkpoints import build_pipeline, build_shared

    made: dict[tuple[str, int, str], Path] = {}

    def make(kind: str, *, seed: int = 0, dtype: str = "float32") -> Path:
        key = (kind, seed, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoints") / f"{kind}-{seed}-{dtype}"
            if kind == "shared":
                made[key] = build_shared(folder, seed=seed, dtype=dtype)
            else:
                made[key] = build_pipeline(folder, kind, seed=seed, dtype=dtype)
        return made[key]

    return make


@pytest.fixture(scope="session")
def bundle(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: CheckpointFactory
) -> BundleFactory:
    """Return ``bundle(kind, precision, lowering)``; nobody may write to what it returns."""
    from motrt.engines.dtypes import Precision
    from motrt.export.pipeline import export_checkpoint
    from motrt.export.result import ExportOptions

    made: dict[tuple[str, str, str], Path] = {}

    def make(kind: str, precision: str = "fp32", lowering: str = "native") -> Path:
        key = (kind, precision, lowering)
        if key not in made:
            folder = tmp_path_factory.mktemp("bundles") / "-".join(key)
            options = ExportOptions(precision=Precision(precision), lowering=lowering)
            made[key] = export_checkpoint(checkpoint(kind), folder, options).bundle
        return made[key]

    return make


@pytest.fixture
def stage(
    bundle: BundleFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Return ``stage(kind, lowering, weights, release)``; see ``tensorrt_stage.py``."""
    from tensorrt_stage import stages

    yield from stages(bundle, tmp_path, monkeypatch)

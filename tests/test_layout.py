"""The shape of the repository: four roots of one namespace, small files, no heavy imports."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = ("export", "runtime", "engines", "calibration")
HEAVY = ("torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "diffusers", "transformers")
MAX_LINES = 400


def test_no_init_file_hides_the_namespace() -> None:
    for root in ROOTS:
        assert not (ROOT / root / "__init__.py").exists()
        assert not (ROOT / root / "motrt" / "__init__.py").exists()
        assert (ROOT / root / "motrt" / root / "py.typed").exists()


def test_files_are_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for root in ROOTS
        for path in (ROOT / root).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def _modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["motrt.runtime", "motrt.engines"])
def test_import_brings_nothing_heavy(package: str) -> None:
    """Every module of runtime and engines, not only what the package itself imports."""
    names = [package, *_submodules(package)]
    assert len(names) >= 3
    loaded = _modules_after("\n".join(f"import {name}" for name in names))
    assert not loaded & set(HEAVY)


def test_the_program_imports_nothing_heavy_before_it_knows_the_verb() -> None:
    loaded = _modules_after("import motrt.export.cli")
    assert not loaded & set(HEAVY)


def _submodules(package: str) -> list[str]:
    module = importlib.import_module(package)
    walk = pkgutil.walk_packages(module.__path__, f"{package}.")
    return [info.name for info in walk if not info.name.endswith("__main__")]

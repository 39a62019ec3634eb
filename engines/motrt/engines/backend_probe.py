"""Finding out whether a backend is installed and loads.

A backend is imported by a short-lived child, and only if it is installed: a broken wheel may end
the process that imports it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from motrt.engines._tensorrt import Flavour, module_of

ABSENT = "not installed"
_IMPORT_SECONDS = 120  # a first import from a slow SD card


@dataclass(frozen=True, slots=True)
class Backend:
    """An optional package that runs engines.

    Attributes:
        version: None if it is not installed or does not load.
        providers: ONNX Runtime's execution providers; empty for the others.
        reason: Why there is no version, or None.
    """

    version: str | None
    providers: tuple[str, ...]
    reason: str | None


def probe_onnxruntime() -> Backend:
    """Look for ONNX Runtime and its execution providers."""
    return _probe_backend(
        "onnxruntime",
        "from motrt.engines._onnxruntime import onnxruntime\n"
        "module = onnxruntime()\n"
        "providers = module.get_available_providers()\n",
    )


def probe_tensorrt(flavour: Flavour) -> Backend:
    """Look for one of the two TensorRTs."""
    return _probe_backend(
        module_of(flavour),
        "from motrt.engines._tensorrt import tensorrt\n"
        f"module, providers = tensorrt({flavour!r}), []\n",
    )


def _probe_backend(module: str, script: str) -> Backend:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a half-removed package
        is_there = False
    if not is_there:
        return Backend(None, (), ABSENT)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"{_child_header()}{script}{_REPORT}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            return Backend(None, (), _failure(done))
        data = json.loads(done.stdout.splitlines()[-1])  # some packages greet on stdout
        return Backend(str(data["version"]), tuple(map(str, data["providers"])), None)
    except subprocess.TimeoutExpired:
        return Backend(None, (), f"its import takes longer than {_IMPORT_SECONDS} s")
    except (OSError, ValueError, LookupError, TypeError) as err:
        return Backend(None, (), f"its probe failed ({err!r})")


def _child_header() -> str:
    # Isolated, then given this process's path: the child sees the same packages and no others.
    return f"import json, sys\nsys.path[:] = {sys.path!r}\n"


_REPORT = 'print(json.dumps({"version": str(module.__version__), "providers": providers}))\n'


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"installed, but its import ends the process with signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    last = lines[-1] if lines else "no message"
    return f"installed, but: {last.partition('Error: ')[2] or last}"

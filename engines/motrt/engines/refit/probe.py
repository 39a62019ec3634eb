"""The proof after a refit: both engines on the fixed input, against the weights taken by name.

A graph finds its weights by offsets, or by what a backend uploaded; the reference gets every tensor
by its name from the store. A stale tensor, or two that traded places, makes them differ.
"""

from __future__ import annotations

import hashlib
import platform
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.dtypes import DType
from motrt.engines.errors import MissingDependencyError, RefitError
from motrt.engines.onnxruntime_engine import (
    open_session,
    ort_value,
    run_once,
    session_options,
)
from motrt.engines.probe_inputs import probe_feeds
from motrt.engines.weight_names import read_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array

    Outputs = dict[str, Array]

# Of an output's largest value. The reference is not optimized, so sums run in another order:
# 2e-6 in float32, 1e-3 in float16. tests/runtime/test_refit_runtime.py has wrong weights beyond it.
TOLERANCE = {DType.FLOAT32: 1e-4, DType.FLOAT16: 1e-2}
_CPU = ("CPUExecutionProvider",)


def feeds_of(bundle: Bundle, engine: str) -> dict[str, Array]:
    """Return the fixed input of an engine."""
    reasoner = engine == "reasoner"
    return probe_feeds(bundle.reasoner_contract() if reasoner else bundle.generator_contract())


def why_not(bundle: Bundle) -> str | None:
    """Return why the probe cannot run here, or None if it can."""
    if bundle.dtype not in TOLERANCE:
        return f"ONNX Runtime's CPU provider does not run {bundle.dtype.label}"
    try:
        onnxruntime()
    except MissingDependencyError as err:
        return err.message
    return None


def by_file(bundle: Bundle, engine: str) -> Outputs:
    """Run an engine as a process would that opens the bundle's folder: weights by offset."""
    options = session_options(1)
    options.add_session_config_entry("session.disable_prepacking", "1")
    path = str(bundle.path(f"{engine}.onnx"))
    return run_once(open_session(engine, path, options, _CPU), engine, feeds_of(bundle, engine))


def by_name(bundle: Bundle, engine: str) -> Outputs:
    """Run an engine over the store's tensors, each given by its name."""
    ort = onnxruntime()
    options = session_options(1)
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    store = bundle.weights()
    names = read_by(bundle.manifest.model, engine) & store.entries.keys()
    held = {name: ort_value(ort, store, name) for name in names}
    for name, value in held.items():
        options.add_initializer(name, value)
    path = str(bundle.path(f"{engine}.onnx"))
    return run_once(open_session(engine, path, options, _CPU), engine, feeds_of(bundle, engine))


def require_same(
    engine: str, have: Mapping[str, Array], want: Mapping[str, Array], dtype: DType
) -> float:
    """Refuse an engine whose outputs are not those of its weights.

    Args:
        engine: Name for the message.
        have: The engine's outputs.
        want: The reference's.
        dtype: The compute type.

    Returns:
        The largest difference, as a share of the output's largest value.

    Raises:
        RefitError: They differ, or are not finite.
    """
    worst = 0.0
    for name, expected in want.items():
        got, reference = (np.asarray(a, np.float32) for a in (have[name], expected))
        peak = float(np.abs(reference).max(initial=0.0))
        gap = float(np.abs(got - reference).max(initial=0.0)) / (peak or 1.0)
        if not (np.isfinite(got).all() and np.isfinite(reference).all()):
            raise _failed(engine, name, "NaN or infinity", "finite outputs")
        if not gap <= TOLERANCE[dtype]:
            got_text = f"{gap:.3g} of the largest value from what the weights give"
            raise _failed(engine, name, got_text, f"at most {TOLERANCE[dtype]:g}")
        worst = max(worst, gap)
    return worst


def digest(outputs: Mapping[str, Array]) -> str:
    """Return a hash of all outputs, bit for bit."""
    found = hashlib.sha256()
    for name in sorted(outputs):
        found.update(name.encode() + np.ascontiguousarray(outputs[name]).tobytes())
    return found.hexdigest()[:32]


def machine() -> str:
    """Return what digests depend on: they are compared only where it is the same."""
    node = hashlib.sha256(platform.node().encode()).hexdigest()[:8]  # a bundle names no hosts
    return f"onnxruntime {onnxruntime().__version__}, {platform.machine()}, {node}"


def _failed(engine: str, output: str, got: str, expected: str) -> RefitError:
    return RefitError(
        f"the probe of the refitted {engine} failed at {output}; the old weights are in place",
        got=got,
        expected=expected,
        fix="Check the new weights; if they are sound, report a bug of motrt.",
    )

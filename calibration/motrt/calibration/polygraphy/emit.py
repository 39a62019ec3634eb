"""Writing a folder with which Polygraphy compares a bundle's engines, on whatever runs them.

The input is the probe's, the expected output is the PyTorch modules' over the bundle's own weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.polygraphy.commands import EngineCase, shell_files
from motrt.calibration.polygraphy.data import require_polygraphy, save_inputs, save_outputs
from motrt.engines.arguments import as_path
from motrt.engines.bundle import Bundle
from motrt.engines.bundle_writer import new_bundle
from motrt.engines.contract import Cache, EngineContract
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError, ExportError
from motrt.engines.plans.graph_file import with_dims
from motrt.engines.plans.identity import plan_profiles
from motrt.engines.plans.options import BuildOptions, BuildShapes
from motrt.engines.probe_inputs import PAST, TOKENS, probe_feeds
from motrt.export.probe import generator_outputs, reasoner_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from motrt.engines.tensors import Array

# Of an output's largest value: as in the probe, and in 16 bits a hundred roundings of it.
_TOLERANCE = {DType.FLOAT32: 1e-4, DType.FLOAT16: 2e-2}
_CAPACITY = PAST + TOKENS
_SHAPES = BuildShapes(max_context=_CAPACITY, max_tokens=64, max_sound=16, max_action=16)
_README = """# {bundle}, for Polygraphy

Both engines of a motrt bundle ({precision}, {lowering} lowering), one fixed input each, and what PyTorch makes of it over the same weights, in float32.

    sh onnxruntime.sh       # runs anywhere: pip install polygraphy onnxruntime
    sh tensorrt.sh          # TensorRT, on a GPU
    sh tensorrt-rtx.sh      # TensorRT-RTX, on a GPU
    sh debug-reduce.sh      # if TensorRT differs: the least graph that still does

`*.inputs.json` and `*.golden.json` are Polygraphy's own files (`polygraphy inspect data`). `weights/` holds the bundle's weight files, as hard links. In the static cache's graph the capacity is a
number ({capacity}), as TensorRT wants it. Tolerances are {tolerance:g} of an output's largest value. Only onnxruntime.sh is run by motrt's tests.
"""


@dataclass(frozen=True, slots=True)
class Emission:
    """What was written: the folder, and its files by name."""

    folder: Path
    files: tuple[str, ...]


def emit_polygraphy(bundle: str | Path, folder: str | Path) -> Emission:
    """Write inputs, expected outputs, graphs, weights (as hard links) and commands.

    Args:
        bundle: The bundle.
        folder: A new or empty folder, on the bundle's file system.

    Raises:
        BundleError: There is no sound bundle.
        ConfigError: The bundle's type has no NumPy form.
        ExportError: The folder is not empty, is on another file system, or the disk refuses.
        MissingDependencyError: Polygraphy or PyTorch is not installed.
    """
    opened = Bundle.open(bundle)
    target = as_path("the folder", folder)
    manifest = opened.manifest
    if opened.dtype not in _TOLERANCE:
        raise ConfigError(
            "Polygraphy's data files hold NumPy arrays",
            got=f"a {manifest.precision.value} bundle",
            expected="fp32 or fp16",
            fix="Export the checkpoint with --precision fp16 as well, and emit from that.",
        )
    require_polygraphy()
    profiles = plan_profiles(opened, BuildOptions(shapes=_SHAPES))
    with new_bundle(target) as place:
        cases: list[EngineCase] = []
        for contract in (opened.reasoner_contract(), opened.generator_contract()):
            name = contract.name
            feeds = probe_feeds(contract)
            golden = _golden(opened, contract, feeds)
            graph = opened.path(f"{name}.onnx").read_bytes()
            if manifest.cache is Cache.STATIC:
                graph = with_dims(graph, {"capacity": _CAPACITY})
            (place / f"{name}.onnx").write_bytes(graph)
            save_inputs(place / f"{name}.inputs.json", feeds)
            save_outputs(place / f"{name}.golden.json", "pytorch", golden)
            tolerances = {
                output: _TOLERANCE[opened.dtype] * max(float(np.abs(array).max()), 1e-6)
                for output, array in golden.items()
            }
            cases.append(
                EngineCase(contract=contract, profile=profiles[name][0], tolerances=tolerances)
            )
        _link_weights(opened, place)
        for file, text in shell_files(cases).items():
            (place / file).write_text(text, encoding="utf-8")
            (place / file).chmod(0o755)
        text = _README.format(
            bundle=opened.root.absolute().name,
            precision=manifest.precision.value,
            lowering=manifest.lowering,
            capacity=_CAPACITY,
            tolerance=_TOLERANCE[opened.dtype],
        )
        (place / "README.md").write_text(text, encoding="utf-8")
        files = sorted(p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file())
    return Emission(target, tuple(files))


def _golden(
    bundle: Bundle, contract: EngineContract, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Return what PyTorch makes of the feeds, in the shapes and types of the graph's outputs."""
    wide = {
        name: array if array.dtype == np.int64 else array.astype(np.float32)
        for name, array in feeds.items()
    }
    if contract.name == "generator":
        outputs = generator_outputs(bundle, wide)
    else:
        outputs = reasoner_outputs(bundle, wide)
        if bundle.manifest.cache is Cache.STATIC:
            for name in [name for name in outputs if name.startswith("present.")]:
                cache = wide[name.replace("present.", "past_key_values.", 1)].copy()
                cache[:, :, PAST:] = outputs[name]
                outputs[name] = cache
    return {spec.name: outputs[spec.name].astype(spec.dtype.numpy) for spec in contract.outputs}


def _link_weights(bundle: Bundle, place: Path) -> None:
    for name in {entry.file for entry in bundle.weights().entries.values()}:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(bundle.path(name).resolve(), target)
        except OSError as err:
            raise ExportError(
                "the bundle's weights cannot be linked into the folder",
                got=err.strerror or err,
                expected="a folder on the bundle's file system",
                fix=f"Choose one beside {bundle.root}.",
            ) from err

"""Comparing a bundle with a checkpoint's public implementations, or with another bundle."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.calibration.parity.candidate import Candidate
from motrt.calibration.parity.cases import Cases, build_cases
from motrt.calibration.parity.metrics import Difference, difference
from motrt.calibration.parity.reference_process import (
    ReferenceResult,
    ReferenceRun,
    run_reference,
)
from motrt.calibration.parity.report import ParityReport, Row
from motrt.calibration.parity.tolerances import tolerance
from motrt.engines.bundle import MANIFEST, Bundle
from motrt.engines.checkpoint import open_checkpoint
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.tensors import Array

# Config keys that change values, not shapes: a wrong one must fail by its effect.
_NUMBERS = frozenset(
    {
        "base_fps",
        "enable_fps_modulation",
        "rms_norm_eps",
        "rope_axes_dim",
        "rope_theta",
        "sound_latent_fps",
        "timestep_scale",
        "unified_3d_mrope_reset_spatial_ids",
        "unified_3d_mrope_temporal_modality_margin",
    }
)
_LAYER = re.compile(r"^(present|context)\.(\d+)\.(key|value)$")


def validate(
    bundle: Path,
    against: Path,
    *,
    threads: int | None = None,
    progress: Progress = silent,
) -> ParityReport:
    """Compare a bundle with what it should equal.

    Args:
        bundle: The bundle.
        against: A checkpoint (diffusers and transformers compute the reference) or a bundle.
        threads: Threads on either side; the machine's cores if None.
        progress: Told how far each stage is.

    Returns:
        The report; whether it is ok is the caller's to look at.

    Raises:
        BundleError: A bundle is damaged.
        CheckpointError: The checkpoint is damaged.
        ConfigError: The two are models of different architecture.
        ExecutionError: One side could not run at all.
        MissingDependencyError: An extra is not installed.
    """
    started = time.perf_counter()
    opened = Bundle.open(bundle)
    cases = build_cases(opened.manifest)
    cores = threads or os.cpu_count() or 1
    if (against / MANIFEST).is_file():
        rows, sources = _against_bundle(opened, Bundle.open(against), cases, cores, progress)
    else:
        rows, sources = _against_checkpoint(opened, against, cases, cores, progress)
    return ParityReport(
        precision=opened.manifest.precision.value,
        lowering=opened.manifest.lowering,
        against=against.resolve().name,
        rows=rows,
        sources=sources,
        seconds=time.perf_counter() - started,
    )


def _against_checkpoint(
    bundle: Bundle, checkpoint: Path, cases: Cases, threads: int, progress: Progress
) -> tuple[list[Row], dict[str, object]]:
    source = open_checkpoint(checkpoint)
    _require_same_model(bundle, source.config)
    if "vae" not in source.components:
        cases.vae.clear()
    dtype = bundle.dtype
    runs = [
        ReferenceRun("reference", dtype, DType.FLOAT32),
        ReferenceRun("float32", dtype, DType.FLOAT32, order="other"),
    ]
    if dtype is DType.FLOAT16:
        runs.append(ReferenceRun("float16", dtype, dtype))
    progress("reference", 0, 1)
    with tempfile.TemporaryDirectory(prefix="motrt-parity-") as folder:
        results = run_reference(checkpoint, cases, runs, Path(folder), threads)
    progress("reference", 1, 1)
    rows: list[Row] = []
    for twin in _passes(dtype):
        label = DType.FLOAT32 if twin else dtype
        arrays = _candidate(bundle, cases, twin=twin, threads=threads, progress=progress)
        noise = results[1] if label is DType.FLOAT32 else results[2]
        rows += _rows(cases, arrays, results[0], noise, label)
    return rows, results[0].report


def _against_bundle(
    bundle: Bundle, other: Bundle, cases: Cases, threads: int, progress: Progress
) -> tuple[list[Row], dict[str, object]]:
    _require_same_model(bundle, other.manifest.model)
    if bundle.manifest.modalities != other.manifest.modalities:
        raise ConfigError(
            "the two bundles have other modalities",
            got=", ".join(modality.value for modality in bundle.manifest.modalities),
            expected=", ".join(modality.value for modality in other.manifest.modalities),
            fix="Export both with the same --modalities.",
        )
    if "vae" not in other.manifest.components:
        cases.vae.clear()
    dtypes = (bundle.dtype, other.dtype)
    # Weights of another type are other weights: the coarser type sets the tolerance.
    label = max(dtypes, key=[DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16].index)
    if dtypes[0] is dtypes[1]:
        label = DType.FLOAT32
    twins = [dtype is not DType.FLOAT32 for dtype in dtypes]
    ours = _candidate(bundle, cases, twin=twins[0], threads=threads, progress=progress)
    theirs = _candidate(other, cases, twin=twins[1], threads=threads, progress=progress)
    reference = ReferenceResult(theirs, {"bundle": other.root.resolve().name})
    rows = _rows(cases, ours, reference, None, label, by_prompt=False)
    return rows, reference.report


def _passes(dtype: DType) -> list[bool]:
    """Return for each run of the bundle whether it is the float32 twin's."""
    if dtype is DType.FLOAT16:
        return [True, False]
    return [dtype is DType.BFLOAT16]


def _candidate(
    bundle: Bundle, cases: Cases, *, twin: bool, threads: int, progress: Progress
) -> dict[str, Array]:
    total = len(cases.reasoner) + len(cases.generator) + len(cases.vae)
    stage = f"{bundle.root.name} ({'float32 twin' if twin else bundle.dtype.label})"
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    return Candidate(bundle, twin=twin, threads=threads).run(cases, advance)


def _rows(
    cases: Cases,
    candidate: dict[str, Array],
    reference: ReferenceResult,
    noise: ReferenceResult | None,
    arithmetic: DType,
    *,
    by_prompt: bool = True,
) -> list[Row]:
    """One row a tensor; K/V of all layers share a row, which shows the worst layer."""
    plan = [
        ("reasoner", c.name, f"prompt: {c.prompt}" if by_prompt else c.name)
        for c in cases.reasoner
    ]
    plan += [("generator", case.name, case.name) for case in cases.generator]
    if arithmetic is DType.FLOAT32:  # the VAE computes in float32 in every bundle
        plan += [("vae", case.name, case.name) for case in cases.vae]
    rows: list[Row] = []
    for engine, case, source in plan:
        groups: dict[str, Row] = {}
        for key, expected in reference.arrays.items():
            prefix, _, tensor = key.rpartition("/")
            if prefix != source:
                continue
            have = candidate.get(f"{case}/{tensor.removesuffix('.diffusers')}")
            if have is None:
                continue
            gap = difference(have, expected)
            own = None if noise is None else difference(noise.arrays[key], expected).max_abs
            bound = tolerance(tensor, arithmetic, gap.reference_max, own or 0.0)
            row = Row(engine, case, tensor, arithmetic, gap, own, bound)
            match = _LAYER.match(tensor)
            group = f"{match[1]}.{match[3]}" if match else tensor
            if group not in groups or row.severity > groups[group].severity:
                groups[group] = row
        if not groups:
            rows.append(_nothing(engine, case, arithmetic))
        rows += groups.values()
    return rows


def _nothing(engine: str, case: str, arithmetic: DType) -> Row:
    """A case for which the two sides have no tensor in common must not pass unseen."""
    gap = Difference(float("inf"), float("inf"), 0.0, 0.0, ())
    return Row(engine, case, "nothing to compare", arithmetic, gap, None, 0.0)


def _require_same_model(bundle: Bundle, other: ModelConfig) -> None:
    """Refuse models of other dimensions; numbers such as rope_theta are left to the comparison."""
    ours, theirs = bundle.manifest.model.to_dict(), other.to_dict()
    keys = [key for key in ours if key not in _NUMBERS and ours[key] != theirs[key]]
    if keys:
        raise ConfigError(
            "the two are not the same architecture",
            got=", ".join(f"{key} {ours[key]}" for key in keys),
            expected=", ".join(f"{key} {theirs[key]}" for key in keys),
            fix="Compare the bundle with the checkpoint that it was exported from.",
        )

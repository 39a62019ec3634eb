"""Comparing a bundle with a checkpoint's public implementations, or with another bundle."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.calibration.parity.availability import drop, without_parts, without_parts_of_either
from motrt.calibration.parity.candidate import Candidate
from motrt.calibration.parity.cases import Cases, build_cases
from motrt.calibration.parity.reference_process import ReferenceRun, run_reference
from motrt.calibration.parity.report import Outcome, ParityReport, Row, Skipped
from motrt.calibration.parity.rows import tower_rows
from motrt.calibration.parity.sequence_rows import SequenceRows
from motrt.engines.bundle import MANIFEST, Bundle
from motrt.engines.checkpoint import open_checkpoint
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        outcome = _against_bundle(opened, Bundle.open(against), cases, cores, progress)
    else:
        outcome = _against_checkpoint(opened, against, cases, cores, progress)
    return ParityReport(
        precision=opened.manifest.precision.value,
        lowering=opened.manifest.lowering,
        against=against.resolve().name,
        outcome=outcome,
        seconds=time.perf_counter() - started,
    )


def _against_checkpoint(
    bundle: Bundle, checkpoint: Path, cases: Cases, threads: int, progress: Progress
) -> Outcome:
    source = open_checkpoint(checkpoint)
    _require_same_model(bundle, source.config)
    skipped = without_parts(bundle.manifest, source.components)
    drop(cases, skipped)
    dtype = bundle.dtype
    towers = ("reasoner", "generator")
    noisy = (*towers, "vae", "trajectory")  # the others are equal or not
    runs = [
        ReferenceRun("reference", dtype, DType.FLOAT32),
        ReferenceRun("float32", dtype, DType.FLOAT32, order="other", engines=noisy),
    ]
    if dtype is DType.FLOAT16:
        runs.append(ReferenceRun("float16", dtype, dtype, engines=towers))
    progress("reference", 0, 1)
    with tempfile.TemporaryDirectory(prefix="motrt-parity-") as folder:
        results = run_reference(checkpoint, cases, runs, Path(folder), threads)
    progress("reference", 1, 1)
    reference, sources = results[0].arrays, dict(results[0].report)
    refused = [Skipped(**item) for item in sources.pop("skipped")]
    drop(cases, refused)
    outcome = Outcome([], [*skipped, *refused], [], sources)
    for twin in _passes(dtype):
        label = DType.FLOAT32 if twin else dtype
        asked = cases if label is DType.FLOAT32 else cases.of_the_towers()
        candidate = Candidate(bundle, twin=twin, threads=threads)
        ours = _run(candidate, asked, reference, _stage(bundle, twin), progress)
        noise = results[1] if label is DType.FLOAT32 else results[2]
        rows = tower_rows(asked, ours, reference, noise.arrays, label)
        outcome.rows.extend(rows)
        _add_sequences(outcome, asked, candidate, ours, reference, noise.arrays, rows)
    return outcome


def _against_bundle(
    bundle: Bundle, other: Bundle, cases: Cases, threads: int, progress: Progress
) -> Outcome:
    _require_same_model(bundle, other.manifest.model)
    if bundle.manifest.modalities != other.manifest.modalities:
        raise ConfigError(
            "the two bundles have other modalities",
            got=", ".join(modality.value for modality in bundle.manifest.modalities),
            expected=", ".join(modality.value for modality in other.manifest.modalities),
            fix="Export both with the same --modalities.",
        )
    skipped = without_parts_of_either((bundle.manifest, other.manifest))
    drop(cases, skipped)
    dtypes = (bundle.dtype, other.dtype)
    # Weights of another type are other weights: the coarser type sets the tolerance.
    label = max(dtypes, key=[DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16].index)
    if dtypes[0] is dtypes[1]:
        label = DType.FLOAT32
    theirs: dict[str, Array] = {}
    arrays = []
    for each in (other, bundle):  # the reference first
        twin = each.dtype is not DType.FLOAT32
        candidate = Candidate(each, twin=twin, threads=threads)
        arrays.append(_run(candidate, cases, theirs, _stage(each, twin), progress))
        theirs = arrays[0]
    outcome = Outcome([], skipped, [], {"bundle": other.root.resolve().name})
    rows = tower_rows(cases, arrays[1], theirs, None, label, by_prompt=False)
    outcome.rows.extend(rows)
    _add_sequences(outcome, cases, candidate, arrays[1], theirs, {}, rows)
    return outcome


def _add_sequences(
    outcome: Outcome,
    cases: Cases,
    candidate: Candidate,
    ours: Mapping[str, Array],
    reference: Mapping[str, Array],
    noise: Mapping[str, Array],
    rows: list[Row],
) -> None:
    """Add the rows of sequences; ``rows`` of single runs say how noisy the logits are."""
    logits = [row.self_noise or 0.0 for row in rows if row.tensor.startswith("logits")]
    sequences = SequenceRows(ours, reference, noise, max(logits, default=0.0))
    outcome.rows.extend(sequences.rows(cases))
    outcome.notes.extend(sequences.notes)
    outcome.notes.extend(f"{name}: {message}" for name, message in candidate.failures.items())


def _passes(dtype: DType) -> list[bool]:
    """Return for each run of the bundle whether it is the float32 twin's."""
    if dtype is DType.FLOAT16:
        return [True, False]
    return [dtype is DType.BFLOAT16]


def _stage(bundle: Bundle, twin: bool) -> str:
    return f"{bundle.root.name} ({'float32 twin' if twin else bundle.dtype.label})"


def _run(
    candidate: Candidate,
    cases: Cases,
    along: Mapping[str, Array],
    stage: str,
    progress: Progress,
) -> dict[str, Array]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(stage, done, cases.count)

    return candidate.run(cases, advance, along)


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

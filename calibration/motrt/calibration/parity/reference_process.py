"""Asking the public implementations, which run in a process of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.calibration.parity.cases import Cases
    from motrt.engines.dtypes import DType
    from motrt.engines.tensors import Array


ENGINES = ("reasoner", "generator", "vae", "text", "scheduler", "prompt", "trajectory")


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One way to run the reference.

    Attributes:
        name: Folder name of the request.
        weights: Type that the weights are rounded to first.
        compute: Type of the arithmetic.
        order: ``default``, or ``other``: the same sums in another order.
        engines: Whose cases are run.
    """

    name: str
    weights: DType
    compute: DType
    order: str = "default"
    engines: tuple[str, ...] = ENGINES


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Arrays by ``case/tensor``, and what the process says about itself."""

    arrays: dict[str, Array]
    report: dict[str, Any]


def run_reference(
    checkpoint: Path, cases: Cases, runs: list[ReferenceRun], folder: Path, threads: int
) -> list[ReferenceResult]:
    """Run the reference in each of the ways; one process, so that imports are paid once.

    Args:
        checkpoint: The checkpoint.
        cases: The inputs.
        runs: The ways.
        folder: An empty folder for the exchange.
        threads: Threads of the process.

    Raises:
        ExecutionError: The process failed; the message is its own.
    """
    folders = []
    for run in runs:
        target = folder / run.name
        target.mkdir()
        folders.append(target)
        _write_request(checkpoint, cases, run, target, threads)
    command = [sys.executable, "-m", "motrt.calibration.reference", *map(str, folders)]
    # Never ask a hub for anything: what is compared is on this disk.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # Threads that spin while they wait for work of a few microseconds took three times the CPU time
    # (measured, two cores that others use too).
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,  # never ask a person either: nobody sees the question
        capture_output=True,
        text=True,
        check=False,
    )
    results = []
    for target in folders:
        report = _report(target)
        if report is None or "error" in report or done.returncode != 0:
            error = (report or {}).get("error") or {
                "type": f"exit code {done.returncode}",
                "message": (done.stderr.strip().splitlines() or ["no message"])[-1],
            }
            raise ExecutionError(
                "the reference implementation could not run",
                got=f"{error['type']}: {error['message']}",
                fix="It needs: pip install 'motrt[export]', and memory for the float32 weights.",
            )
        with np.load(target / "result.npz", allow_pickle=False) as data:
            results.append(ReferenceResult({name: data[name] for name in data.files}, report))
    return results


def _report(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    return data if isinstance(data, dict) else None


def _write_request(
    checkpoint: Path, cases: Cases, run: ReferenceRun, folder: Path, threads: int
) -> None:
    arrays: dict[str, Array] = {f"prompt/{name}": ids for name, ids in cases.prompts.items()}

    def keep(name: str, array: Array | None) -> str | None:
        if array is not None:
            arrays[name] = array
        return None if array is None else name

    by_engine: dict[str, list[dict[str, Any]]] = {
        # Reasoner cases differ in how a prompt is fed; to the reference a prompt is a prompt.
        "reasoner": [
            {"name": f"prompt: {name}", "input_ids": f"prompt/{name}"}
            for name in dict.fromkeys(case.prompt for case in cases.reasoner)
        ],
        "generator": [
            {
                "name": case.name,
                "input_ids": f"prompt/{case.prompt}",
                "latents": keep(f"{case.name}/latents", case.latents),
                "clean_frames": list(case.clean_frames),
                "sound_latents": keep(f"{case.name}/sound", case.sound_latents),
                "clean_sound_frames": list(case.clean_sound_frames),
                "action_latents": keep(f"{case.name}/action", case.action_latents),
                "clean_action_steps": list(case.clean_action_steps),
                "domain_id": None if case.action_latents is None else case.domain_id,
                "timestep": case.timestep,
                "fps": case.fps,
            }
            for case in cases.generator
        ],
        "text": [
            {
                "name": case.name,
                "input_ids": f"prompt/{case.prompt}",
                "max_new_tokens": case.max_new_tokens,
            }
            for case in cases.text
        ],
    }
    for engine in ("vae", "scheduler", "prompt", "trajectory"):
        by_engine[engine] = [
            {
                field: keep(f"{case.name}/{field}", value)
                if isinstance(value, np.ndarray)
                else value
                for field, value in _fields(case).items()
                if value is not None
            }
            for case in getattr(cases, engine)
        ]
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "weights_dtype": run.weights.label,
        "compute_dtype": run.compute.label,
        "order": run.order,
        "threads": threads,
        **{f"{engine}_cases": by_engine[engine] for engine in run.engines},
    }
    (folder / "request.json").write_text(json.dumps(request))
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]


def _fields(case: Any) -> dict[str, Any]:
    """Return a case's fields, which the protocol calls by the same names."""
    return {item.name: getattr(case, item.name) for item in dataclasses.fields(case)}

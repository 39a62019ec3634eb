"""Asking the public implementations, which run in a process of their own."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One way to run the reference.

    Attributes:
        name: Folder name of the request.
        weights: Type that the weights are rounded to first.
        compute: Type of the arithmetic.
        order: ``default``, or ``other``: the same sums in another order.
    """

    name: str
    weights: DType
    compute: DType
    order: str = "default"


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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

    generator = [
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
    ]
    vae = []
    for case in cases.vae:
        kind = "latents" if case.latents is not None else "video"
        array = case.latents if case.latents is not None else case.video
        vae.append({"name": case.name, kind: keep(f"{case.name}/{kind}", array)})
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "weights_dtype": run.weights.label,
        "compute_dtype": run.compute.label,
        "order": run.order,
        "threads": threads,
        # Reasoner cases differ in how a prompt is fed; to the reference a prompt is a prompt.
        "reasoner_cases": [
            {"name": f"prompt: {name}", "input_ids": f"prompt/{name}"}
            for name in dict.fromkeys(case.prompt for case in cases.reasoner)
        ],
        "generator_cases": generator,
        "vae_cases": vae,
    }
    (folder / "request.json").write_text(json.dumps(request))
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]

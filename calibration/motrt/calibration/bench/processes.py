"""What is measured in processes of its own: start, memory, import.

Run as ``python -m motrt.calibration.bench.processes JOB FOLDER SIZE THREADS``; the first line on
stdout says that the work is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.calibration.bench.inputs import noise, prompt_ids
from motrt.calibration.bench.sizes import SIZES
from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.calibration.bench.sizes import Size
    from motrt.engines.tensors import Array

_ROLLUP = Path("/proc/self/smaps_rollup")


def run_job(job: str, folder: Path, size: Size, threads: int) -> tuple[float, dict[str, Any]]:
    """Run a job in a new process.

    Returns:
        Seconds from its start to its first line, and what that line says.

    Raises:
        ExecutionError: The process failed.
    """
    command = [sys.executable, "-m", __name__, job, str(folder), size.name, str(threads)]
    return _first_line(command)


def import_seconds() -> float:
    """Return what ``import motrt.runtime`` takes in a new process."""
    code = (
        "import time; s = time.perf_counter(); import motrt.runtime; "
        "print(time.perf_counter() - s)"
    )
    return float(_first_line([sys.executable, "-c", code])[1])


def pss_bytes() -> int | None:
    """Return this process's share of memory, or None where the kernel does not say."""
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main(arguments: list[str]) -> None:
    """Do a job and say so in one line."""
    job, folder, size, threads = arguments
    report = _JOBS[job](Path(folder), SIZES[size], int(threads))
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()  # now, and not at the exit, which takes time of its own


def _first_line(command: list[str]) -> tuple[float, Any]:
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        _, errors = process.communicate()
    if process.returncode != 0 or not line:
        raise ExecutionError(
            "a process of the bench failed",
            got=(errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1],
            fix="The reference side needs: pip install 'motrt[export]'.",
        )
    return seconds, json.loads(line)


def _start_ours(folder: Path, size: Size, threads: int) -> dict[str, Any]:
    from motrt.calibration.bench.ours import Ours

    engines = Ours(folder / "bundle", threads, residency="shared")
    return _save(engines.step, folder / "ours.npy", size)


def _start_theirs(folder: Path, size: Size, threads: int) -> dict[str, Any]:
    from motrt.calibration.bench.theirs import Theirs

    return _save(Theirs(folder / "checkpoint", threads).step, folder / "theirs.npy", size)


def _save(
    step: Callable[[Array, Array], Callable[[], Array]], path: Path, size: Size
) -> dict[str, Any]:
    np.save(path, step(prompt_ids(size, size.context), noise(size, size.image))())
    return {}


def _share_memory(folder: Path, size: Size, threads: int) -> dict[str, Any]:
    """Measure the growth of memory over both engines' first runs."""
    from motrt.calibration.bench.ours import Ours
    from motrt.engines._onnxruntime import onnxruntime

    onnxruntime()  # the library itself is no part of the growth
    before = pss_bytes()
    engines = Ours(folder / "shared.bundle", threads, residency="shared")
    step = engines.step(prompt_ids(size, size.prompt), noise(size, size.image))
    step()
    after = pss_bytes()
    growth = None if before is None or after is None else after - before
    return {"growth_bytes": growth, "weight_bytes": engines.weight_bytes}


_JOBS: dict[str, Callable[[Path, Size, int], dict[str, Any]]] = {
    "start-ours": _start_ours,
    "start-theirs": _start_theirs,
    "share-memory": _share_memory,
}

if __name__ == "__main__":
    main(sys.argv[1:])

"""Run rows and report them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.calibration.bench.rows import ROWS, Bench
from motrt.engines.errors import ConfigError
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.calibration.bench.sizes import Size

_PACKAGES = ("motrt", "numpy", "onnxruntime", "torch", "diffusers", "transformers")


def bench(
    size: Size,
    *,
    rows: Sequence[str] | None = None,
    threads: int = 2,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure rows, each after its two sides were found to compute the same.

    Args:
        size: What to run.
        rows: Names of rows; all if None.
        threads: Threads of either side.
        progress: Told which row is running.

    Returns:
        ``ratios`` and ``seconds`` by row, None for what cannot be measured here, and ``detail``.

    Raises:
        ConfigError: An unknown row.
        ExecutionError: A side failed.
        ParityError: The two sides of a row differ.
    """
    chosen = list(ROWS) if rows is None else list(dict.fromkeys(rows))
    unknown = [name for name in chosen if name not in ROWS]
    if unknown or not chosen:
        raise ConfigError(
            "unknown row of the bench",
            got=", ".join(unknown) or "none",
            expected=f"among {', '.join(ROWS)}",
        )
    report: dict[str, Any] = {"ratios": {}, "seconds": {}}
    details: dict[str, Any] = {}
    loads = [_load()]
    with tempfile.TemporaryDirectory(prefix="motrt-bench-") as folder:
        shared = Bench(Path(folder), size, threads)
        for index, name in enumerate(chosen):
            progress("bench", index, len(chosen))
            value, details[name] = ROWS[name].measure(shared)
            report[ROWS[name].kind][name] = None if value is None else round(value, 4)
        progress("bench", len(chosen), len(chosen))
    loads.append(_load())
    report["detail"] = {
        "rows": details,
        "bars": {name: ROWS[name].bar for name in chosen if ROWS[name].bar is not None},
        "size": size.name,
        "config": size.config,
        "threads": threads,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_average": {"before": loads[0], "after": loads[1]},
        "notes": _notes(size, loads, threads),
    }
    return report


def _notes(size: Size, loads: list[float], threads: int) -> list[str]:
    notes = [
        "ratios are least time by least time, the two sides in turn; of rss_shared, bytes by bytes",
        "decode rows count from the first token to the last; the prompt is not in them",
        "cold_start opens the bundle with residency 'shared'; files are in the disk cache",
        "refit_reopen: a bundle that is there; refit_export: motrt export, then open",
    ]
    if size.name == "quick":
        notes.append("a quick run shows that the rows work; its numbers mean nothing")
    if max(loads) > (os.cpu_count() or 1) + 0.5 or threads > (os.cpu_count() or 1):
        notes.append("the machine was busy: look at ratio_of_cpu, or repeat")
    return notes


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

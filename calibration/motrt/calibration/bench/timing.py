"""Timing of two sides in turn, so that whatever else the machine does falls on both."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from motrt.calibration.parity.metrics import difference
from motrt.engines.errors import ParityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.engines.tensors import Array


@dataclass(slots=True)
class Timing:
    """What one side took, run by run: wall clock and processor seconds of all threads."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return minimum and median."""
        summary = {
            "min_s": round(min(self.seconds), 6),
            "median_s": round(statistics.median(self.seconds), 6),
            "runs": len(self.seconds),
        }
        if self.cpu_seconds:
            summary["min_cpu_s"] = round(min(self.cpu_seconds), 6)
        return summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two timings of the same work."""

    ours: Timing
    theirs: Timing

    @property
    def ratio(self) -> float:
        """How many times faster we are: least time by least time."""
        return min(self.theirs.seconds) / min(self.ours.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return both sides, and the ratio of medians and of processor time.

        The latter two are what to look at where the machine was busy.
        """
        ours, theirs = self.ours, self.theirs
        medians = statistics.median(theirs.seconds) / statistics.median(ours.seconds)
        result: dict[str, Any] = {
            "ours": ours.to_dict(),
            "theirs": theirs.to_dict(),
            "ratio_of_medians": round(medians, 3),
            "load_average": round(os.getloadavg()[0], 2),
        }
        if ours.cpu_seconds and theirs.cpu_seconds:
            cpu = min(theirs.cpu_seconds) / min(ours.cpu_seconds)
            result["ratio_of_cpu"] = round(cpu, 3)
        return result


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> Comparison:
    """Run both sides in turn. Each has run once before, or the first run counts as any other."""
    comparison = Comparison(Timing(), Timing())
    for _ in range(repeats):
        for run, timing in ((ours, comparison.ours), (theirs, comparison.theirs)):
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            timing.seconds.append(time.perf_counter() - wall)
            timing.cpu_seconds.append(time.process_time() - cpu)
    return comparison


def require_equal(row: str, ours: Array, theirs: Array, tolerance: float = 1e-5) -> float:
    """Refuse to time two sides that do not compute the same.

    Args:
        row: Name for the message.
        ours: The candidate.
        theirs: The reference.
        tolerance: Of the largest difference, as a share of the reference's largest value.

    Returns:
        The difference, as that share.

    Raises:
        ParityError: They differ.
    """
    gap = difference(ours, theirs)
    error = gap.max_abs / (gap.reference_max or 1.0)
    if not error <= tolerance:
        raise ParityError(
            f"bench row {row} was not timed: its two sides differ",
            got=f"{error:.3g} of the largest value",
            expected=f"at most {tolerance:.3g}",
            fix="A wrong answer has no speed; see: motrt validate --help",
        )
    return error

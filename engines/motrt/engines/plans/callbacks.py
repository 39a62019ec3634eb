"""TensorRT's callbacks: its log and its progress.

The classes derive from the module's own, so they are made in functions. TensorRT calls them from
any of its threads, and an exception in one would end the process: none leaves.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.engines.progress import Progress

_logger = logging.getLogger("motrt.tensorrt")
_MAX_MESSAGES = 64
_PARTS = 1000  # of a bar


class Messages:
    """What TensorRT said at the levels error and warning, in order, the newest kept."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def add(self, level: int, text: str) -> None:
        """Keep a message; 10, 20 and so on are the levels of ``logging``."""
        _logger.log(level, "%s", text)
        kept = self.errors if level >= logging.ERROR else self.warnings
        if level >= logging.WARNING:
            kept.append(text)
            del kept[:-_MAX_MESSAGES]


def make_logger(trt: Any, messages: Messages) -> Any:
    """Return an ``ILogger`` that hands everything on."""
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.CRITICAL,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.INFO,
        severity.VERBOSE: logging.DEBUG,
    }

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, text: str) -> None:
            messages.add(levels.get(level, logging.ERROR), str(text))

    return Log()


class Phases:
    """TensorRT's nested phases as one fraction.

    A phase is as far as its finished steps and the furthest of the phases below it.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._lock = threading.Lock()
        self._best = 0.0

    def start(self, phase: str, parent: str | None, num_steps: int) -> None:
        """Begin a phase within another, or the outermost one."""
        with self._lock:
            self._phases[phase] = _Phase(parent, max(num_steps, 1))

    def step(self, phase: str, step: int) -> None:
        """Count a step; the first is 0."""
        with self._lock:
            if phase in self._phases:
                self._phases[phase].done = step + 1

    def finish(self, phase: str) -> None:
        """End a phase. The outermost one stays, as what there is to be done."""
        with self._lock:
            if phase in self._phases and self._phases[phase].parent is not None:
                del self._phases[phase]

    def fraction(self) -> float:
        """Return how much is done, 0 to 1; it never falls."""
        with self._lock:
            roots = [name for name, each in self._phases.items() if each.parent is None]
            now = max((self._of(name) for name in roots), default=0.0)
            self._best = max(self._best, now)
            return self._best

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        below = [other for other, each in self._phases.items() if each.parent == name != other]
        part = max((self._of(other) for other in below), default=0.0)
        return min((phase.done + part) / phase.steps, 1.0)


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


def make_progress_monitor(
    trt: Any, engine: str, progress: Progress, is_cancelled: Callable[[], bool]
) -> Any:
    """Return an ``IProgressMonitor`` that reports one stage and asks whether to go on."""
    phases = Phases()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            phases.start(phase, parent, num_steps)
            self._tell()

        def step_complete(self, phase: str, step: int) -> bool:
            phases.step(phase, step)
            self._tell()
            return not is_cancelled()

        def phase_finish(self, phase: str) -> None:
            phases.finish(phase)
            self._tell()

        def _tell(self) -> None:
            try:
                progress(engine, round(phases.fraction() * _PARTS), _PARTS)
            except Exception:  # a bar must not end a build
                _logger.exception("the progress of a build cannot be shown")

    return Monitor()

"""TensorRT's callbacks: its log and its progress.

The classes derive from the module's own, so they are made in functions. TensorRT calls them from
any of its threads, and an exception in one would end the process: none leaves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.engines.progress import Progress

_logger = logging.getLogger("motrt.tensorrt")
_MAX_MESSAGES = 64


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


def make_progress_monitor(
    trt: Any, engine: str, progress: Progress, is_cancelled: Callable[[], bool]
) -> Any:
    """Return an ``IProgressMonitor`` that reports phases as stages and asks whether to go on."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, _parent: str | None, num_steps: int) -> None:
            self.steps[phase] = max(num_steps, 1)
            self._tell(phase, 0)

        def step_complete(self, phase: str, step: int) -> bool:
            self._tell(phase, step + 1)
            return not is_cancelled()

        def phase_finish(self, phase: str) -> None:
            self._tell(phase, self.steps.get(phase, 1))

        def _tell(self, phase: str, done: int) -> None:
            try:
                progress(f"{engine}: {phase}", done, self.steps.get(phase, 1))
            except Exception:  # a bar must not end a build
                _logger.exception("the progress of a build cannot be shown")

    return Monitor()

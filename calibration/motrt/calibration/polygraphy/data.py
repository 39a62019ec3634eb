"""The only place that imports Polygraphy: its data files, written by itself."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from motrt.engines.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from motrt.engines.tensors import Array


def require_polygraphy() -> None:
    """Refuse early.

    Raises:
        MissingDependencyError: Polygraphy is not installed.
    """
    try:
        importlib.import_module("polygraphy.json")
    except ImportError as err:
        raise MissingDependencyError(
            "Polygraphy is not installed",
            got=err,
            fix="Install it with: pip install 'motrt[calibration]'.",
        ) from err


def save_inputs(path: Path, feeds: Mapping[str, Array]) -> None:
    """Write what ``polygraphy run --load-inputs`` reads: one iteration."""
    with _quiet():
        importlib.import_module("polygraphy.json").save_json([dict(feeds)], str(path))


def save_outputs(path: Path, runner: str, outputs: Mapping[str, Array]) -> None:
    """Write what ``polygraphy run --load-outputs`` reads, as if a runner had made it."""
    comparator = importlib.import_module("polygraphy.comparator")
    results = comparator.RunResults()
    results.append((runner, [comparator.IterationResult(dict(outputs), runner_name=runner)]))
    with _quiet():
        results.save(str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Polygraphy's words off stdout, where the program's answer goes."""
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    with logger.verbosity(logger.CRITICAL):
        yield

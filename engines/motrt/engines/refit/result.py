"""What a refit did."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from motrt.engines.weight_names import weight_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitResult:
    """What a refit did.

    Attributes:
        changed: False if the weights were there already: then nothing was touched.
        revision: Of a bundle on disk: the revision that is in force now; None is the base.
        tensors: ``total`` in the transformer, ``touched`` that differ from the pristine base,
            ``moved`` that differ from what was in force before.
        moved: The moved ones by who reads them: ``host``, ``reasoner``, ``generator``, ``both``.
        sources: Checkpoints and adapters that the weights come from.
        probe: Status, and by engine the outputs' hashes before and after.
        seconds: Wall time by stage, and ``total``.
        written_bytes: Bytes of weight files that were written, on disk.
        linked_bytes: Bytes of weight files that were linked instead.
    """

    changed: bool
    revision: str | None
    tensors: dict[str, int]
    moved: dict[str, int]
    sources: tuple[dict[str, object], ...]
    probe: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    written_bytes: int = 0
    linked_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``motrt refit --json`` prints."""
        return {
            "changed": self.changed,
            "revision": self.revision,
            "tensors": self.tensors,
            "moved": self.moved,
            "sources": list(self.sources),
            "probe": self.probe,
            "seconds": {stage: round(value, 4) for stage, value in self.seconds.items()},
            "written_bytes": self.written_bytes,
            "linked_bytes": self.linked_bytes,
        }


def count_by_reader(config: ModelConfig, names: Iterable[str]) -> dict[str, int]:
    """Return how many of some tensors each reader has."""
    table = weight_table(config)
    counts: dict[str, int] = {}
    for name in names:
        reader = table[name].part.value
        counts[reader] = counts.get(reader, 0) + 1
    return dict(sorted(counts.items()))


class Clock:
    """Wall time by stage."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage."""
        now = time.perf_counter()
        self._laps[stage], self._last = now - self._last, now

    def seconds(self) -> dict[str, float]:
        """Return all stages and ``total``."""
        return {**self._laps, "total": time.perf_counter() - self._started}

"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

# Called with a stage's name, what is done so far, and the total, in any unit.
Progress = Callable[[str, int, int], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """Say nothing."""

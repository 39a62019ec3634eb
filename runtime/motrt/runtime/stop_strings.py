"""Texts that end an answer, found across the borders of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Text in, piece by piece; text out as soon as it cannot belong to a stop text.

    The answer ends where a stop text is first complete, read character by character, however the
    pieces are cut; of two complete at once the longer counts. The stop text itself is not given
    out, nor is anything after it.

    Attributes:
        stopped_by: The stop text that was found, or None.

    Args:
        stop: The texts; none at all lets everything pass.

    Raises:
        ConfigError: A stop text is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(
                "stop makes no sense", got=repr(stop), expected="texts that are not empty"
            )
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """Take a piece of text, as ``StreamDecoder`` gives it, and return what is certain."""
        if self.stopped_by is not None:
            return ""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return what was held back, for no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how much of the end of ``text`` could be the beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

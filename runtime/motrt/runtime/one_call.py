"""One call at a time: the lock of a runtime."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from motrt.engines.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator


class OneCall:
    """Lets one call in; a second thread waits or gets an error.

    Args:
        on_busy: What a second thread gets: it waits, or :class:`ExecutionError`.

    Raises:
        ConfigError: ``on_busy`` is neither ``wait`` nor ``raise``.
    """

    def __init__(self, on_busy: Literal["wait", "raise"]) -> None:
        if on_busy not in ("wait", "raise"):
            raise ConfigError("unknown on_busy", got=on_busy, expected="wait or raise")
        self._waits = on_busy == "wait"
        self._lock = threading.Lock()
        self._owner: int | None = None  # thread that holds the lock
        self._is_closed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            ExecutionError: Busy, closed, or called from within the own thread's call.
        """
        self.refuse_own_call()
        if not self._lock.acquire(blocking=self._waits):
            raise ExecutionError(
                "the runtime is busy with another call",
                expected="one call at a time",
                fix="Open a second runtime, or open this one with on_busy='wait'.",
            )
        self._owner = threading.get_ident()
        try:
            if self._is_closed:
                raise ExecutionError("the runtime is closed", fix="Open the bundle again.")
            yield
        finally:
            self._owner = None
            self._lock.release()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Wait for the call that runs, and let no further one in.

        Raises:
            ExecutionError: It is the own thread's.
        """
        self.refuse_own_call()
        with self._lock:
            self._is_closed = True
            yield

    def refuse_own_call(self) -> None:
        """Refuse what would wait for itself."""
        if self._owner == threading.get_ident():
            raise ExecutionError(
                "this thread's own call to the runtime has not ended",
                got="a stream that is still open, or a call from a callback",
                expected="one call at a time",
                fix="Read the stream to its end, or close it.",
            )

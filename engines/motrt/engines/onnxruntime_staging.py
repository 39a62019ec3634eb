"""ONNX Runtime's half of a refit: sessions on the new weights, until they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
    from motrt.engines.tensors import Array


class StagedSessions:
    """A second backend on other weights, and what it is to replace; see ``refit/protocol.py``.

    Args:
        current: The backend that runs.
        fresh: One of its kind on the new weights.
        engines: Names of the engines whose weights change.
    """

    def __init__(
        self, current: OnnxRuntimeBackend, fresh: OnnxRuntimeBackend, engines: tuple[str, ...]
    ) -> None:
        self._current = current
        self._fresh = fresh
        self._engines = engines

    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines whose weights change."""
        return self._engines

    def run(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run one of them once, on the new weights."""
        getattr(self._fresh, engine)()  # with residency 'swap' it opens here, one at a time
        outputs = self._fresh.run_current(engine, feeds)
        if outputs is None:
            raise ExecutionError(f"the staged {engine} was discarded", expected="a staged engine")
        return outputs

    def commit(self) -> None:
        """Put them in the old ones' place; assignments alone, which cannot fail."""
        self._current.take_over(self._fresh, self._engines)

    def discard(self) -> None:
        """Let them go."""
        self._fresh.close()

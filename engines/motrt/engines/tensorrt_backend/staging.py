"""TensorRT's half of a refit: engines are filled in place, or dropped if that fails midway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensorrt_backend.backend import TensorRtBackend
    from motrt.engines.tensors import Array


class StagedWeights:
    """Weights that both engines were checked against; see ``refit/protocol.py``.

    Args:
        backend: The backend that runs.
        bundle: The bundle with the new weights.
        changed: Names of the tensors that differ from those in use.
        engines: Names of the engines that read any of them.
    """

    def __init__(
        self,
        backend: TensorRtBackend,
        bundle: Bundle,
        changed: frozenset[str],
        engines: tuple[str, ...],
    ) -> None:
        self._backend = backend
        self._bundle = bundle
        self._changed = changed
        self._engines = engines
        self._filled: set[str] = set()

    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines whose weights change."""
        return self._engines

    def run(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Fill an engine with the new weights and run it once; None if its plan takes no probe.

        Raises:
            ExecutionError: It does not take them, or does not run.
        """
        if engine not in self._engines:
            raise ExecutionError(
                "no weight of this engine changes", got=engine, expected=", ".join(self._engines)
            )
        if engine not in self._filled:
            self._filled.add(engine)  # first: one that refuses midway is neither old nor new
            self._backend.fill(engine, self._bundle, self._changed)
        return self._backend.run_current(engine, feeds)

    def commit(self) -> None:
        """Put the new weights in the old ones' place."""
        self._backend.take_over(self._bundle, set(self._engines) - self._filled)

    def discard(self) -> None:
        """Drop what was filled: it comes again from its plan and the old weights."""
        self._backend.drop_filled(self._filled)

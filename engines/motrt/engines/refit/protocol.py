"""The seam between a refit and the engines: what a backend must offer to take other weights.

ONNX Runtime opens new sessions beside the old ones. TensorRT refits in place, so it keeps the
promise in another way: it stages checks alone, fills an engine when that is first ``run``, and
drops what it filled if anything fails: a dropped engine loads again from its plan and the old weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array


class StagedEngines(Protocol):
    """Both engines on the new weights, beside those that run."""

    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines whose weights change."""

    def run(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run one of them once, on the new weights; None if it does not take feeds of this size.

        Raises:
            ExecutionError: It does not run.
        """

    def commit(self) -> None:
        """Put them in the old ones' place: both, or neither."""

    def discard(self) -> None:
        """Let them go; what ran runs on."""


class RefittableBackend(Protocol):
    """A backend whose two engines take other weights while it lives."""

    @property
    def is_on_cpu(self) -> bool:
        """Whether its arithmetic is that of the probe's reference, which runs on the CPU."""

    def run_current(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run an engine as it is now; None if it is not open, or does not take feeds of this size."""

    def stage(self, bundle: Bundle, changed: frozenset[str]) -> StagedEngines:
        """Prepare both engines on a bundle's weights; nothing that runs is touched.

        Args:
            bundle: The bundle with its new tensors in ``replaced``.
            changed: Names of the tensors that differ from those in use.

        Raises:
            ExecutionError: An engine does not take them; neither is staged.
        """


def can_refit(backend: object) -> TypeGuard[RefittableBackend]:
    """Whether a backend is a :class:`RefittableBackend`."""
    return all(
        callable(getattr(backend, name, None)) for name in ("stage", "run_current")
    ) and hasattr(backend, "is_on_cpu")

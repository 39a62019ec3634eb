"""Every error that motrt raises on purpose.

::

    MotrtError
    ├── ConfigError             (ValueError)   a setting or a config file is wrong
    ├── MissingDependencyError  (ImportError)  an extra is not installed
    ├── CheckpointError                        files or tensors of a checkpoint are wrong
    ├── ContractError           (ValueError)   a graph or an array disagrees with the contract
    ├── BundleError                            a bundle is damaged, foreign or from a newer motrt
    ├── ExportError                            a graph or a converted weight cannot be written
    ├── BuildError                             a plan cannot be built
    │   └── BuildMemoryError                   … for want of memory
    ├── PlanError                              a plan is absent or is not what the bundle vouches for
    │   ├── StalePlanError                     … was built from another graph or with other options
    │   └── ForeignPlanError                   … was built for another GPU, TensorRT or system
    ├── RefitError                             new weights cannot take the place of the old ones
    ├── ExecutionError                         an engine refused a run
    ├── SchedulerError          (RuntimeError) a scheduler was driven out of order
    └── ParityError                            numbers differ from the reference

Each message is one line: what is wrong, what was got, what was expected, what to do.
The four parts are attributes too, so that ``--json`` reports them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class MotrtError(Exception):
    """Base of the tree.

    Args:
        message: What is wrong, without a full stop.
        got: The offending value, if there is one.
        expected: What would have been right.
        fix: What the user can do about it, as an imperative sentence.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.got = None if got is None else str(got)
        self.expected = None if expected is None else str(expected)
        self.fix = fix
        parts = [message]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if fix is not None:
            parts.append(fix)
        super().__init__("; ".join(_one_line(part) for part in parts))

    def to_dict(self) -> dict[str, str | None]:
        """Return the error as the object that ``--json`` prints."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "got": self.got,
            "expected": self.expected,
            "fix": self.fix,
        }


def _one_line(text: str) -> str:
    """Fold white space and spell out control characters, which a stranger's file may bring."""
    folded = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in folded)


class ConfigError(MotrtError, ValueError):
    """A setting or a config file is wrong."""


class MissingDependencyError(MotrtError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class CheckpointError(MotrtError):
    """Files or tensors of a checkpoint are missing, unexpected or damaged."""


class ContractError(MotrtError, ValueError):
    """A graph or an array disagrees with the contract."""


class BundleError(MotrtError):
    """A bundle is damaged, foreign, or written by a newer motrt."""


class ExportError(MotrtError):
    """A graph or a converted weight cannot be written."""


class BuildError(MotrtError):
    """A plan cannot be built.

    Args:
        message: See :class:`MotrtError`, as for the rest.
        got: What was found.
        expected: What would have been right.
        fix: What to do.
        messages: What the parser or the builder said.
    """

    def __init__(
        self,
        message: str,
        *,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        messages: Sequence[str] = (),
    ) -> None:
        super().__init__(message, got=got, expected=expected, fix=fix)
        self.messages = tuple(messages)


class BuildMemoryError(BuildError):
    """A build needs more memory than there is.

    Args:
        message: See :class:`MotrtError`, as for the rest.
        needed_bytes: By estimate.
        available_bytes: When the build began; None if nobody could tell.
        got: What was found.
        expected: What would have been right.
        fix: What to do.
        messages: What the builder said.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int,
        available_bytes: int | None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        messages: Sequence[str] = (),
    ) -> None:
        super().__init__(message, got=got, expected=expected, fix=fix, messages=messages)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class PlanError(MotrtError):
    """A plan is absent, damaged, or not what the bundle's manifest vouches for.

    Args:
        message: See :class:`MotrtError`, as for the rest.
        got: What was found.
        expected: What would have been right.
        fix: What to do.
        fields: What differs, as ``plan.json`` calls it.
    """

    def __init__(
        self,
        message: str,
        *,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        super().__init__(message, got=got, expected=expected, fix=fix)
        self.fields = tuple(fields)


class StalePlanError(PlanError):
    """A plan was built from another graph, or with other options than are asked for."""


class ForeignPlanError(PlanError):
    """A plan was built for another GPU, TensorRT, system or processor."""


class RefitError(MotrtError):
    """New weights cannot take the place of the old ones, which stay as they were."""


class ExecutionError(MotrtError):
    """An engine refused a run."""


class SchedulerError(MotrtError, RuntimeError):
    """A scheduler was driven out of order, or with arrays that do not fit each other."""


class ParityError(MotrtError):
    """Numbers differ from the reference by more than the tolerance."""

    exit_code = 3

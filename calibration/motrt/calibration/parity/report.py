"""The outcome of a comparison: rows, a verdict, JSON and a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motrt.calibration.parity.metrics import Difference
    from motrt.engines.dtypes import DType


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one case.

    Attributes:
        engine: ``reasoner``, ``generator``, ``vae``, ``text``, ``scheduler``, ``prompt`` or
            ``trajectory``.
        case: Name of the case.
        tensor: Name of the tensor; for K/V the worst layer's, for a schedule the worst step.
        arithmetic: Type in which the candidate computed.
        difference: How far it is from the reference.
        self_noise: How far the reference is from itself in another order, or None.
        tolerance: Largest absolute difference allowed.
    """

    engine: str
    case: str
    tensor: str
    arithmetic: DType
    difference: Difference
    self_noise: float | None
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the row is within tolerance."""
        return self.difference.max_abs <= self.tolerance

    @property
    def severity(self) -> float:
        """Difference in units of the tolerance."""
        if self.difference.max_abs == 0.0:
            return 0.0
        return self.difference.max_abs / self.tolerance if self.tolerance else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the row as ``--json`` prints it; infinities become null, which JSON has."""
        values = {
            "max_abs": self.difference.max_abs,
            "rel_l2": self.difference.rel_l2,
            "cosine": self.difference.cosine,
            "reference_max": self.difference.reference_max,
            "self_noise": self.self_noise,
            "tolerance": self.tolerance,
        }
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
        return {
            "engine": self.engine,
            "case": self.case,
            "tensor": self.tensor,
            "arithmetic": self.arithmetic.label,
            **finite,
            "position": list(self.difference.position),
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """Rows that there cannot be.

    Attributes:
        engine: As in :class:`Row`.
        reason: Why not.
    """

    engine: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Return what ``--json`` prints."""
        return {"engine": self.engine, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison has found.

    Attributes:
        rows: What was compared.
        skipped: What was not, and why.
        notes: What a reader of the rows must know.
        sources: What the reference says about itself.
    """

    rows: list[Row]
    skipped: list[Skipped]
    notes: list[str]
    sources: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """An outcome and what it was measured with."""

    precision: str
    lowering: str
    against: str
    outcome: Outcome
    seconds: float

    @property
    def rows(self) -> list[Row]:
        """What was compared."""
        return self.outcome.rows

    @property
    def ok(self) -> bool:
        """Whether there are rows and every one is within tolerance."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that is farthest out, in units of its tolerance."""
        return max(self.rows, key=lambda row: row.severity)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints and ``parity.json`` holds."""
        return {
            "ok": self.ok,
            "precision": self.precision,
            "lowering": self.lowering,
            "against": self.against,
            "seconds": round(self.seconds, 2),
            "sources": self.outcome.sources,
            "worst": self.worst.to_dict() if self.rows else None,
            "skipped": [skipped.to_dict() for skipped in self.outcome.skipped],
            "notes": self.outcome.notes,
            "rows": [row.to_dict() for row in self.rows],
        }

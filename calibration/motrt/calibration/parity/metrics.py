"""How far two arrays are apart, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from motrt.engines.tensors import Array


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of a candidate from its reference.

    Attributes:
        max_abs: Largest absolute difference; infinite if the candidate is not finite.
        rel_l2: ``|a - b| / |b|``.
        cosine: Cosine of the angle between the two, flattened; 1 if they are equal.
        reference_max: Largest absolute value of the reference.
        position: Index of the largest difference.
    """

    max_abs: float
    rel_l2: float
    cosine: float
    reference_max: float
    position: tuple[int, ...]


def difference(candidate: Array, reference: Array) -> Difference:
    """Compare two arrays of one shape, in float64.

    Another shape counts as infinitely far: it is a wrong answer, not a wrong question.
    """
    peak = float(np.abs(reference).max(initial=0.0))
    if candidate.shape != reference.shape:
        return Difference(math.inf, math.inf, 0.0, peak, ())
    a, b = candidate.astype(np.float64), reference.astype(np.float64)
    if a.size == 0:
        return Difference(0.0, 0.0, 1.0, peak, ())
    if not np.isfinite(a).all():
        where = np.unravel_index(int(np.argmin(np.isfinite(a))), a.shape)
        return Difference(math.inf, math.inf, 0.0, peak, tuple(int(i) for i in where))
    gap = np.abs(a - b)
    where = np.unravel_index(int(np.argmax(gap)), gap.shape)
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    distance = float(np.linalg.norm(a - b))
    equal = distance == 0.0  # also where both are zero
    return Difference(
        max_abs=float(gap.max()),
        rel_l2=0.0 if equal else distance / norm_b if norm_b else math.inf,
        cosine=1.0 if equal else float(np.vdot(a, b)) / (norm_a * norm_b or math.inf),
        reference_max=peak,
        position=tuple(int(i) for i in where),
    )


def count_differences(candidate: Array, reference: Array) -> Difference:
    """Compare two lists of ids: ``max_abs`` is how many differ, those beyond the shorter included.

    ``rel_l2`` is their share, ``position`` the first.
    """
    peak = float(np.abs(reference).max(initial=0))
    shared = min(len(candidate), len(reference))
    differs = np.ones(max(len(candidate), len(reference)), bool)
    differs[:shared] = candidate[:shared] != reference[:shared]
    count = int(differs.sum())
    if not count:
        return Difference(0.0, 0.0, 1.0, peak, ())
    share = count / len(differs)
    return Difference(float(count), share, 1 - share, peak, (int(np.argmax(differs)),))

"""How much difference is rounding, and from where on it is a mistake.

Bounds are relative to the largest value of the reference tensor. Two sorts of rows:

* *float32 rows*: float32 arithmetic on both sides, over the same weight bytes. Reordering the
  reference's own sums moves it by 6e-7 to 1.6e-6 (measured, 3 to 8 layers); 1e-5 leaves room for
  another library's order and no room for a wrong weight: one layer's norm off by 1 % moves an
  output by 1e-4 and more.
* *float16 rows*: the graph as it is, in float16, against float32 arithmetic over the same
  float16 weights. Measured on the 3-layer fixtures: 3e-4 to 1.1e-3; the bound is 5e-3. These rows
  are there for the rounding that only the real graph has; mistakes of mapping are caught by the
  float32 rows over the same bytes.

The *self-noise* of a row is how far the reference moves when it is run in another order of sums
(float32 rows) or in float16 itself (float16 rows). Where three times that is more than the bound
(deep models), it is the bound: nobody can be asked to be closer to the reference than the
reference is. A reference that is noisier than ``MAX_SELF_NOISE`` judges nothing: the row fails.

*Sequences* have bounds of their own. Ids are equal or not; a greedy token may be another one only
where the two best are closer than the noise of both. A step of a schedule is float32 there and
float64 here. A guided run (10 steps, g = 4) ends 7e-7 to 1.7e-6 of its largest latent from itself
in another order, and ours 1.0e-6 to 2.0e-6 from it (measured, the fixtures): float noise is not
amplified there, so the bound is that of single runs. g = 4.01 moves the end by 9e-4 and more.

Two bundles of different precision hold differently rounded weights; the coarser type's bound
applies to them.
"""

from __future__ import annotations

from motrt.engines.dtypes import DType

RELATIVE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 5e-3, DType.BFLOAT16: 5e-2}
MAX_SELF_NOISE = {DType.FLOAT32: 1e-3, DType.FLOAT16: 5e-2, DType.BFLOAT16: 5e-1}
LOGITS_ABSOLUTE = 1e-4  # float32, against logits of ordinary size


def tolerance(tensor: str, arithmetic: DType, reference_max: float, self_noise: float) -> float:
    """Return the largest absolute difference that a row may show.

    Args:
        tensor: The tensor's name; logits also have an absolute bound.
        arithmetic: Type in which the candidate computed.
        reference_max: Largest absolute value of the reference.
        self_noise: Largest absolute difference of the reference from itself.
    """
    if self_noise > MAX_SELF_NOISE[arithmetic] * reference_max:
        return 0.0
    bound = max(RELATIVE[arithmetic] * reference_max, 3 * self_noise)
    if arithmetic is DType.FLOAT32 and tensor.startswith("logits"):
        bound = max(bound, LOGITS_ABSOLUTE)
    return bound


SCHEDULER_STEP = 1e-6  # of the largest value of the sample; a float32 step rounds to 1e-7
TRAJECTORY = 1e-5  # of the largest latent


def near_tie(margin: float, logits_max: float, self_noise: float) -> bool:
    """Return whether two logits are so close that float noise decides between them.

    Args:
        margin: How far apart they are.
        logits_max: The larger absolute value.
        self_noise: How far the reference's logits are from themselves.
    """
    return margin <= 2 * max(RELATIVE[DType.FLOAT32] * logits_max, 3 * self_noise)


def trajectory_tolerance(reference_max: float, self_noise: float) -> float:
    """Return the largest absolute difference that the end of a run may show."""
    if self_noise > MAX_SELF_NOISE[DType.FLOAT32] * reference_max:
        return 0.0
    return max(TRAJECTORY * reference_max, 3 * self_noise)

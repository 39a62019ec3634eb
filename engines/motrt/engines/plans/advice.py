"""Which way of holding weights suits a bundle: what ``motrt build --weights`` costs on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motrt.engines.memory_estimate import MemoryEstimate
    from motrt.engines.plans.options import WeightsMode

# Constants are laid out for the kernels that read them, inputs are not: a saving has to be worth it.
_WORTH = 0.1


@dataclass(frozen=True, slots=True)
class WeightsAdvice:
    """Device memory of both engines in each mode, and the mode to build with.

    Attributes:
        refit: Bytes with ``--weights refit``: each engine has constants of its own.
        inputs: Bytes with ``--weights inputs``: what both engines read is there once.
        recommended: One of the two.
        reason: Why.
    """

    refit: int
    inputs: int
    recommended: WeightsMode
    reason: str


def weights_advice(memory: MemoryEstimate) -> WeightsAdvice:
    """Compare the modes: weights, caches, the prompt's K/V and latents, without activations.

    The embedding table stays with the host, and the VAE is no plan.
    """
    besides = memory.host_weights + memory.other_weights
    refit, inputs = memory.total - besides, memory.total_one_copy - besides
    saved = refit - inputs
    if not saved:
        return WeightsAdvice(
            refit,
            inputs,
            "refit",
            "no weight is in both engines",
        )
    share = f"{saved / refit:.0%} are weights of both"
    if saved < _WORTH * refit:
        return WeightsAdvice(refit, inputs, "refit", f"only {share}")
    return WeightsAdvice(refit, inputs, "inputs", f"{share}, then there once")

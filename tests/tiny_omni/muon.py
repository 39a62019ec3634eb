"""Muon: momentum whose directions all get the same length, for matrices and convolutions.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale of a step,
which lets one learning rate serve AdamW beside it, is Liu et al., "Muon is scalable for LLM training"
(2025), equation 4. On this autoencoder 300 steps of it did what 1200 of AdamW did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOMENTUM = 0.95
_DECAY = 0.01
_RMS = 0.2  # of AdamW's steps
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Descend along the nearest orthogonal matrix of each parameter's momentum.

    Args:
        parameters: Of two dimensions or more; those after the first are one.
        lr: Learning rate.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - _MOMENTUM)
                nesterov = p.grad.lerp(state["momentum"], _MOMENTUM)
                update = orthogonal(nesterov.flatten(1)).view_as(p)
                scale = _RMS * max(len(p), p[0].numel()) ** 0.5
                p.mul_(1 - group["lr"] * _DECAY).sub_(update, alpha=group["lr"] * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Bring a matrix's singular values near 1 by five Newton-Schulz steps, without an SVD."""
    a, b, c = _QUINTIC
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if wide is not matrix else x

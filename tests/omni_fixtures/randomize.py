"""Seeded parameter values at which mapping bugs show and activations stay of order one."""

import math

import torch
from torch import nn

# Norms start at one, biases and modality embeddings at zero: left so, a swapped, dropped or
# doubly used one would go unseen.
_NORM_SPREAD = 0.25
_BIAS_SPREAD = 0.2
_MODALITY_SPREAD = 0.5


@torch.no_grad()
def randomize_(module: nn.Module, seed: int, *, gain: float = 1.0) -> None:
    """Overwrite every parameter of ``module`` in place; equal seeds give equal values.

    At ``gain`` one, linear maps and convolutions keep the variance of their input (fan-in
    scaling), so that with RMS-normed inputs attention logits have a spread of about one: neither
    flat nor saturated.
    """
    generator = torch.Generator().manual_seed(seed)
    domain_fan_in = _domain_fan_in(module)
    for name, parameter in module.named_parameters():
        fan_in = domain_fan_in.get(name, parameter.numel() // parameter.shape[0])
        mean, spread = _mean_and_spread(name, parameter, gain / math.sqrt(fan_in))
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(mean + spread * noise)


def _domain_fan_in(module: nn.Module) -> dict[str, int]:
    # A DomainAwareLinear keeps a whole [in, out] matrix in each row of an embedding table, so
    # the fan-in cannot be read from the parameter's shape.
    return {
        f"{name}.fc.weight": int(child.input_size)
        for name, child in module.named_modules()
        if type(child).__name__ == "DomainAwareLinear"
    }


def _mean_and_spread(name: str, parameter: torch.Tensor, map_spread: float) -> tuple[float, float]:
    owner, _, leaf = name.rpartition(".")
    if leaf == "gamma" or (leaf == "weight" and parameter.ndim == 1):
        return 1.0, _NORM_SPREAD
    if leaf.endswith("_modality_embed"):
        return 0.0, _MODALITY_SPREAD
    if leaf == "bias" or owner.endswith(".bias"):  # the latter: a table of biases, one per domain
        return 0.0, _BIAS_SPREAD
    if name == "embed_tokens.weight":
        return 0.0, 1.0
    return 0.0, map_spread

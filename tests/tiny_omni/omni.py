"""Stages two and three: a reasoner that answers and a generator that denoises, trained together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from motrt.calibration.score.world import FPS
from tiny_omni.examples import CLIPS, question_batch
from tiny_omni.loop import train
from tiny_omni.model import Omni

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tiny_omni.examples import Batch, World
    from tiny_omni.prompts import Prompts

_SHIFT = 2.0
# Where actions are given, they are summed at high noise; later the latents themselves tell the place.
_SHIFT_DRIVEN = 8.0
_TEXT_WEIGHT = 0.3
# Answers are learned long before clips are.
_TEXT_ALWAYS = 1000
_TEXT_EVERY = 4
_ACTION_WEIGHT = 4.0  # two numbers among a clip's thousand: at 0.5 they were hardly learned


def train_omni(
    name: str, config: dict[str, Any], world: World, prompts: Prompts, work: Path, steps: int
) -> dict[str, Tensor]:
    """Train both towers and return the moving average of their tensors, by checkpoint name."""
    torch.manual_seed(1)
    model = Omni(config)

    def loss_of(step: int) -> dict[str, Tensor]:
        torch.manual_seed(step)
        random = np.random.default_rng([2, step])
        losses = _denoise(model, world.batch(random))
        if step < _TEXT_ALWAYS or step % _TEXT_EVERY == 0:
            losses["text"] = _TEXT_WEIGHT * _answer(model, prompts, step)
        return losses

    average = train(name, model, loss_of, steps=steps, peak=4e-3, work=work)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(average[key])
    return {key: value.detach() for key, value in model.tensors().items()}


def _answer(model: Omni, prompts: Prompts, step: int) -> Tensor:
    ids, targets = question_batch(prompts, seed=step)
    return functional.cross_entropy(
        model.logits(ids).flatten(0, 1), targets.flatten(), ignore_index=-100
    )


def _denoise(model: Omni, batch: Batch) -> dict[str, Tensor]:
    context = [
        (key.repeat_interleave(CLIPS, 0), value.repeat_interleave(CLIPS, 0))
        for key, value in model.context(batch.ids)
    ]
    count = len(batch.latents)
    uniform = (torch.rand(count) + torch.arange(count)) / count  # stratified
    driven = batch.actions is not None and not batch.actions_noisy
    shift = _SHIFT_DRIVEN if driven else _SHIFT
    level = shift * uniform / (1 + (shift - 1) * uniform)
    level = level.clamp(1e-3, 0.9995)
    timestep = (1000 * level).floor()  # what the schedulers hand to the network

    def blend(clean: Tensor, noise: Tensor) -> Tensor:
        sigma = level.view(-1, *[1] * (clean.ndim - 1))
        return (1 - sigma) * clean + sigma * noise

    mask = batch.noisy.view(1, 1, -1, 1, 1)
    noise = torch.randn_like(batch.latents)
    latents = mask * blend(batch.latents, noise) + (1 - mask) * batch.latents
    actions, action_noise = batch.actions, torch.zeros(0)
    if actions is not None and batch.actions_noisy:
        action_noise = torch.zeros_like(actions)
        action_noise[..., :2] = torch.randn_like(actions[..., :2])
        actions = blend(actions, action_noise)
    velocity, action_velocity = model.denoise(
        latents, batch.noisy, actions, batch.actions_noisy, timestep, context, FPS
    )
    losses: dict[str, Tensor] = {}
    if batch.noisy.any():
        error = ((velocity - (noise - batch.latents)) * mask).square()
        losses["vision"] = error.mean() / batch.noisy.mean()
    if batch.actions is not None and action_velocity is not None and batch.actions_noisy:
        target = (action_noise - batch.actions)[..., :2]
        losses["action"] = _ACTION_WEIGHT * (action_velocity[..., :2] - target).square().mean()
    return losses

"""The denoise loop: schedule, guidance and network, and nothing else.

Latents are dictionaries by modality name (``vision`` ``[C, T, H, W]``, ``sound`` ``[Cs, Ts]``,
``action`` ``[Ta, Da]``); the network is a callable, so that any backend, or a formula in a test,
runs this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from motrt.engines.tensors import Array
    from motrt.runtime.schedulers import Scheduler

Latents = dict[str, "Array"]
Predict = Callable[[Mapping[str, "Array"], float], Latents]
Noise = Callable[[tuple[int, ...]], "Array"]


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: ``v = v₋ + g (v₊ - v₋)``.

    Attributes:
        scale: ``g``; at 1 the negative branch is not run.
        interval: Timesteps between which guidance is on, exclusive; elsewhere ``g`` is 1.

    Source: Ho and Salimans (2022), eq. 6 in velocities; interval: Kynkäänniemi et al. (2024).
    """

    scale: float
    interval: tuple[float, float] | None = None

    def is_on(self, timestep: float) -> bool:
        """Return whether the negative branch counts at this timestep."""
        if self.scale == 1.0:
            return False
        return self.interval is None or self.interval[0] < timestep < self.interval[1]

    def combine(self, positive: Latents, negative: Latents) -> Latents:
        """Return the guided prediction."""
        scale = np.float32(self.scale)
        return {k: negative[k] + scale * (positive[k] - negative[k]) for k in positive}


@dataclass(slots=True)
class StepState:
    """What a callback sees after a step, and may change.

    Attributes:
        latents: The latents, by modality; replace or edit them to steer the rest of the run.
        should_stop: Set it to end the run after this step.
    """

    latents: Latents
    should_stop: bool = False


Callback = Callable[[int, float, StepState], None]


def denoise(
    positive: Predict,
    negative: Predict | None,
    schedulers: Mapping[str, Scheduler],
    latents: Latents,
    guidance: Guidance,
    *,
    noisy: Mapping[str, Array],
    clean: Mapping[str, Array],
    noise: Noise,
    callback: Callback | None = None,
) -> Latents:
    """Run a schedule from noise to data.

    Args:
        positive: Predicts from latents and a timestep under the prompt.
        negative: Likewise under the negative prompt; None if guidance is never on.
        schedulers: One for each modality, all with the same timesteps set.
        latents: Where to start; not modified.
        guidance: How the branches combine.
        noisy: Masks that broadcast over the latents: 1 where something is denoised.
        clean: What stands where the mask is 0; set again after every step.
        noise: Draws standard normal noise for stochastic schedulers.
        callback: Called after every step.

    Returns:
        The latents at the end of the schedule, float32.

    Raises:
        ConfigError: The callback left latents of other names or shapes.
        ExecutionError: A prediction or a latent is not finite; names step and modality.
    """
    latents = {name: array.astype(np.float32) for name, array in latents.items()}
    first = next(iter(schedulers.values()))
    for index, timestep in enumerate(first.timesteps.tolist()):
        predicted = positive(latents, timestep)
        if negative is not None and guidance.is_on(timestep):
            predicted = guidance.combine(predicted, negative(latents, timestep))
        for name, scheduler in schedulers.items():
            _require_finite(predicted[name], "prediction is", name, index)
            fresh = noise(latents[name].shape) if scheduler.is_stochastic else None
            stepped = scheduler.step(predicted[name], index, latents[name], fresh)
            mask = noisy[name]
            latents[name] = stepped * mask + clean[name] * (1 - mask)
            _require_finite(latents[name], "latents are", name, index)
        if callback is not None:
            state = StepState(dict(latents))
            callback(index, timestep, state)
            latents = _steered(latents, state.latents, index)
            if state.should_stop:
                break
    return latents


def _steered(before: Latents, after: Latents, step: int) -> Latents:
    """Take over what a callback left, if it can go on from there."""
    expected = {name: array.shape for name, array in before.items()}
    shapes = {name: np.shape(array) for name, array in after.items()}
    if shapes != expected:
        raise ConfigError(
            f"the callback's latents do not fit after step {step}", got=shapes, expected=expected
        )
    latents = {name: np.asarray(array, np.float32) for name, array in after.items()}
    for name, array in latents.items():
        _require_finite(array, "latents are", name, step)
    return latents


def _require_finite(array: Array, what: str, modality: str, step: int) -> None:
    if not np.isfinite(array).all():
        raise ExecutionError(
            f"the generator's {modality} {what} not finite",
            got=f"{int((~np.isfinite(array)).sum())} NaN or infinite values at step {step}",
            expected="finite numbers",
            fix="Check the bundle with: motrt inspect BUNDLE --verify; fp16 may overflow, bf16 or fp32 do not.",
        )

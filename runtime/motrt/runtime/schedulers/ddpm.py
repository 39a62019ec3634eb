"""DDPM (Ho et al. 2020): ancestral sampling for checkpoints that were trained by diffusion.

The network's output is what ``prediction_type`` says, no velocity. The scalars are float32 in
diffusers' order, as its σ are: ``1 - ᾱ_t / ᾱ_prev`` cancels, and float64 from the same ᾱ differs in
the fourth digit of it. Samples are float64.

Source: diffusers ``schedulers/scheduling_ddpm.py``, 0.42.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.runtime.schedulers.betas import (
    NoiseConfig,
    alphas_cumprod,
    edm_sigmas,
    spread_timesteps,
)
from motrt.runtime.schedulers.config import read_config, require, require_one_of
from motrt.runtime.schedulers.sigmas import end_with_zero
from motrt.runtime.schedulers.stepping import (
    Stepping,
    checked_noise,
    checked_steps,
    require_no_mu,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.runtime.schedulers.stepping import Array, Float32Array, Float64Array

_FIXED = {"thresholding": False, "rescale_betas_zero_snr": False}
_IGNORED = frozenset(
    {"dynamic_thresholding_ratio", "sample_max_value", "set_alpha_to_one", "skip_prk_steps"}
)
_ONE = np.float32(1)
_SMALLEST_VARIANCE = np.float32(1e-20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPMConfig(NoiseConfig):
    """Options of ``DDPMScheduler``: diffusers' names and defaults.

    Raises:
        ConfigError: Values that describe no schedule.
    """

    variance_type: str = "fixed_small"
    clip_sample: bool = True
    clip_sample_range: float = 1.0

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        NoiseConfig.__post_init__(self)
        require_one_of(self, "prediction_type", "epsilon", "sample", "v_prediction")
        require_one_of(self, "variance_type", "fixed_small", "fixed_large")
        require(self, "clip_sample_range", self.clip_sample_range > 0, "a positive number")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "scheduler/scheduler_config.json"
    ) -> DDPMConfig:
        """Read a ``scheduler_config.json``.

        Raises:
            ConfigError: An unknown key, an option that is not implemented, or a wrong value.
        """
        return read_config(cls, data, fixed=_FIXED, ignored=_IGNORED, source=source)


class DDPMScheduler(Stepping):
    """Ancestral sampling; wants fresh noise every step."""

    is_stochastic = True

    def __init__(self, config: DDPMConfig) -> None:
        super().__init__()
        self.config = config
        self._alphas_cumprod = alphas_cumprod(config)

    def set_timesteps(
        self, num_inference_steps: int | None = None, *, mu: float | None = None
    ) -> None:
        """Choose a schedule; see :class:`Scheduler`."""
        require_no_mu(mu)
        steps = checked_steps(num_inference_steps, at_most=self.config.num_train_timesteps)
        timesteps = spread_timesteps(self.config, steps)
        self._start(end_with_zero(edm_sigmas(self._alphas_cumprod)[timesteps]), timesteps)

    def step(
        self, prediction: Array, step_index: int, sample: Array, noise: Array | None = None
    ) -> Float32Array:
        """Draw the next sample; see :class:`Scheduler`. At timestep 0 no noise is added.

        Source: Ho et al. (2020), eq. 6 and 7.
        """
        i, output, x = self._enter(prediction, step_index, sample)
        t = int(self.timesteps[i])
        is_last = i + 1 == len(self.timesteps)
        alpha_bar = self._alphas_cumprod[t]
        alpha_bar_prev = _ONE if is_last else self._alphas_cumprod[self.timesteps[i + 1]]
        alpha_t = alpha_bar / alpha_bar_prev
        beta_t = _ONE - alpha_t
        beta_bar, beta_bar_prev = _ONE - alpha_bar, _ONE - alpha_bar_prev

        x0 = predicted_x0(self.config.prediction_type, output, x, alpha_bar)
        if self.config.clip_sample:
            x0 = x0.clip(-self.config.clip_sample_range, self.config.clip_sample_range)
        x0_coefficient = np.sqrt(alpha_bar_prev) * beta_t / beta_bar
        x_coefficient = np.sqrt(alpha_t) * beta_bar_prev / beta_bar
        mean = float(x0_coefficient) * x0 + float(x_coefficient) * x
        if t == 0:
            return self._leave(mean)

        variance = beta_t
        if self.config.variance_type == "fixed_small":
            variance = np.maximum(beta_bar_prev / beta_bar * beta_t, _SMALLEST_VARIANCE)
        return self._leave(mean + float(np.sqrt(variance)) * checked_noise(noise, sample))


def predicted_x0(
    prediction_type: str, output: Float64Array, x: Float64Array, alpha_bar: np.float32
) -> Float64Array:
    """Return the data that the network's output at ``x`` amounts to."""
    alpha, sigma = float(np.sqrt(alpha_bar)), float(np.sqrt(_ONE - alpha_bar))
    if prediction_type == "epsilon":
        return (x - sigma * output) / alpha
    if prediction_type == "v_prediction":
        return alpha * x - sigma * output
    return output

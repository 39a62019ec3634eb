"""DDIM (Song et al. 2021): few steps for checkpoints that were trained by diffusion.

The network's output is what ``prediction_type`` says, no velocity. Scalars are float32 in diffusers'
order, for the reason given in ``ddpm.py``. Samples are float64.

Source: diffusers ``schedulers/scheduling_ddim.py``, 0.42.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers.betas import (
    NoiseConfig,
    alphas_cumprod,
    edm_sigmas,
    spread_timesteps,
)
from motrt.runtime.schedulers.config import read_config, require, require_one_of
from motrt.runtime.schedulers.ddpm import predicted_x0
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
    {"dynamic_thresholding_ratio", "sample_max_value", "skip_prk_steps", "variance_type"}
)
_ONE = np.float32(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDIMConfig(NoiseConfig):
    """Options of ``DDIMScheduler``: diffusers' names and defaults.

    Raises:
        ConfigError: Values that describe no schedule.
    """

    clip_sample: bool = True
    clip_sample_range: float = 1.0
    set_alpha_to_one: bool = True

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        NoiseConfig.__post_init__(self)
        require_one_of(self, "prediction_type", "epsilon", "sample", "v_prediction")
        require(self, "clip_sample_range", self.clip_sample_range > 0, "a positive number")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "scheduler/scheduler_config.json"
    ) -> DDIMConfig:
        """Read a ``scheduler_config.json``.

        Raises:
            ConfigError: An unknown key, an option that is not implemented, or a wrong value.
        """
        return read_config(cls, data, fixed=_FIXED, ignored=_IGNORED, source=source)


class DDIMScheduler(Stepping):
    """DDIM: deterministic at ``eta`` 0, as random as DDPM at 1.

    Args:
        config: Options.
        eta: The paper's η; no key of the config.

    Raises:
        ConfigError: ``eta`` is not from 0 to 1.
    """

    def __init__(self, config: DDIMConfig, *, eta: float = 0.0) -> None:
        super().__init__()
        if not 0 <= eta <= 1:
            raise ConfigError("eta is refused", got=f"{eta}", expected="a number from 0 to 1")
        self.config = config
        self.eta = eta
        self.is_stochastic = eta > 0
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
        """Step towards the predicted data; see :class:`Scheduler`.

        Source: Song et al. (2021), eq. 12 and 16.
        """
        i, output, x = self._enter(prediction, step_index, sample)
        t = int(self.timesteps[i])
        # Not the next of the list: with spacings other than leading the two differ.
        t_prev = t - self.config.num_train_timesteps // len(self.timesteps)
        alpha_bar = self._alphas_cumprod[t]
        alpha_bar_prev = self._alphas_cumprod[t_prev] if t_prev >= 0 else self._final_alpha_bar

        x0 = predicted_x0(self.config.prediction_type, output, x, alpha_bar)
        epsilon = self._epsilon(output, x, alpha_bar)
        if self.config.clip_sample:
            x0 = x0.clip(-self.config.clip_sample_range, self.config.clip_sample_range)
        variance = (
            (_ONE - alpha_bar_prev) / (_ONE - alpha_bar) * (_ONE - alpha_bar / alpha_bar_prev)
        )
        sigma = np.float32(self.eta) * np.sqrt(variance)
        # Below 0 by rounding at η = 1 next to pure noise, where diffusers makes NaN.
        direction = float(np.sqrt(max(_ONE - alpha_bar_prev - sigma * sigma, np.float32(0))))
        x_prev = float(np.sqrt(alpha_bar_prev)) * x0 + direction * epsilon
        if self.is_stochastic:
            x_prev = x_prev + float(sigma) * checked_noise(noise, sample)
        return self._leave(x_prev)

    @property
    def _final_alpha_bar(self) -> np.float32:
        return _ONE if self.config.set_alpha_to_one else np.float32(self._alphas_cumprod[0])

    def _epsilon(
        self, output: Float64Array, x: Float64Array, alpha_bar: np.float32
    ) -> Float64Array:
        """The noise that the network's output at ``x`` amounts to."""
        alpha, sigma = float(np.sqrt(alpha_bar)), float(np.sqrt(_ONE - alpha_bar))
        if self.config.prediction_type == "sample":
            return (x - alpha * output) / sigma
        if self.config.prediction_type == "v_prediction":
            return alpha * output + sigma * x
        return output

"""Euler steps along a flow, plain or with fresh noise each step, and the distilled 4-step sampler.

Source: diffusers ``schedulers/scheduling_flow_match_euler_discrete.py``, 0.42; Esser et al. (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers.config import read_config, require, require_one_of
from motrt.runtime.schedulers.sigmas import (
    end_with_zero,
    exponential_sigmas,
    karras_sigmas,
    native_flow_sigmas,
    shift_sigmas,
    shift_sigmas_dynamically,
    stretch_sigmas,
)
from motrt.runtime.schedulers.stepping import (
    Stepping,
    checked_noise,
    checked_steps,
    require_no_mu,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.runtime.schedulers.stepping import Array, Float32Array

_MAX_TRAIN_TIMESTEPS = 1_000_000  # a config is read from a stranger
_FIXED = {"invert_sigmas": False, "use_beta_sigmas": False}
# What pipelines compute mu from; the scheduler is handed mu.
_IGNORED = frozenset({"base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatchEulerConfig:
    """Options of ``FlowMatchEulerDiscreteScheduler``: diffusers' names and defaults.

    Raises:
        ConfigError: Values that contradict each other or describe no schedule.
    """

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    time_shift_type: str = "exponential"
    shift_terminal: float | None = None
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    stochastic_sampling: bool = False

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        total = self.num_train_timesteps
        require(
            self,
            "num_train_timesteps",
            1 <= total <= _MAX_TRAIN_TIMESTEPS,
            f"1 to {_MAX_TRAIN_TIMESTEPS}",
        )
        require(self, "shift", self.shift > 0, "a positive number")
        require_one_of(self, "time_shift_type", "exponential", "linear")
        if self.use_exponential_sigmas:
            require(self, "use_exponential_sigmas", not self.use_karras_sigmas, "only one of both")
        if self.shift_terminal is not None:
            require(self, "shift_terminal", 0 <= self.shift_terminal < 1, "from 0, below 1")

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "scheduler/scheduler_config.json"
    ) -> FlowMatchEulerConfig:
        """Read a ``scheduler_config.json``.

        Raises:
            ConfigError: An unknown key, an option that is not implemented, or a wrong value.
        """
        return read_config(cls, data, fixed=_FIXED, ignored=_IGNORED, source=source)


class FlowMatchEulerDiscreteScheduler(Stepping):
    """Euler over a flow; with ``stochastic_sampling``, to the data and back with fresh noise.

    Args:
        config: Options.
        distilled_sigmas: σ before the final 0, where the checkpoint was distilled for them: steps
            and guidance are then fixed.
        is_native: Use the native flow schedule, as a pipeline's ``use_native_flow_schedule`` says.

    Raises:
        ConfigError: ``distilled_sigmas`` do not fall from at most 1.
    """

    def __init__(
        self,
        config: FlowMatchEulerConfig,
        *,
        distilled_sigmas: Sequence[float] | None = None,
        is_native: bool = False,
    ) -> None:
        super().__init__()
        if distilled_sigmas is not None:
            bounds = np.array([*distilled_sigmas, 0.0])
            if len(bounds) < 2 or not (bounds[0] <= 1 and (np.diff(bounds) < 0).all()):
                raise ConfigError(
                    "distilled_sigmas cannot be right",
                    got=f"{list(distilled_sigmas)}",
                    expected="numbers that fall, from at most 1, all above 0",
                )
        self.config = config
        self.distilled_sigmas = None if distilled_sigmas is None else tuple(distilled_sigmas)
        self.is_native = is_native
        self.is_stochastic = config.stochastic_sampling
        self.fixed_guidance_scale = None if distilled_sigmas is None else 1.0

    def set_timesteps(
        self, num_inference_steps: int | None = None, *, mu: float | None = None
    ) -> None:
        """Choose a schedule; see :class:`Scheduler`. Timesteps are float32 ``1000σ``, not rounded."""
        if not self.config.use_dynamic_shifting:
            require_no_mu(mu)
        elif mu is None:
            raise ConfigError("use_dynamic_shifting needs mu", got="None", expected="a number")
        with np.errstate(all="ignore"):  # what comes out is checked
            sigmas = end_with_zero(self._shifted(self._unshifted(num_inference_steps), mu))
        self._start(sigmas, sigmas[:-1] * np.float32(self.config.num_train_timesteps))

    def step(
        self, prediction: Array, step_index: int, sample: Array, noise: Array | None = None
    ) -> Float32Array:
        """Take an Euler step, or renew the noise around the predicted data; see :class:`Scheduler`.

        Stochastic: ``x ← (1 - σ') (x - σ v) + σ' ε``; clean frames have to be put back afterwards.
        """
        i, velocity, x = self._enter(prediction, step_index, sample)
        sigma, sigma_next = float(self.sigmas[i]), float(self.sigmas[i + 1])
        if not self.is_stochastic:
            return self._leave(x + (sigma_next - sigma) * velocity)
        x0 = x - sigma * velocity
        if sigma_next > 0:
            x0 = (1 - sigma_next) * x0 + sigma_next * checked_noise(noise, sample)
        return self._leave(x0)

    def _unshifted(self, num_inference_steps: int | None) -> Array:
        total = self.config.num_train_timesteps
        if self.distilled_sigmas is not None:
            fixed = len(self.distilled_sigmas)
            if num_inference_steps not in {None, fixed}:
                raise ConfigError(
                    "the checkpoint is distilled: its number of steps is fixed",
                    got=f"num_inference_steps {num_inference_steps}",
                    expected=f"{fixed}",
                    fix="Leave num_inference_steps out.",
                )
            return np.array(self.distilled_sigmas, np.float32)
        num_steps = checked_steps(num_inference_steps)
        if self.is_native:
            return native_flow_sigmas(num_steps, total).astype(np.float32)
        # The list's ends are shifted once as training's are, and below once more with the rest.
        ends = np.array([total, 1], np.float32) / np.float32(total)
        if not self.config.use_dynamic_shifting:
            ends = shift_sigmas(ends, self.config.shift)
        first, last = ends.tolist()
        return np.linspace(first * total, last * total, num_steps) / total

    def _shifted(self, sigmas: Array, mu: float | None) -> Array:
        config = self.config
        if mu is None:
            sigmas = shift_sigmas(sigmas, config.shift)
        else:
            sigmas = shift_sigmas_dynamically(sigmas, mu, config.time_shift_type)
        if config.shift_terminal:  # 0 means none, as there
            sigmas = stretch_sigmas(sigmas, config.shift_terminal)
        if config.use_karras_sigmas:
            return karras_sigmas(len(sigmas), float(sigmas[0]), float(sigmas[-1]))
        if config.use_exponential_sigmas:
            return exponential_sigmas(len(sigmas), float(sigmas[0]), float(sigmas[-1]))
        return sigmas

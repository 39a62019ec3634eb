"""UniPC's options, and the σ and timesteps that they choose; the solver is in ``unipc.py``.

Source: diffusers ``schedulers/scheduling_unipc_multistep.py``, 0.42.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers.betas import (
    NoiseConfig,
    alphas_cumprod,
    checked_timesteps,
    edm_sigmas,
)
from motrt.runtime.schedulers.config import read_config, require, require_one_of
from motrt.runtime.schedulers.sigmas import (
    below_one,
    end_with_zero,
    exponential_sigmas,
    flow_from_edm,
    flow_sigmas,
    karras_sigmas,
    native_flow_sigmas,
    shift_sigmas,
    shift_sigmas_dynamically,
    stretch_sigmas,
    timesteps_of_sigmas,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Floats = npt.NDArray[Any]
    Schedule = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

_MAX_ORDER = 3
_FIXED = {
    "thresholding": False,
    "predict_x0": True,
    "solver_p": None,
    "use_beta_sigmas": False,
    "rescale_betas_zero_snr": False,
    "final_sigmas_type": "zero",
}
# Of thresholding, and of other classes whose configs were converted to this one.
_IGNORED = frozenset(
    {
        "clip_sample",
        "clip_sample_range",
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "set_alpha_to_one",
        "skip_prk_steps",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniPCConfig(NoiseConfig):
    """Options of ``UniPCMultistepScheduler``: diffusers' names and defaults.

    Raises:
        ConfigError: Values that contradict each other or describe no solver.
    """

    timestep_spacing: str = "linspace"
    solver_order: int = 2
    solver_type: str = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[int, ...] = ()
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_flow_sigmas: bool = False
    flow_shift: float = 1.0
    use_dynamic_shifting: bool = False
    time_shift_type: str = "exponential"
    sigma_min: float | None = None
    sigma_max: float | None = None
    shift_terminal: float | None = None

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        NoiseConfig.__post_init__(self)
        require_one_of(
            self, "prediction_type", "flow_prediction", "epsilon", "sample", "v_prediction"
        )
        require(self, "solver_order", 1 <= self.solver_order <= _MAX_ORDER, f"1 to {_MAX_ORDER}")
        # diffusers takes midpoint, heun and logrho for bh2 without a word.
        require_one_of(self, "solver_type", "bh1", "bh2")
        require_one_of(self, "time_shift_type", "exponential", "linear")
        require(self, "flow_shift", self.flow_shift > 0, "a positive number")
        if self.use_exponential_sigmas:
            require(self, "use_exponential_sigmas", not self.use_karras_sigmas, "only one of both")
            # diffusers leaves σ up to 157 then, where a flow's α = 1 - σ is negative.
            require(self, "use_exponential_sigmas", not self.use_flow_sigmas, "no flow sigmas")
        if self.shift_terminal is not None:
            require(self, "shift_terminal", self.use_flow_sigmas, "null without use_flow_sigmas")
            require(self, "shift_terminal", 0 <= self.shift_terminal < 1, "from 0, below 1")
        low, high = self.sigma_min, self.sigma_max
        require(self, "sigma_min", low is None or low > 0, "a positive number")
        require(self, "sigma_max", high is None or high > (low or 0), "more than sigma_min")

    @property
    def shifts_flow(self) -> bool:
        """Whether ``flow_shift`` has any effect."""
        return (
            self.use_flow_sigmas and not self.use_karras_sigmas and not self.use_dynamic_shifting
        )

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "scheduler/scheduler_config.json"
    ) -> UniPCConfig:
        """Read a ``scheduler_config.json``.

        Raises:
            ConfigError: An unknown key, an option that is not implemented, or a wrong value.
        """
        return read_config(cls, data, fixed=_FIXED, ignored=_IGNORED, source=source)


def unipc_schedule(
    config: UniPCConfig, num_steps: int, *, mu: float | None = None, is_native: bool = False
) -> Schedule:
    """Return σ (float32, the last 0) and the truncated timesteps that the network is fed.

    Args:
        config: The options.
        num_steps: Steps, at least 1.
        mu: Shift by resolution, if ``use_dynamic_shifting``.
        is_native: Start from the native flow schedule, as ``use_native_flow_schedule`` says.

    Raises:
        ConfigError: The schedule cannot be stepped: σ repeat or are not finite.
    """
    with np.errstate(all="ignore"):  # what comes out is checked
        sigmas, timesteps = _schedule(config, num_steps, mu, is_native)
        ended = end_with_zero(sigmas)
    steppable = bool((np.diff(ended) < 0).all()) and not (config.use_flow_sigmas and ended[0] >= 1)
    if not steppable:
        raise ConfigError(
            "UniPC needs noise levels that fall at every step, below 1 for a flow",
            got=f"{num_steps} steps: {ended[:4].tolist()} …",
            fix="Take fewer steps, or a smaller shift.",
        )
    return ended, timesteps.astype(np.int64)


def _schedule(
    config: UniPCConfig, num_steps: int, mu: float | None, is_native: bool
) -> tuple[Floats, Floats]:
    total = config.num_train_timesteps
    if config.use_flow_sigmas and not config.use_karras_sigmas:
        grid = native_flow_sigmas if is_native else flow_sigmas
        sigmas = grid(num_steps, total)
        if mu is None:
            sigmas = shift_sigmas(sigmas, config.flow_shift)
        else:
            sigmas = shift_sigmas_dynamically(sigmas, mu, config.time_shift_type)
        if config.shift_terminal:  # 0 means none, as there
            sigmas = stretch_sigmas(sigmas, config.shift_terminal)
        sigmas = below_one(sigmas)
        return sigmas, sigmas * total

    trained = edm_sigmas(alphas_cumprod(config))
    if config.use_karras_sigmas or config.use_exponential_sigmas:
        high = float(trained[-1]) if config.sigma_max is None else config.sigma_max
        low = float(trained[0]) if config.sigma_min is None else config.sigma_min
        space = karras_sigmas if config.use_karras_sigmas else exponential_sigmas
        sigmas = space(num_steps, high, low)
        if config.use_flow_sigmas:
            sigmas = flow_from_edm(sigmas)
            return sigmas, sigmas * total
        timesteps = timesteps_of_sigmas(sigmas, trained)
        return sigmas, timesteps.round() if config.use_karras_sigmas else timesteps

    spread = _spread(config, num_steps)
    return np.interp(spread, np.arange(total), trained), spread


def _spread(config: UniPCConfig, num_steps: int) -> Floats:
    """Timesteps over the trained ones: unlike DDPM's, the last lies one step above 0."""
    total = config.num_train_timesteps
    timesteps: Floats
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, num_steps + 1).round()[::-1][:-1]
    elif config.timestep_spacing == "leading":
        step = total // (num_steps + 1)
        timesteps = np.arange(0, num_steps + 1)[::-1][:-1] * step + config.steps_offset
    else:
        timesteps = np.arange(total, 0, -(total / num_steps)).round() - 1
    return checked_timesteps(timesteps, config, num_steps)

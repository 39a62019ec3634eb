"""The variance-preserving noise of training, β and ᾱ, and timesteps spread over it.

``ᾱ`` is the running product of ``1 - β``. Values equal torch's float32 ones bit for bit.

Source: diffusers ``schedulers/scheduling_ddpm.py``, 0.42; Ho et al. (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers.config import require, require_one_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]

_MAX_TRAIN_TIMESTEPS = 1_000_000  # a config is read from a stranger
_MAX_BETA = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """What the schedulers of diffused (not flow-matched) networks share; diffusers' names.

    Raises:
        ConfigError: Values that describe no schedule.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        require(
            self,
            "num_train_timesteps",
            2 <= self.num_train_timesteps <= _MAX_TRAIN_TIMESTEPS,
            f"2 to {_MAX_TRAIN_TIMESTEPS}",
        )
        require_one_of(self, "beta_schedule", "linear", "scaled_linear", "squaredcos_cap_v2")
        require_one_of(self, "timestep_spacing", "leading", "linspace", "trailing")
        require(
            self,
            "steps_offset",
            0 <= self.steps_offset < self.num_train_timesteps,
            "0 or more, below num_train_timesteps",
        )
        if self.trained_betas is not None:
            values = self.trained_betas
            fits = len(values) == self.num_train_timesteps and 0 < min(values) <= max(values) < 1
            require(self, "trained_betas", fits, "num_train_timesteps numbers between 0 and 1")
        elif self.beta_schedule != "squaredcos_cap_v2":
            require(self, "beta_end", 0 < self.beta_end < 1, "a number between 0 and 1")
            require(self, "beta_start", 0 < self.beta_start < 1, "a number between 0 and 1")


def betas(config: NoiseConfig) -> Float32Array:
    """Return β of every training timestep, float32."""
    count = config.num_train_timesteps
    if config.trained_betas is not None:
        return np.array(config.trained_betas, np.float32)
    if config.beta_schedule == "linear":
        return _linspace(config.beta_start, config.beta_end, count)
    if config.beta_schedule == "scaled_linear":
        roots = _linspace(config.beta_start**0.5, config.beta_end**0.5, count)
        return roots * roots
    cosine = [_alpha_bar(i / count) for i in range(count + 1)]
    return np.array(
        [min(1 - cosine[i + 1] / cosine[i], _MAX_BETA) for i in range(count)], np.float32
    )


def alphas_cumprod(config: NoiseConfig) -> Float32Array:
    """Return ᾱ of every training timestep, float32; torch multiplies it up in float64.

    Raises:
        ConfigError: ᾱ falls to 0, from where no step leads back.
    """
    alphas = np.float32(1) - betas(config)
    product = np.cumprod(alphas, dtype=np.float64).astype(np.float32)
    if not product[-1] > 0:
        raise ConfigError(
            "the betas leave no signal at the last training timestep",
            got=f"alphas_cumprod {product[-1]}",
            expected="a positive number",
        )
    return product


def edm_sigmas(product: Float32Array) -> Float32Array:
    """Return ``σ = √((1 - ᾱ) / ᾱ)`` of ``x0 + σε``, in float32.

    NumPy rounds the root correctly. Torch's, where it is MKL's, is one unit off in 0.7 % of values.
    """
    sigmas: Float32Array = np.sqrt((np.float32(1) - product) / product)
    return sigmas


def spread_timesteps(config: NoiseConfig, num_steps: int) -> npt.NDArray[np.int64]:
    """Return the timesteps of DDPM and DDIM, descending.

    Source: Lin et al. (2024), table 2.

    Raises:
        ConfigError: ``steps_offset`` leads beyond the trained timesteps, or rounding to too many.
    """
    total = config.num_train_timesteps
    timesteps: npt.NDArray[Any]
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, num_steps).round()[::-1]
    elif config.timestep_spacing == "leading":
        timesteps = np.arange(0, num_steps)[::-1] * (total // num_steps) + config.steps_offset
    else:
        timesteps = np.round(np.arange(total, 0, -(total / num_steps))) - 1
    return checked_timesteps(timesteps, config, num_steps)


def checked_timesteps(
    timesteps: npt.NDArray[Any], config: NoiseConfig, num_steps: int
) -> npt.NDArray[np.int64]:
    """Return timesteps as integers.

    Raises:
        ConfigError: There are too many, or some that were never trained.
    """
    highest = config.num_train_timesteps - 1
    if len(timesteps) != num_steps or timesteps[0] > highest or timesteps[-1] < 0:
        raise ConfigError(
            f"timestep_spacing {config.timestep_spacing!r} does not go with {num_steps} steps and "
            f"steps_offset {config.steps_offset}",
            got=f"{len(timesteps)} timesteps from {timesteps[0]:.0f} to {timesteps[-1]:.0f}",
            expected=f"{num_steps} from at most {highest} to at least 0",
            fix="Take another number of steps.",
        )
    return timesteps.astype(np.int64)


def _linspace(start: float, end: float, count: int) -> Float32Array:
    """``torch.linspace`` in float32: from both ends to the middle, multiply-add rounded once."""
    first, last = np.float64(np.float32(start)), np.float64(np.float32(end))
    step = np.float64(np.float32(last - first) / np.float32(count - 1))
    index = np.arange(count)
    rising = first + step * index
    falling = last - step * (count - 1 - index)
    return np.where(index < count // 2, rising, falling).astype(np.float32)


def _alpha_bar(time: float) -> float:
    """Nichol and Dhariwal (2021), eq. 17."""
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

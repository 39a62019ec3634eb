"""Lists of noise levels σ, apart from the solvers that step along them.

All are pure functions over float64 arrays in descending order, without the final 0. Each operation
stands in diffusers' order: a solver reads the float32 values, and these are equal bit for bit.

Source: diffusers ``schedulers/scheduling_unipc_multistep.py`` and
``scheduling_flow_match_euler_discrete.py`` (``set_timesteps``), 0.42.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[Any]

# Where σ = 1, α = 0 and ln α is infinite.
_LARGEST_FLOW_SIGMA_GAP = 1e-6


def flow_sigmas(num_steps: int, num_train_timesteps: int) -> Floats:
    """Return σ from 1 down, even steps; the next would be the smallest that was trained."""
    return np.linspace(1, 1 / num_train_timesteps, num_steps + 1)[:-1]


def native_flow_sigmas(num_steps: int, num_train_timesteps: int) -> Floats:
    """Return σ from just below 1 down, even steps; the next would be 0.

    Source: diffusers ``Cosmos3OmniPipeline.__call__`` with ``use_native_flow_schedule``.
    """
    return np.linspace(1.0 - 1.0 / num_train_timesteps, 0.0, num_steps + 1)[:-1]


def shift_sigmas(sigmas: Floats, shift: float) -> Floats:
    """Spend more steps at high noise: ``sσ / (1 + (s - 1)σ)``.

    Source: Esser et al. (2024), eq. 23.
    """
    shifted: Floats = shift * sigmas / (1 + (shift - 1) * sigmas)
    return shifted


def shift_sigmas_dynamically(sigmas: Floats, mu: float, time_shift_type: str) -> Floats:
    """Shift by a resolution's ``mu``: ``e^μ / (e^μ + 1/σ - 1)``, or with ``μ`` itself if linear."""
    shift = math.exp(mu) if time_shift_type == "exponential" else mu
    shifted: Floats = shift / (shift + (1 / sigmas - 1))
    return shifted


def stretch_sigmas(sigmas: Floats, shift_terminal: float) -> Floats:
    """Stretch a list so that it ends at ``shift_terminal``."""
    one_minus_z = 1 - sigmas
    scale_factor = one_minus_z[-1] / (1 - shift_terminal)
    stretched: Floats = 1 - (one_minus_z / scale_factor)
    return stretched


def below_one(sigmas: Floats) -> Floats:
    """Move a first σ of 1 down by 1e-6, for ``ln(1 - σ)`` stands in UniPC."""
    if np.fabs(sigmas[0] - 1) < _LARGEST_FLOW_SIGMA_GAP:
        sigmas = sigmas.copy()
        sigmas[0] -= _LARGEST_FLOW_SIGMA_GAP
    return sigmas


def karras_sigmas(num_steps: int, sigma_max: float, sigma_min: float, rho: float = 7.0) -> Floats:
    """Return σ that are even in ``σ^(1/ρ)``.

    Source: Karras et al. (2022), eq. 5.
    """
    ramp = np.linspace(0, 1, num_steps)
    min_inv_rho = sigma_min ** (1 / rho)
    max_inv_rho = sigma_max ** (1 / rho)
    sigmas: Floats = (max_inv_rho + ramp * (min_inv_rho - max_inv_rho)) ** rho
    return sigmas


def exponential_sigmas(num_steps: int, sigma_max: float, sigma_min: float) -> Floats:
    """Return σ that are even in ``ln σ``."""
    sigmas: Floats = np.exp(np.linspace(math.log(sigma_max), math.log(sigma_min), num_steps))
    return sigmas


def flow_from_edm(sigmas: Floats) -> Floats:
    """Map σ of ``x0 + σε`` to σ of ``(1 - σ) x0 + σε`` with the same signal-to-noise ratio."""
    flow: Floats = sigmas / (sigmas + 1)
    return flow


def timesteps_of_sigmas(sigmas: Floats, trained: Floats) -> Floats:
    """Return at which fractional training timesteps the σ lie, linear in ``ln σ``.

    Args:
        sigmas: float64, in any order.
        trained: σ of every training timestep, float32, ascending.

    Source: ``UniPCMultistepScheduler._sigma_to_t``.
    """
    log_trained = np.log(trained)
    log_sigmas = np.log(np.maximum(sigmas, 1e-10))
    at_or_below = (log_sigmas - log_trained[:, None] >= 0).cumsum(axis=0).argmax(axis=0)
    low = at_or_below.clip(max=len(trained) - 2)
    high = low + 1
    weight = (log_trained[low] - log_sigmas) / (log_trained[low] - log_trained[high])
    weight = np.clip(weight, 0, 1)
    timesteps: Floats = (1 - weight) * low + weight * high
    return timesteps


def end_with_zero(sigmas: Floats) -> npt.NDArray[np.float32]:
    """Return the list that solvers read: float32, with the final 0.

    Raises:
        ConfigError: A σ is not finite (shift_terminal with one step divides by 0, for example).
    """
    ended = np.concatenate([sigmas, [0.0]]).astype(np.float32)
    if not np.isfinite(ended).all():
        raise ConfigError(
            "the schedule has no finite noise levels",
            got=f"{len(sigmas)} steps: {sigmas[:4].tolist()} …",
            expected="finite σ",
            fix="Take another number of steps or correct the scheduler's config.",
        )
    return ended

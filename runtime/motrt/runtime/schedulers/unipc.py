"""UniPC (Zhao et al. 2023), the multistep solver of the public Cosmos 3 pipelines.

Symbols are the paper's, in its data-prediction form: a sample ``x = α x0 + σ ε``, the network's
``m ≈ x0``, ``λ = ln(α / σ)``, a step's ``h = λ_t - λ_s``, ``r_k = (λ_k - λ_s) / h`` of older points
and their ``D_k = (m_k - m_s) / r_k``. Everything is float64, from the schedule's float32 σ.

Source: arXiv 2302.04867, algorithms 5 to 8; diffusers ``scheduling_unipc_multistep.py``, 0.42.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers.stepping import Stepping, checked_steps, require_no_mu
from motrt.runtime.schedulers.unipc_schedule import UniPCConfig, unipc_schedule

if TYPE_CHECKING:
    from motrt.runtime.schedulers.stepping import Array, Float32Array, Float64Array


class UniPCMultistepScheduler(Stepping):
    """UniPC of order 1 to 3 with ``B(h)`` of either form.

    Args:
        config: Options.
        is_native: Use the native flow schedule, as a pipeline's ``use_native_flow_schedule`` says.

    Raises:
        ConfigError: The native schedule with options that it does not go with.
    """

    def __init__(self, config: UniPCConfig, *, is_native: bool = False) -> None:
        super().__init__()
        if is_native and not config.use_flow_sigmas:
            raise ConfigError(
                "use_native_flow_schedule needs flow sigmas",
                got="use_flow_sigmas false",
                expected="use_flow_sigmas true",
            )
        if is_native and config.use_karras_sigmas and None in {config.sigma_min, config.sigma_max}:
            # With both, the native schedule goes unread; without, diffusers turns it upside down.
            raise ConfigError(
                "use_karras_sigmas on the native flow schedule needs both of its ends",
                got=f"sigma_min {config.sigma_min}, sigma_max {config.sigma_max}",
                expected="two numbers",
            )
        self.config = config
        self.is_native = is_native
        self._x0_predictions: tuple[Float64Array, ...] = ()  # m, newest first
        self._last_sample: Float64Array | None = None
        self._last_order = 0

    def set_timesteps(
        self, num_inference_steps: int | None = None, *, mu: float | None = None
    ) -> None:
        """Choose a schedule and forget all history; see :class:`Scheduler`."""
        num_steps = checked_steps(num_inference_steps)
        if not self.config.use_dynamic_shifting:
            require_no_mu(mu)
        elif mu is None:
            raise ConfigError("use_dynamic_shifting needs mu", got="None", expected="a number")
        schedule = unipc_schedule(self.config, num_steps, mu=mu, is_native=self.is_native)
        self._start(*schedule)
        self._x0_predictions = ()
        self._last_sample = None
        self._last_order = 0

    def step(
        self,
        prediction: Array,
        step_index: int,
        sample: Array,
        noise: Array | None = None,  # noqa: ARG002
    ) -> Float32Array:
        """Correct the sample with its own prediction, then predict the next; see :class:`Scheduler`.

        A velocity of 0 keeps the sample: ``(σ_t / σ_s)(1 - α_s) + α_t = 1`` where ``α = 1 - σ``.
        """
        i, output, x = self._enter(prediction, step_index, sample)
        m = self._x0(i, output, x)
        if self._last_sample is not None and i - 1 not in self.config.disable_corrector:
            x = self._correct(i, m)
        self._x0_predictions = (m, *self._x0_predictions)[: self.config.solver_order]
        self._last_sample = x
        self._last_order = self._order(i)
        return self._leave(self._predict(i))

    def _x0(self, i: int, output: Float64Array, x: Float64Array) -> Float64Array:
        """The data prediction that the network's output at ``x`` amounts to."""
        alpha, sigma = self._alpha_sigma(i)
        if self.config.prediction_type == "flow_prediction":
            return x - float(self.sigmas[i]) * output
        if self.config.prediction_type == "epsilon":
            return (x - sigma * output) / alpha
        if self.config.prediction_type == "v_prediction":
            return alpha * x - sigma * output
        return output.copy()

    def _order(self, i: int) -> int:
        """The order at a step: it warms up, and falls again where few steps are left."""
        steps_left = len(self.timesteps) - i
        order = min(self.config.solver_order, i + 1)
        if self.config.lower_order_final or steps_left == 1:
            # At σ = 0, h is infinite: of order 2 and more, diffusers makes NaN there.
            order = min(order, steps_left)
        return order

    def _predict(self, i: int) -> Float64Array:
        """UniP-p: the sample at ``σ_{i+1}`` from those at ``σ_i`` and before."""
        assert self._last_sample is not None
        p = self._last_order
        m_s, older = self._x0_predictions[0], self._x0_predictions[1:p]
        s = self._interval(i, i + 1, p)
        x = s.sigma_ratio * self._last_sample - s.alpha_t * s.phi_1 * m_s
        if p > 1:
            rho = [0.5] if p == 2 else s.solve_rho(p - 1)
            d = [(m_k - m_s) / r_k for m_k, r_k in zip(older, s.r, strict=False)]
            x -= s.alpha_t * s.b_h * _weighted(rho, d)
        return x

    def _correct(self, i: int, m_t: Float64Array) -> Float64Array:
        """UniC-p: the sample at ``σ_i`` once more, now that its own prediction is known."""
        assert self._last_sample is not None
        p = self._last_order
        m_s, older = self._x0_predictions[0], self._x0_predictions[1:p]
        s = self._interval(i - 1, i, p)
        rho = [0.5] if p == 1 else s.solve_rho(p)
        d = [(m_k - m_s) / r_k for m_k, r_k in zip(older, s.r, strict=False)]
        d.append(m_t - m_s)
        x = s.sigma_ratio * self._last_sample - s.alpha_t * s.phi_1 * m_s
        x -= s.alpha_t * s.b_h * _weighted(rho, d)
        return x

    def _interval(self, s: int, t: int, p: int) -> _Interval:
        """Everything scalar about the way from σ at index ``s`` to ``t``."""
        _, sigma_s = self._alpha_sigma(s)
        alpha_t, sigma_t = self._alpha_sigma(t)
        h = self._lambda(t) - self._lambda(s)
        r = [(self._lambda(s - k) - self._lambda(s)) / h for k in range(1, p)]
        return _Interval(
            h=h,
            sigma_ratio=sigma_t / sigma_s,
            alpha_t=alpha_t,
            r=(*r, 1.0),
            is_bh1=self.config.solver_type == "bh1",
        )

    def _alpha_sigma(self, i: int) -> tuple[float, float]:
        sigma = float(self.sigmas[i])
        if self.config.use_flow_sigmas:
            return 1 - sigma, sigma
        alpha = 1 / math.sqrt(sigma**2 + 1)
        return alpha, sigma * alpha

    def _lambda(self, i: int) -> float:
        alpha, sigma = self._alpha_sigma(i)
        return math.log(alpha) - math.log(sigma) if sigma > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """One step in λ; ``r`` ends with the 1 of its end point."""

    h: float
    sigma_ratio: float
    alpha_t: float
    r: tuple[float, ...]
    is_bh1: bool

    @property
    def phi_1(self) -> float:
        """``e^(-h) - 1``."""
        return math.expm1(-self.h)

    @property
    def b_h(self) -> float:
        """The paper's ``B₁(h) = h`` or ``B₂(h) = e^h - 1``, at ``-h`` for data prediction."""
        return -self.h if self.is_bh1 else self.phi_1

    def solve_rho(self, count: int) -> list[float]:
        """Solve ``R ρ = b`` for the first ``count`` points: what makes the order come out.

        ``R_{jk} = r_k^(j-1)``, ``b_j = j! φ_{j+1}(-h) / B(h)``; eq. 9 and theorem 3.1 there.
        """
        powers = np.vander(self.r[:count], increasing=True).T
        b = np.empty(count)
        phi = self.phi_1 / -self.h - 1
        factorial = 1
        for j in range(1, count + 1):
            b[j - 1] = phi * factorial / self.b_h
            factorial *= j + 1
            phi = phi / -self.h - 1 / factorial
        solved: list[float] = np.linalg.solve(powers, b).tolist()
        return solved


def _weighted(rho: list[float], d: list[Float64Array]) -> Float64Array:
    """``Σ ρ_k D_k``."""
    total = rho[0] * d[0]
    for rho_k, d_k in zip(rho[1:], d[1:], strict=True):
        total += rho_k * d_k
    return total

"""Where in its schedule a scheduler stands; knows neither σ formulas nor solvers."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError, SchedulerError

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self

    Array = npt.NDArray[Any]
    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]


class Stepping:
    """A schedule and the index of its next step."""

    init_noise_sigma: float = 1.0
    is_stochastic: bool = False
    fixed_guidance_scale: float | None = None

    def __init__(self) -> None:
        self._sigmas: Float32Array | None = None
        self._timesteps: Array | None = None
        self._next_index = 0

    @property
    def timesteps(self) -> Array:
        """What the network is fed, one a step."""
        if self._timesteps is None:
            raise _no_schedule()
        return self._timesteps

    @property
    def sigmas(self) -> Float32Array:
        """Noise levels, float32, one more than steps."""
        if self._sigmas is None:
            raise _no_schedule()
        return self._sigmas

    def clone(self) -> Self:
        """Return an independent copy; arrays are never changed in place, so they are shared."""
        return copy.copy(self)

    def _start(self, sigmas: Array, timesteps: Array) -> None:
        """Take a schedule, read-only from now on."""
        self._sigmas = sigmas.astype(np.float32)
        self._timesteps = timesteps.copy()
        self._sigmas.flags.writeable = False
        self._timesteps.flags.writeable = False
        self._next_index = 0

    def _enter(
        self, prediction: Array, step_index: int, sample: Array
    ) -> tuple[int, Float64Array, Float64Array]:
        """Check a call of ``step`` and return index, prediction and sample, both in float64."""
        num_steps = len(self.timesteps)
        if step_index != self._next_index or self._next_index == num_steps:
            due = f"index {self._next_index} of {num_steps}"
            raise SchedulerError(
                "steps are taken once each and in order",
                got=f"index {step_index}",
                expected=due if self._next_index < num_steps else f"no step after {num_steps}",
                fix="Call set_timesteps to start another run, or step a clone.",
            )
        _require_shape("the prediction", prediction, sample)
        prediction = np.asarray(prediction, np.float64)
        return self._next_index, prediction, np.asarray(sample, np.float64)

    def _leave(self, sample: Float64Array) -> Float32Array:
        """Count the step, now that nothing can fail any more, and return its sample in float32."""
        self._next_index += 1
        return sample.astype(np.float32)


def checked_steps(num_inference_steps: int | None, *, at_most: int | None = None) -> int:
    """Return the number of steps that a user asked for.

    Raises:
        ConfigError: It is missing, no whole number, below 1 or above ``at_most``.
    """
    expected = "a whole number of at least 1" if at_most is None else f"1 to {at_most}"
    try:
        steps = operator.index(num_inference_steps)  # type: ignore[arg-type]  # None raises too
    except TypeError:
        steps = 0
    if isinstance(num_inference_steps, bool) or steps < 1 or steps > (at_most or steps):
        raise ConfigError(
            "num_inference_steps is refused", got=repr(num_inference_steps), expected=expected
        )
    return steps


def checked_noise(noise: Array | None, sample: Array) -> Float64Array:
    """Return the noise of a stochastic step in float64.

    Raises:
        SchedulerError: There is none, or its shape is not the sample's.
    """
    if noise is None:
        raise SchedulerError(
            "a stochastic step needs noise",
            expected=f"standard normal values of shape {list(sample.shape)}",
            fix="Draw noise for every step while is_stochastic is true.",
        )
    _require_shape("the noise", noise, sample)
    return np.asarray(noise, np.float64)


def require_no_mu(mu: float | None) -> None:
    """Refuse a shift that the config would not read.

    Raises:
        ConfigError: ``mu`` is given.
    """
    if mu is not None:
        raise ConfigError(
            "mu has no effect without use_dynamic_shifting",
            got=f"mu {mu}",
            expected="no mu",
        )


def _require_shape(what: str, array: Array, sample: Array) -> None:
    if np.shape(array) != np.shape(sample):
        raise SchedulerError(
            f"{what} does not fit the sample",
            got=f"shape {list(np.shape(array))}",
            expected=f"shape {list(np.shape(sample))}",
        )


def _no_schedule() -> SchedulerError:
    return SchedulerError("the scheduler has no schedule yet", fix="Call set_timesteps first.")

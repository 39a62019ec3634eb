"""What the denoise loop needs of a scheduler.

A schedule (the list of σ and of timesteps) is set once a run; then every index is stepped once, in
order. Multistep schedulers keep history, so each modality steps its own :meth:`Scheduler.clone`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    Array = npt.NDArray[Any]
    Float32Array = npt.NDArray[np.float32]


class Scheduler(Protocol):
    """Which σ to visit, and how a sample gets from one to the next."""

    @property
    def init_noise_sigma(self) -> float:
        """Standard deviation of the noise that a run starts from."""

    @property
    def is_stochastic(self) -> bool:
        """Whether :meth:`step` wants fresh standard normal noise every time."""

    @property
    def fixed_guidance_scale(self) -> float | None:
        """The only guidance scale that the checkpoint was distilled for; None if any is right."""

    @property
    def timesteps(self) -> Array:
        """What the network is fed, one a step: int64 where the scheduler truncates, else float32."""

    @property
    def sigmas(self) -> Float32Array:
        """Noise levels, float32, one more than steps; the last is 0."""

    def set_timesteps(
        self, num_inference_steps: int | None = None, *, mu: float | None = None
    ) -> None:
        """Choose a schedule and forget all history.

        Args:
            num_inference_steps: Steps; None only where the checkpoint fixes them.
            mu: Shift by resolution, where the config has ``use_dynamic_shifting``; else None.

        Raises:
            ConfigError: The number is refused, or the schedule that it gives cannot be stepped.
        """

    def step(
        self, prediction: Array, step_index: int, sample: Array, noise: Array | None = None
    ) -> Float32Array:
        """Return the sample at the next σ, float32 of the same shape.

        Args:
            prediction: The network's output at ``timesteps[step_index]``: a velocity ``ε - x0`` or
                what ``prediction_type`` says; any shape, not modified.
            step_index: Counts from 0; every index once, in order.
            sample: The sample at ``sigmas[step_index]``, same shape; not modified.
            noise: Standard normal, same shape; needed if :attr:`is_stochastic` (a last step that
                adds none takes None too).

        Raises:
            SchedulerError: No schedule, wrong index, or shapes that differ.
        """

    def clone(self) -> Self:
        """Return an independent copy, schedule and history included."""


def check_guidance_scale(scheduler: Scheduler, guidance_scale: float) -> None:
    """Refuse guidance where it is distilled into the weights.

    Raises:
        ConfigError: The scheduler has another fixed scale.
    """
    fixed = scheduler.fixed_guidance_scale
    if fixed is not None and guidance_scale != fixed:
        raise ConfigError(
            "the checkpoint is distilled: guidance is part of its weights",
            got=f"guidance_scale {guidance_scale}",
            expected=f"{fixed}",
            fix="Leave guidance_scale out.",
        )

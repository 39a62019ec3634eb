"""Scheduler cases: the checkpoint's scheduler in diffusers, driven as ``Cosmos3OmniPipeline`` drives it.

Source: diffusers 0.42 ``Cosmos3OmniPipeline.__call__`` step 6, and the modular pipeline's set-timesteps step for
distilled checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.checkpoint import load_json
from motrt.calibration.reference.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from motrt.calibration.reference.sequence_cases import SchedulerCase

# Named by Edge's files. diffusers lacks it: it is UniPC on the native flow schedule, with this shift.
_EDGE = "Cosmos3EdgeUniPCMultistepScheduler"
_EDGE_DEFAULTS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A scheduler, and what the pipeline's config adds to it.

    Attributes:
        scheduler: Of diffusers, fresh.
        is_native: Whether the pipeline hands it the σ of the native flow schedule.
        distilled_sigmas: The σ of a distilled checkpoint, or None.
    """

    scheduler: Any
    is_native: bool
    distilled_sigmas: list[float] | None

    def set_timesteps(self, num_steps: int) -> None:
        """Choose the schedule of ``num_steps`` steps; a distilled checkpoint has its own number."""
        if self.distilled_sigmas is not None:
            self.scheduler.set_timesteps(sigmas=self.distilled_sigmas, device="cpu")
        elif self.is_native:
            first = 1.0 - 1.0 / self.scheduler.config.num_train_timesteps
            sigmas = np.linspace(first, 0.0, num_steps + 1)[:-1]
            self.scheduler.set_timesteps(num_steps, device="cpu", sigmas=sigmas)
        else:
            self.scheduler.set_timesteps(num_steps, device="cpu")


def load_schedule(checkpoint: Path) -> Schedule:
    """Build the scheduler that the checkpoint's files name.

    Raises:
        UnavailableError: There is none, or diffusers cannot build it.
        CheckpointError: Its config cannot be read.
    """
    path = checkpoint / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        raise UnavailableError("the checkpoint has no scheduler/")
    config, index = load_json(path), pipeline_config(checkpoint)
    name = config.get("_class_name")
    if name == _EDGE:
        shift = index.get("native_flow_shift")
        own = {} if shift is None else {"flow_shift": shift}
        config = {**_EDGE_DEFAULTS, **own, **config, "_class_name": "UniPCMultistepScheduler"}
    cls = _class_named(str(config.get("_class_name")))
    sigmas = index.get("distilled_sigmas")
    try:
        return Schedule(
            scheduler=cls.from_config(config),
            is_native=name == _EDGE or bool(index.get("use_native_flow_schedule")),
            distilled_sigmas=None if index.get("is_distilled") is False else sigmas or None,
        )
    except (TypeError, ValueError, NotImplementedError) as err:
        raise UnavailableError(f"diffusers' {name} refuses its config: {err}") from err


def _class_named(name: str) -> Any:
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise UnavailableError(f"diffusers has no scheduler {name!r}")
    return found


def pipeline_config(checkpoint: Path) -> dict[str, Any]:
    """Return ``model_index.json``, and where it is silent ``modular_model_index.json``."""
    merged: dict[str, Any] = {}
    for name in ("model_index.json", "modular_model_index.json"):
        if (checkpoint / name).is_file():
            merged = load_json(checkpoint / name) | merged
    return merged


def run_schedules(checkpoint: Path, cases: Sequence[SchedulerCase]) -> dict[str, NDArray[Any]]:
    """Return ``sigmas``, ``timesteps`` and ``states`` ``[N + 1, C, T, H, W]`` of every case.

    Raises:
        UnavailableError: There is no scheduler, or diffusers cannot set or step it.
        CheckpointError: Its config cannot be read.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for case in cases:
        schedule = load_schedule(checkpoint)
        scheduler, drawn = schedule.scheduler, _GivenNoise()
        state = torch.from_numpy(case.sample)[None]
        states = [state]
        try:
            schedule.set_timesteps(len(case.predictions))
            for index, timestep in enumerate(scheduler.timesteps[: len(case.predictions)]):
                prediction = torch.from_numpy(case.predictions[index])[None]
                drawn.noise = torch.from_numpy(case.noise[index])[None]
                with drawn:
                    state = scheduler.step(prediction, timestep, state, return_dict=False)[0]
                states.append(state)
        except (TypeError, ValueError, NotImplementedError) as err:
            name = type(scheduler).__name__
            raise UnavailableError(f"diffusers' {name} cannot run its config: {err}") from err
        arrays[f"{case.name}/states"] = to_float32(torch.cat(states))
        arrays[f"{case.name}/timesteps"] = scheduler.timesteps.numpy().copy()
        if hasattr(scheduler, "sigmas"):
            arrays[f"{case.name}/sigmas"] = to_float32(torch.as_tensor(scheduler.sigmas))
    return arrays


class _GivenNoise(TorchFunctionMode):
    """Let ``torch.randn`` return the noise of the case, which the other side is given too."""

    noise: torch.Tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in {torch.randn, torch.randn_like}:
            return self.noise.clone()
        return func(*args, **(kwargs or {}))

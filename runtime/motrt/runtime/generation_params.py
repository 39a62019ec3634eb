"""What a generation is asked for."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.embodiments import embodiment_named

if TYPE_CHECKING:
    from motrt.engines.tensors import Array

ActionMode = Literal["forward_dynamics", "inverse_dynamics", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Settings of one generation; names and defaults are diffusers' (``Cosmos3OmniPipeline``).

    Attributes:
        num_frames: Frames of the clip, 1 + n times the VAE's temporal factor; 1 makes an image.
        height: Pixels, a multiple of the VAE's spatial factor.
        width: Likewise.
        fps: Frames per second; moves positions and the prompt's sentence about duration.
        num_inference_steps: Steps of the schedule; None is 35, or what a distilled checkpoint fixes.
        guidance_scale: 1 runs the prompt's branch alone; None is 6, or 1 where it is distilled.
        guidance_interval: Timesteps between which guidance is on, exclusive; None is everywhere.
        seed: Of the initial noise and of stochastic schedulers.
        negative_prompt: Text of the other branch; None is empty.
        use_system_prompt: None is the checkpoint's default.
        add_resolution_template: Append the sentence about resolution.
        add_duration_template: Append the sentence about duration.
        sound: Denoise sound latents too.
        flow_shift: Override of the scheduler's shift.
        use_karras_sigmas: Override of the scheduler's grid.

    Raises:
        ConfigError: A value that no checkpoint can serve.
    """

    num_frames: int = 189
    height: int = 720
    width: int = 1280
    fps: float = 24.0
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_interval: tuple[float, float] | None = None
    seed: int = 0
    negative_prompt: str | None = None
    use_system_prompt: bool | None = None
    add_resolution_template: bool = True
    add_duration_template: bool = True
    sound: bool = False
    flow_shift: float | None = None
    use_karras_sigmas: bool | None = None

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        for name in ("num_frames", "height", "width", "num_inference_steps"):
            value = getattr(self, name)
            if value is None and name == "num_inference_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise _wrong(name, value, "a whole number of at least 1")
        for name in ("fps", "guidance_scale", "flow_shift"):
            value = getattr(self, name)
            if value is None and name != "fps":
                continue
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise _wrong(name, value, "a positive number")
        is_whole = isinstance(self.seed, (int, np.integer)) and not isinstance(self.seed, bool)
        if not is_whole or not 0 <= self.seed < 2**32:
            raise _wrong("seed", self.seed, "0 to 2**32 - 1")
        if self.guidance_interval is not None:
            pair = self.guidance_interval
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not is_pair or not 0 <= pair[0] < pair[1]:
                raise _wrong("guidance_interval", pair, "two numbers, 0 <= low < high")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionCondition:
    """An action-conditioned generation.

    ``forward_dynamics``: first frame and actions are given, the clip is made. ``inverse_dynamics``:
    the clip is given, the actions are made. ``policy``: the first frame is given, actions and clip
    are made.

    Attributes:
        mode: Which of the three.
        chunk_size: Action steps; the clip has one frame more.
        domain_name: One of the public embodiments; gives the two numbers below.
        domain_id: Row of the action heads.
        raw_action_dim: Channels in use; those beyond are zero. None is all.
        raw_actions: For forward dynamics, float32 ``[T, raw_action_dim]``; shorter than
            ``chunk_size`` repeats the last, longer is cut.
        view_point: Camera, for the caption's sentence about framing.

    Raises:
        ConfigError: Contradicting or missing values.
    """

    mode: ActionMode
    chunk_size: int = 16
    domain_name: str | None = None
    domain_id: int | None = None
    raw_action_dim: int | None = None
    raw_actions: Array | None = None
    view_point: str = "ego_view"

    def __post_init__(self) -> None:
        """Check every value and look up the embodiment."""
        modes = ("forward_dynamics", "inverse_dynamics", "policy")
        if self.mode not in modes:
            raise _wrong("action mode", self.mode, ", ".join(modes))
        if self.chunk_size < 1:
            raise _wrong("chunk_size", self.chunk_size, "at least 1")
        if (self.domain_name is None) == (self.domain_id is None):
            raise _wrong(
                "the action's embodiment",
                f"domain_name {self.domain_name}, domain_id {self.domain_id}",
                "one of the two",
            )
        if self.domain_name is not None:
            found = embodiment_named(self.domain_name)
            object.__setattr__(self, "domain_id", found.domain_id)
            if self.raw_action_dim is None:
                object.__setattr__(self, "raw_action_dim", found.raw_action_dim)
        actions = self.raw_actions
        if (self.mode == "forward_dynamics") != (actions is not None):
            raise _wrong(
                "the given actions", "none" if actions is None else "some", _ACTIONS[self.mode]
            )
        if actions is not None:
            width = self.raw_action_dim
            if actions.ndim != 2 or not len(actions) or width not in (None, actions.shape[1]):
                raise _wrong(
                    "the shape of the actions",
                    list(actions.shape),
                    f"[T, {width or 'width'}], T >= 1",
                )
            if not np.isfinite(actions).all():
                raise _wrong("the given actions", "NaN or infinity", "finite numbers")


_ACTIONS = {
    "forward_dynamics": "the actions that drive the clip (--actions)",
    "inverse_dynamics": "none: they are what is asked for",
    "policy": "none: they are what is asked for",
}


def _wrong(name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"{name} cannot be right", got=got, expected=expected)

"""Cases of a request in which one result leads to the next: tokens, steps of a schedule, a whole run.

Knows the protocol and numpy; knows neither torch nor any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.calibration.reference.errors import RequestError
from motrt.calibration.reference.fields import check_keys, ids, needed_floats, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from motrt.calibration.reference.fields import Arrays

_SIZES = ("num_frames", "height", "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """``max_new_tokens`` greedy tokens after ``input_ids`` ``[S]``, int64, whatever they are."""

    name: str
    input_ids: NDArray[np.int64]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCase:
    """A schedule from ``sample`` ``[C, T, H, W]`` along ``predictions`` ``[N, C, T, H, W]``.

    ``noise``, of the predictions' shape, is what a stochastic scheduler draws at each step.
    """

    name: str
    sample: NDArray[np.float32]
    predictions: NDArray[np.float32]
    noise: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCase:
    """A prompt as the pipeline tokenizes it; None leaves a choice to the pipeline."""

    name: str
    prompt: str
    negative_prompt: str | None
    num_frames: int
    height: int
    width: int
    fps: float
    use_system_prompt: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCase(PromptCase):
    """A run of the pipeline from ``latents`` ``[1, C, T, h, w]``."""

    latents: NDArray[np.float32]
    num_inference_steps: int
    guidance_scale: float


def text_case(case: Mapping[str, Any], arrays: Arrays) -> TextCase:
    """Read a text case."""
    check_keys(case, case["name"], required=("name", "input_ids", "max_new_tokens"))
    return TextCase(
        name=case["name"],
        input_ids=ids(case, arrays),
        max_new_tokens=whole(case, "max_new_tokens"),
    )


def scheduler_case(case: Mapping[str, Any], arrays: Arrays) -> SchedulerCase:
    """Read a scheduler case."""
    check_keys(case, case["name"], required=("name", "sample", "predictions", "noise"))
    sample = needed_floats(case, "sample", arrays, rank=4)
    steps = {
        field: needed_floats(case, field, arrays, rank=5) for field in ("predictions", "noise")
    }
    for field, array in steps.items():
        if array.shape[1:] != sample.shape or len(array) != len(steps["predictions"]):
            raise RequestError(
                f"{case['name']}: {field} is {list(array.shape)}; expected one {list(sample.shape)} a step"
            )
    return SchedulerCase(name=case["name"], sample=sample, **steps)


def prompt_case(case: Mapping[str, Any]) -> PromptCase:
    """Read a prompt case."""
    required = ("name", "prompt", *_SIZES, "fps")
    optional = ("negative_prompt", "use_system_prompt")
    check_keys(case, case["name"], required=required, optional=optional)
    return PromptCase(**_prompt(case))


def trajectory_case(case: Mapping[str, Any], arrays: Arrays) -> TrajectoryCase:
    """Read a trajectory case."""
    own = ("latents", "num_inference_steps", "guidance_scale")
    required = ("name", "prompt", *_SIZES, "fps", *own)
    optional = ("negative_prompt", "use_system_prompt")
    check_keys(case, case["name"], required=required, optional=optional)
    return TrajectoryCase(
        latents=needed_floats(case, "latents", arrays, rank=5),
        num_inference_steps=whole(case, "num_inference_steps"),
        guidance_scale=float(case["guidance_scale"]),
        **_prompt(case),
    )


def _prompt(case: Mapping[str, Any]) -> dict[str, Any]:
    prompt, system = text(case, "prompt"), case.get("use_system_prompt")
    if prompt is None or system not in (None, True, False):
        raise RequestError(
            f"{case['name']}: prompt {prompt!r} with use_system_prompt {system!r}; expected text, "
            "and true, false or null"
        )
    return {
        "name": case["name"],
        "prompt": prompt,
        "negative_prompt": text(case, "negative_prompt"),
        **{field: whole(case, field) for field in _SIZES},
        "fps": float(case["fps"]),
        "use_system_prompt": system,
    }

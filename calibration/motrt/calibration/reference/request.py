"""The request of one reference run: reading ``request.json`` and ``arrays.npz``, refusing what is unclear.

Knows the protocol and numpy; knows neither torch nor any model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from motrt.calibration.reference.errors import RequestError
from motrt.calibration.reference.fields import (
    check_keys,
    choice,
    floats,
    ids,
    indexes,
    named_cases,
    needed_floats,
)
from motrt.calibration.reference.sequence_cases import (
    prompt_case,
    scheduler_case,
    text_case,
    trajectory_case,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from motrt.calibration.reference.fields import Arrays
    from motrt.calibration.reference.sequence_cases import (
        PromptCase,
        SchedulerCase,
        TextCase,
        TrajectoryCase,
    )

DtypeName = Literal["float32", "float16", "bfloat16", "float64"]
Order = Literal["default", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonerCase:
    """One causal forward over ``input_ids`` ``[S]``, int64."""

    name: str
    input_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorCase:
    """One denoising forward: prompt ids ``[U]`` and the latents of each modality, float32.

    ``latents`` is ``[C, T, H, W]``, ``sound_latents`` ``[C, T]``, ``action_latents`` ``[T, A]``. The clean
    tuples name the frames or steps that condition and carry no noise.
    """

    name: str
    input_ids: NDArray[np.int64]
    latents: NDArray[np.float32]
    timestep: float
    fps: float
    clean_frames: tuple[int, ...] = ()
    sound_latents: NDArray[np.float32] | None = None
    clean_sound_frames: tuple[int, ...] = ()
    action_latents: NDArray[np.float32] | None = None
    clean_action_steps: tuple[int, ...] = ()
    domain_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeCase:
    """One decode of ``latents`` ``[1, C, T, H, W]`` or one encode of ``video`` ``[1, 3, F, H, W]``."""

    name: str
    latents: NDArray[np.float32] | None = None
    video: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that one reference run is asked for."""

    checkpoint: Path
    weights_dtype: DtypeName
    compute_dtype: DtypeName
    threads: int
    order: Order
    reasoner_cases: tuple[ReasonerCase, ...]
    generator_cases: tuple[GeneratorCase, ...]
    vae_cases: tuple[VaeCase, ...]
    text_cases: tuple[TextCase, ...]
    scheduler_cases: tuple[SchedulerCase, ...]
    prompt_cases: tuple[PromptCase, ...]
    trajectory_cases: tuple[TrajectoryCase, ...]


_KINDS = ("reasoner", "generator", "vae", "text", "scheduler", "prompt", "trajectory")


def load_request(folder: Path) -> Request:
    """Read ``request.json`` and ``arrays.npz`` of ``folder``.

    Raises:
        RequestError: A file is missing or malformed, a field is unknown, missing or out of range.
    """
    try:
        fields = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        with np.load(folder / "arrays.npz", allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except (OSError, ValueError) as err:
        raise RequestError(f"cannot read the request in {folder}: {err}") from err
    check_keys(
        fields,
        "request.json",
        required=("checkpoint", "weights_dtype", "compute_dtype"),
        optional=("threads", "order", *(f"{kind}_cases" for kind in _KINDS)),
    )
    weights_dtype = choice(fields, "weights_dtype", ("float32", "float16", "bfloat16"))
    threads = fields.get("threads", 1)
    if not isinstance(threads, int) or threads < 1:
        raise RequestError(f"threads is {threads!r}; expected an integer of at least 1")
    cases = {kind: named_cases(fields, f"{kind}_cases") for kind in _KINDS}
    return Request(
        checkpoint=Path(str(fields["checkpoint"])),
        weights_dtype=cast("DtypeName", weights_dtype),
        compute_dtype=cast("DtypeName", choice(fields, "compute_dtype", get_args(DtypeName))),
        threads=threads,
        order=cast("Order", choice(fields, "order", get_args(Order), default="default")),
        reasoner_cases=tuple(_reasoner_case(c, arrays) for c in cases["reasoner"]),
        generator_cases=tuple(_generator_case(c, arrays) for c in cases["generator"]),
        vae_cases=tuple(_vae_case(c, arrays) for c in cases["vae"]),
        text_cases=tuple(text_case(c, arrays) for c in cases["text"]),
        scheduler_cases=tuple(scheduler_case(c, arrays) for c in cases["scheduler"]),
        prompt_cases=tuple(prompt_case(c) for c in cases["prompt"]),
        trajectory_cases=tuple(trajectory_case(c, arrays) for c in cases["trajectory"]),
    )


def _reasoner_case(case: Mapping[str, Any], arrays: Arrays) -> ReasonerCase:
    check_keys(case, case["name"], required=("name", "input_ids"))
    return ReasonerCase(name=case["name"], input_ids=ids(case, arrays))


def _generator_case(case: Mapping[str, Any], arrays: Arrays) -> GeneratorCase:
    check_keys(
        case,
        case["name"],
        required=("name", "input_ids", "latents", "timestep", "fps"),
        optional=(
            "clean_frames",
            "sound_latents",
            "clean_sound_frames",
            "action_latents",
            "clean_action_steps",
            "domain_id",
        ),
    )
    latents = needed_floats(case, "latents", arrays, rank=4)
    sound = floats(case, "sound_latents", arrays, rank=2)
    action = floats(case, "action_latents", arrays, rank=2)
    domain_id = case.get("domain_id")
    if action is not None and not isinstance(domain_id, int):
        raise RequestError(
            f"{case['name']}: domain_id is {domain_id!r}; action latents need an integer"
        )
    sound_frames = 0 if sound is None else sound.shape[1]
    action_steps = 0 if action is None else action.shape[0]
    return GeneratorCase(
        name=case["name"],
        input_ids=ids(case, arrays),
        latents=latents,
        clean_frames=indexes(case, "clean_frames", latents.shape[1]),
        sound_latents=sound,
        clean_sound_frames=indexes(case, "clean_sound_frames", sound_frames),
        action_latents=action,
        clean_action_steps=indexes(case, "clean_action_steps", action_steps),
        domain_id=domain_id,
        timestep=float(case["timestep"]),
        fps=float(case["fps"]),
    )


def _vae_case(case: Mapping[str, Any], arrays: Arrays) -> VaeCase:
    check_keys(case, case["name"], required=("name",), optional=("latents", "video"))
    latents = floats(case, "latents", arrays, rank=5)
    video = floats(case, "video", arrays, rank=5)
    if (latents is None) == (video is None):
        raise RequestError(
            f"{case['name']}: a VAE case has either latents (decode) or video (encode)"
        )
    return VaeCase(name=case["name"], latents=latents, video=video)

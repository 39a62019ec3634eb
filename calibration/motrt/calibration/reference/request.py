"""The request of one reference run: reading ``request.json`` and ``arrays.npz``, refusing what is unclear.

Knows the protocol and numpy; knows neither torch nor any model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np

from motrt.calibration.reference.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    Arrays: TypeAlias = Mapping[str, NDArray[Any]]

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
    _check_keys(
        fields,
        "request.json",
        required=("checkpoint", "weights_dtype", "compute_dtype"),
        optional=("threads", "order", "reasoner_cases", "generator_cases", "vae_cases"),
    )
    weights_dtype = _choice(fields, "weights_dtype", ("float32", "float16", "bfloat16"))
    threads = fields.get("threads", 1)
    if not isinstance(threads, int) or threads < 1:
        raise RequestError(f"threads is {threads!r}; expected an integer of at least 1")
    return Request(
        checkpoint=Path(str(fields["checkpoint"])),
        weights_dtype=cast("DtypeName", weights_dtype),
        compute_dtype=cast("DtypeName", _choice(fields, "compute_dtype", get_args(DtypeName))),
        threads=threads,
        order=cast("Order", _choice(fields, "order", get_args(Order), default="default")),
        reasoner_cases=tuple(_reasoner_case(c, arrays) for c in _cases(fields, "reasoner_cases")),
        generator_cases=tuple(
            _generator_case(c, arrays) for c in _cases(fields, "generator_cases")
        ),
        vae_cases=tuple(_vae_case(c, arrays) for c in _cases(fields, "vae_cases")),
    )


def _cases(fields: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    cases = fields.get(kind) or []
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise RequestError(f"{kind} is not a list of objects")
    names = [case.get("name") for case in cases]
    if any(not isinstance(name, str) or not name for name in names) or len(set(names)) < len(
        names
    ):
        raise RequestError(f"{kind} are named {names}; every case needs a name of its own")
    return cases


def _reasoner_case(case: Mapping[str, Any], arrays: Arrays) -> ReasonerCase:
    _check_keys(case, case["name"], required=("name", "input_ids"))
    return ReasonerCase(name=case["name"], input_ids=_ids(case, arrays))


def _generator_case(case: Mapping[str, Any], arrays: Arrays) -> GeneratorCase:
    _check_keys(
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
    latents = _floats(case, "latents", arrays, rank=4)
    if latents is None:
        raise RequestError(f"{case['name']}: latents are missing; a generator case needs them")
    sound = _floats(case, "sound_latents", arrays, rank=2)
    action = _floats(case, "action_latents", arrays, rank=2)
    domain_id = case.get("domain_id")
    if action is not None and not isinstance(domain_id, int):
        raise RequestError(
            f"{case['name']}: domain_id is {domain_id!r}; action latents need an integer"
        )
    sound_frames = 0 if sound is None else sound.shape[1]
    action_steps = 0 if action is None else action.shape[0]
    return GeneratorCase(
        name=case["name"],
        input_ids=_ids(case, arrays),
        latents=latents,
        clean_frames=_clean(case, "clean_frames", latents.shape[1]),
        sound_latents=sound,
        clean_sound_frames=_clean(case, "clean_sound_frames", sound_frames),
        action_latents=action,
        clean_action_steps=_clean(case, "clean_action_steps", action_steps),
        domain_id=domain_id,
        timestep=float(case["timestep"]),
        fps=float(case["fps"]),
    )


def _vae_case(case: Mapping[str, Any], arrays: Arrays) -> VaeCase:
    _check_keys(case, case["name"], required=("name",), optional=("latents", "video"))
    latents = _floats(case, "latents", arrays, rank=5)
    video = _floats(case, "video", arrays, rank=5)
    if (latents is None) == (video is None):
        raise RequestError(
            f"{case['name']}: a VAE case has either latents (decode) or video (encode)"
        )
    return VaeCase(name=case["name"], latents=latents, video=video)


def _ids(case: Mapping[str, Any], arrays: Arrays) -> NDArray[np.int64]:
    ids = _array(case, "input_ids", arrays)
    if ids is None or ids.dtype != np.int64 or ids.ndim != 1 or not ids.size:
        got = "nothing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise RequestError(
            f"{case['name']}: input_ids are {got}; expected int64 [S], S of at least 1"
        )
    return ids


def _floats(
    case: Mapping[str, Any], field: str, arrays: Arrays, *, rank: int
) -> NDArray[np.float32] | None:
    array = _array(case, field, arrays)
    if array is None:
        return None
    if array.dtype != np.float32 or array.ndim != rank or not array.size:
        raise RequestError(
            f"{case['name']}: {field} is {array.dtype} {list(array.shape)}; expected float32 of rank {rank}"
        )
    if not np.isfinite(array).all():
        raise RequestError(f"{case['name']}: {field} holds NaN or infinity")
    return array


def _array(case: Mapping[str, Any], field: str, arrays: Arrays) -> NDArray[Any] | None:
    key = case.get(field)
    if key is None:
        return None
    if key not in arrays:
        raise RequestError(
            f"{case['name']}: {field} names {key!r}, which arrays.npz does not hold"
        )
    return arrays[key]


def _clean(case: Mapping[str, Any], field: str, length: int) -> tuple[int, ...]:
    indexes = tuple(case.get(field) or ())
    # The pipeline drops indexes outside of the clip silently; here they would hide a caller's mistake.
    if any(not isinstance(index, int) or not 0 <= index < length for index in indexes):
        raise RequestError(
            f"{case['name']}: {field} is {list(indexes)}; expected 0 to {length - 1}"
        )
    return tuple(sorted(set(indexes)))


def _choice(
    fields: Mapping[str, Any], field: str, allowed: Iterable[str], default: str | None = None
) -> str:
    value = fields.get(field, default)
    if value not in allowed:
        raise RequestError(f"{field} is {value!r}; expected one of {', '.join(allowed)}")
    return str(value)


def _check_keys(
    fields: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(fields, dict):
        raise RequestError(f"{where} is not a JSON object")
    missing = [key for key in required if key not in fields]
    unknown = [key for key in fields if key not in {*required, *optional}]
    if missing or unknown:
        raise RequestError(f"{where}: missing fields {missing}, unknown fields {unknown}")

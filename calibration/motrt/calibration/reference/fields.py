"""Reading the fields of a request: every key known, every array of the right type and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from motrt.calibration.reference.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    Arrays: TypeAlias = Mapping[str, NDArray[Any]]


def named_cases(fields: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the list of cases under ``kind``; each has a name of its own."""
    cases = fields.get(kind) or []
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise RequestError(f"{kind} is not a list of objects")
    names = [case.get("name") for case in cases]
    if any(not isinstance(name, str) or not name for name in names) or len(set(names)) < len(
        names
    ):
        raise RequestError(f"{kind} are named {names}; every case needs a name of its own")
    return cases


def check_keys(
    fields: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Refuse an object that lacks a key or has an unknown one."""
    if not isinstance(fields, dict):
        raise RequestError(f"{where} is not a JSON object")
    missing = [key for key in required if key not in fields]
    unknown = [key for key in fields if key not in {*required, *optional}]
    if missing or unknown:
        raise RequestError(f"{where}: missing fields {missing}, unknown fields {unknown}")


def choice(
    fields: Mapping[str, Any], field: str, allowed: Iterable[str], default: str | None = None
) -> str:
    """Return a field that has one of a few values."""
    value = fields.get(field, default)
    if value not in allowed:
        raise RequestError(f"{field} is {value!r}; expected one of {', '.join(allowed)}")
    return str(value)


def whole(case: Mapping[str, Any], field: str) -> int:
    """Return a field that counts something."""
    value = case.get(field)
    if type(value) is not int or value < 1:
        raise RequestError(
            f"{case['name']}: {field} is {value!r}; expected an integer of at least 1"
        )
    return value


def text(case: Mapping[str, Any], field: str) -> str | None:
    """Return a field that is text or nothing."""
    value = case.get(field)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{case['name']}: {field} is {value!r}; expected text")
    return value


def ids(case: Mapping[str, Any], arrays: Arrays) -> NDArray[np.int64]:
    """Return the token ids of a case."""
    found = _array(case, "input_ids", arrays)
    if found is None or found.dtype != np.int64 or found.ndim != 1 or not found.size:
        got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise RequestError(
            f"{case['name']}: input_ids are {got}; expected int64 [S], S of at least 1"
        )
    return found


def floats(
    case: Mapping[str, Any], field: str, arrays: Arrays, *, rank: int
) -> NDArray[np.float32] | None:
    """Return the finite float32 array that a field names, or None if it names none."""
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


def needed_floats(
    case: Mapping[str, Any], field: str, arrays: Arrays, *, rank: int
) -> NDArray[np.float32]:
    """Return the finite float32 array that a field names."""
    array = floats(case, field, arrays, rank=rank)
    if array is None:
        raise RequestError(f"{case['name']}: {field} are missing; such a case needs them")
    return array


def indexes(case: Mapping[str, Any], field: str, length: int) -> tuple[int, ...]:
    """Return the frames or steps that a field lists."""
    listed = tuple(case.get(field) or ())
    # The pipeline drops indexes outside of the clip silently; here they would hide a caller's mistake.
    if any(not isinstance(index, int) or not 0 <= index < length for index in listed):
        raise RequestError(
            f"{case['name']}: {field} is {list(listed)}; expected 0 to {length - 1}"
        )
    return tuple(sorted(set(listed)))


def _array(case: Mapping[str, Any], field: str, arrays: Arrays) -> NDArray[Any] | None:
    key = case.get(field)
    if key is None:
        return None
    if key not in arrays:
        raise RequestError(
            f"{case['name']}: {field} names {key!r}, which arrays.npz does not hold"
        )
    return arrays[key]

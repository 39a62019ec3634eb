"""Reading config dataclasses from JSON: every key is known and has its type.

A key that is silently dropped is a model that is silently another one.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_INT = 2**53  # beyond, a float rounds


def refuse_unknown(keys: Iterable[str], known: Iterable[str], source: str) -> None:
    """Refuse keys that mean nothing here.

    Raises:
        ConfigError: A key is unknown; the nearest known one is named.
    """
    names = sorted(known)
    for key in keys:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"{source} has an unknown key",
                got=repr(key),
                expected=f"a known key; the nearest is {near[0]!r}",
                fix="Correct the key, or remove it if it has no meaning for inference.",
            )


def typed(name: str, annotation: str, value: Any, source: str) -> Any:
    """Check the JSON type of one value; JSON has one number type, so 1e3 may stand for an int.

    Args:
        name: The key.
        annotation: Of the dataclass' field: ``int``, ``float``, ``bool``, ``str``, a ``Literal`` (of
            texts; which ones is the dataclass' to check), ``tuple[...]`` of one of these, or one
            of these ``| None``.
        value: The value.
        source: How messages call the file.

    Raises:
        ConfigError: The type is another one, or a number is not finite.
    """
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind.startswith("tuple["):
        items = kind.removeprefix("tuple[").removesuffix("]").split(", ")
        if isinstance(value, (list, tuple)) and (items[-1] == "..." or len(items) == len(value)):
            return tuple(typed(name, items[0], each, source) for each in value)
    elif kind == "bool":
        if isinstance(value, bool):
            return value
    elif kind in {"int", "float"}:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_sane(value):
            if kind == "float":
                return float(value)
            if float(value).is_integer() and abs(value) <= _MAX_INT:
                return int(value)
    elif isinstance(value, str):
        return value
    raise ConfigError(f"{source}: {name} has the wrong type", got=repr(value), expected=annotation)


def _is_sane(value: float) -> bool:
    """Whether ``float()`` keeps it: an integer of hundreds of digits would raise or round."""
    return abs(value) <= _MAX_INT if isinstance(value, int) else math.isfinite(value)

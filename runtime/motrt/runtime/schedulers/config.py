"""Reading scheduler configs: every key is known, has its JSON type, and does what it says."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING, Any, TypeVar

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ConfigT = TypeVar("ConfigT")

_MAX_INT = 2**53


def read_config(
    cls: type[ConfigT],
    data: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any],
    ignored: frozenset[str],
    source: str,
) -> ConfigT:
    """Build a config dataclass from a scheduler's JSON object.

    Args:
        cls: A frozen dataclass; its field annotations say which JSON types are right.
        data: The object; keys with a leading underscore have no meaning for the arithmetic.
        fixed: Public keys with the only value that is implemented.
        ignored: Public keys without meaning for inference by this class.
        source: How messages call the file.

    Raises:
        ConfigError: An unknown key (the nearest known one is named), an option that is not
            implemented, or a wrong value.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = sorted(fields.keys() | fixed.keys() | ignored)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in fields:
            values[key] = typed(key, fields[key], value, source)
        elif key in fixed:
            if value != fixed[key]:
                raise ConfigError(
                    f"{source}: this {key} is not implemented",
                    got=repr(value),
                    expected=repr(fixed[key]),
                )
        elif key not in ignored and not key.startswith("_"):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"{source} has an unknown key",
                got=key,
                expected=f"a known key; the nearest is {near[0]!r}",
                fix="Correct the key, or remove it if it has no meaning for inference.",
            )
    return cls(**values)


def typed(name: str, annotation: str, value: Any, source: str) -> Any:
    """Check the JSON type of one value; JSON has one number type, so 1e3 may stand for an int.

    Raises:
        ConfigError: The type is another one, or a number is not finite.
    """
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind.startswith("tuple["):
        if isinstance(value, (list, tuple)):
            item = kind.removeprefix("tuple[").removesuffix(", ...]")
            return tuple(typed(name, item, each, source) for each in value)
    elif kind in {"bool", "str"}:
        if isinstance(value, {"bool": bool, "str": str}[kind]):
            return value
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and _is_sane(value):
        if kind == "float":
            return float(value)
        if float(value).is_integer():
            return int(value)
    raise ConfigError(f"{source}: {name} has the wrong type", got=repr(value), expected=annotation)


def require(config: Any, name: str, holds: bool, expected: str) -> None:
    """Refuse a config's value unless ``holds``.

    Raises:
        ConfigError: It does not hold.
    """
    if not holds:
        raise ConfigError(
            f"the scheduler config's {name} cannot be right",
            got=repr(getattr(config, name)),
            expected=expected,
        )


def require_one_of(config: Any, name: str, *choices: str) -> None:
    """Refuse a config's value that is none of the choices.

    Raises:
        ConfigError: It is another one.
    """
    if getattr(config, name) not in choices:
        raise ConfigError(
            f"the scheduler config's {name} is not implemented",
            got=repr(getattr(config, name)),
            expected=f"one of {', '.join(choices)}",
        )


def _is_sane(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MAX_INT  # beyond, float() rounds or raises
    return math.isfinite(value)

"""Reading scheduler configs: every key is known, has its JSON type, and does what it says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from motrt.engines.errors import ConfigError
from motrt.engines.json_fields import refuse_unknown, typed

if TYPE_CHECKING:
    from collections.abc import Mapping

ConfigT = TypeVar("ConfigT")


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
    refuse_unknown(
        (key for key in data if not key.startswith("_")),
        fields.keys() | fixed.keys() | ignored,
        source,
    )
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in fields:
            values[key] = typed(key, fields[key], value, source)
        elif key in fixed and value != fixed[key]:
            raise ConfigError(
                f"{source}: this {key} is not implemented",
                got=repr(value),
                expected=repr(fixed[key]),
            )
    return cls(**values)


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

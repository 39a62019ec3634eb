"""Action vectors in JSON: a list of equally long lists of numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.atomic import write_atomic
from motrt.engines.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.tensors import Array


def load_actions(path: Path) -> Array:
    """Read actions, float32 ``[T, width]``.

    Raises:
        ConfigError: The file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        _check_widths(path, data)
        actions = np.array(data, np.float32)
    except (OSError, ValueError, TypeError, RecursionError) as err:
        raise ConfigError(
            f"cannot read actions from {path}", got=err, expected="a JSON list of number lists"
        ) from err
    if actions.ndim != 2 or not actions.size or not np.isfinite(actions).all():
        raise ConfigError(
            f"cannot use the actions of {path}",
            got=f"an array of shape {list(actions.shape)}",
            expected="finite numbers [T, width], T >= 1",
        )
    return actions


def _check_widths(path: Path, data: object) -> None:
    if not isinstance(data, list) or not all(isinstance(row, list) for row in data):
        return
    widths = [len(row) for row in data]
    odd = next((row for row, width in enumerate(widths) if width != widths[0]), None)
    if odd is not None:
        raise ConfigError(
            f"the actions of {path} are not equally wide",
            got=f"{widths[odd]} numbers in row {odd}",
            expected=f"{widths[0]}, as in row 0",
        )


def save_actions(path: Path, actions: Array | None) -> Path:
    """Write actions ``[T, width]``; nothing is left of a write that fails.

    Raises:
        ConfigError: There are none.
        ExportError: The disk refuses.
    """
    if actions is None:
        raise ConfigError("there are no actions to write", expected="an action mode")
    try:
        write_atomic(path, (json.dumps(actions.tolist()) + "\n").encode())
    except OSError as err:
        raise ExportError(f"cannot write {path}", got=err.strerror) from err
    return path

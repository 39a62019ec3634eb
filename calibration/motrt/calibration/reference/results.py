"""Writing the result of a reference run: both files, or an error, never half of one.

Needs numpy only, so that a missing torch can still be reported in ``result.json``.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.calibration.reference.errors import NonFiniteReference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

_ARRAYS, _REPORT = "result.npz", "result.json"


def clear_result(folder: Path) -> None:
    """Remove an earlier result, so that a killed run cannot be taken for the earlier one."""
    for name in (_REPORT, _ARRAYS):
        (folder / name).unlink(missing_ok=True)


def write_result(
    folder: Path, arrays: Mapping[str, NDArray[Any]], report: Mapping[str, Any]
) -> None:
    """Write ``result.npz``, then ``result.json``; the second rename is what says that the run is complete.

    Raises:
        NonFiniteReference: An array holds NaN or infinity; nothing is written.
    """
    broken = [key for key, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise NonFiniteReference(
            f"{len(broken)} reference outputs hold NaN or infinity, first {broken[0]!r}; "
            "use a compute_dtype with more range or check the checkpoint"
        )

    def save(file: BinaryIO) -> None:
        named: dict[str, Any] = dict(arrays)
        np.savez(file, **named)

    _replace(folder / _ARRAYS, save)
    _write_report(folder, report)


def write_error(folder: Path, error: BaseException) -> None:
    """Write ``result.json`` with the error's type and message, and leave no ``result.npz``."""
    (folder / _ARRAYS).unlink(missing_ok=True)
    _write_report(folder, {"error": {"type": type(error).__name__, "message": str(error)}})


def _write_report(folder: Path, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=2) + "\n"
    _replace(folder / _REPORT, lambda file: file.write(text.encode()))


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

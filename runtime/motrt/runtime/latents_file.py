"""Latents in a file: what ``--latents`` reads and writes.

An NPZ of float32 arrays: ``latents`` ``[1, C, T, h, w]``, and, where a model has them,
``sound_latents`` ``[C, T]`` and ``action_latents`` ``[T, A]``; as the generator makes them, that is
normalised.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime._atomic_output import AtomicOutput, refusals
from motrt.runtime._npz import read_npz, write_member

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

_SHAPES = {
    "latents": ("1", "C", "T", "h", "w"),
    "sound_latents": ("C", "T"),
    "action_latents": ("T", "A"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latents:
    """Latents of one sample; float32, finite.

    Attributes:
        latents: Of the picture, ``[1, C, T, h, w]``.
        sound_latents: ``[C, T]``, if there is sound.
        action_latents: ``[T, A]``, if there are actions.

    Raises:
        ConfigError: An array is of another type or shape, empty, or not finite.
    """

    latents: Floats
    sound_latents: Floats | None = None
    action_latents: Floats | None = None

    def __post_init__(self) -> None:
        """Check every array; see the class docstring."""
        for name, array in self.arrays().items():
            shape = _SHAPES[name]
            dtype = getattr(array, "dtype", type(array).__name__)
            have: tuple[int, ...] = getattr(array, "shape", ())
            fits = len(have) == len(shape) and 0 not in have
            if dtype != np.float32 or not fits or (shape[0] == "1" and have[0] != 1):
                raise ConfigError(
                    f"{name} are of the wrong type or shape",
                    got=f"{dtype} {list(have)}",
                    expected=f"float32 [{', '.join(shape)}]",
                )
            if not np.isfinite(array).all():
                raise ConfigError(
                    f"{name} hold NaN or infinity",
                    got=f"{int((~np.isfinite(array)).sum())} such values",
                    expected="finite numbers",
                )

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays that are there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: array for name, array in found.items() if array is not None or name == "latents"
        }


def load_latents(path: str | os.PathLike[str]) -> Latents:
    """Read a file of latents.

    Raises:
        ConfigError: It is absent, damaged, no NPZ, or an array is missing, unknown or wrong.
    """
    path = Path(path)
    arrays = read_npz(path, names=tuple(_SHAPES))
    if "latents" not in arrays:
        raise ConfigError(
            f"{path} lacks an array",
            got=f"only {', '.join(arrays) or 'nothing'}",
            expected="latents [1, C, T, h, w]",
        )
    try:
        return Latents(**arrays)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err.message}", got=err.got, expected=err.expected) from err


def save_latents(path: str | os.PathLike[str], latents: Latents) -> None:
    """Write a file of latents, whole or not at all.

    Raises:
        ExportError: The disk refuses; a file of that name is unchanged.
    """
    output = AtomicOutput(Path(path))
    try:
        with refusals(output.target):
            with zipfile.ZipFile(output.temporary, "w") as archive:
                for name, array in latents.arrays().items():
                    write_member(archive, name, array)
            output.commit()
    finally:
        output.discard()

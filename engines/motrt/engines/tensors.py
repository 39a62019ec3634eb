"""The description of one named tensor that crosses an engine's boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from motrt.engines.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.dtypes import DType

Array = npt.NDArray[Any]
Dim = int | str  # a number, or the name of a dimension that varies from run to run


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape; a shape may hold names of dimensions."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with its dimensions' values put in."""
        return tuple(dims[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of this type and of such a shape."""
        return math.prod(shape) * self.dtype.itemsize

    def describe(self) -> str:
        """Return for example ``logits float32 [batch, logits, 512]``."""
        return f"{self.name} {self.dtype.label} [{', '.join(map(str, self.shape))}]"


class Shaped(Protocol):
    """An array, or something on a device that has an array's shape and type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""


def check_arrays(
    specs: tuple[TensorSpec, ...], arrays: Mapping[str, Shaped], *, engine: str
) -> dict[str, int]:
    """Check what somebody wants to feed to an engine, before it computes.

    Args:
        specs: The engine's inputs.
        arrays: Array per input name.
        engine: Name for messages.

    Returns:
        The value of each named dimension.

    Raises:
        ContractError: A name is missing or unknown, or a dtype or a shape is wrong, or two
            inputs disagree about a dimension.
    """
    names = {spec.name for spec in specs}
    if names != arrays.keys():
        missing, unknown = sorted(names - arrays.keys()), sorted(arrays.keys() - names)
        raise ContractError(
            f"the {engine}'s inputs do not match the contract",
            got=f"missing {missing[:4]}, unknown {unknown[:4]}",
            expected=f"{len(names)} named inputs",
            fix="See docs/contract.md.",
        )
    dims: dict[str, int] = {}
    for spec in specs:
        array = arrays[spec.name]
        if array.dtype != spec.dtype.numpy or len(array.shape) != len(spec.shape):
            raise _wrong(engine, spec, array)
        for want, have in zip(spec.shape, array.shape, strict=True):
            expected = dims.setdefault(want, have) if isinstance(want, str) else want
            if expected != have:
                raise _wrong(engine, spec, array, dims)
    return dims


def _wrong(
    engine: str, spec: TensorSpec, array: Shaped, dims: Mapping[str, int] | None = None
) -> ContractError:
    known = ", ".join(f"{name}={value}" for name, value in (dims or {}).items())
    return ContractError(
        f"the {engine}'s input {spec.name} has the wrong type or shape",
        got=f"{np.dtype(array.dtype).name} {list(array.shape)}",
        expected=spec.describe() + (f" with {known}" if known else ""),
        fix="See docs/contract.md.",
    )

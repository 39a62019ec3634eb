"""What a finished plan holds, before anybody trusts it.

Without a GPU a plan cannot be deserialized, so its names are looked for in its bytes: TensorRT
writes a string with its length before it, which no accident of code or of a longer name has.
Where the target's GPU is here, TensorRT's own list is read instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.plans.options import WeightsMode

# Code of a layer in one profile was 0.9 to 1.3 MB on TensorRT-RTX 1.7, whatever the weights.
_BYTES_PER_LAYER_AND_PROFILE = 2_000_000
_BYTES_BESIDES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found in a plan.

    Attributes:
        method: ``bytes`` (looked for in the plan) or ``engine`` (asked of TensorRT).
        weights: How many names were looked for; all were found.
        nbytes: Size of the plan.
        bound_bytes: What a plan without weights should not exceed.
        products: Matrix products and fused attentions by the type that they compute in.
        fused_attention: Number of fused attentions.
        decomposed_attention: Number of attentions that may fall apart.
    """

    method: str
    weights: int
    nbytes: int
    bound_bytes: int
    products: dict[str, int]
    fused_attention: int
    decomposed_attention: int

    @property
    def is_within_bound(self) -> bool:
        """Whether the plan is as small as one without weights is."""
        return self.nbytes <= self.bound_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "method": self.method,
            "weights": self.weights,
            "bytes": self.nbytes,
            "bound_bytes": self.bound_bytes,
            "within_bound": self.is_within_bound,
            "products": self.products,
            "fused_attention": self.fused_attention,
            "decomposed_attention": self.decomposed_attention,
        }


def names_in_bytes(plan: bytes, names: Iterable[str]) -> set[str]:
    """Return the names that a plan holds as whole strings."""
    return {name for name in names if _as_written(name) in plan}


def size_bound(num_layers: int, num_profiles: int) -> int:
    """Return the most bytes that a plan without weights should have."""
    return num_layers * num_profiles * _BYTES_PER_LAYER_AND_PROFILE + _BYTES_BESIDES


def check_names(engine: str, mode: WeightsMode, wanted: Iterable[str], found: set[str]) -> None:
    """Account for every weight.

    Raises:
        BuildError: A weight's name is not in the plan, or (where TensorRT listed them) the plan
            has one that the store lacks.
    """
    names = set(wanted)
    missing, foreign = sorted(names - found), sorted(found - names)
    if missing or foreign:
        what = "can be refitted" if mode == "refit" else "are inputs"
        raise BuildError(
            f"the {engine}'s plan does not have the store's weights",
            got=f"{len(missing)} missing ({', '.join(missing[:3])}), "
            f"{len(foreign)} foreign ({', '.join(foreign[:3])})",
            expected=f"{len(names)} names that {what}",
            fix="Do not use this TensorRT for it; --weights "
            f"{'inputs' if mode == 'refit' else 'refit'} is the other way.",
        )


def check_precision(engine: str, wanted: str, products: dict[str, int]) -> None:
    """Hold the network to the bundle's precision: a build must not quietly widen it.

    Raises:
        BuildError: No matrix product computes in it.
    """
    if not products.get(wanted):
        raise BuildError(
            f"the {engine}'s network does not compute in the bundle's precision",
            got=", ".join(f"{count} x {name}" for name, count in products.items())
            or "no products",
            expected=wanted,
            fix="Export the checkpoint again.",
        )


def names_of_engine(trt: Any, logger: Any, plan: bytes, mode: WeightsMode) -> set[str]:
    """Ask TensorRT for a plan's refittable weights, or its inputs; needs the target's GPU.

    Raises:
        BuildError: The plan does not deserialize on this machine.
    """
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise BuildError(
            "the plan does not deserialize where it was built",
            got="no engine",
            expected="an engine",
            fix="Run motrt doctor: is the driver new enough for this TensorRT?",
        )
    if mode == "refit":
        return set(trt.Refitter(engine, logger).get_all_weights())
    return {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}


def _as_written(name: str) -> bytes:
    data = name.encode()
    return struct.pack("<Q", len(data)) + data

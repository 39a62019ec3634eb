"""Optimization profiles: the sizes that a plan accepts, from the contract and the user's shapes.

The reasoner has two, a prefill and a decode one. Decode is 1 to 16 tokens and not 1 alone: a
profile without a dynamic dimension is compiled as another graph with its own copy of the weights.
The generator has one, or several where one range would be wide, as TensorRT tunes for one point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.contract import Cache, Modality
from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from motrt.engines.model_config import ModelConfig
    from motrt.engines.plans.options import BuildShapes
    from motrt.engines.tensors import Dim, TensorSpec
    from motrt.engines.vae_config import VaeConfig

Range = tuple[int, int, int]  # least, tuned for, most

DECODE_TOKENS = 16
MAX_LOGITS = 16
_TYPICAL_CONTEXT = 512
# A clip of 192x320 has 60 tokens a frame: below, ranges are narrow in any case.
_SMALLEST_CLIP_TOKENS = 64
_WIDE = 16  # most over least, beyond which a range gets several profiles


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile: the range of each named dimension of the contract."""

    name: str
    dims: dict[str, Range]

    def shapes(self, spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return an input's least, tuned and most shape."""
        low, best, high = (
            tuple(self._size(dim, which) for dim in spec.shape) for which in range(3)
        )
        return low, best, high

    def _size(self, dim: Dim, which: int) -> int:
        return self.dims[dim][which] if isinstance(dim, str) else dim

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"name": self.name, "dims": {name: list(each) for name, each in self.dims.items()}}


def reasoner_profiles(shapes: BuildShapes, cache: Cache) -> tuple[Profile, ...]:
    """Return prefill and decode."""
    batch = _up_to(shapes.max_batch)
    capacity = shapes.max_context
    prefill = (1, min(_TYPICAL_CONTEXT, shapes.prefill), shapes.prefill)
    decode = (1, 1, min(DECODE_TOKENS, capacity))
    profiles: list[Profile] = []
    for name, tokens in (("prefill", prefill), ("decode", decode)):
        dims: dict[str, Range] = {"batch": batch, "tokens": tokens}
        dims["logits"] = (1, 1, min(MAX_LOGITS, tokens[2]))
        if cache is Cache.STATIC:
            dims["capacity"] = (capacity, capacity, capacity)
        else:
            # A first call has no past; a decoding step most often has some hundred tokens. The
            # runtime hands over whole buffers, so that a past may be as long as the cache.
            past = (0, 0 if name == "prefill" else min(_TYPICAL_CONTEXT, capacity), capacity)
            dims["past"] = past
            dims["total"] = _sum([past, tokens])
        profiles.append(Profile(name, dims))
    return tuple(profiles)


def generator_profiles(
    shapes: BuildShapes,
    modalities: Sequence[Modality],
    model: ModelConfig,
    vae: VaeConfig | None,
) -> tuple[Profile, ...]:
    """Return one profile for each range of vision tokens.

    Raises:
        ConfigError: Sizes that give more tokens than a dimension can hold.
    """
    sizes = sorted({size.tokens(model, vae) for size in shapes.sizes})
    if sizes and sizes[-1] >= 1 << 30:
        raise ConfigError("a clip is too large", got=f"{sizes[-1]} tokens", expected="below 2^30")
    ranges = _around(sizes) if sizes else _split(shapes.max_tokens)
    others = {Modality.SOUND: shapes.max_sound, Modality.ACTION: shapes.max_action}
    profiles: list[Profile] = []
    for index, vision in enumerate(ranges):
        dims: dict[str, Range] = {
            "batch": _up_to(shapes.max_batch),
            "context": (1, min(_TYPICAL_CONTEXT, shapes.max_context), shapes.max_context),
            "vision": vision,
        }
        for modality in modalities:
            if modality in others:
                dims[modality.value] = (0, others[modality], others[modality])
        dims["generated"] = _sum(dims[modality.value] for modality in modalities)
        profiles.append(Profile(f"vision-{index}", dims))
    return tuple(profiles)


def _split(most: int) -> list[Range]:
    """Cut 1 … most into as few ranges as keep each narrow; each is tuned for its largest."""
    span = max(most / _SMALLEST_CLIP_TOKENS, 1)
    count = max(math.ceil(math.log(span, _WIDE) - 1e-9), 1)
    ends = [round(most * span ** (-(count - 1 - i) / count)) for i in range(count)]
    starts = [1, *(end + 1 for end in ends[:-1])]
    return [(low, high, high) for low, high in zip(starts, ends, strict=True)]


def _around(sizes: list[int]) -> list[Range]:
    """Group the sizes that are asked for; a group is tuned for its largest."""
    groups: list[list[int]] = [[sizes[0]]]
    for size in sizes[1:]:
        if size > groups[-1][0] * _WIDE:
            groups.append([size])
        else:
            groups[-1].append(size)
    return [(group[0], group[-1], group[-1]) for group in groups]


def _up_to(most: int) -> Range:
    return 1, 1, most


def _sum(ranges: Iterable[Range]) -> Range:
    low, best, high = (sum(column) for column in zip(*ranges, strict=True))
    return low, best, high

"""The fixed input on which engines are compared after every write: small, seeded, for any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import MASK_VALUE
from motrt.engines.dtypes import DType

if TYPE_CHECKING:
    from motrt.engines.contract import EngineContract
    from motrt.engines.tensors import Array, TensorSpec

SEED = 20
TOKENS, PAST = 5, 3
_SIZES = {
    "batch": 1,
    "tokens": TOKENS,
    "past": PAST,
    "total": PAST + TOKENS,
    "capacity": PAST + TOKENS,
    "logits": TOKENS,
    "context": 4,
    "vision": 6,
    "sound": 3,
    "action": 2,
}


def probe_feeds(contract: EngineContract) -> dict[str, Array]:
    """Return an array for each input of an engine; the same numbers every time."""
    rng = np.random.RandomState(SEED)
    sizes = dict(_SIZES)
    generated = ("vision", "sound", "action")
    names = {dim for spec in contract.inputs for dim in spec.shape}
    sizes["generated"] = sum(sizes[name] for name in generated if name in names)

    def draw(spec: TensorSpec) -> Array:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        if spec.dtype is DType.INT64:
            return np.zeros(shape, np.int64)
        return rng.standard_normal(shape).astype(spec.dtype.numpy)

    feeds = {spec.name: draw(spec) for spec in contract.inputs}
    if "attention_bias" in feeds:
        visible = np.arange(PAST + TOKENS) <= PAST + np.arange(TOKENS)[:, None]
        bias = np.where(visible, 0, MASK_VALUE)[None, None]
        feeds["attention_bias"] = bias.astype(feeds["attention_bias"].dtype)
        feeds["logit_indices"] = np.arange(TOKENS, dtype=np.int64)[None]
    if "write_indices" in feeds:
        feeds["write_indices"] = np.array([PAST], np.int64)
    for name in ("vision_noise_mask", "sound_noise_mask", "action_noise_mask"):
        if name in feeds:
            feeds[name] = (np.arange(feeds[name].size) > 0).astype(np.float32)[None]
    if "timestep" in feeds:
        feeds["timestep"] = np.array([417.0], np.float32)
    return feeds

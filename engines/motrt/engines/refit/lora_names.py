"""From the keys of a LoRA file to the tensors of a checkpoint.

Two families of names: PEFT's ``base_model.model.<module>.lora_A.weight`` and diffusers'
``transformer.<module>.lora_A.weight``, of which older files say ``lora.down`` / ``lora.up``, and
``lora_down`` / ``lora_up``. A reasoner trained through transformers' classes has other module names;
they are renamed. What a key may end in is listed here; everything else is refused by name.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from motrt.engines.errors import RefitError
from motrt.engines.weight_names import EMBED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.store import WeightEntry


class Role(enum.Enum):
    """What a tensor of an adapter is: W' = W + scale · up @ down."""

    DOWN = "lora_A"
    UP = "lora_B"
    ALPHA = "alpha"


_ENDINGS: tuple[tuple[str, Role], ...] = (
    (".lora_A.weight", Role.DOWN),
    (".lora_B.weight", Role.UP),
    (".lora_A.default.weight", Role.DOWN),
    (".lora_B.default.weight", Role.UP),
    (".lora.down.weight", Role.DOWN),
    (".lora.up.weight", Role.UP),
    (".lora_down.weight", Role.DOWN),
    (".lora_up.weight", Role.UP),
    (".alpha", Role.ALPHA),
)
# Parts of keys by which variants are known that are no plain low-rank update.
_VARIANTS: tuple[tuple[str, str], ...] = (
    ("lora_magnitude_vector", "DoRA"),
    ("dora_scale", "DoRA"),
    ("lora_embedding_", "LoRA of an embedding table"),
    ("lora_mid", "LoCon"),
    ("lokr_", "LoKr"),
    ("hada_", "LoHa"),
    ("oft_", "OFT"),
    ("boft_", "BOFT"),
    ("ia3_", "IA3"),
    ("vera_", "VeRA"),
    ("lora_B.bias", "LoRA with a bias"),
    ("lora_B.default.bias", "LoRA with a bias"),
    ("modules_to_save", "whole modules beside the low-rank ones"),
)
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
_TEXT_PREFIXES = ("model.language_model.", "language_model.", "model.")
# transformers' names of the causal tower's maps; no rows are permuted between the two.
_RENAMED = {
    "self_attn.q_proj": "self_attn.to_q",
    "self_attn.k_proj": "self_attn.to_k",
    "self_attn.v_proj": "self_attn.to_v",
    "self_attn.o_proj": "self_attn.to_out",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_LAYER = re.compile(r"(layers\.\d+\.)(.+)")


def role_of(key: str, file: str) -> tuple[str, Role]:
    """Split a key into the module that it names and what the tensor is.

    Raises:
        RefitError: The tensor is no part of a plain LoRA; the variant is named if it is known.
    """
    for mark, variant in _VARIANTS:
        if mark in key:
            raise unsupported(file, variant, key)
    for ending, role in _ENDINGS:
        if key.endswith(ending):
            return key.removesuffix(ending), role
    raise unsupported(file, "a tensor that is no low-rank factor", key)


def unsupported(file: str, variant: str, got: str) -> RefitError:
    """Return the refusal of something that a merge of plain LoRA would silently drop."""
    return RefitError(
        f"{file} is not a plain LoRA",
        got=f"{variant} ({got})",
        expected="low-rank factors of linear maps alone",
        fix="Merge the adapter into a checkpoint with the tool that trained it, "
        "and refit with --weights.",
    )


def without_wrapper(module: str) -> str:
    """Return a module's name in the model that was trained, without PEFT's or a pipeline's."""
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    return module


def tensor_of(module: str, table: Mapping[str, WeightEntry]) -> str | None:
    """Return the checkpoint's name of a module's matrix, or None if there is none."""
    name = without_wrapper(module)
    names = [name, *(name.removeprefix(p) for p in _TEXT_PREFIXES if name.startswith(p))]
    for candidate in names:
        layer = _LAYER.fullmatch(candidate)
        own = layer[1] + _RENAMED.get(layer[2], layer[2]) if layer else candidate
        tensor = f"{own}.weight"
        if tensor in table and is_linear(tensor, table[tensor].shape):
            return tensor
    return None


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the matrix of a linear map, ``[out, in]``: tables are not."""
    is_table = name == EMBED_TOKENS or name.startswith(("action_proj_in.", "action_proj_out."))
    return len(shape) == 2 and not is_table

"""Tensor names of the two halves of a layer; no torch.

Only for building fixtures: the exporter has its own map, and tests hold the two against each other.
"""

import re

_LAYER_HALVES = {
    "input_layernorm": "input_layernorm_moe_gen",
    "post_attention_layernorm": "post_attention_layernorm_moe_gen",
    "self_attn.to_q": "self_attn.add_q_proj",
    "self_attn.to_k": "self_attn.add_k_proj",
    "self_attn.to_v": "self_attn.add_v_proj",
    "self_attn.to_out": "self_attn.to_add_out",
    "self_attn.norm_q": "self_attn.norm_added_q",
    "self_attn.norm_k": "self_attn.norm_added_k",
    "mlp.gate_proj": "mlp_moe_gen.gate_proj",
    "mlp.up_proj": "mlp_moe_gen.up_proj",
    "mlp.down_proj": "mlp_moe_gen.down_proj",
}
_LAYER = re.compile(r"(layers\.\d+\.)(.+)(\.weight|\.bias)")


def generator_name(name: str) -> str | None:
    """Return the generator's name of a reasoner tensor of the layer stack, ``None`` for heads."""
    if name == "norm.weight":
        return "norm_moe_gen.weight"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_HALVES:
        return None
    return match[1] + _LAYER_HALVES[match[2]] + match[3]

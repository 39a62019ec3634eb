"""transformers' Cosmos 3 text path over the reasoner's weights of a diffusers model.

Knows which configs transformers has a class for, and the names that its classes give to the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from motrt.calibration.reference.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ATTENTION_NAMES = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out": "o_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_EDGE_NAMES = {"up_proj": "fc1", "down_proj": "fc2"}
_TINY_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_attention_heads": 1,
    "depth": 1,
    "num_hidden_layers": 1,
    "deepstack_visual_indexes": [],
}


def unsupported_reason(config: Any) -> str | None:
    """Say why transformers has no class for ``config`` (of a diffusers transformer), or return None."""
    if config.hidden_act == "silu":
        return None if config.qk_norm_for_text else "cosmos3_omni always has qk-norm"
    if config.qk_norm_for_text:
        return "cosmos3_edge never has qk-norm"
    if config.hidden_size % config.num_attention_heads:
        return "cosmos3_edge wants hidden_size to be a multiple of num_attention_heads"
    if sum(config.rope_axes_dim) != config.head_dim // 2:
        return "cosmos3_edge wants rope axes that fill half of head_dim"
    return None


def build_text_model(transformer: Any) -> Any:
    """Build transformers' conditional-generation model over the parameters of ``transformer``.

    Parameters are shared, not copied. The vision tower stays on the meta device and cannot run.

    Args:
        transformer: A filled ``Cosmos3OmniTransformer`` for which ``unsupported_reason`` is None.

    Raises:
        CheckpointError: The class has a text parameter that the checkpoint has no tensor for.
    """
    import transformers

    source = transformer.config
    is_edge = source.hidden_act == "relu2"
    text_config = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": source.head_dim,
        "hidden_act": source.hidden_act,
        "rms_norm_eps": source.rms_norm_eps,
        "attention_bias": source.attention_bias,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": source.rope_theta,
            "mrope_section": list(source.rope_axes_dim),
        },
    }
    if is_edge:
        config = transformers.Cosmos3EdgeConfig(
            text_config=text_config,
            vision_config=_vision(transformers.Cosmos3EdgeVisionConfig),
            projector_hidden_size=8,
        )
        cls = transformers.Cosmos3EdgeForConditionalGeneration
    else:
        text_config |= {"model_type": "qwen3_vl_text"}
        vision = _vision(transformers.Qwen3VLVisionConfig) | {"model_type": "qwen3_vl_vision"}
        config = transformers.Cosmos3OmniConfig(text_config=text_config, vision_config=vision)
        cls = transformers.Cosmos3OmniForConditionalGeneration
    with torch.device("meta"):
        model = cls(config)
    text = model.model.language_model
    # As in weights.py: the frequencies come from the constructor, not from a file.
    text.rotary_emb = type(text.rotary_emb)(config=config.text_config)
    _share_parameters(model, transformer, is_edge=is_edge)
    return model.eval()


def _vision(config_class: Any) -> dict[str, Any]:
    known = config_class().to_dict()
    return {key: value for key, value in _TINY_VISION.items() if key in known}


def _share_parameters(model: torch.nn.Module, transformer: Any, *, is_edge: bool) -> None:
    renamed: Mapping[str, torch.nn.Parameter] = {
        _transformers_name(name, is_edge=is_edge): parameter
        for name, parameter in transformer.named_parameters()
    }
    for name, parameter in list(model.named_parameters()):
        if name.startswith(("model.visual.", "model.projector.")):
            continue
        shared = renamed.get(name)
        if shared is None or shared.shape != parameter.shape:
            raise CheckpointError(
                f"{type(model).__name__} wants {name} {list(parameter.shape)}, the checkpoint has "
                f"{'nothing' if shared is None else list(shared.shape)} for it"
            )
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, shared)


def _transformers_name(name: str, *, is_edge: bool) -> str:
    names = _ATTENTION_NAMES | (_EDGE_NAMES if is_edge else {})
    renamed = ".".join(names.get(part, part) for part in name.split("."))
    return renamed if name.startswith("lm_head.") else f"model.language_model.{renamed}"

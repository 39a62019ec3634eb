"""The table of tensors equals diffusers' ``state_dict``, for every kind of config."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import Cosmos3OmniTransformer

from motrt.engines.model_config import ModelConfig
from motrt.engines.weight_names import (
    EMBED_TOKENS,
    TIME_EMBEDDER,
    Part,
    generator_layer,
    generator_norm,
    reasoner_layer,
    weight_table,
)
from omni_fixtures.configs import (
    EDGE_LIKE,
    NANO_LIKE,
    PUBLISHED,
    SHARED,
    SUPER_LIKE,
    transformer_kwargs,
)
from omni_fixtures.names import generator_name
from tiny_checkpoints import TINY

CUSTOM: dict[str, Any] = {
    **TINY,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": 33,
    "latent_channel": 5,
    "latent_patch_size": 3,
    "patch_latent_dim": 45,
    "action_dim": 7,
    "num_embodiment_domains": 5,
    "sound_dim": 9,
}
SEPARATE: dict[str, dict[str, Any]] = {
    "nano-like": NANO_LIKE,
    "edge-like": EDGE_LIKE,
    "super-like": SUPER_LIKE,
    **PUBLISHED,
    "tiny": TINY,
    "custom": CUSTOM,
    "bias": {**CUSTOM, "attention_bias": True},
    "bias, relu2": {**CUSTOM, "attention_bias": True, "hidden_act": "relu2"},
    "no text norm": {**CUSTOM, "qk_norm_for_text": False},
    "both key norms": {**CUSTOM, "qk_norm_for_text": True, "use_und_k_norm_for_gen": True},
    "context key norm": {**CUSTOM, "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
    "action alone": {**CUSTOM, "sound_gen": False, "sound_dim": None},
    "sound alone": {**CUSTOM, "action_gen": False, "action_dim": None},
    "vision alone": {**CUSTOM, "action_gen": False, "sound_gen": False},
}


def _state_dict(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Cosmos3OmniTransformer(**transformer_kwargs(config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", SEPARATE)
def test_the_table_is_the_state_dict(name: str) -> None:
    config = SEPARATE[name]
    table = weight_table(ModelConfig.from_dict(config))
    assert {key: spec.shape for key, spec in table.items()} == _state_dict(config)
    assert Part.BOTH not in {spec.part for spec in table.values()}


def test_the_shared_table_is_the_state_dict_without_the_second_half() -> None:
    table = weight_table(ModelConfig.from_dict(SHARED))
    whole = _state_dict(SHARED)
    second = {generator_name(name) for name in whole} - {None}
    assert second <= whole.keys()
    assert {key: spec.shape for key, spec in table.items()} == {
        name: shape for name, shape in whole.items() if name not in second
    }
    both = {name for name, spec in table.items() if spec.part is Part.BOTH}
    assert both == {name for name in whole if generator_name(name) is not None}


@pytest.mark.parametrize("config", [NANO_LIKE, EDGE_LIKE, {**CUSTOM, "attention_bias": True}])
def test_the_halves_pair_up_as_in_the_fixtures(config: dict[str, Any]) -> None:
    table = weight_table(ModelConfig.from_dict(config))
    for name, spec in table.items():
        other = generator_name(name)
        if other is not None:
            assert spec.part is Part.REASONER
            assert table[other].part is Part.GENERATOR
            assert table[other].shape == spec.shape


def test_who_reads_what() -> None:
    model = ModelConfig.from_dict(EDGE_LIKE)
    table = weight_table(model)
    parts = {part: {n for n, s in table.items() if s.part is part} for part in Part}
    assert parts[Part.HOST] == {EMBED_TOKENS}
    assert {n for n in parts[Part.REASONER] if not n.startswith("layers.")} == {
        "lm_head.weight",
        "norm.weight",
    }
    assert f"{reasoner_layer(2).context_key_norm}.weight" in parts[Part.REASONER]
    assert f"{generator_norm(model)}.weight" in parts[Part.GENERATOR]
    assert {name for name in table if name.startswith(TIME_EMBEDDER)} <= parts[Part.GENERATOR]
    assert f"{generator_layer(model, 1).query_norm}.weight" in parts[Part.GENERATOR]

"""Config files: public ones of every age are read, and nothing doubtful is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError
from motrt.engines.model_config import ModelConfig
from omni_fixtures.configs import EDGE_LIKE, NANO_LIKE, PUBLISHED, SHARED, SUPER_LIKE
from tiny_checkpoints import TINY

NEWEST = ("hidden_act", "qk_norm_for_text", "use_und_k_norm_for_gen", "rope_axes_dim")
HUGE = 10**400


def _refusal(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**TINY, **values}, source="config.json")
    assert "\n" not in str(caught.value)
    assert caught.value.got
    assert caught.value.expected
    return caught.value


@pytest.mark.parametrize("config", [NANO_LIKE, EDGE_LIKE, SUPER_LIKE, SHARED, TINY])
def test_a_config_survives_the_round_trip(config: dict[str, Any]) -> None:
    model = ModelConfig.from_dict(config)
    assert ModelConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    for key, value in config.items():
        assert model.to_dict()[key] == value


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    model = ModelConfig.from_dict(PUBLISHED[name])
    assert model.rope_axes_dim == (24, 20, 20)
    assert model.weight_layout == "separate"
    assert model.has_context_key_norm is (name == "edge")
    assert model.is_gated is (name != "edge")
    assert model.norm_multiplies_in_float32 is (name == "edge")
    assert model.sound_gen is (name != "edge")


def test_old_files_take_the_defaults_of_diffusers() -> None:
    old = {key: value for key, value in NANO_LIKE.items() if key not in NEWEST}
    model = ModelConfig.from_dict(old)
    assert (model.hidden_act, model.qk_norm_for_text) == ("silu", True)
    assert (model.use_und_k_norm_for_gen, model.rope_axes_dim) == (False, (24, 20, 20))
    axes = {"rope_scaling": {"mrope_section": [12, 10, 10]}}
    assert ModelConfig.from_dict({**old, **axes}).rope_axes_dim == (12, 10, 10)
    assert ModelConfig.from_dict({**NANO_LIKE, "rope_scaling": None}).rope_axes_dim == (12, 10, 10)
    both = {**axes, "rope_axes_dim": [6, 5, 5]}
    assert ModelConfig.from_dict({**old, **both}).rope_axes_dim == (6, 5, 5)


def test_defaults_are_those_of_diffusers() -> None:
    transformer = pytest.importorskip("diffusers").Cosmos3OmniTransformer
    import inspect

    theirs = inspect.signature(transformer.__init__).parameters
    ours = ModelConfig().to_dict()
    for key in ours.keys() - {"weight_layout", "rope_axes_dim"}:
        assert ours[key] == theirs[key].default, key
    assert theirs.keys() - ours.keys() == {"self", "attention_dropout", "dtype", "rope_scaling"}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("hiden_size", "hidden_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("rope_thetas", "rope_theta"),
        ("weightlayout", "weight_layout"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(key: str, nearest: str) -> None:
    error = _refusal(**{key: 1})
    assert error.got == repr(key)
    assert nearest in str(error)


@pytest.mark.parametrize("key", ["", "\x00", "日本語", "z" * 500, "{}"])
def test_odd_unknown_keys_are_refused(key: str) -> None:
    _refusal(**{key: 1})


def test_quantized_checkpoints_are_refused() -> None:
    assert "quantized" in str(_refusal(quantization_config={"quant_method": "fp8"}))
    assert ModelConfig.from_dict({**TINY, "quantization_config": None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", True),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("hidden_size", [64]),
        ("hidden_size", {"value": 64}),
        ("hidden_size", 64.5),
        ("hidden_size", float("nan")),
        ("hidden_size", float("inf")),
        ("num_hidden_layers", False),
        ("num_hidden_layers", "two"),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", True),
        ("rms_norm_eps", None),
        ("rms_norm_eps", HUGE),
        ("rms_norm_eps", -HUGE),
        ("rope_theta", None),
        ("rope_theta", [1e6]),
        ("hidden_act", 3),
        ("hidden_act", None),
        ("hidden_act", ["silu"]),
        ("weight_layout", 1),
        ("weight_layout", None),
        ("attention_bias", 1),
        ("attention_bias", 0.0),
        ("attention_bias", "false"),
        ("attention_bias", None),
        ("qk_norm_for_text", "true"),
        ("action_gen", 1),
        ("action_dim", "8"),
        ("action_dim", True),
        ("action_dim", 8.5),
        ("rope_axes_dim", [4, 2]),
        ("rope_axes_dim", [4, 2, 2, 2]),
        ("rope_axes_dim", [4, 2, 2.5]),
        ("rope_axes_dim", [4, True, 2]),
        ("rope_axes_dim", "422"),
        ("rope_axes_dim", 4),
        ("rope_axes_dim", {"t": 4}),
    ],
    ids=str,
)
def test_wrong_types_are_refused_by_name(key: str, value: Any) -> None:
    assert key in str(_refusal(**{key: value}))


@pytest.mark.parametrize("value", ["default", [1, 2, 3], 3, {"mrope_section": "422"}])
def test_a_malformed_rope_scaling_is_refused(value: Any) -> None:
    config = {key: item for key, item in TINY.items() if key != "rope_axes_dim"}
    with pytest.raises(ConfigError, match="rope"):
        ModelConfig.from_dict({**config, "rope_scaling": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            (key, value)
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "vocab_size",
                "latent_channel",
                "latent_patch_size",
                "patch_latent_dim",
                "base_fps",
                "action_dim",
                "sound_dim",
                "num_embodiment_domains",
            )
            for value in (0, -1, -HUGE)
        ],
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 4097),
        ("num_hidden_layers", HUGE),
        ("num_hidden_layers", 1e300),
        ("head_dim", 17),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("patch_latent_dim", 17),
        ("latent_channel", HUGE),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", 0.0),
        ("rope_theta", 0.5),
        ("rope_theta", 1e300),
        ("rope_theta", float("nan")),
        ("timestep_scale", float("-inf")),
        ("sound_latent_fps", 0),
        ("rope_axes_dim", [-1, 2, 2]),
        ("unified_3d_mrope_temporal_modality_margin", -1),
        ("hidden_act", "gelu"),
        ("hidden_act", ""),
        ("weight_layout", "tied"),
        ("weight_layout", "Shared"),
        ("action_dim", None),
        ("sound_dim", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_values_are_refused_by_name(key: str, value: Any) -> None:
    assert key in str(_refusal(**{key: value}))


def test_shared_weights_need_the_qk_norm() -> None:
    assert "qk_norm_for_text" in str(_refusal(weight_layout="shared", qk_norm_for_text=False))


def test_integral_floats_are_integers() -> None:
    model = ModelConfig.from_dict({**TINY, "hidden_size": 64.0, "rope_theta": 5000000})
    assert type(model.hidden_size) is int
    assert type(model.rope_theta) is float
    assert model == ModelConfig.from_dict(TINY)


def test_a_width_without_its_modality_is_ignored() -> None:
    model = ModelConfig.from_dict({**TINY, "sound_gen": False})
    assert model.sound_dim == 8


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted({*ModelConfig().to_dict(), "rope_scaling"})), value=_JSON)
@settings(deadline=None, max_examples=400)
def test_any_json_value_is_read_or_refused(key: str, value: Any) -> None:
    try:
        model = ModelConfig.from_dict({**TINY, key: value})
    except ConfigError:
        return
    assert ModelConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model

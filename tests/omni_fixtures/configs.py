"""Transformer, scheduler and pipeline configs: tiny ones to run, published ones to read.

Plain data; knows no torch. Sources: the public converter of NVIDIA/cosmos-framework
(``scripts/_convert_model_to_diffusers.py``) and the defaults of ``Cosmos3OmniTransformer``.
"""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

# Keys that checkpoints carry next to the constructor's own. Keys with a leading underscore too.
EXTRA_KEYS = frozenset({"weight_layout", "backbone_type", "temporal_compression_factor"})


def transformer_kwargs(config: Mapping[str, Any]) -> Config:
    """Return the keys of a transformer ``config.json`` that ``Cosmos3OmniTransformer`` takes."""
    return {
        key: value
        for key, value in config.items()
        if key not in EXTRA_KEYS and not key.startswith("_")
    }


# head_dim 64 gives interleave limits of 30 < 32: the last frequencies fall back to the time axis,
# as they do in the published models (60 < 64).
_TINY: Config = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "latent_channel": 48,
    "latent_patch_size": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "patch_latent_dim": 192,
    "rope_axes_dim": [12, 10, 10],
    "vocab_size": 512,
}
_QWEN: Config = {
    "hidden_act": "silu",
    "qk_norm_for_text": True,
    "use_und_k_norm_for_gen": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
}
_NEMOTRON: Config = {
    "hidden_act": "relu2",
    "qk_norm_for_text": False,
    "use_und_k_norm_for_gen": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}
_ACTION: Config = {"action_gen": True, "action_dim": 64, "num_embodiment_domains": 4}
_SOUND: Config = {"sound_gen": True, "sound_dim": 64}

NANO_LIKE: Config = {**_TINY, **_QWEN, **_ACTION, **_SOUND}
EDGE_LIKE: Config = {**_TINY, **_NEMOTRON, **_ACTION}
# Super's attention is wider than its hidden size; 4 * 64 != 192 keeps that.
SUPER_LIKE: Config = {**_TINY, **_QWEN, "hidden_size": 192, "intermediate_size": 448}
SHARED: Config = {**_TINY, **_QWEN, **_ACTION, **_SOUND, "weight_layout": "shared"}

PIPELINES: dict[str, Config] = {
    "nano-like": NANO_LIKE,
    "edge-like": EDGE_LIKE,
    "super-like": SUPER_LIKE,
}

_PUBLISHED_COMMON: Config = {
    "_class_name": "Cosmos3OmniTransformer",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "base_fps": 24,
    "enable_fps_modulation": True,
    "latent_channel": 48,
    "unified_3d_mrope_reset_spatial_ids": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "latent_patch_size": 2,
    "num_key_value_heads": 8,
    "patch_latent_dim": 192,
    "action_dim": 64,
    "action_gen": True,
    "num_embodiment_domains": 32,
    "sound_latent_fps": 25.0,
    "timestep_scale": 0.001,
}
# Files older than the four newest keys (hidden_act, qk_norm_for_text, use_und_k_norm_for_gen,
# rope_axes_dim): a reader has to know their defaults.
_PUBLISHED_QWEN: Config = {
    **_PUBLISHED_COMMON,
    "_diffusers_version": "0.39.0",
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
        "mrope_interleaved": True,
    },
    "rope_theta": 5000000.0,
    "sound_dim": 64,
    "sound_gen": True,
    "vocab_size": 151936,
}

PUBLISHED: dict[str, Config] = {
    "edge": {
        **_PUBLISHED_COMMON,
        "_diffusers_version": "0.40.0.dev0",
        "hidden_size": 2048,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000.0,
        "sound_dim": None,
        "sound_gen": False,
        "vocab_size": 131072,
        "hidden_act": "relu2",
        "qk_norm_for_text": False,
        "use_und_k_norm_for_gen": True,
        "rope_axes_dim": [24, 20, 20],
        # The Edge exporter adds these after diffusers has saved the file.
        "rope_scaling": {"mrope_section": [24, 20, 20]},
        "backbone_type": "cosmos3_edge_nemotron_dense",
        "temporal_compression_factor": 4,
    },
    "nano": {
        **_PUBLISHED_QWEN,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "super": {
        **_PUBLISHED_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
}

_KARRAS_SCHEDULER: Config = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "sigma_max": 200.0,
    "sigma_min": 0.147,
}
# A class that diffusers 0.42 lacks: a reader needs its own mapping to UniPC with a native flow
# schedule, and diffusers' pipeline only loads when it is handed a scheduler.
_EDGE_SCHEDULER: Config = {
    "_class_name": "Cosmos3EdgeUniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
    "flow_shift": 3.0,
}
SCHEDULERS: dict[str, Config] = {
    "nano-like": _KARRAS_SCHEDULER,
    "edge-like": _EDGE_SCHEDULER,
    "super-like": _KARRAS_SCHEDULER,
}

_MODEL_INDEX: Config = {
    "_class_name": "Cosmos3OmniPipeline",
    "_diffusers_version": "0.39.0",
    # The checker needs the package cosmos_guardrail; published converters turn it off as well.
    "enable_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "sound_tokenizer": [None, None],
    "text_tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "Cosmos3OmniTransformer"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
MODEL_INDEXES: dict[str, Config] = {
    # default_use_system_prompt and use_native_flow_schedule are newer than these files: absent.
    "nano-like": _MODEL_INDEX,
    "super-like": _MODEL_INDEX,
    "edge-like": {
        **_MODEL_INDEX,
        "_diffusers_version": "0.40.0.dev0",
        "default_use_system_prompt": False,
        "native_flow_shift": 3.0,
        "scheduler": ["diffusers", "Cosmos3EdgeUniPCMultistepScheduler"],
        "text_tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "use_native_flow_schedule": True,
    },
}

# Wan 2.2 form (residual blocks, pixel unshuffle by 2, 48 latent channels) at a small width.
VAE: Config = {
    "base_dim": 16,
    "decoder_base_dim": 24,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    # Every channel differs from the others and from (0, 1), and none is exact in bfloat16.
    "latents_mean": [round(((7 * i) % 48 - 23.5) / 32, 4) for i in range(48)],
    "latents_std": [round(0.6 + ((11 * i) % 48) / 51, 4) for i in range(48)],
}

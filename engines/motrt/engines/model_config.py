"""The architecture of one omni transformer, as its config file states it.

The keys are those of diffusers' ``Cosmos3OmniTransformer.__init__`` plus ``weight_layout``.
Old public files lack the newest four keys and take that class's defaults; Edge's file carries
three keys that the class ignores. Anything else is refused: a key that is silently dropped is a
model that is silently another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from motrt.engines.errors import ConfigError
from motrt.engines.json_fields import refuse_unknown, typed

WeightLayout = Literal["separate", "shared"]

# Written by public tools, without meaning for the arithmetic.
_IGNORED = frozenset(
    {
        "_class_name",
        "_diffusers_version",
        "_name_or_path",
        "architectures",
        "attention_dropout",  # inference only; a non-zero value changes nothing
        "backbone_type",
        "dtype",
        "model_type",
        "quantization_config",
        "temporal_compression_factor",
        "torch_dtype",
        "transformers_version",
    }
)
_DEFAULT_AXES = (24, 20, 20)
_MAX_LAYERS = 4096  # a config is read from a stranger: keep absurd numbers out of the loops


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and switches of the two towers.

    Attributes follow diffusers' names; defaults are those of its class (Cosmos 3 Nano).

    Raises:
        ConfigError: Values that contradict each other or describe no model.
    """

    weight_layout: WeightLayout = "separate"
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    hidden_act: Literal["silu", "relu2"] = "silu"
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    qk_norm_for_text: bool = True
    use_und_k_norm_for_gen: bool = False
    rope_theta: float = 5_000_000.0
    rope_axes_dim: tuple[int, int, int] = _DEFAULT_AXES
    latent_channel: int = 48
    latent_patch_size: int = 2
    patch_latent_dim: int = 192
    timestep_scale: float = 0.001
    base_fps: int = 24
    enable_fps_modulation: bool = True
    unified_3d_mrope_reset_spatial_ids: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15000
    action_gen: bool = False
    action_dim: int | None = None
    num_embodiment_domains: int = 32
    sound_gen: bool = False
    sound_dim: int | None = None
    sound_latent_fps: float = 25.0

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        for name in _POSITIVE:
            _require(self, name, getattr(self, name) >= 1, "a number of at least 1")
        _require(self, "num_hidden_layers", self.num_hidden_layers <= _MAX_LAYERS, "at most 4096")
        for name in ("rms_norm_eps", "rope_theta", "timestep_scale", "sound_latent_fps"):
            value = getattr(self, name)
            _require(self, name, 0 < value < float("inf"), "a positive number")
        # In float32 the frequencies 1 / theta^(2j / D) must be neither 0 nor infinite.
        _require(self, "rope_theta", 1 <= self.rope_theta <= 1e30, "a number from 1 to 1e30")
        _require(
            self, "weight_layout", self.weight_layout in ("separate", "shared"), "separate, shared"
        )
        _require(self, "hidden_act", self.hidden_act in ("silu", "relu2"), "silu or relu2")
        _require(
            self,
            "num_attention_heads",
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
        )
        _require(self, "head_dim", self.head_dim % 2 == 0, "an even number (rotary pairs)")
        # As the references: axes need not sum to head_dim / 2, slots beyond it are cut off.
        _require(self, "rope_axes_dim", min(self.rope_axes_dim) >= 0, "three numbers, 0 or more")
        _require(
            self,
            "patch_latent_dim",
            self.patch_latent_dim == self.latent_channel * self.latent_patch_size**2,
            f"latent_channel * latent_patch_size² = "
            f"{self.latent_channel * self.latent_patch_size**2}",
        )
        _require(
            self,
            "unified_3d_mrope_temporal_modality_margin",
            self.unified_3d_mrope_temporal_modality_margin >= 0,
            "0 or more",
        )
        if self.action_gen:
            _require(
                self, "action_dim", (self.action_dim or 0) >= 1, "a width, as action_gen is on"
            )
        if self.sound_gen:
            _require(self, "sound_dim", (self.sound_dim or 0) >= 1, "a width, as sound_gen is on")
        if self.weight_layout == "shared":
            _require(
                self,
                "qk_norm_for_text",
                self.qk_norm_for_text,
                "true in the shared layout, whose generator reads the same qk-norms",
            )

    @property
    def has_context_key_norm(self) -> bool:
        """Whether prompt keys get a norm of their own on the way to the generator (Edge).

        Source: diffusers ``Cosmos3PackedMoTAttention``: only without qk-norm for text.
        """
        return self.use_und_k_norm_for_gen and not self.qk_norm_for_text

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is SwiGLU (else squared ReLU)."""
        return self.hidden_act == "silu"

    @property
    def norm_multiplies_in_float32(self) -> bool:
        """Whether RMSNorm applies its weight before the cast back (Nemotron's flavour).

        Source: diffusers ``Cosmos3NemotronRMSNorm``, chosen by ``hidden_act == "relu2"``.
        """
        return self.hidden_act == "relu2"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "config") -> ModelConfig:
        """Read the keys of a transformer's ``config.json``.

        Args:
            data: The JSON object.
            source: How messages call the file.

        Raises:
            ConfigError: An unknown key (the nearest known one is named) or a wrong value.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        known = fields | _IGNORED | {"rope_scaling"}
        refuse_unknown(data, known, source)
        if data.get("quantization_config"):
            raise ConfigError(
                f"{source} describes a quantized checkpoint",
                got="quantization_config",
                expected="16- or 32-bit weights",
                fix="Export the checkpoint that it was quantized from.",
            )
        given = {**data, "rope_axes_dim": _rope_axes(data, source)}
        return cls(
            **{
                field.name: typed(field.name, str(field.type), given[field.name], source)
                for field in dataclasses.fields(cls)
                if field.name in given
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that :meth:`from_dict` reads back."""
        data = dataclasses.asdict(self)
        data["rope_axes_dim"] = list(self.rope_axes_dim)
        return data


_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "latent_channel",
    "latent_patch_size",
    "base_fps",
    "num_embodiment_domains",
)


def _rope_axes(data: Mapping[str, Any], source: str) -> Any:
    axes, scaling = data.get("rope_axes_dim"), data.get("rope_scaling")
    if axes is not None:
        return axes
    if not isinstance(scaling, (Mapping, type(None))):
        raise ConfigError(
            f"{source}: rope_scaling has the wrong type", got=repr(scaling), expected="an object"
        )
    return (scaling or {}).get("mrope_section", _DEFAULT_AXES)


def _require(config: ModelConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"the model config's {name} cannot be right",
            got=repr(getattr(config, name)),
            expected=expected,
        )

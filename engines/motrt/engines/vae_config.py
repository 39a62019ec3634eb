"""The video autoencoder's architecture, as its config file states it.

Source: diffusers ``models/autoencoders/autoencoder_kl_wan.py``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ConfigError
from motrt.engines.json_fields import refuse_unknown, typed

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLASS_NAME = "AutoencoderKLWan"

# Without meaning for the arithmetic. clip_output stands in Wan 2.2's public file; diffusers' class
# has no such argument and always clamps.
_IGNORED = frozenset(
    {"_class_name", "_diffusers_version", "_name_or_path", "clip_output", "dropout"}
)
# A config is read from a stranger: keep absurd numbers out of the loops.
_MAX_STAGES = 16
_MAX_RES_BLOCKS = 64

# fmt: off
_WAN21_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
_WAN21_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """Dimensions and switches of a Wan VAE, in the 2.1 or the 2.2 (``is_residual``) form.

    Attributes follow diffusers' names (its spelling of ``temperal`` too) and defaults (Wan 2.1).

    Raises:
        ConfigError: Values that contradict each other or describe no model.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _WAN21_MEAN
    latents_std: tuple[float, ...] = _WAN21_STD
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int | None = 4
    scale_factor_spatial: int | None = 8

    def __post_init__(self) -> None:
        """Check every value; see the class docstring."""
        for name in ("base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels"):
            _require(self, name, getattr(self, name) >= 1, "a number of at least 1")
        for name in ("decoder_base_dim", "patch_size"):
            value = getattr(self, name)
            _require(self, name, value is None or value >= 1, "null or a number of at least 1")
        _require(self, "num_res_blocks", self.num_res_blocks <= _MAX_RES_BLOCKS, "at most 64")
        stages = len(self.dim_mult)
        _require(
            self,
            "dim_mult",
            1 <= stages <= _MAX_STAGES and min(self.dim_mult) >= 1,
            f"1 to {_MAX_STAGES} numbers of at least 1",
        )
        _require(
            self,
            "temperal_downsample",
            len(self.temperal_downsample) == stages - 1,
            f"{stages - 1} switches, one between each two of dim_mult",
        )
        # The graphs keep attention in the middle only, as every published Wan VAE does.
        _require(self, "attn_scales", not self.attn_scales, "[] (attention in the middle only)")
        for name in ("in_channels", "out_channels"):
            patch = self.patch**2
            _require(self, name, getattr(self, name) % patch == 0, f"a multiple of {patch}")
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            _require(self, name, len(values) == self.z_dim, f"z_dim = {self.z_dim} numbers")
            _require(self, name, all(map(math.isfinite, values)), "finite numbers")
        _require(self, "latents_std", min(self.latents_std) > 0, "positive numbers")
        for name, factor in (
            ("scale_factor_temporal", self.temporal_factor),
            ("scale_factor_spatial", self.spatial_factor),
        ):
            _require(
                self,
                name,
                getattr(self, name) in (None, factor),
                f"{factor}, as temperal_downsample, dim_mult and patch_size make it",
            )

    @property
    def patch(self) -> int:
        """Pixels per side that are folded into channels outside the convolutions."""
        return self.patch_size or 1

    @property
    def temporal_factor(self) -> int:
        """Video frames per latent frame, after the first."""
        return 1 << sum(self.temperal_downsample)

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent, in height and in width."""
        return self.patch << (len(self.dim_mult) - 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "vae/config.json") -> VaeConfig:
        """Read the keys of an ``AutoencoderKLWan``'s ``config.json``.

        Args:
            data: The JSON object.
            source: How messages call the file.

        Raises:
            ConfigError: Another class' file, an unknown key (the nearest known one is named), or
                a wrong value.
        """
        class_name = data.get("_class_name", _CLASS_NAME)
        if class_name != _CLASS_NAME:
            # AutoencoderKLQwenImage has the same keys and is another model.
            raise ConfigError(
                f"{source} is of another class", got=class_name, expected=_CLASS_NAME
            )
        fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        known = fields.keys() | _IGNORED
        refuse_unknown(data, known, source)
        values = {
            name: typed(name, annotation, data[name], source)
            for name, annotation in fields.items()
            if name in data and (data[name] is not None or annotation.endswith("None"))
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that :meth:`from_dict` reads back, complete."""
        items = dataclasses.asdict(self).items()
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in items},
            "scale_factor_spatial": self.spatial_factor,
            "scale_factor_temporal": self.temporal_factor,
        }


def _require(config: VaeConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"the VAE config's {name} cannot be right",
            got=repr(getattr(config, name)),
            expected=expected,
        )

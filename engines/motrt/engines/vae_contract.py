"""The video autoencoder: its config, its tensors, and the contract of its four graphs.

The graphs work in chunks of one latent frame: ``*_first`` takes the first (one video frame), and
``*_next`` every later one (``temporal_factor`` video frames). What a causal convolution needs of
the past travels as ``past_cache.{k}`` / ``present_cache.{k}``: the last two frames of its input,
with zeros where there were none yet. Hence the ``first`` graphs take no caches, and one ``next``
graph serves every later chunk.

Dimension names: ``batch``; ``height`` and ``width`` of the latents; ``height_x8`` is 8 times
``height``, and so on.

Source: diffusers ``models/autoencoders/autoencoder_kl_wan.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from motrt.engines.contract import EngineContract
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.tensors import Dim, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CACHE_FRAMES = 2  # diffusers CACHE_T: a kernel of three frames looks back two
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
        if self.is_residual:
            for network in (decoder_network(self), encoder_network(self)):
                for stage in network.stages:
                    _require(self, "dim_mult", _can_shortcut(stage, network), "widths that divide")

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
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
                raise ConfigError(
                    f"{source} has an unknown key",
                    got=key,
                    expected=f"a known key; the nearest is {near[0]!r}",
                    fix="Correct the key, or remove it if it has no meaning for inference.",
                )
        values = {
            name: _typed(name, annotation, data[name], source)
            for name, annotation in fields.items()
            if name in data and (data[name] is not None or annotation.endswith("None"))
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that :meth:`from_dict` reads back."""
        items = dataclasses.asdict(self).items()
        return {name: list(v) if isinstance(v, tuple) else v for name, v in items}


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """A ``WanResidualBlock``."""

    name: str
    in_channels: int
    out_channels: int


@dataclass(frozen=True, slots=True)
class ResampleLayer:
    """A ``WanResample``: twice or half the size, and as many frames where it is temporal."""

    name: str
    in_channels: int
    out_channels: int
    is_temporal: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Residual blocks and the resampling after them.

    Attributes:
        blocks: In order of execution; at least one.
        resample: The change of size, if there is one.
        shortcut: Name of the connection around the whole stage (2.2 form); it has no weights.
        scale: Height of the residual blocks' frames as a multiple of the latents'.
    """

    blocks: tuple[ResidualLayer, ...]
    resample: ResampleLayer | None
    shortcut: str | None
    scale: int

    @property
    def in_channels(self) -> int:
        """Channels that enter."""
        return self.blocks[0].in_channels

    @property
    def out_channels(self) -> int:
        """Channels that leave the residual blocks, and in the 2.2 form the stage."""
        return self.blocks[-1].out_channels

    @property
    def factors(self) -> tuple[int, int]:
        """What the resampling changes: factor of the frames, and of height and width."""
        if self.resample is None:
            return 1, 1
        return (2 if self.resample.is_temporal else 1), 2


@dataclass(frozen=True, slots=True)
class Network:
    """The encoder or the decoder: what weights, caches and graphs are derived from.

    Attributes:
        name: Prefix of the tensors.
        upsamples: Whether it is the decoder, whose middle block comes before the stages.
        in_channels: Channels that ``conv_in`` takes.
        entry: Channels that ``conv_in`` gives.
        middle: Channels of ``mid_block``.
        stages: In order of execution.
        last_channels: Channels of ``norm_out``.
        out_channels: Channels that ``conv_out`` gives.
        in_scale: Height of the input as a multiple of the latents'.
        out_scale: Height of the output likewise.
    """

    name: str
    upsamples: bool
    in_channels: int
    entry: int
    middle: int
    stages: tuple[Stage, ...]
    last_channels: int
    out_channels: int
    in_scale: int
    out_scale: int

    @property
    def attention(self) -> str:
        """Name of the middle's attention."""
        return f"{self.name}.mid_block.attentions.0"

    @property
    def middle_blocks(self) -> tuple[ResidualLayer, ResidualLayer]:
        """The residual blocks before and after the middle's attention."""
        prefix, width = f"{self.name}.mid_block.resnets", self.middle
        return (
            ResidualLayer(f"{prefix}.0", width, width),
            ResidualLayer(f"{prefix}.1", width, width),
        )


@dataclass(frozen=True, slots=True)
class CacheSlot:
    """The cache of one causal convolution, by the convolution's name."""

    conv: str
    channels: int
    scale: int


def decoder_network(config: VaeConfig) -> Network:
    """Return the decoder's layers. Source: ``WanDecoder3d.__init__``."""
    base = config.decoder_base_dim or config.base_dim
    mults = config.dim_mult[::-1]
    dims = [base * mult for mult in (mults[0], *mults)]
    temporal = config.temperal_downsample[::-1]
    stages = []
    for i, width in enumerate(dims[1:]):
        prefix = f"decoder.up_blocks.{i}"
        # In the 2.1 form each upsampling halves the channels too.
        entry = dims[i] if i == 0 or config.is_residual else dims[i] // 2
        resample = None
        if i < len(temporal):
            name = f"{prefix}.upsampler" if config.is_residual else f"{prefix}.upsamplers.0"
            leaving = width if config.is_residual else width // 2
            resample = ResampleLayer(name, width, leaving, temporal[i])
        count = config.num_res_blocks + 1
        blocks = _blocks([f"{prefix}.resnets.{j}" for j in range(count)], entry, width)
        has_shortcut = config.is_residual and resample is not None
        shortcut = f"{prefix}.avg_shortcut" if has_shortcut else None
        stages.append(Stage(blocks, resample, shortcut, 1 << i))
    return Network(
        name="decoder",
        upsamples=True,
        in_channels=config.z_dim,
        entry=dims[0],
        middle=dims[0],
        stages=tuple(stages),
        last_channels=dims[-1],
        out_channels=config.out_channels,
        in_scale=1,
        out_scale=1 << len(temporal),
    )


def encoder_network(config: VaeConfig) -> Network:
    """Return the encoder's layers. Source: ``WanEncoder3d.__init__``."""
    dims = [config.base_dim * mult for mult in (1, *config.dim_mult)]
    temporal, last = config.temperal_downsample, len(config.dim_mult) - 1
    stages: list[Stage] = []
    flat = 0  # the 2.1 form numbers residual blocks and resamplings in one list
    for i, (entry, width) in enumerate(pairwise(dims)):
        if config.is_residual:
            prefix = f"encoder.down_blocks.{i}"
            names = [f"{prefix}.resnets.{j}" for j in range(config.num_res_blocks)]
            resample_name = f"{prefix}.downsampler"
        else:
            names = [f"encoder.down_blocks.{flat + j}" for j in range(config.num_res_blocks)]
            resample_name = f"encoder.down_blocks.{flat + config.num_res_blocks}"
            flat += config.num_res_blocks + 1
        resample = ResampleLayer(resample_name, width, width, temporal[i]) if i < last else None
        blocks = _blocks(names, entry, width)
        shortcut = f"encoder.down_blocks.{i}.avg_shortcut" if config.is_residual else None
        stages.append(Stage(blocks, resample, shortcut, 1 << (last - i)))
    return Network(
        name="encoder",
        upsamples=False,
        in_channels=config.in_channels,
        entry=dims[0],
        middle=dims[-1],
        stages=tuple(stages),
        last_channels=dims[-1],
        out_channels=2 * config.z_dim,
        in_scale=1 << last,
        out_scale=1,
    )


def cache_slots(network: Network) -> tuple[CacheSlot, ...]:
    """Return the caches of one network; the position is the ``k`` of ``past_cache.{k}``.

    Every convolution over three frames has one. The order is that of execution, in which diffusers
    fills its ``feat_cache`` too.
    """
    return tuple(
        CacheSlot(name.removesuffix(".weight"), shape[1], scale)
        for name, shape, scale in _tensors(network)
        if len(shape) == 5 and shape[2] == CACHE_FRAMES + 1
    )


def vae_weight_table(config: VaeConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of ``AutoencoderKLWan.state_dict()``."""
    tensors = [
        *_tensors(encoder_network(config)),
        *_conv("quant_conv", 1, 2 * config.z_dim, 2 * config.z_dim, 1, 1, 1),
        *_conv("post_quant_conv", 1, config.z_dim, config.z_dim, 1, 1, 1),
        *_tensors(decoder_network(config)),
    ]
    return {name: shape for name, shape, _ in tensors}


# Name, shape, and the height of the frames that the layer reads as a multiple of the latents'.
_Tensor = tuple[str, tuple[int, ...], int]


def _tensors(network: Network) -> Iterator[_Tensor]:
    """List a network's tensors in the order of execution."""
    name, last = network.name, network.last_channels
    yield from _conv(
        f"{name}.conv_in", network.in_scale, network.entry, network.in_channels, 3, 3, 3
    )
    if network.upsamples:
        yield from _middle(network)
    for stage in network.stages:
        for block in stage.blocks:
            yield from _residual(block, stage.scale)
        if stage.resample is not None:
            yield from _resample(stage.resample, stage.scale, upsamples=network.upsamples)
    if not network.upsamples:
        yield from _middle(network)
    yield f"{name}.norm_out.gamma", (last, 1, 1, 1), network.out_scale
    yield from _conv(f"{name}.conv_out", network.out_scale, network.out_channels, last, 3, 3, 3)


def _middle(network: Network) -> Iterator[_Tensor]:
    before, after = network.middle_blocks
    name, width = network.attention, network.middle
    yield from _residual(before, 1)
    yield f"{name}.norm.gamma", (width, 1, 1), 1
    yield from _conv(f"{name}.to_qkv", 1, 3 * width, width, 1, 1)
    yield from _conv(f"{name}.proj", 1, width, width, 1, 1)
    yield from _residual(after, 1)


def _residual(block: ResidualLayer, scale: int) -> Iterator[_Tensor]:
    name, incoming, outgoing = block.name, block.in_channels, block.out_channels
    yield f"{name}.norm1.gamma", (incoming, 1, 1, 1), scale
    yield from _conv(f"{name}.conv1", scale, outgoing, incoming, 3, 3, 3)
    yield f"{name}.norm2.gamma", (outgoing, 1, 1, 1), scale
    yield from _conv(f"{name}.conv2", scale, outgoing, outgoing, 3, 3, 3)
    if incoming != outgoing:
        yield from _conv(f"{name}.conv_shortcut", scale, outgoing, incoming, 1, 1, 1)


def _resample(layer: ResampleLayer, scale: int, *, upsamples: bool) -> Iterator[_Tensor]:
    width = layer.in_channels
    yield from _conv(f"{layer.name}.resample.1", scale, layer.out_channels, width, 3, 3)
    if layer.is_temporal:
        # The convolution over time runs at the lower of the two resolutions.
        outgoing, low = (2 * width, scale) if upsamples else (width, scale // 2)
        yield from _conv(f"{layer.name}.time_conv", low, outgoing, width, 3, 1, 1)


def _conv(name: str, scale: int, outgoing: int, incoming: int, *kernel: int) -> Iterator[_Tensor]:
    yield f"{name}.weight", (outgoing, incoming, *kernel), scale
    yield f"{name}.bias", (outgoing,), scale


def vae_contracts(config: VaeConfig) -> dict[str, EngineContract]:
    """Return the contracts of ``{decoder,encoder}_{first,next}``; all tensors are float32.

    The decoder takes ``latents`` ``[B, z, 1, h, w]`` (already multiplied by the standard deviation
    and shifted by the mean) and gives ``sample``, clamped to [-1, 1]; the encoder takes ``video``
    in [-1, 1] and gives ``latents``, the distribution's mean, not yet normalised.
    """
    contracts = {}
    latents = _frames("latents", config.z_dim, 1, 1)
    for network in (decoder_network(config), encoder_network(config)):
        slots = cache_slots(network)
        past, present = (
            tuple(
                _frames(f"{kind}_cache.{k}", slot.channels, CACHE_FRAMES, slot.scale)
                for k, slot in enumerate(slots)
            )
            for kind in ("past", "present")
        )
        for chunk, frames in (("first", 1), ("next", config.temporal_factor)):
            side = "sample" if network.upsamples else "video"
            channels = config.out_channels if network.upsamples else config.in_channels
            pixels = _frames(side, channels // config.patch**2, frames, config.spatial_factor)
            source, result = (latents, pixels) if network.upsamples else (pixels, latents)
            caches = past if chunk == "next" else ()
            name = f"{network.name}_{chunk}"
            contracts[name] = EngineContract(name, (source, *caches), (result, *present))
    return contracts


def _frames(name: str, channels: int, frames: int, scale: int) -> TensorSpec:
    suffix = "" if scale == 1 else f"_x{scale}"
    shape: tuple[Dim, ...] = ("batch", channels, frames, f"height{suffix}", f"width{suffix}")
    return TensorSpec(name, DType.FLOAT32, shape)


def _blocks(names: list[str], entry: int, width: int) -> tuple[ResidualLayer, ...]:
    return tuple(
        ResidualLayer(name, entry if j == 0 else width, width) for j, name in enumerate(names)
    )


def _can_shortcut(stage: Stage, network: Network) -> bool:
    """Whether AvgDown3D or DupUp3D can spread the channels evenly."""
    if stage.shortcut is None:
        return True
    time, space = stage.factors
    spread, over = stage.in_channels, stage.out_channels
    if network.upsamples:
        spread, over = over, spread
    return spread * time * space**2 % over == 0


def _typed(name: str, annotation: str, value: Any, source: str) -> Any:
    """Check the JSON type of one value; JSON has one number type, so 1e6 may stand for an int."""
    if annotation.startswith("tuple"):
        kind = annotation.removeprefix("tuple[").removesuffix(", ...]")
        if isinstance(value, (list, tuple)):
            return tuple(_typed(name, kind, item, source) for item in value)
    elif value is None and annotation.endswith("None"):
        return None
    elif annotation == "bool" and isinstance(value, bool):
        return value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if annotation == "float":
            return float(value)
        if annotation.startswith("int") and float(value).is_integer():
            return int(value)
    raise ConfigError(f"{source}: {name} has the wrong type", got=repr(value), expected=annotation)


def _require(config: VaeConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"the VAE config's {name} cannot be right",
            got=repr(getattr(config, name)),
            expected=expected,
        )

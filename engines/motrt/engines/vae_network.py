"""The layers of the video autoencoder: what its weights, caches and graphs are derived from.

Source: diffusers ``models/autoencoders/autoencoder_kl_wan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from motrt.engines.vae_config import VaeConfig


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


def decoder_network(config: VaeConfig) -> Network:
    """Return the decoder's layers.

    Raises:
        ConfigError: Widths that a shortcut cannot spread evenly.

    Source: ``WanDecoder3d.__init__``.
    """
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
    network = Network(
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
    _require_shortcuts(network)
    return network


def encoder_network(config: VaeConfig) -> Network:
    """Return the encoder's layers.

    Raises:
        ConfigError: Widths that a shortcut cannot spread evenly.

    Source: ``WanEncoder3d.__init__``.
    """
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
    network = Network(
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
    _require_shortcuts(network)
    return network


def _blocks(names: list[str], entry: int, width: int) -> tuple[ResidualLayer, ...]:
    return tuple(
        ResidualLayer(name, entry if j == 0 else width, width) for j, name in enumerate(names)
    )


def _require_shortcuts(network: Network) -> None:
    """Refuse widths that AvgDown3D or DupUp3D cannot spread evenly."""
    for stage in network.stages:
        time, space = stage.factors
        spread, over = stage.in_channels, stage.out_channels
        if network.upsamples:
            spread, over = over, spread
        if stage.shortcut is not None and spread * time * space**2 % over != 0:
            raise ConfigError(
                "the VAE config's dim_mult cannot be right",
                got=f"{spread} channels spread over {over} in the {network.name}",
                expected="widths that divide",
            )

"""The tensors of the video autoencoder, in the order of execution, and its caches.

Source: diffusers ``models/autoencoders/autoencoder_kl_wan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.vae_network import (
    Network,
    ResampleLayer,
    ResidualLayer,
    decoder_network,
    encoder_network,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from motrt.engines.vae_config import VaeConfig

CACHE_FRAMES = 2  # diffusers CACHE_T: a kernel of three frames looks back two


@dataclass(frozen=True, slots=True)
class CacheSlot:
    """The cache of one causal convolution, by the convolution's name."""

    conv: str
    channels: int
    scale: int


def vae_weight_table(config: VaeConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of ``AutoencoderKLWan.state_dict()``."""
    tensors = [
        *_tensors(encoder_network(config)),
        *_conv("quant_conv", 1, 2 * config.z_dim, 2 * config.z_dim, 1, 1, 1),
        *_conv("post_quant_conv", 1, config.z_dim, config.z_dim, 1, 1, 1),
        *_tensors(decoder_network(config)),
    ]
    return {name: shape for name, shape, _ in tensors}


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

"""The contract of the video autoencoder's four graphs.

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

from typing import TYPE_CHECKING

from motrt.engines.contract import EngineContract
from motrt.engines.dtypes import DType
from motrt.engines.tensors import Dim, TensorSpec
from motrt.engines.vae_network import decoder_network, encoder_network
from motrt.engines.vae_tensors import CACHE_FRAMES, cache_slots

if TYPE_CHECKING:
    from motrt.engines.vae_config import VaeConfig


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

"""The four graphs of the video autoencoder, in opset 18's primitive operators.

Written like the transformers' and not traced: initializers bear the checkpoint's names, height and
width stay free, and no torch is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.dtypes import DType
from motrt.engines.errors import ExportError
from motrt.engines.vae_contract import vae_contracts
from motrt.engines.vae_network import decoder_network, encoder_network
from motrt.engines.vae_tensors import cache_slots, vae_weight_table
from motrt.export.graphs.builder import GraphBuilder
from motrt.export.graphs.vae_blocks import (
    Chunk,
    Frames,
    causal_convolve,
    convolve,
    cut,
    middle_block,
    norm_silu,
    residual_block,
)
from motrt.export.graphs.vae_resample import (
    average_shortcut,
    downsample,
    duplicate_shortcut,
    fold_pixels,
    unfold_pixels,
    upsample,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from motrt.engines.contract import EngineContract
    from motrt.engines.store import WeightEntry
    from motrt.engines.vae_config import VaeConfig
    from motrt.engines.vae_network import Network, Stage


def author_vae(
    config: VaeConfig, weights: Mapping[str, WeightEntry], opset: int = 18
) -> dict[str, ir.Model]:
    """Write ``decoder_first``, ``decoder_next``, ``encoder_first`` and ``encoder_next``.

    The arithmetic is float32 whatever the stored type is.

    Args:
        config: The architecture.
        weights: Place of each tensor of the VAE's checkpoint, under the checkpoint's names.
        opset: ONNX operator set.

    Returns:
        A model of each of :func:`~motrt.engines.vae_contract.vae_contracts`.

    Raises:
        ExportError: A tensor is missing, or has another shape than the config says.

    Source: diffusers ``AutoencoderKLWan._decode`` and ``_encode``.
    """
    _check_weights(config, weights)
    decoder, encoder = decoder_network(config), encoder_network(config)
    return {
        name: _author(
            config, weights, opset, contract, decoder if name.startswith("decoder") else encoder
        )
        for name, contract in vae_contracts(config).items()
    }


def _check_weights(config: VaeConfig, weights: Mapping[str, WeightEntry]) -> None:
    for name, shape in vae_weight_table(config).items():
        if name not in weights:
            raise ExportError("the VAE's checkpoint lacks a tensor", got=name)
        if weights[name].shape != shape:
            raise ExportError(
                f"the VAE's tensor {name} does not fit vae/config.json",
                got=list(weights[name].shape),
                expected=list(shape),
            )


def _author(
    config: VaeConfig,
    weights: Mapping[str, WeightEntry],
    opset: int,
    contract: EngineContract,
    network: Network,
) -> ir.Model:
    graph = GraphBuilder(contract.name, opset=opset, dtype=DType.FLOAT32, weights=weights)
    source, *caches = [graph.add_input(spec) for spec in contract.inputs]
    slots = cache_slots(network)
    # The first chunk has no caches among its inputs.
    past = {slot.conv: cache for slot, cache in zip(slots, caches, strict=bool(caches))}
    with graph.scope("shapes"):
        chunk = Chunk(graph, past, graph.dims(source, 0, 1), is_first=not caches)
        size = graph.dims(source, 3, 5)
        if not network.upsamples and config.patch > 1:
            size = graph.op("Div", size, graph.constant([config.patch]))
        chunk.set_size(network.in_scale, size)
    frames = int(contract.inputs[0].shape[2])
    x = Frames(source, network.in_channels, frames, network.in_scale)
    run = _decode if network.upsamples else _encode
    result = run(chunk, x, network, config)
    graph.add_output(result, contract.outputs[0])
    for slot, spec in zip(slots, contract.outputs[1:], strict=True):
        graph.add_output(chunk.present[slot.conv], spec)
    return graph.model()


def _decode(chunk: Chunk, x: Frames, network: Network, config: VaeConfig) -> ir.Value:
    """Latents to video frames. Source: ``AutoencoderKLWan._decode``, ``WanDecoder3d``."""
    graph = chunk.graph
    latents = convolve(graph, x.value, "post_quant_conv")
    x = Frames(latents, x.channels, x.count, x.scale)
    x = causal_convolve(chunk, x, "decoder.conv_in")
    x = middle_block(chunk, x, network)
    for stage in network.stages:
        x = _up_stage(chunk, x, stage)
    x = _head(chunk, x, network)
    with graph.scope("sample"):
        sample = unfold_pixels(chunk, x, config.patch)
        return graph.op("Clip", sample, graph.scalar(-1.0), graph.scalar(1.0))


def _encode(chunk: Chunk, x: Frames, network: Network, config: VaeConfig) -> ir.Value:
    """Video frames to the mean of the latents. Source: ``_encode``, ``WanEncoder3d``."""
    graph = chunk.graph
    with graph.scope("video"):
        x = fold_pixels(chunk, x.value, config.patch, x)
    x = causal_convolve(chunk, x, "encoder.conv_in")
    for stage in network.stages:
        x = _down_stage(chunk, x, stage)
    x = middle_block(chunk, x, network)
    x = _head(chunk, x, network)
    # DiagonalGaussianDistribution: the first half of the channels is the mean.
    return cut(graph, convolve(graph, x.value, "quant_conv"), 1, 0, config.z_dim)


def _head(chunk: Chunk, x: Frames, network: Network) -> Frames:
    x = norm_silu(chunk.graph, x, f"{network.name}.norm_out")
    return causal_convolve(chunk, x, f"{network.name}.conv_out")


def _up_stage(chunk: Chunk, x: Frames, stage: Stage) -> Frames:
    """Source: ``WanResidualUpBlock`` with a shortcut, ``WanUpBlock`` without."""
    entry = x
    for block in stage.blocks:
        x = residual_block(chunk, x, block)
    if stage.resample is not None:
        x = upsample(chunk, x, stage.resample)
    if stage.shortcut is None:
        return x
    with chunk.graph.scope(stage.shortcut):
        shortcut = duplicate_shortcut(chunk, entry, stage)
        value = chunk.graph.op("Add", x.value, shortcut)
    return Frames(value, x.channels, x.count, x.scale)


def _down_stage(chunk: Chunk, x: Frames, stage: Stage) -> Frames:
    """Source: ``WanResidualDownBlock`` with a shortcut; loose layers in the 2.1 form."""
    entry = x
    for block in stage.blocks:
        x = residual_block(chunk, x, block)
    if stage.resample is not None:
        x = downsample(chunk, x, stage.resample)
    if stage.shortcut is None:
        return x
    with chunk.graph.scope(stage.shortcut):
        shortcut = average_shortcut(chunk, entry, stage)
        value = chunk.graph.op("Add", x.value, shortcut)
    return Frames(value, x.channels, x.count, x.scale)

"""The layers of the VAE that change the size of frames or their number.

Source of every layer: diffusers ``models/autoencoders/autoencoder_kl_wan.py``. No value has more
than seven axes (batch and channels travel as one): TensorRT's limit is eight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.export.graphs.vae_blocks import (
    Chunk,
    Frames,
    as_frames,
    as_images,
    causal_convolve,
    convolve,
    cut,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from motrt.engines.vae_network import ResampleLayer, Stage


def upsample(chunk: Chunk, x: Frames, layer: ResampleLayer) -> Frames:
    """Double the size, and the frames where the layer is temporal; the first chunk's frame stays one.

    Source: ``WanResample``, modes ``upsample2d`` and ``upsample3d``; ``WanUpsample``.
    """
    graph, scale = chunk.graph, 2 * x.scale
    with graph.scope(layer.name):
        if layer.is_temporal:
            x = _double_frames(chunk, x, f"{layer.name}.time_conv")
        images = graph.op(
            "Resize",
            as_images(chunk, x),
            None,
            graph.constant([1, 1, 2, 2], graph.dtype),
            mode="nearest",
            # At twice the size this is torch's nearest-exact: each pixel becomes four.
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
        images = convolve(graph, images, f"{layer.name}.resample.1", pads=[1, 1, 1, 1])
        chunk.measure(scale, images)
        return as_frames(chunk, images, layer.out_channels, x.count, scale)


def _double_frames(chunk: Chunk, x: Frames, conv: str) -> Frames:
    """One frame of twice the channels is two frames."""
    if chunk.is_first:
        # diffusers notes "Rep" here, and later treats it as two zero frames.
        chunk.zero_cache(conv, x.channels, x.scale)
        return x
    y = causal_convolve(chunk, x, conv)
    pairs = chunk.reshape(y.value, 0, 2, x.channels, x.count, -1)
    pairs = chunk.graph.op("Transpose", pairs, perm=[0, 2, 3, 1, 4])  # [B, C, F, 2, h·w]
    count, height, width = 2 * x.count, chunk.height(x.scale), chunk.width(x.scale)
    value = chunk.reshape(pairs, 0, x.channels, count, height, width)
    return Frames(value, x.channels, count, x.scale)


def downsample(chunk: Chunk, x: Frames, layer: ResampleLayer) -> Frames:
    """Halve the size, and the frames where the layer is temporal; the first chunk's frame stays.

    Source: ``WanResample``, modes ``downsample2d`` and ``downsample3d``.
    """
    graph, scale = chunk.graph, x.scale // 2
    with graph.scope(layer.name):
        images = convolve(
            graph,
            as_images(chunk, x),
            f"{layer.name}.resample.1",
            pads=[0, 0, 1, 1],  # ZeroPad2d((0, 1, 0, 1)): right and below only
            strides=[2, 2],
        )
        chunk.measure(scale, images)
        y = as_frames(chunk, images, layer.out_channels, x.count, scale)
        return _halve_frames(chunk, y, f"{layer.name}.time_conv") if layer.is_temporal else y


def _halve_frames(chunk: Chunk, x: Frames, conv: str) -> Frames:
    """Convolve at every second frame; of the cache, the kernel reaches the newer frame only."""
    graph = chunk.graph
    if chunk.is_first:
        chunk.present[conv] = chunk.prepend_zeros(x.value, 1)
        return x
    joined = graph.op("Concat", cut(graph, chunk.past[conv], 2, 1, 2), x.value, axis=2)
    chunk.present[conv] = cut(graph, joined, 2, x.count - 1, x.count + 1)
    y = convolve(graph, joined, conv, strides=[2, 1, 1])
    return Frames(y, x.channels, x.count // 2, x.scale)


def duplicate_shortcut(chunk: Chunk, x: Frames, stage: Stage) -> ir.Value:
    """Spread channels over the new pixels and frames, repeating them where they are too few.

    Source: ``DupUp3D``.
    """
    graph, (time, space) = chunk.graph, stage.factors
    repeats = stage.out_channels * time * space**2 // x.channels
    count, height, width = x.count, chunk.height(x.scale), chunk.width(x.scale)
    y = x.value
    if repeats > 1:
        y = graph.op("Unsqueeze", y, graph.constant([2]))
        y = graph.op("Expand", y, graph.constant([1, 1, repeats, 1, 1, 1]))
    y = chunk.reshape(y, -1, time, space, space, count, height, width)
    if chunk.is_first and time > 1:
        # The first frame has no predecessor: of its copies the last one stays.
        y, time = cut(graph, y, 1, time - 1, time), 1
    y = graph.op("Transpose", y, perm=[0, 4, 1, 5, 2, 6, 3])
    scale = x.scale * space
    return chunk.reshape(
        y, -1, stage.out_channels, count * time, chunk.height(scale), chunk.width(scale)
    )


def average_shortcut(chunk: Chunk, x: Frames, stage: Stage) -> ir.Value:
    """Fold pixels and frames into channels, and average groups of those to the stage's number.

    Source: ``AvgDown3D``.
    """
    graph, (time, space) = chunk.graph, stage.factors
    group = x.channels * time * space**2 // stage.out_channels
    if group == 1 and time * space == 1:
        return x.value
    y, count = x.value, x.count
    if count % time:
        y, count = chunk.prepend_zeros(y, time - count % time), count + time - count % time
    scale = x.scale // space
    height, width = chunk.height(scale), chunk.width(scale)
    if time * space > 1:
        y = chunk.reshape(y, -1, count // time, time, height, space, width, space)
        y = graph.op("Transpose", y, perm=[0, 2, 4, 6, 1, 3, 5])
    y = chunk.reshape(y, -1, stage.out_channels, group, count // time, height, width)
    return graph.op("ReduceMean", y, graph.constant([2]), keepdims=0)


def fold_pixels(chunk: Chunk, video: ir.Value, patch: int, pixels: Frames) -> Frames:
    """Move squares of ``patch`` pixels a side into channels; ``pixels`` says what comes out.

    Source: ``patchify``.
    """
    if patch == 1:
        return pixels
    height, width = chunk.height(pixels.scale), chunk.width(pixels.scale)
    y = chunk.reshape(video, -1, pixels.count, height, patch, width, patch)
    y = chunk.graph.op("Transpose", y, perm=[0, 5, 3, 1, 2, 4])  # column before row
    y = chunk.reshape(y, -1, pixels.channels, pixels.count, height, width)
    return Frames(y, pixels.channels, pixels.count, pixels.scale)


def unfold_pixels(chunk: Chunk, x: Frames, patch: int) -> ir.Value:
    """Undo :func:`fold_pixels`. Source: ``unpatchify``."""
    if patch == 1:
        return x.value
    graph, scale = chunk.graph, x.scale
    y = chunk.reshape(x.value, -1, patch, patch, x.count, chunk.height(scale), chunk.width(scale))
    y = graph.op("Transpose", y, perm=[0, 3, 4, 2, 5, 1])
    sides = (
        graph.op("Mul", s, graph.constant([patch]))
        for s in (chunk.height(scale), chunk.width(scale))
    )
    return chunk.reshape(y, -1, x.channels // patch**2, x.count, *sides)

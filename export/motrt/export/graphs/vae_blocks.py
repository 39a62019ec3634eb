"""The layers that the VAE's encoder and decoder share.

Source of every layer: diffusers ``models/autoencoders/autoencoder_kl_wan.py``; a function names
its class. Shapes: ``[B, C, F, h, w]`` with the number of frames F known when the graph is written;
B, h and w are the run's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.vae_tensors import CACHE_FRAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from motrt.engines.vae_network import Network, ResidualLayer
    from motrt.export.graphs.builder import GraphBuilder

_NORM_EPS = 1e-12  # torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class Frames:
    """A ``[B, channels, count, h, w]`` value; ``scale`` is h as a multiple of the latents'."""

    value: ir.Value
    channels: int
    count: int
    scale: int


class Chunk:
    """One graph in the making: its caches, and the sizes of its frames.

    Args:
        graph: The graph.
        past: What earlier chunks left, by the convolution's name; empty in the first chunk.
        batch: The number of videos, int64 ``[1]``.
        is_first: Whether the chunk is the first of its video.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        past: Mapping[str, ir.Value],
        batch: ir.Value,
        *,
        is_first: bool,
    ) -> None:
        self.graph = graph
        self.is_first = is_first
        self.past = past
        self.present: dict[str, ir.Value] = {}
        self._batch = batch
        self._sizes: dict[int, tuple[ir.Value, ir.Value]] = {}

    def set_size(self, scale: int, size: ir.Value) -> None:
        """Say how high and wide frames of ``scale`` are, int64 ``[2]``."""
        ones = self.graph.constant([1, 1])
        parts = self.graph.op_n("Split", [size, ones], 2, axis=0)
        self._sizes[scale] = (parts[0], parts[1])

    def measure(self, scale: int, images: ir.Value) -> None:
        """Read height and width of ``scale`` off ``[B·F, C, h, w]``, unless they are known."""
        if scale not in self._sizes:
            self.set_size(scale, self.graph.dims(images, 2, 4))

    def height(self, scale: int) -> ir.Value:
        """Return the height of frames of ``scale``, int64 ``[1]``."""
        return self._sizes[scale][0]

    def width(self, scale: int) -> ir.Value:
        """Return the width of frames of ``scale``, int64 ``[1]``."""
        return self._sizes[scale][1]

    def reshape(self, x: ir.Value, *target: int | ir.Value) -> ir.Value:
        """Reshape to numbers (-1 and 0 as in ONNX) and sizes that only the run knows."""
        return self.graph.op("Reshape", x, self._shape(*target))

    def zero_cache(self, conv: str, channels: int, scale: int) -> None:
        """Leave zeros for a convolution that the first chunk skips."""
        shape = self._shape(
            self._batch, channels, CACHE_FRAMES, self.height(scale), self.width(scale)
        )
        self.present[conv] = self.graph.op("Expand", self.graph.scalar(0.0), shape)

    def prepend_zeros(self, x: ir.Value, frames: int) -> ir.Value:
        """Put ``frames`` black frames before ``x`` ``[B, C, F, h, w]``."""
        pads = self.graph.constant([0, 0, frames, 0, 0, 0, 0, 0, 0, 0])
        return self.graph.op("Pad", x, pads)

    def _shape(self, *sizes: int | ir.Value) -> ir.Value:
        parts: list[ir.Value] = []
        numbers: list[int] = []
        for size in (*sizes, None):
            if isinstance(size, int):
                numbers.append(size)
                continue
            if numbers:
                parts.append(self.graph.constant(numbers))
                numbers = []
            if size is not None:
                parts.append(size)
        return parts[0] if len(parts) == 1 else self.graph.op("Concat", *parts, axis=0)


def convolve(
    graph: GraphBuilder,
    x: ir.Value,
    name: str,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> ir.Value:
    """A convolution with bias, over images or frames as its kernel has two or three axes."""
    kernel = graph.weight_shape(f"{name}.weight")[2:]
    return graph.op(
        "Conv",
        x,
        graph.weight(f"{name}.weight"),
        graph.weight(f"{name}.bias"),
        kernel_shape=list(kernel),
        pads=pads or [0] * 2 * len(kernel),
        strides=strides or [1] * len(kernel),
    )


def causal_convolve(chunk: Chunk, x: Frames, name: str) -> Frames:
    """Convolve each frame with the two before it, which for the oldest ones are the cache.

    Source: ``WanCausalConv3d`` and the handling of ``feat_cache`` around it.
    """
    graph = chunk.graph
    outgoing, _, _, *sides = graph.weight_shape(f"{name}.weight")
    sides = [side // 2 for side in sides]
    if chunk.is_first:
        # Padding stands for the cache: before the first frame all is zero.
        y = convolve(graph, x.value, name, pads=[CACHE_FRAMES, *sides, 0, *sides])
        chunk.present[name] = chunk.prepend_zeros(x.value, CACHE_FRAMES - x.count)
    else:
        joined = graph.op("Concat", chunk.past[name], x.value, axis=2)
        y = convolve(graph, joined, name, pads=[0, *sides, 0, *sides])
        chunk.present[name] = cut(graph, joined, 2, x.count, x.count + CACHE_FRAMES)
    return Frames(y, outgoing, x.count, x.scale)


def cut(graph: GraphBuilder, x: ir.Value, axis: int, start: int, end: int) -> ir.Value:
    """Return ``x[start:end]`` along ``axis``."""
    return graph.op(
        "Slice", x, graph.constant([start]), graph.constant([end]), graph.constant([axis])
    )


def norm(graph: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """``x / max(|x|, eps) · sqrt(C) · gamma``, the length taken over channels (axis 1).

    Source: ``WanRMS_norm``.
    """
    gamma = f"{name}.gamma"
    length = graph.op("ReduceL2", x, graph.constant([1]), keepdims=1)
    unit = graph.op("Div", x, graph.op("Max", length, graph.scalar(_NORM_EPS)))
    # The small product first: one pass over the frames less.
    root = graph.scalar(math.sqrt(graph.weight_shape(gamma)[0]))
    return graph.op("Mul", unit, graph.op("Mul", graph.weight(gamma), root))


def norm_silu(graph: GraphBuilder, x: Frames, name: str) -> Frames:
    """The norm ``name``, then ``y · sigmoid(y)``."""
    y = norm(graph, x.value, name)
    y = graph.op("Mul", y, graph.op("Sigmoid", y))
    return Frames(y, x.channels, x.count, x.scale)


def residual_block(chunk: Chunk, x: Frames, layer: ResidualLayer) -> Frames:
    """Two normed causal convolutions around a shortcut. Source: ``WanResidualBlock``."""
    graph, name = chunk.graph, layer.name
    with graph.scope(name):
        shortcut = x.value
        if layer.in_channels != layer.out_channels:
            shortcut = convolve(graph, x.value, f"{name}.conv_shortcut")
        y = causal_convolve(chunk, norm_silu(graph, x, f"{name}.norm1"), f"{name}.conv1")
        y = causal_convolve(chunk, norm_silu(graph, y, f"{name}.norm2"), f"{name}.conv2")
        return Frames(graph.op("Add", y.value, shortcut), y.channels, y.count, y.scale)


def middle_block(chunk: Chunk, x: Frames, network: Network) -> Frames:
    """Residual block, attention, residual block. Source: ``WanMidBlock``."""
    before, after = network.middle_blocks
    x = residual_block(chunk, x, before)
    with chunk.graph.scope(network.attention):
        x = _attention(chunk, x, network.attention)
    return residual_block(chunk, x, after)


def _attention(chunk: Chunk, x: Frames, name: str) -> Frames:
    """Attention with one head among the positions of each frame. Source: ``WanAttentionBlock``."""
    graph, channels = chunk.graph, x.channels
    images = as_images(chunk, x)
    mixed = convolve(graph, norm(graph, images, f"{name}.norm"), f"{name}.to_qkv")
    mixed = graph.op("Reshape", mixed, graph.constant([0, 3 * channels, -1]))
    widths = graph.constant([channels] * 3)
    query, key, value = graph.op_n("Split", [mixed, widths], 3, axis=1)  # [B·F, C, h·w]
    query = graph.op("Mul", query, graph.scalar(1 / math.sqrt(channels)))
    scores = graph.op("MatMul", graph.op("Transpose", query, perm=[0, 2, 1]), key)
    weights = graph.op("Softmax", scores, axis=-1)
    y = graph.op("MatMul", weights, graph.op("Transpose", value, perm=[0, 2, 1]))
    y = graph.op("Transpose", y, perm=[0, 2, 1])
    y = chunk.reshape(y, 0, channels, chunk.height(x.scale), chunk.width(x.scale))
    y = graph.op("Add", convolve(graph, y, f"{name}.proj"), images)
    return as_frames(chunk, y, channels, x.count, x.scale)


def as_images(chunk: Chunk, x: Frames) -> ir.Value:
    """``[B, C, F, h, w]`` to ``[B·F, C, h, w]``."""
    graph = chunk.graph
    if x.count == 1:
        return graph.op("Squeeze", x.value, graph.constant([2]))
    y = graph.op("Transpose", x.value, perm=[0, 2, 1, 3, 4])
    return chunk.reshape(y, -1, x.channels, chunk.height(x.scale), chunk.width(x.scale))


def as_frames(chunk: Chunk, x: ir.Value, channels: int, count: int, scale: int) -> Frames:
    """``[B·F, C, h, w]`` to ``[B, C, F, h, w]``."""
    graph = chunk.graph
    if count == 1:
        y = graph.op("Unsqueeze", x, graph.constant([2]))
    else:
        y = chunk.reshape(x, -1, count, channels, chunk.height(scale), chunk.width(scale))
        y = graph.op("Transpose", y, perm=[0, 2, 1, 3, 4])
    return Frames(y, channels, count, scale)

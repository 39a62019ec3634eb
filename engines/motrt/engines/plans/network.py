"""From a bundle's graph to TensorRT's network: parsed, its weights put in their place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines._tensorrt import data_type, has_attention
from motrt.engines.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from motrt.engines.plans.callbacks import Messages
    from motrt.engines.store import WeightStore
    from motrt.engines.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention of the network, under the graph's own node name."""

    name: str
    attention: Any


def create_network(trt: Any, builder: Any) -> Any:
    """Return an empty network that keeps every type of the graph as it is written."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def parse(trt: Any, logger: Any, network: Any, model: bytes, messages: Messages) -> None:
    """Read a serialized model without initializers into the network.

    Raises:
        BuildError: The parser refuses; its words are in ``messages`` of the error.
    """
    parser = trt.OnnxParser(network, logger)
    if parser.parse(model):
        return
    said: list[str] = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        said.append(f"{_node_of(error)}{error.desc()}")
    raise BuildError(
        "TensorRT does not read the graph",
        got=said[0] if said else "no reason given",
        expected="a graph of a lowering that this TensorRT imports",
        fix="motrt doctor says which lowering to export with.",
        messages=[*said, *messages.errors],
    )


def fill_weights(
    trt: Any, network: Any, weights: Sequence[TensorSpec], store: WeightStore | None
) -> None:
    """Replace the inputs that stand for weights by refittable constants under their names.

    Args:
        trt: The module.
        network: A parsed network, each weight of which is an input.
        weights: Those weights.
        store: Where their values are, which must live until the build ends; None for placeholders
            without values, of which the builder reads nothing.

    Raises:
        BuildError: TensorRT refuses a name.
    """
    inputs = {tensor.name: tensor for tensor in _inputs(network)}
    uses: dict[str, list[tuple[Any, int]]] = {}
    for layer in _layers(network):
        for index in range(layer.num_inputs):
            tensor = layer.get_input(index)
            if tensor is not None and tensor.name in inputs:
                uses.setdefault(tensor.name, []).append((layer, index))
    for spec in weights:
        count = math.prod(size for size in spec.shape if isinstance(size, int))
        dtype = data_type(trt, spec.dtype)
        address = 0 if store is None else int(store[spec.name].ctypes.data)
        constant = network.add_constant(spec.shape, trt.Weights(dtype, address, count))
        tensor = inputs[spec.name]
        for layer, index in uses.get(spec.name, []):
            layer.set_input(index, constant.get_output(0))
        network.remove_tensor(tensor)
        # A placeholder is known by an address that TensorRT makes up: ask the layer for it.
        own = constant.weights
        if not isinstance(own, trt.Weights):
            own = trt.Weights(dtype, own.ctypes.data, count)
        named = network.set_weights_name(own, spec.name)
        if not named or not network.mark_weights_refittable(spec.name):
            raise BuildError(
                "TensorRT does not let a weight be refitted",
                got=spec.describe(),
                expected="a constant that can be named and marked",
                fix="Build with --weights inputs.",
            )


def attention_layers(trt: Any, network: Any) -> list[AttentionLayer]:
    """Return the fused attentions; none where TensorRT has no such layer, or the graph none."""
    found: list[AttentionLayer] = []
    if not has_attention(trt):
        return found
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # pybind hands out the base class
            attention = layer.attention
            found.append(AttentionLayer(str(attention.name), attention))
    return found


def products_by_type(trt: Any, network: Any) -> dict[str, int]:
    """Count matrix products and fused attentions by the type that they compute in."""
    kinds = [trt.LayerType.MATRIX_MULTIPLY]
    if has_attention(trt):
        kinds.append(trt.LayerType.ATTENTION_INPUT)
    counts: dict[str, int] = {}
    for layer in _layers(network):
        if layer.type in kinds:
            name = layer.get_input(0).dtype.name.lower()
            counts[name] = counts.get(name, 0) + 1
    return counts


def _layers(network: Any) -> Iterator[Any]:
    for index in range(network.num_layers):
        yield network.get_layer(index)


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


def _node_of(error: Any) -> str:
    name = error.node_name()
    return f"{name}: " if name else ""

"""ONNX's own checker and shape inference, over graphs whose weights are linked files.

The checker refuses external data with more than one link (it takes hard links for an attack) and
would read the weights. Neither is wanted: here each initializer becomes a graph input of its
type, which is all that the checker needs to know about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from motrt.engines.errors import ContractError

if TYPE_CHECKING:
    from onnx import ModelProto


def without_weights(model: ir.Model) -> ModelProto:
    """Return the model's proto with its initializers turned into graph inputs."""
    proto = ir.serde.serialize_model(model)
    graph = proto.graph
    for tensor in graph.initializer:
        graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        )
    del graph.initializer[:]
    return proto


def check_onnx(model: ir.Model, name: str) -> None:
    """Run the checker with strict shape inference.

    Raises:
        ContractError: The checker refuses.
    """
    try:
        onnx.checker.check_model(without_weights(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as err:
        raise ContractError(
            f"ONNX's checker refuses graph {name}", got=str(err).strip().splitlines()[0]
        ) from err

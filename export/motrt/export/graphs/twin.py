"""The float32 twin of a 16-bit graph, over the same weight bytes.

ONNX Runtime's CPU kernels do not run bfloat16 and round float16 in their own way. The twin keeps
every node, name and weight of a graph and only widens its arithmetic, so that a mistake in the
graph or in its weights shows against a float32 reference at float32 tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from motrt.export.graphs.builder import serialize

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.dtypes import DType

_FLOAT = ir.DataType.FLOAT


def float32_twin_of(path: Path, dtype: DType) -> bytes:
    """Return the bytes of the float32 twin of a graph file."""
    return serialize(float32_twin(ir.load(path), dtype))


def float32_twin(model: ir.Model, dtype: DType) -> ir.Model:
    """Return a copy of ``model`` in which everything of type ``dtype`` is float32.

    Initializers keep their type and bytes, each followed by a Cast; graph inputs, outputs,
    constants and the targets of casts change their type.
    """
    narrow = ir.DataType(dtype.onnx)
    twin = ir.serde.deserialize_model(ir.serde.serialize_model(model))
    graph = twin.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == narrow:
            value.dtype = _FLOAT
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == narrow:
            node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
        if node.op_type == "Constant":
            tensor = node.attributes["value"].as_tensor()
            if tensor.dtype == narrow:
                wide = ir.tensor(tensor.numpy().astype(np.float32))
                node.attributes["value"] = ir.AttrTensor("value", wide)
    first = graph[0]
    for value in list(graph.initializers.values()):
        if value.dtype != narrow:
            continue
        cast = ir.node("Cast", [value], attributes={"to": int(_FLOAT)}, name=f"twin.{value.name}")
        cast.outputs[0].name = f"twin.{value.name}"
        users = [use for use in value.uses() if use.node is not cast]
        graph.insert_before(first, cast)
        for use in users:
            use.node.replace_input_with(use.idx, cast.outputs[0])
    return twin

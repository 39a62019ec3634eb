"""A thin hand over onnx-ir: append nodes, keep names readable, never touch a weight's bytes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from motrt.engines.dtypes import DType
from motrt.engines.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from motrt.engines.store import WeightEntry
    from motrt.engines.tensors import TensorSpec

# The IR version that brought each opset that we write.
_IR_VERSION = {18: 8, 24: 11}


class GraphBuilder:
    """Collect one graph.

    Initializers come from ``weights`` only, as references to byte ranges; everything else that
    is constant becomes a ``Constant`` node. So "every initializer is a checkpoint tensor" is an
    exact statement, and a refit needs to know no exception.

    Args:
        name: Name of the graph.
        opset: ONNX operator set.
        dtype: Compute type of the activations.
        weights: Place of each tensor that may become an initializer.
    """

    def __init__(
        self, name: str, *, opset: int, dtype: DType, weights: Mapping[str, WeightEntry]
    ) -> None:
        self.name = name
        self.opset = opset
        self.dtype = dtype
        self._weights = weights
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._constants: dict[tuple[bytes, tuple[int, ...], str], ir.Value] = {}
        self._casts: dict[tuple[str, DType], ir.Value] = {}
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes, so that an error of any backend names the layer."""
        outer, self._scope = self._scope, f"{self._scope}{name}."
        yield
        self._scope = outer

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Append a node with one output and return it."""
        return self.op_n(op_type, inputs, 1, **attributes)[0]

    def op_n(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Append a node with ``count`` outputs."""
        name = f"{self._scope}{op_type}_{len(self._nodes)}"
        node = ir.node(
            op_type, inputs, attributes=attributes or None, num_outputs=count, name=name
        )
        for index, output in enumerate(node.outputs):
            output.name = name if count == 1 else f"{name}.{index}"
        self._nodes.append(node)
        return node.outputs

    def constant(self, value: Any, dtype: DType = DType.INT64) -> ir.Value:
        """Return a constant; equal ones share a node."""
        array = np.asarray(value, dtype.numpy)
        key = (array.tobytes(), array.shape, dtype.value)
        if key not in self._constants:
            outer, self._scope = self._scope, "constants."
            self._constants[key] = self.op("Constant", value=ir.tensor(array))
            self._scope = outer
        return self._constants[key]

    def scalar(self, value: float) -> ir.Value:
        """Return a scalar constant of the compute type."""
        return self.constant(value, self.dtype)

    def cast(self, value: ir.Value, to: DType) -> ir.Value:
        """Append a Cast. Values carry no type here: the caller knows whether one is needed."""
        return self.op("Cast", value, to=to.onnx)

    def has_weight(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self._weights

    def weight(self, name: str, dtype: DType | None = None) -> ir.Value:
        """Return an initializer under the checkpoint's name.

        Args:
            name: Tensor name.
            dtype: Type wanted, the compute type by default; a Cast follows where the stored
                type differs.

        Raises:
            ExportError: The checkpoint has no such tensor.
        """
        wanted = dtype or self.dtype
        if name not in self._weights:
            raise ExportError(f"graph {self.name} needs a tensor the checkpoint lacks", got=name)
        entry = self._weights[name]
        if name not in self._initializers:
            self._initializers[name] = _initializer(name, entry)
        value = self._initializers[name]
        if entry.dtype is wanted:
            return value
        if (name, wanted) not in self._casts:
            self._casts[name, wanted] = self.cast(value, wanted)
        return self._casts[name, wanted]

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._weights[name].shape

    def add_input(self, spec: TensorSpec) -> ir.Value:
        """Declare a graph input."""
        value = ir.Value(
            name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(_ir_type(spec.dtype))
        )
        self._inputs.append(value)
        return value

    def add_output(self, value: ir.Value, spec: TensorSpec) -> None:
        """Make a node's output a graph output, under the contract's name."""
        value.name = spec.name
        value.shape = ir.Shape(spec.shape)
        value.type = ir.TensorType(_ir_type(spec.dtype))
        self._outputs.append(value)

    def dims(self, value: ir.Value, start: int, end: int) -> ir.Value:
        """Return sizes ``start`` to ``end`` of a value's shape, int64 ``[end - start]``."""
        return self.op("Shape", value, start=start, end=end)

    def model(self) -> ir.Model:
        """Return the finished model; initializers point to files and hold no data."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": self.opset},
            name=self.name,
        )
        return ir.Model(graph, ir_version=_IR_VERSION[self.opset], producer_name="motrt")


def serialize(model: ir.Model) -> bytes:
    """Return a model's protobuf bytes; external data stays external."""
    return bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))


def _initializer(name: str, entry: WeightEntry) -> ir.Value:
    dtype, shape = _ir_type(entry.dtype), ir.Shape(entry.shape)
    tensor = ir.ExternalTensor(
        entry.file, entry.offset, entry.nbytes, dtype, shape=shape, name=name
    )
    return ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)


def _ir_type(dtype: DType) -> ir.DataType:
    return ir.DataType(dtype.onnx)

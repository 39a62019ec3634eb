"""The two edits that a graph needs before TensorRT parses it, on ONNX's wire format.

Weights become graph inputs: the parser then reads no weight, and their names are free for what
takes their place (a placeholder, the store's bytes, or the input itself). And named dimensions
that TensorRT wants as numbers become numbers. An embedded box has no onnx package, so the fields
of ``onnx.proto`` that this takes are spelled out here; everything else is copied as it is.
``tests/engines/plans/test_graph_file.py`` compares with the onnx package.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.dtypes import DType
from motrt.engines.errors import ContractError
from motrt.engines.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Field numbers of onnx.proto, which never change.
_MODEL_OPSET, _MODEL_GRAPH = 8, 7
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 5, 11, 12
_GRAPH_SPARSE_INITIALIZER = 15
_TENSOR_DIMS, _TENSOR_DTYPE, _TENSOR_NAME = 1, 2, 8
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR = 1, 2, 1
_TENSOR_TYPE_DTYPE, _TENSOR_TYPE_SHAPE, _SHAPE_DIM = 1, 2, 1
_DIM_VALUE, _DIM_PARAM = 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_DTYPES = {dtype.onnx: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A graph without its weights.

    Attributes:
        model: A ModelProto in which every initializer has become a graph input.
        weights: Name, type and shape of each, in the file's order.
        opset: Version of the default operator set.
    """

    model: bytes
    weights: tuple[TensorSpec, ...]
    opset: int

    @property
    def sha256(self) -> str:
        """Hash of ``model``: it does not depend on where the weights lie, nor on their values."""
        return hashlib.sha256(self.model).hexdigest()

    def with_dims(self, dims: Mapping[str, int]) -> bytes:
        """Return ``model`` with these named dimensions of its inputs and outputs as numbers."""
        return with_dims(self.model, dims)


def with_dims(model: bytes, dims: Mapping[str, int]) -> bytes:
    """Return a serialized model with named dimensions of its inputs and outputs as numbers.

    Raises:
        ContractError: It is no model.
    """

    def edit_graph(graph: memoryview) -> bytes:
        return b"".join(
            _message(number, _with_dims(value, dims))
            if number in {_GRAPH_INPUT, _GRAPH_OUTPUT}
            else bytes(whole)
            for number, value, whole in _fields(graph)
        )

    return _edit_model(model, edit_graph)


def read_graph(data: bytes) -> GraphFile:
    """Take the weights out of a serialized model.

    Raises:
        ContractError: It is no model, or it has weights of a kind that bundles do not have.
    """
    weights: list[TensorSpec] = []

    def edit_graph(graph: memoryview) -> bytes:
        kept: list[bytes] = []
        for number, value, whole in _fields(graph):
            if number == _GRAPH_INITIALIZER:
                weights.append(_weight(value))
            elif number == _GRAPH_SPARSE_INITIALIZER:
                raise _unsound("a sparse initializer")
            else:
                kept.append(bytes(whole))
        # A field's place in a message means nothing, only the order of those of one number does.
        inputs = (_message(_GRAPH_INPUT, _value_info(spec)) for spec in weights)
        return b"".join([*kept, *inputs])

    model = _edit_model(data, edit_graph)
    return GraphFile(model, tuple(weights), _opset(data))


def _edit_model(data: bytes, edit_graph: Callable[[memoryview], bytes]) -> bytes:
    parts: list[bytes] = []
    graphs = 0
    for number, value, whole in _fields(memoryview(data)):
        if number == _MODEL_GRAPH:
            graphs += 1
            parts.append(_message(_MODEL_GRAPH, edit_graph(value)))
        else:
            parts.append(bytes(whole))
    if graphs != 1:
        raise _unsound(f"{graphs} graphs")
    return b"".join(parts)


def _opset(data: bytes) -> int:
    for number, value, _ in _fields(memoryview(data)):
        if number == _MODEL_OPSET:
            fields = {n: v for n, v, _ in _fields(value)}
            if not bytes(fields.get(_OPSET_DOMAIN, memoryview(b""))):
                return _integer(fields[_OPSET_VERSION]) if _OPSET_VERSION in fields else 0
    raise _unsound("no operator set")


def _weight(tensor: memoryview) -> TensorSpec:
    shape: list[int] = []
    dtype, name = 0, ""
    for number, value, whole in _fields(tensor):
        if number == _TENSOR_DIMS:
            packed = _wire_type(whole) == _BYTES
            shape += _integers(value) if packed else [_integer(value)]
        elif number == _TENSOR_DTYPE:
            dtype = _integer(value)
        elif number == _TENSOR_NAME:
            name = _text(value)
    if not name or dtype not in _DTYPES:
        raise _unsound(f"initializer {name!r} of type {dtype}")
    return TensorSpec(name, _DTYPES[dtype], tuple(shape))


def _value_info(spec: TensorSpec) -> bytes:
    dims = b"".join(
        _message(_SHAPE_DIM, _number(_DIM_VALUE, size))
        for size in spec.shape
        if isinstance(size, int)
    )
    tensor = _number(_TENSOR_TYPE_DTYPE, spec.dtype.onnx) + _message(_TENSOR_TYPE_SHAPE, dims)
    kind = _message(_VALUE_TYPE, _message(_TYPE_TENSOR, tensor))
    return _message(_VALUE_NAME, spec.name.encode()) + kind


def _with_dims(value_info: memoryview, dims: Mapping[str, int]) -> bytes:
    """Follow ValueInfoProto.type.tensor_type.shape.dim.dim_param."""
    path = (_VALUE_TYPE, _TYPE_TENSOR, _TENSOR_TYPE_SHAPE, _SHAPE_DIM)

    def edit(message: memoryview, depth: int) -> bytes:
        parts: list[bytes] = []
        for number, value, whole in _fields(message):
            if depth < len(path) and number == path[depth]:
                parts.append(_message(number, edit(value, depth + 1)))
            elif depth == len(path) and number == _DIM_PARAM and _text(value) in dims:
                parts.append(_number(_DIM_VALUE, dims[_text(value)]))
            else:
                parts.append(bytes(whole))
        return b"".join(parts)

    return edit(value_info, 0)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield number, content, and the whole field with its tag, of each field of a message."""
    position = 0
    while position < len(message):
        start = position
        tag, position = _varint(message, position)
        wire = tag & 7
        if wire == _BYTES:
            length, position = _varint(message, position)
        elif wire == _VARINT:
            length = _varint(message, position)[1] - position
        elif wire in {_FIXED32, _FIXED64}:
            length = 4 if wire == _FIXED32 else 8
        else:
            raise _unsound(f"wire type {wire}")
        end = position + length
        if end > len(message) or not tag >> 3:
            raise _unsound("a field that is cut off")
        yield tag >> 3, message[position:end], message[start:end]
        position = end


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return value, position + index + 1
    raise _unsound("a number that is cut off")


def _integer(content: memoryview) -> int:
    return _varint(content, 0)[0]


def _integers(packed: memoryview) -> Iterator[int]:
    position = 0
    while position < len(packed):
        value, position = _varint(packed, position)
        yield value


def _wire_type(field: memoryview) -> int:
    return _varint(field, 0)[0] & 7


def _text(content: memoryview) -> str:
    try:
        return bytes(content).decode()
    except UnicodeDecodeError as err:
        raise _unsound("a name that is no text") from err


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _encode(field << 3 | _VARINT) + _encode(value)


def _message(field: int, content: bytes) -> bytes:
    return _encode(field << 3 | _BYTES) + _encode(len(content)) + content


def _unsound(got: str) -> ContractError:
    return ContractError(
        "the graph is not one of a bundle",
        got=got,
        expected="an ONNX model of motrt's",
        fix="Export the checkpoint again.",
    )

"""The edits on ONNX's wire format do what the onnx package does, and refuse what it would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from motrt.engines.bundle import Bundle
from motrt.engines.dtypes import DType
from motrt.engines.errors import ContractError
from motrt.engines.plans.graph_file import read_graph

CASES = [("nano-like", "native"), ("edge-like", "native"), ("shared", "portable")]


def _theirs(model: onnx.ModelProto, dims: dict[str, int]) -> onnx.ModelProto:
    """The same edits with the onnx package."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    for tensor in graph.initializer:
        graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        )
    del graph.initializer[:]
    return copy


@pytest.mark.parametrize(("kind", "lowering"), CASES)
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_a_bundle_graph_is_edited_as_onnx_does(
    engine: str, kind: str, lowering: str, bundle: Callable[..., Path]
) -> None:
    opened = Bundle.open(bundle(kind, "fp16", lowering))
    data = opened.path(f"{engine}.onnx").read_bytes()
    model = onnx.load_model_from_string(data)
    graph = read_graph(data)
    for dims in ({}, {"capacity": 300}, {"batch": 1, "capacity": 1 << 40}):
        mine = onnx.load_model_from_string(graph.with_dims(dims))
        assert mine == _theirs(model, dims)
    assert graph.opset == model.opset_import[0].version
    entries = opened.weights().entries
    assert {spec.name for spec in graph.weights} == {t.name for t in model.graph.initializer}
    for spec in graph.weights:
        assert (spec.dtype, spec.shape) == (entries[spec.name].dtype, entries[spec.name].shape)


def test_the_hash_is_blind_to_where_weights_lie_and_sees_all_else(
    bundle: Callable[..., Path],
) -> None:
    data = Bundle.open(bundle("nano-like", "fp16")).path("reasoner.onnx").read_bytes()
    model = onnx.load_model_from_string(data)
    first = read_graph(data).sha256
    for entry in model.graph.initializer[0].external_data:
        entry.value = "weights/elsewhere.safetensors" if entry.key == "location" else "12345"
    assert read_graph(model.SerializeToString()).sha256 == first
    model.graph.initializer[0].dims[0] += 1
    assert read_graph(model.SerializeToString()).sha256 != first
    other = onnx.load_model_from_string(data)
    other.graph.node[3].attribute[0].i += 1
    assert read_graph(other.SerializeToString()).sha256 != first


NAMES = st.text("abcé.0_", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.dictionaries(
        NAMES,
        st.tuples(
            st.sampled_from([DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT64]),
            st.lists(st.integers(0, 1 << 33), max_size=4),
        ),
        max_size=4,
    ),
    dims=st.lists(st.one_of(st.sampled_from(["a", "b"]), st.integers(0, 300)), max_size=4),
    value=st.integers(1, 1 << 40),
)
def test_any_graph_is_edited_as_onnx_does(
    weights: dict[str, tuple[DType, list[int]]], dims: list[int | str], value: int
) -> None:
    node = helper.make_node("Identity", ["x"], ["y"], name="n")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], doc_string="a")
    for name, (dtype, shape) in weights.items():
        tensor = TensorProto(name=name, data_type=dtype.onnx, dims=shape)
        graph.initializer.append(tensor)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    read = read_graph(model.SerializeToString())
    edited = onnx.load_model_from_string(read.with_dims({"a": value}))
    assert edited == _theirs(model, {"a": value})
    assert [(s.name, s.dtype, list(s.shape)) for s in read.weights] == [
        (name, dtype, shape) for name, (dtype, shape) in weights.items()
    ]


def test_packed_dims_are_read(bundle: Callable[..., Path]) -> None:
    """protobuf readers must take repeated numbers packed or not; onnx writes them unpacked."""
    packed = b"\x0a\x02\x03\x05" + b"\x10\x01" + b"\x42\x01w"  # dims 3, 5; float; name w
    graph = b"\x2a" + bytes([len(packed)]) + packed
    model = b"\x3a" + bytes([len(graph)]) + graph + b"\x42\x02\x10\x12"
    assert [spec.describe() for spec in read_graph(model).weights] == ["w float32 [3, 5]"]


def test_what_is_no_graph_of_a_bundle_is_refused(bundle: Callable[..., Path]) -> None:
    data = Bundle.open(bundle("nano-like", "fp16")).path("reasoner.onnx").read_bytes()
    for damaged in (data[:-1], data[:5000], b"", b"\x00", b"\xff" * 40, b"stands for it", b"\x3a"):
        with pytest.raises(ContractError):
            read_graph(damaged)
    model = onnx.load_model_from_string(data)
    model.graph.sparse_initializer.append(onnx.SparseTensorProto())
    with pytest.raises(ContractError, match="sparse"):
        read_graph(model.SerializeToString())
    model = onnx.load_model_from_string(data)
    model.graph.initializer[0].data_type = TensorProto.STRING
    with pytest.raises(ContractError, match="of type 8"):
        read_graph(model.SerializeToString())

"""The rules that a graph must keep so that every backend computes what the contract says.

Each rule is a function that yields one sentence per violation. Most of them keep out spellings
that a backend accepts and computes differently; the docstring says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from motrt.engines.contract import Cache
from motrt.engines.dtypes import DType
from motrt.engines.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from motrt.engines.contract import EngineContract
    from motrt.engines.store import WeightEntry

    Rule = Callable[["GraphUnderLint"], Iterator[str]]

_NARROW = (DType.FLOAT16, DType.BFLOAT16)
_MAX_CONSTANT_BYTES = 4096  # shapes, axes, eps, the 128 time frequencies; a weight is larger
_NATIVE_OPS = frozenset({"Attention", "RotaryEmbedding", "RMSNormalization", "TensorScatter"})
_COMMON_OPS = frozenset(
    {
        "Add", "Cast", "Clip", "Concat", "Constant", "Conv", "Cos", "Div", "Expand", "Gather",
        "GatherND", "Gemm", "MatMul", "Max", "Mul", "Pad", "ReduceMean", "ReduceSum", "ReduceL2",
        "Relu", "Reshape", "Resize", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split",
        "Sqrt", "Sub", "Transpose", "Unsqueeze", "Squeeze",
    }
)  # fmt: skip


class GraphUnderLint:
    """A model with what it is measured against."""

    def __init__(
        self, model: ir.Model, contract: EngineContract, weights: Mapping[str, WeightEntry]
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.contract = contract
        self.weights = weights

    def nodes(self, *op_types: str) -> Iterator[ir.Node]:
        """Yield the nodes of these types, or all."""
        for node in self.graph:
            if not op_types or node.op_type in op_types:
                yield node


def lint(
    model: ir.Model, contract: EngineContract, weights: Mapping[str, WeightEntry]
) -> list[str]:
    """Return every violation of every rule, each with the rule's name in front."""
    subject = GraphUnderLint(model, contract, weights)
    return [f"{rule.__name__}: {sentence}" for rule in RULES for sentence in rule(subject)]


def require_clean(
    model: ir.Model, contract: EngineContract, weights: Mapping[str, WeightEntry]
) -> None:
    """Refuse a graph that breaks a rule.

    Raises:
        ContractError: Names the violations.
    """
    violations = lint(model, contract, weights)
    if violations:
        raise ContractError(
            f"graph {contract.name} breaks the contract's rules",
            got="; ".join(violations[:5]),
            expected="a graph as docs/contract.md describes it",
            fix="Export the checkpoint again.",
        )


def boundary(subject: GraphUnderLint) -> Iterator[str]:
    """Inputs and outputs are the contract's: names, order, types, shapes."""
    for kind, specs, values in (
        ("inputs", subject.contract.inputs, subject.graph.inputs),
        ("outputs", subject.contract.outputs, subject.graph.outputs),
    ):
        have = [_describe(value) for value in values]
        want = [spec.describe() for spec in specs]
        if have != want:
            first = next(
                (f"{h} for {w}" for h, w in zip(have, want, strict=False) if h != w),
                f"{len(have)} for {len(want)}",
            )
            yield f"{kind} differ from the contract: {first}"


def initializers(subject: GraphUnderLint) -> Iterator[str]:
    """Every initializer is the checkpoint's tensor of that name, at the store's place."""
    for name, value in subject.graph.initializers.items():
        tensor, entry = value.const_value, subject.weights.get(name or "")
        if entry is None:
            yield f"{name} is no tensor of the checkpoint"
        elif not isinstance(tensor, ir.ExternalTensor):
            yield f"{name} is stored inside the graph"
        else:
            have = (str(tensor.location), tensor.offset, tensor.length, int(tensor.dtype))
            want = (entry.file, entry.offset, entry.nbytes, entry.dtype.onnx)
            if have != want or tuple(tensor.shape.numpy()) != entry.shape:
                yield f"{name} points to {have}, the store has {want}"


def constants(subject: GraphUnderLint) -> Iterator[str]:
    """Constants are small: nothing of a weight was folded, fused or copied into one."""
    for node in subject.nodes("Constant"):
        attribute = node.attributes.get("value")
        nbytes = 0 if attribute is None else attribute.as_tensor().nbytes
        if nbytes > _MAX_CONSTANT_BYTES:
            yield f"{node.name} holds {nbytes} bytes"


def operators(subject: GraphUnderLint) -> Iterator[str]:
    """Standard operators only, and those of opset 24 only where the opset is 24.

    Swish is not among them: TensorRT parses it from 11 on. Nor is any vendor's operator.
    """
    opsets = dict(subject.model.graph.opset_imports)
    if set(opsets) != {""}:
        yield f"operator sets {opsets}"
    allowed = _COMMON_OPS | (_NATIVE_OPS if opsets.get("", 0) >= 24 else frozenset())
    for node in subject.nodes():
        if node.domain or node.op_type not in allowed:
            yield f"{node.name} is {node.domain or 'ai.onnx'}::{node.op_type}"


def attention(subject: GraphUnderLint) -> Iterator[str]:
    """Attention has one output, no is_causal, no softcap, no past, no nonpad_kv_seqlen.

    TensorRT aligns is_causal top-left (wrong with a cache), never reads nonpad_kv_seqlen, and
    refuses softcap, softmax_precision and more than one output.
    """
    for node in subject.nodes("Attention"):
        extra = set(node.attributes) - {"scale"}
        if extra:
            yield f"{node.name} sets {', '.join(sorted(extra))}"
        if sum(value is not None for value in node.inputs[4:]):
            yield f"{node.name} takes past or nonpad_kv_seqlen"
        if len(node.outputs) != 1:
            yield f"{node.name} has {len(node.outputs)} outputs"


def mask(subject: GraphUnderLint) -> Iterator[str]:
    """The reasoner's attention is masked by attention_bias alone, the generator's by nothing.

    A bool mask shared by several layers breaks TensorRT's builder.
    """
    want = "attention_bias" if subject.contract.name == "reasoner" else None
    for node in subject.nodes("Attention"):
        have = node.inputs[3].name if len(node.inputs) > 3 and node.inputs[3] else None
        if have != want:
            yield f"{node.name} is masked by {have}"


def scatter(subject: GraphUnderLint) -> Iterator[str]:
    """TensorScatter is linear on axis 2, from a graph input to a graph output.

    TensorRT maps it to an in-place cache update, which exists in this form only.
    """
    outputs = set(subject.graph.outputs)
    inputs = set(subject.graph.inputs)
    for node in subject.nodes("TensorScatter"):
        mode, axis = node.attributes.get("mode"), node.attributes.get("axis")
        if mode is None or mode.as_string() != "linear" or axis is None or axis.as_int() != 2:
            yield f"{node.name} is not linear on axis 2"
        if node.outputs[0] not in outputs or node.inputs[0] not in inputs:
            yield f"{node.name} does not lead from a graph input to a graph output"


def cache_rows(subject: GraphUnderLint) -> Iterator[str]:
    """Each layer's cache is fed by its own past, and key and value are not mixed up."""
    if subject.contract.name != "reasoner":
        return
    static = Cache.STATIC if any(subject.nodes("TensorScatter")) else Cache.APPEND
    op_type = "TensorScatter" if static is Cache.STATIC else "Concat"
    for value in subject.graph.inputs:
        name = value.name or ""
        if not name.startswith("past_key_values."):
            continue
        users = [use.node for use in value.uses()]
        if len(users) != 1 or users[0].op_type != op_type:
            yield f"{name} is not read by exactly one {op_type}"
        elif static is Cache.STATIC:
            present = users[0].outputs[0].name
            if present != name.replace("past_key_values.", "present."):
                yield f"{name} is updated into {present}"


def gemm(subject: GraphUnderLint) -> Iterator[str]:
    """Linears are Gemm(transB=1) on the checkpoint's own matrix."""
    for node in subject.nodes("Gemm"):
        trans_b = node.attributes.get("transB")
        others = set(node.attributes) - {"transB"}
        if trans_b is None or trans_b.as_int() != 1 or others:
            yield f"{node.name} is not Gemm(transB=1)"
        if not _is_weight(node.inputs[1]):
            yield f"{node.name} does not multiply by a tensor of the checkpoint"


def transposes(subject: GraphUnderLint) -> Iterator[str]:
    """No weight is transposed: ONNX Runtime would store a second copy of it."""
    for node in subject.nodes("Transpose"):
        if _is_weight(node.inputs[0]):
            yield f"{node.name} transposes a weight"


def norms(subject: GraphUnderLint) -> Iterator[str]:
    """RMSNormalization keeps its statistics in float32 (stash_type 1) over the last axis."""
    for node in subject.nodes("RMSNormalization"):
        stash, axis = node.attributes.get("stash_type"), node.attributes.get("axis")
        if stash is None or stash.as_int() != 1 or axis is None or axis.as_int() != -1:
            yield f"{node.name} does not say stash_type=1, axis=-1"


def softmax(subject: GraphUnderLint) -> Iterator[str]:
    """A spelled-out softmax runs in float32, on the last axis."""
    narrow = any(spec.dtype in _NARROW for spec in subject.contract.inputs)
    for node in subject.nodes("Softmax"):
        axis = node.attributes.get("axis")
        if axis is None or axis.as_int() != -1:
            yield f"{node.name} does not say axis=-1"
        if narrow and not _comes_from_float32(node):
            yield f"{node.name} runs in 16 bits"


def anonymity(subject: GraphUnderLint) -> Iterator[str]:
    """No metadata: it would carry source paths of the machine that exported."""
    if subject.model.metadata_props or subject.graph.metadata_props:
        yield "the model carries metadata_props"
    for node in subject.nodes():
        if node.metadata_props or node.doc_string:
            yield f"{node.name} carries metadata"


def inputs_read(subject: GraphUnderLint) -> Iterator[str]:
    """Every input has an effect; a backend that drops an unread one breaks the contract."""
    for value in subject.graph.inputs:
        if not any(True for _ in value.uses()):
            yield f"{value.name} is read by no node"


RULES: tuple[Rule, ...] = (
    boundary,
    inputs_read,
    initializers,
    constants,
    operators,
    attention,
    mask,
    scatter,
    cache_rows,
    gemm,
    transposes,
    norms,
    softmax,
    anonymity,
)


def _describe(value: ir.Value) -> str:
    dims = ", ".join(
        str(dim.value if isinstance(dim, ir.SymbolicDim) else dim) for dim in value.shape or ()
    )
    dtype = "untyped" if value.dtype is None else _LABELS.get(int(value.dtype), str(value.dtype))
    return f"{value.name} {dtype} [{dims}]"


_LABELS = {dtype.onnx: dtype.label for dtype in DType}


def _is_weight(value: ir.Value | None) -> bool:
    if value is None:
        return False
    if value.is_initializer():
        return True
    producer = value.producer()
    return producer is not None and producer.op_type == "Cast" and _is_weight(producer.inputs[0])


def _comes_from_float32(node: ir.Node) -> bool:
    """Look up from a softmax for the Cast to float32, through the bias addition."""
    value = node.inputs[0]
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Add":
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    return (
        producer is not None
        and producer.op_type == "Cast"
        and producer.attributes["to"].as_int() == int(ir.DataType.FLOAT)
    )

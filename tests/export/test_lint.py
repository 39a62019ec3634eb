"""The lint passes what we write and catches, rule by rule, what must not be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from motrt.engines.contract import Cache, Modality, generator_contract, reasoner_contract
from motrt.engines.dtypes import DType
from motrt.engines.errors import ContractError
from motrt.engines.model_config import ModelConfig
from motrt.engines.store import WeightEntry
from motrt.engines.weight_names import weight_table
from motrt.export.graphs import lint
from motrt.export.graphs.builder import serialize
from motrt.export.graphs.check import check_onnx
from motrt.export.graphs.generator import author_generator
from motrt.export.graphs.lowering import lowering_named
from motrt.export.graphs.reasoner import author_reasoner
from omni_fixtures.configs import EDGE_LIKE, NANO_LIKE, transformer_kwargs

CONFIG = ModelConfig.from_dict(transformer_kwargs(NANO_LIKE))
MODALITIES = (Modality.VISION, Modality.SOUND, Modality.ACTION)


def _weights(config: ModelConfig, dtype: DType) -> dict[str, WeightEntry]:
    entries, offset = {}, 128
    for name, spec in weight_table(config).items():
        entries[name] = WeightEntry("weights/transformer/w.safetensors", offset, dtype, spec.shape)
        offset += entries[name].nbytes
    return entries


class Subject:
    """An authored graph with what it is linted against; tests damage ``model``."""

    def __init__(
        self,
        engine: str,
        lowering: str = "native",
        dtype: DType = DType.FLOAT16,
        config: ModelConfig = CONFIG,
    ) -> None:
        self.weights = _weights(config, dtype)
        how = lowering_named(lowering)
        if engine == "reasoner":
            self.model = author_reasoner(config, self.weights, dtype, how)
            self.contract = reasoner_contract(config, dtype, how.cache)
        else:
            chosen = MODALITIES if config.sound_gen else (Modality.VISION, Modality.ACTION)
            self.model = author_generator(config, self.weights, dtype, how, chosen)
            self.contract = generator_contract(config, dtype, chosen)

    def lint(self) -> list[str]:
        return lint.lint(self.model, self.contract, self.weights)

    def first(self, op_type: str) -> ir.Node:
        return next(node for node in self.model.graph if node.op_type == op_type)

    def value(self, name: str) -> ir.Value:
        return next(value for value in self.model.graph.inputs if value.name == name)


@pytest.mark.parametrize("config", [NANO_LIKE, EDGE_LIKE], ids=["nano-like", "edge-like"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("lowering", ["native", "portable"])
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_what_we_write_is_clean(
    engine: str, lowering: str, dtype: DType, config: dict[str, Any]
) -> None:
    subject = Subject(engine, lowering, dtype, ModelConfig.from_dict(transformer_kwargs(config)))
    assert subject.lint() == []
    check_onnx(subject.model, engine)


def test_initializers_are_exactly_the_checkpoints_tensors() -> None:
    reasoner, generator = Subject("reasoner"), Subject("generator")
    used = {*reasoner.model.graph.initializers, *generator.model.graph.initializers}
    assert used == weight_table(CONFIG).keys() - {"embed_tokens.weight"}
    assert not set(reasoner.model.graph.initializers) & set(generator.model.graph.initializers)


def _set(node: ir.Node, name: str, value: int | str | float) -> None:
    if isinstance(value, str):
        node.attributes[name] = ir.AttrString(name, value)
    elif isinstance(value, int):
        node.attributes[name] = ir.AttrInt64(name, value)
    else:
        node.attributes[name] = ir.AttrFloat32(name, value)


def _rename_input(s: Subject) -> None:
    s.value("rotary_cos").name = "cos"


def _widen_output(s: Subject) -> None:
    s.model.graph.outputs[0].dtype = ir.DataType.DOUBLE


def _detach_input(s: Subject) -> None:
    cos, sin = s.value("rotary_cos"), s.value("rotary_sin")
    for use in list(sin.uses()):
        use.node.replace_input_with(use.idx, cos)


def _foreign_initializer(s: Subject) -> None:
    node = s.first("Gemm")
    bias = ir.Value(name="val_1", const_value=ir.tensor(np.zeros(4, np.float16), name="val_1"))
    s.model.graph.register_initializer(bias)
    node.resize_inputs(3)
    node.replace_input_with(2, bias)


def _moved_initializer(s: Subject) -> None:
    entry = s.weights["norm.weight"]
    s.weights["norm.weight"] = WeightEntry(entry.file, entry.offset + 2, entry.dtype, entry.shape)


def _big_constant(s: Subject) -> None:
    s.first("Constant").attributes["value"] = ir.AttrTensor(
        "value", ir.tensor(np.zeros((64, 64), np.float32))
    )


def _retype(op_type: str, new: str, domain: str = "") -> Callable[[Subject], None]:
    def damage(s: Subject) -> None:
        node = s.first(op_type)
        node.op_type, node.domain = new, domain

    return damage


def _attribute(op_type: str, name: str, value: int | str | float) -> Callable[[Subject], None]:
    return lambda s: _set(s.first(op_type), name, value)


def _drop_attribute(op_type: str, name: str) -> Callable[[Subject], None]:
    def damage(s: Subject) -> None:
        s.first(op_type).attributes.pop(name)

    return damage


def _attention_inputs(s: Subject) -> None:
    node = s.first("Attention")
    node.resize_inputs(7)
    node.replace_input_with(6, s.value("write_indices"))


def _attention_outputs(s: Subject) -> None:
    s.first("Attention").resize_outputs(3)


def _other_mask(s: Subject) -> None:
    s.first("Attention").replace_input_with(3, s.value("rotary_cos"))


def _generator_mask(s: Subject) -> None:
    node = s.first("Attention")
    node.resize_inputs(4)
    node.replace_input_with(3, s.value("rotary_cos"))


def _hide_scatter(s: Subject) -> None:
    s.model.graph.outputs.remove(s.first("TensorScatter").outputs[0])


def _cross_caches(s: Subject) -> None:
    key, value = [node for node in s.model.graph if node.op_type == "TensorScatter"][:2]
    a, b = key.inputs[0], value.inputs[0]
    key.replace_input_with(0, b)
    value.replace_input_with(0, a)


def _computed_weight(s: Subject) -> None:
    node = s.first("Gemm")
    node.replace_input_with(1, node.inputs[0])


def _transposed_weight(s: Subject) -> None:
    node = s.first("Gemm")
    s.first("Transpose").replace_input_with(0, node.inputs[1])


def _narrow_softmax(s: Subject) -> None:
    node = s.first("Softmax")
    producer = node.inputs[0]
    assert producer is not None
    add = producer.producer()
    assert add is not None
    cast = add.inputs[0]
    assert cast is not None
    source = cast.producer()
    assert source is not None
    _set(source, "to", int(ir.DataType.FLOAT16))


def _metadata(s: Subject) -> None:
    s.first("Gemm").metadata_props["stack_trace"] = "model.py, line 1"


DAMAGES: list[tuple[str, str, str, Callable[[Subject], None]]] = [
    ("boundary", "reasoner", "native", _rename_input),
    ("boundary", "generator", "portable", _widen_output),
    ("inputs_read", "reasoner", "native", _detach_input),
    ("initializers", "generator", "native", _foreign_initializer),
    ("initializers", "reasoner", "portable", _moved_initializer),
    ("constants", "generator", "native", _big_constant),
    ("operators", "reasoner", "native", _retype("Sigmoid", "Swish")),
    (
        "operators",
        "reasoner",
        "native",
        _retype("Attention", "GroupQueryAttention", "com.microsoft"),
    ),
    ("operators", "generator", "portable", _retype("Softmax", "RMSNormalization")),
    ("attention", "reasoner", "native", _attribute("Attention", "is_causal", 1)),
    ("attention", "generator", "native", _attribute("Attention", "softcap", 30.0)),
    ("attention", "reasoner", "native", _attribute("Attention", "softmax_precision", 1)),
    ("attention", "reasoner", "native", _attention_inputs),
    ("attention", "reasoner", "native", _attention_outputs),
    ("mask", "reasoner", "native", _other_mask),
    ("mask", "generator", "native", _generator_mask),
    ("scatter", "reasoner", "native", _attribute("TensorScatter", "mode", "circular")),
    ("scatter", "reasoner", "native", _attribute("TensorScatter", "axis", 1)),
    ("scatter", "reasoner", "native", _hide_scatter),
    ("cache_rows", "reasoner", "native", _cross_caches),
    ("gemm", "reasoner", "native", _attribute("Gemm", "transB", 0)),
    ("gemm", "generator", "portable", _attribute("Gemm", "alpha", 2.0)),
    ("gemm", "reasoner", "portable", _computed_weight),
    ("transposes", "generator", "native", _transposed_weight),
    ("norms", "reasoner", "native", _attribute("RMSNormalization", "stash_type", 10)),
    ("norms", "reasoner", "native", _drop_attribute("RMSNormalization", "stash_type")),
    ("softmax", "reasoner", "portable", _narrow_softmax),
    ("softmax", "generator", "portable", _attribute("Softmax", "axis", 1)),
    ("anonymity", "generator", "native", _metadata),
]


@pytest.mark.parametrize(
    ("rule", "engine", "lowering", "damage"),
    DAMAGES,
    ids=[f"{d[0]}-{i}" for i, d in enumerate(DAMAGES)],
)
def test_each_rule_catches_a_violation(
    rule: str, engine: str, lowering: str, damage: Callable[[Subject], None]
) -> None:
    subject = Subject(engine, lowering)
    damage(subject)
    violations = subject.lint()
    assert any(line.startswith(f"{rule}: ") for line in violations), violations
    with pytest.raises(ContractError, match="breaks the contract's rules"):
        lint.require_clean(subject.model, subject.contract, subject.weights)


def test_every_rule_has_a_violation() -> None:
    assert {damage[0] for damage in DAMAGES} == {rule.__name__ for rule in lint.RULES}


def test_no_path_of_this_machine_is_in_a_graph(tmp_path: Path) -> None:
    for engine in ("reasoner", "generator"):
        data = serialize(Subject(engine).model)
        assert str(Path(lint.__file__).parent).encode() not in data
        assert b"/home" not in data


def test_the_same_input_gives_the_same_bytes() -> None:
    assert serialize(Subject("generator").model) == serialize(Subject("generator").model)


def test_native_cache_is_static_and_portable_cache_is_appended() -> None:
    assert lowering_named("native").cache is Cache.STATIC
    assert lowering_named("portable").cache is Cache.APPEND

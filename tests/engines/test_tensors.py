"""Feeds are checked against a contract before anything computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from motrt.engines.contract import (
    Cache,
    available_modalities,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import ConfigError, ContractError, MotrtError
from motrt.engines.model_config import ModelConfig
from motrt.engines.tensors import Array, TensorSpec, check_arrays
from tiny_checkpoints import TINY

SPECS = (
    TensorSpec("ids", DType.INT64, ("batch", "tokens")),
    TensorSpec("x", DType.FLOAT32, ("batch", "tokens", 4)),
    TensorSpec("scale", DType.BFLOAT16, ()),
)


def _feeds(**changes: Array) -> dict[str, Array]:
    feeds: dict[str, Array] = {
        "ids": np.zeros((2, 3), np.int64),
        "x": np.zeros((2, 3, 4), np.float32),
        "scale": np.zeros((), DType.BFLOAT16.numpy),
    }
    return {**feeds, **changes}


def test_sound_feeds_give_the_dimensions() -> None:
    assert check_arrays(SPECS, _feeds(), engine="e") == {"batch": 2, "tokens": 3}
    empty = _feeds(ids=np.zeros((0, 3), np.int64), x=np.zeros((0, 3, 4), np.float32))
    assert check_arrays(SPECS, empty, engine="e") == {"batch": 0, "tokens": 3}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("ids", np.zeros((2, 3), np.int32)),
        ("ids", np.zeros((2, 3), np.float64)),
        ("ids", np.zeros((2, 3), ">i8")),
        ("ids", np.zeros(3, np.int64)),
        ("ids", np.zeros((2, 3, 1), np.int64)),
        ("x", np.zeros((2, 3, 5), np.float32)),
        ("x", np.zeros((2, 4, 4), np.float32)),
        ("x", np.zeros((1, 3, 4), np.float32)),
        ("x", np.zeros((2, 3, 4), np.float16)),
        ("scale", np.zeros((), np.float16)),
        ("scale", np.zeros((), np.uint16)),
        ("scale", np.zeros(1, DType.BFLOAT16.numpy)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{value.shape}",
)
def test_wrong_feeds_are_refused_by_name(name: str, array: Array) -> None:
    with pytest.raises(ContractError) as caught:
        check_arrays(SPECS, _feeds(**{name: array}), engine="reasoner")
    message = str(caught.value)
    assert "\n" not in message
    assert f"reasoner's input {name}" in message
    assert str(list(array.shape)) in (caught.value.got or "")
    assert name in (caught.value.expected or "")


def test_missing_and_unknown_names_are_refused_at_once() -> None:
    feeds = _feeds(surprise=np.zeros(1))
    del feeds["x"]
    with pytest.raises(ContractError, match=r"missing \['x'\], unknown \['surprise'\]"):
        check_arrays(SPECS, feeds, engine="generator")


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("cache", Cache)
def test_contracts_name_each_tensor_once(precision: Precision, cache: Cache) -> None:
    config = ModelConfig.from_dict(TINY)
    for contract in (
        reasoner_contract(config, precision.dtype, cache),
        generator_contract(config, precision.dtype, available_modalities(config)),
    ):
        names = [spec.name for spec in (*contract.inputs, *contract.outputs)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("dtype", DType)
def test_types_are_the_same_under_every_name(dtype: DType) -> None:
    onnx = pytest.importorskip("onnx")
    assert DType.from_label(dtype.label) is dtype
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx)
    assert kind == dtype.numpy
    assert dtype.itemsize == kind.itemsize


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="float7"):
        DType.from_label("float7")


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\x00b", "a\u2028b", "a\x85b", "\ud800", "a\u202eb"]
)
def test_an_error_is_one_printable_line(text: str) -> None:
    error = MotrtError(f"wrong {text}", got=text, expected=text, fix=text)
    assert str(error).isprintable()
    assert len(str(error).splitlines()) == 1
    assert error.to_dict()["got"] == text


def test_parts_of_an_error_that_do_not_apply_are_null() -> None:
    data: dict[str, Any] = {"type": "MotrtError", "message": "wrong"}
    assert MotrtError("wrong").to_dict() == {**data, "got": None, "expected": None, "fix": None}
    assert str(MotrtError("wrong", got=0, expected=1, fix="Do.")) == (
        "wrong; got 0; expected 1; Do."
    )

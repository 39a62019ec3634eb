"""The element types that cross motrt's files, under the names that each format gives them."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np

from motrt.engines.errors import ConfigError


class DType(enum.Enum):
    """An element type; the value is safetensors' code for it."""

    FLOAT64 = "F64"
    FLOAT32 = "F32"
    FLOAT16 = "F16"
    BFLOAT16 = "BF16"
    FLOAT8_E4M3 = "F8_E4M3"
    FLOAT8_E5M2 = "F8_E5M2"
    INT64 = "I64"
    INT32 = "I32"
    INT16 = "I16"
    INT8 = "I8"
    UINT8 = "U8"
    BOOL = "BOOL"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; ml_dtypes supplies those that NumPy lacks."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def onnx(self) -> int:
        """The number of ``onnx.TensorProto.DataType``."""
        return _ONNX[self]

    @property
    def label(self) -> str:
        """The name that people read: ``float32``, ``bfloat16`` and so on."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> DType:
        """Return the type with that :attr:`label`.

        Raises:
            ConfigError: There is no such type.
        """
        try:
            return cls[label.upper()]
        except KeyError:
            raise ConfigError(
                "unknown element type", got=repr(label), expected=", ".join(t.label for t in cls)
            ) from None


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT64: np.dtype(np.float64),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.INT64: np.dtype(np.int64),
    DType.INT32: np.dtype(np.int32),
    DType.INT16: np.dtype(np.int16),
    DType.INT8: np.dtype(np.int8),
    DType.UINT8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}

_ONNX: dict[DType, int] = {
    DType.FLOAT32: 1,
    DType.UINT8: 2,
    DType.INT8: 3,
    DType.INT16: 5,
    DType.INT32: 6,
    DType.INT64: 7,
    DType.BOOL: 9,
    DType.FLOAT16: 10,
    DType.FLOAT64: 11,
    DType.BFLOAT16: 16,
    DType.FLOAT8_E4M3: 17,
    DType.FLOAT8_E5M2: 19,
}


class Precision(enum.Enum):
    """The compute type of a bundle's two transformers."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> DType:
        """The element type of weights and activations."""
        return {"fp32": DType.FLOAT32, "fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}[self.value]

"""The runtime backend over TensorRT plans: ``backend="tensorrt"`` and ``"tensorrt-rtx"``."""

from motrt.engines.tensorrt_backend.backend import TensorRtBackend
from motrt.engines.tensorrt_backend.device import Device

__all__ = ["Device", "TensorRtBackend"]

"""A bundle with a scripted plan, and the scripted machine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import motrt.engines._cuda as cuda_accessor
import motrt.engines.plans.build as build
import motrt.engines.tensorrt_backend.device as device_module
from motrt.engines.bundle import Bundle
from motrt.engines.plans import BuildOptions, BuildShapes, build_plans
from motrt.engines.plans.targets import Builder
from motrt.engines.tensorrt_backend import TensorRtBackend
from scripted_cuda import ScriptedCuda
from scripted_tensorrt import VERSION, ScriptedTensorRt, link, plan_of
from stub_plans import stub_run

CAPACITY = 48
# What can be built: attention in float32 is not fused, and the native lowering knows no other.
PRECISION = {"native": "fp16", "portable": "fp32"}


class Stage:
    """See the module.

    Attributes:
        root: The bundle.
        cuda: The device.
        trt: TensorRT.
    """

    def __init__(self, root: Path, release: str = "rtx") -> None:
        self.root = root
        self.cuda = ScriptedCuda()
        self.trt = ScriptedTensorRt(self.cuda, release)

    def backend(self, **options: Any) -> TensorRtBackend:
        return TensorRtBackend(Bundle.open(self.root), flavour="tensorrt-rtx", **options)


def stages(
    bundle: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Stage]]:
    """Yield what makes a stage; at the end nobody has misused a device."""
    made: list[Stage] = []
    # Plans are made for the version that the script has, installed or not.
    monkeypatch.setattr(build, "_version", lambda *_: VERSION)

    def make(
        kind: str = "nano-like",
        lowering: str = "native",
        weights: Any = "refit",
        release: str = "rtx",
        **shapes: Any,
    ) -> Stage:
        root = link(folder / f"bundle{len(made)}", bundle(kind, PRECISION[lowering], lowering))
        sizes: dict[str, Any] = {"max_context": CAPACITY, "max_tokens": 64, **shapes}
        options = BuildOptions(shapes=BuildShapes(**sizes), weights=weights)
        nobody = Builder((), None)
        build_plans(
            root, ["sm89"], options, backend="tensorrt-rtx", builder=nobody, run=stub_run(plan_of)
        )
        found = Stage(root, release)
        monkeypatch.setattr(device_module, "tensorrt", lambda _: found.trt.module)
        monkeypatch.setattr(cuda_accessor, "cuda_runtime", lambda: found.cuda)
        made.append(found)
        return found

    yield make
    for each in made:
        assert each.cuda.violations == []

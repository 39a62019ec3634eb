"""The single checks: each says what it saw, or raises what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from motrt.calibration.score.run import score_bundle
from motrt.calibration.selftest.gpu import FLAVOURS, try_flavour
from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.backend_probe import probe_tensorrt
from motrt.engines.bundle import Bundle
from motrt.engines.dtypes import DType
from motrt.engines.errors import MissingDependencyError, ParityError
from motrt.engines.host import probe_gpus
from motrt.engines.plans import BuildOptions, BuildShapes, build_plans
from motrt.engines.plans.targets import Builder
from motrt.engines.refit.probe import by_file, by_name, feeds_of, why_not
from motrt.engines.weight_names import ENGINES, read_by
from motrt.export.probe import generator_outputs, reasoner_outputs
from motrt.runtime import GenerationParams, Lora, Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from motrt.engines.tensors import Array

RTX_TARGETS = ("sm86", "sm89", "sm120")
# Of an output's largest value; see refit.probe, and tests/calibration/test_selftest.py for a wrong one.
_TOLERANCE = {DType.FLOAT32: 1e-4, DType.FLOAT16: 1e-2}
_LIMIT_BYTES = 4 << 30
_QUESTIONS, _CLIPS = 12, 4
_ADAPTED = 0.2


class SkippedError(Exception):
    """This machine, or this bundle, cannot do it; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Workplace:
    """What there is to work on.

    Attributes:
        bundle: The bundle that ONNX Runtime runs.
        folder: For what is written.
        is_packaged: Whether it is the tiny trained model, of which the answers are known.
        fp16_bundle: One that TensorRT may put its plans into, or None.
    """

    bundle: Path
    folder: Path
    is_packaged: bool
    fp16_bundle: Path | None = None


def weights_by_name(place: Workplace) -> str:
    """Both engines on ONNX Runtime: weights found by offset against weights given by name."""
    bundle = _small(place)
    worst = max(
        _require_near(engine, by_file(bundle, engine), by_name(bundle, engine), bundle.dtype)
        for engine in ENGINES
    )
    return f"both engines, largest difference {worst:.1e} of the largest value"


def pytorch(place: Workplace) -> str:
    """Both engines on ONNX Runtime against the PyTorch modules over the same weights."""
    bundle = _small(place)
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("PyTorch is not installed")
    if bundle.dtype is not DType.FLOAT32:
        raise SkippedError(f"a {bundle.dtype.label} bundle; float32 is compared")
    want = {
        "reasoner": reasoner_outputs(bundle, feeds_of(bundle, "reasoner")),
        "generator": generator_outputs(bundle, feeds_of(bundle, "generator")),
    }
    worst = 0.0
    for engine, expected in want.items():
        have = by_file(bundle, engine)
        # The static cache comes back whole, PyTorch returns the new rows: both end with them.
        new = {
            name: have[name][:, :, -array.shape[2] :]
            if name.startswith("present.")
            else have[name]
            for name, array in expected.items()
        }
        worst = max(worst, _require_near(engine, new, expected, bundle.dtype))
    return f"both engines, largest difference {worst:.1e} of the largest value"


def known_answers(place: Workplace) -> str:
    """The trained model's skills: its answers are exact, and its clips show the right colour."""
    if not place.is_packaged:
        raise SkippedError("the packaged model's answers are known, this bundle's are not")
    _require_runtime()
    answers = score_bundle(place.bundle, ["reasoner"], samples=_QUESTIONS).skills
    clips = score_bundle(place.bundle, ["text_to_video"], samples=_CLIPS).skills
    got = {"answers": answers["reasoner_exact_match"], "colours": clips["colour"]}
    if min(got.values()) < 1:
        raise ParityError(
            "the trained model does not know what it has learned",
            got=", ".join(f"{name} {value:.0%}" for name, value in got.items()),
            expected="100%",
            fix="Report this machine: its arithmetic is wrong.",
        )
    return f"{_QUESTIONS} of {_QUESTIONS} answers, {_CLIPS} of {_CLIPS} colours"


def refit(place: Workplace) -> str:
    """A, B, A: an adapter goes into both running engines and comes out again to the bit."""
    bundle = _small(place)
    adapter = _write_adapter(bundle, place.folder / "adapter")
    with Runtime.open(place.bundle) as runtime:
        before = _latents(runtime)
        runtime.refit(lora=Lora(adapter))
        between = _latents(runtime)
        runtime.refit(restore=True)
        after = _latents(runtime)
    if np.array_equal(before, between):
        raise ParityError("a refit changed nothing", got="the same latents", expected="others")
    if not np.array_equal(before, after):
        raise ParityError(
            "the weights did not come back",
            got=f"latents {np.abs(before - after).max():.1e} apart",
            expected="the same bits",
        )
    return "latents change with the adapter, and come back to the bit"


def rtx_build(place: Workplace) -> str:
    """Stripped plans of both engines, each audited, for GPUs that need not be here."""
    found = probe_tensorrt("tensorrt-rtx")
    if found.version is None:
        raise SkippedError(f"TensorRT-RTX: {found.reason}")
    if place.fp16_bundle is None:
        raise SkippedError("the packaged model is built, this bundle is not: motrt build does it")
    options = BuildOptions(shapes=BuildShapes(max_context=256, max_tokens=64))
    nobody = Builder((), None)  # ahead of time, whatever is here
    result = build_plans(
        place.fp16_bundle, RTX_TARGETS, options, backend="tensorrt-rtx", builder=nobody
    )
    nbytes = [each.nbytes for plan in result.plans for each in plan.record.engines.values()]
    return (
        f"TensorRT-RTX {found.version}: {len(nbytes)} plans for {', '.join(RTX_TARGETS)}, "
        f"{max(nbytes) / 1e6:.1f} MB at most, every weight's name found"
    )


def gpu(place: Workplace) -> str:
    """Both engines on the GPU: built, run, refitted there and back, captured as graphs."""
    gpus, reason = probe_gpus()
    if not gpus:
        raise SkippedError(f"no NVIDIA GPU ({reason})")
    if not place.is_packaged:
        raise SkippedError("the packaged model is built, this bundle is not: motrt build does it")
    try:
        tried = [
            try_flavour(flavour, gpus[0], place.folder, _write_adapter, _require_near)
            for flavour in FLAVOURS
        ]
    except MissingDependencyError as err:
        raise SkippedError(str(err)) from err
    told = [each for each in tried if each is not None]
    if not told:
        raise SkippedError(f"neither {' nor '.join(FLAVOURS)} is installed")
    return "; ".join(told)


def _small(place: Workplace) -> Bundle:
    bundle = Bundle.open(place.bundle)
    _require_runtime()
    reason = why_not(bundle)
    if reason is not None:
        raise SkippedError(reason)
    nbytes = sum(entry.nbytes for entry in bundle.weights().entries.values())
    if nbytes > _LIMIT_BYTES:
        raise SkippedError(f"{nbytes / 2**30:.1f} GiB of weights, over the limit of 4 GiB")
    return bundle


def _require_runtime() -> None:
    if importlib.util.find_spec("onnxruntime") is None:
        raise SkippedError("ONNX Runtime is not installed")
    onnxruntime()


def _require_near(
    engine: str, have: Mapping[str, Array], want: Mapping[str, Array], dtype: DType
) -> float:
    worst = 0.0
    for name, expected in want.items():
        got, reference = (np.asarray(a, np.float32) for a in (have[name], expected))
        peak = float(np.abs(reference).max(initial=0.0)) or 1.0
        gap = float(np.abs(got - reference).max(initial=0.0)) / peak
        if not gap <= _TOLERANCE[dtype]:  # NaN is not
            raise ParityError(
                f"the {engine} computes something else at {name}",
                got=f"{gap:.3g} of the largest value",
                expected=f"at most {_TOLERANCE[dtype]:g}",
            )
        worst = max(worst, gap)
    return worst


def _write_adapter(bundle: Bundle, folder: Path) -> Path:
    """Write a LoRA of rank 1 for one matrix of each engine, as PEFT does."""
    random = np.random.RandomState(0)
    tensors: dict[str, Array] = {}
    modules: list[str] = []
    entries = bundle.weights().entries
    for engine in ENGINES:
        names = sorted(read_by(bundle.manifest.model, engine))
        name = next(n for n in names if n.startswith("layers.") and len(entries[n].shape) == 2)
        rows, columns = entries[name].shape
        module = name.removesuffix(".weight")
        modules.append(module)
        for factor, shape in (("lora_A", (1, columns)), ("lora_B", (rows, 1))):
            values = random.standard_normal(shape).astype(np.float32) * _ADAPTED
            tensors[f"base_model.model.{module}.{factor}.weight"] = values
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _latents(runtime: Runtime) -> Array:
    params = GenerationParams(num_frames=1, height=64, width=64, num_inference_steps=2, seed=0)
    return runtime.generate("A red square.", params).latents

"""TensorRT's engines on the GPU that is here: built, filled, run, refitted, captured, measured."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.demo.tiny_omni import prepare_bundle
from motrt.engines.backend_probe import probe_tensorrt
from motrt.engines.bundle import Bundle
from motrt.engines.capabilities import gpu_precisions, lowering_fit
from motrt.engines.errors import ParityError
from motrt.engines.plans import BuildOptions, BuildShapes, build_plans
from motrt.engines.refit.probe import by_name, feeds_of, why_not
from motrt.engines.tensorrt_backend import Device, TensorRtBackend
from motrt.engines.weight_names import ENGINES
from motrt.runtime import GenerationParams, Lora, Runtime, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    from motrt.engines._tensorrt import Flavour
    from motrt.engines.host import Gpu
    from motrt.engines.tensors import Array

FLAVOURS: tuple[Flavour, ...] = ("tensorrt", "tensorrt-rtx")
_EXPORTED = ("fp32", "fp16", "bf16")
_SHAPES = BuildShapes(max_context=256, max_tokens=64)
_QUESTION = "The red circle is at 1,1. Plan its way to 3,2."


@dataclass(frozen=True, slots=True)
class Trial:
    """A bundle on a flavour of TensorRT.

    Attributes:
        flavour: Which.
        root: The bundle, with its plan.
        device: Where it runs.
    """

    flavour: Flavour
    root: Path
    device: Device

    def runtime(self, **options: Any) -> Runtime:
        """Open a runtime on the device."""

        def backend(bundle: Bundle) -> Any:
            return TensorRtBackend(bundle, flavour=self.flavour, device=self.device, **options)

        return Runtime.open(self.root, backend=backend, capacity=_SHAPES.max_context)


def try_flavour(
    flavour: Flavour,
    gpu: Gpu,
    folder: Path,
    write_adapter: Callable[[Bundle, Path], Path],
    require_near: Callable[[str, Mapping[str, Array], Mapping[str, Array], Any], float],
) -> str | None:
    """Try one TensorRT in every precision of the GPU; return what was seen, None if it is absent.

    Args:
        flavour: Which.
        gpu: The GPU.
        folder: For what is written.
        write_adapter: Writes a LoRA of a bundle to a folder.
        require_near: Compares an engine's outputs.

    Raises:
        MotrtError: Something is not as it should be.
    """
    version = probe_tensorrt(flavour).version
    if version is None:
        return None
    lowering = lowering_fit(flavour, version).lowering
    fits = {fit.precision for fit in gpu_precisions(gpu.name, gpu.compute_capability) if fit.fits}
    told: list[str] = []
    device = Device(flavour)
    for precision in (name for name in _EXPORTED if name in fits):
        # Float32 attention is not fused, so it is built from the plain operators of the other form.
        form = "portable" if precision == "fp32" else lowering
        root = prepare_bundle("shared", folder / f"gpu-{precision}-{form}", precision, form)
        build_plans(root, ["current"], BuildOptions(shapes=_SHAPES), backend=flavour)
        trial = Trial(flavour, root, device)
        free, _ = device.cuda.free_bytes()
        gap = _against_reference(trial, require_near)
        used = free - device.cuda.free_bytes()[0]
        _graphs_change_nothing(trial)
        _there_and_back(trial, write_adapter(Bundle.open(root), folder / f"adapter-{precision}"))
        gc.collect()
        told.append(f"{precision} {form} {gap}, {used / 2**20:.0f} MiB")
    return f"{flavour} {version}: {'; '.join(told)}"


def _against_reference(trial: Trial, require_near: Callable[..., float]) -> str:
    """Run both engines on the fixed input, and compare them with the weights taken by name."""
    bundle = Bundle.open(trial.root)
    backend = TensorRtBackend(bundle, flavour=trial.flavour, device=trial.device)
    backend.reasoner()
    backend.generator()
    worst: list[float] = []
    for engine in ENGINES:
        outputs = backend.run_current(engine, feeds_of(bundle, engine))
        if outputs is None or not all(
            np.isfinite(a.astype(np.float32)).all() for a in outputs.values()
        ):
            raise ParityError(
                f"the {engine} gives no finite outputs on {trial.flavour}",
                got="nothing" if outputs is None else "NaN or infinity",
                expected="numbers",
            )
        if why_not(bundle) is None:
            worst.append(require_near(engine, outputs, by_name(bundle, engine), bundle.dtype))
    return f"{max(worst):.1e} from ONNX Runtime" if worst else "finite"


def _graphs_change_nothing(trial: Trial) -> None:
    """Captured steps give the same bits, and the same answer, as steps that are not captured."""
    found = []
    for device in (trial.device, Device(trial.flavour, uses_graphs=False)):
        with Trial(trial.flavour, trial.root, device).runtime() as runtime:
            answer = runtime.reason(_QUESTION, SamplingParams(max_new_tokens=8)).token_ids
            found.append((answer, _latents(runtime).tobytes()))
    if found[0] != found[1]:
        raise ParityError(
            "a captured step gives something else", got=trial.flavour, expected="the same bits"
        )


def _there_and_back(trial: Trial, adapter: Path) -> None:
    """A, B, A: an adapter goes into both engines and comes out again to the bit."""
    with trial.runtime() as runtime:
        before = _latents(runtime)
        runtime.refit(lora=Lora(adapter))
        between = _latents(runtime)
        runtime.refit(restore=True)
        after = _latents(runtime)
    if np.array_equal(before, between) or not np.array_equal(before, after):
        raise ParityError(
            f"a refit of {trial.flavour}'s engines is not undone to the bit",
            got="nothing changed" if np.array_equal(before, between) else "other latents",
            expected="others with the adapter, the same without",
        )


def _latents(runtime: Runtime) -> Array:
    params = GenerationParams(num_frames=1, height=64, width=64, num_inference_steps=4, seed=0)
    return runtime.generate("A red square.", params).latents

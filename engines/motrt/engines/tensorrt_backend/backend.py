"""A bundle's engines on TensorRT: which are loaded, and where their weights are.

Residency decides what is on the device at a time:

* ``separate``: both engines, loaded when they are first needed.
* ``shared``: both, reading one copy of their weights; needs a plan of ``--weights inputs``. (With
  such a plan ``separate`` does the same: weights are there once anyway.)
* ``swap``: one transformer at a time; opening the other closes this one. K/V caches stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import ConfigError
from motrt.engines.onnxruntime_backend import RESIDENCIES
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine, check_providers, check_threads
from motrt.engines.tensorrt_backend.device import Device
from motrt.engines.tensorrt_backend.execution import choose_profile
from motrt.engines.tensorrt_backend.generator import TensorRtGenerator
from motrt.engines.tensorrt_backend.loaded import Loaded, load_engine, open_plan
from motrt.engines.tensorrt_backend.reasoner import TensorRtReasoner
from motrt.engines.tensorrt_backend.run_once import run_once
from motrt.engines.tensorrt_backend.staging import StagedWeights
from motrt.engines.tensorrt_backend.weights import DeviceWeights, Refit
from motrt.engines.weight_names import ENGINES, read_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from motrt.engines._tensorrt import Flavour
    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.onnxruntime_backend import Residency
    from motrt.engines.tensors import Array


class TensorRtBackend:
    """Loads a bundle's plans when they are first asked for, and fills them from its store.

    The VAE and other graphs run on ONNX Runtime.

    Args:
        bundle: The bundle, with a plan for this machine.
        flavour: Which TensorRT.
        residency: See above.
        providers: ONNX Runtime's execution providers, for the other graphs.
        threads: ONNX Runtime's threads inside an operator.
        cuda_graphs: Whether steps that repeat are captured and launched as CUDA graphs.
        device: One that is open already; for several bundles of a process, one after the other.

    Raises:
        ConfigError: An unknown residency, or one that the plan cannot have.
        ExecutionError: There is no GPU, or a provider is absent.
        MissingDependencyError: TensorRT or CUDA's bindings are not installed.
        PlanError: There is no plan for this machine, or it is not what the bundle vouches for.
    """

    name: str

    def __init__(
        self,
        bundle: Bundle,
        *,
        flavour: Flavour = "tensorrt",
        residency: Residency = "separate",
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
        cuda_graphs: bool = True,
        device: Device | None = None,
    ) -> None:
        if residency not in RESIDENCIES:
            raise ConfigError("unknown residency", got=residency, expected=", ".join(RESIDENCIES))
        check_threads(threads)
        self.name = flavour
        self.bundle = bundle
        self.residency = residency
        self._providers = tuple(providers)
        self._threads = threads
        self.device = Device(flavour, uses_graphs=cuda_graphs) if device is None else device
        check_providers(providers)
        self._record = open_plan(bundle, self.device)
        if residency == "shared" and self._record.weights_mode != "inputs":
            raise ConfigError(
                "this plan's engines have weights of their own",
                got=f"residency 'shared' and a plan of --weights {self._record.weights_mode}",
                expected="a plan of --weights inputs",
                fix=f"Build it with: motrt build {bundle.root} --backend {flavour} --weights "
                "inputs, or use residency='separate'.",
            )
        self._on_device: DeviceWeights | None = None
        self._loaded: dict[str, Loaded] = {}
        self._addresses: dict[str, dict[str, int]] = {}
        self._reasoner: TensorRtReasoner | None = None
        self._generator: TensorRtGenerator | None = None

    def reasoner(self) -> TensorRtReasoner:
        """Return the causal engine, loaded if need be.

        Raises:
            ExecutionError: TensorRT refuses, or the memory does not hold it.
            PlanError: The plan is not what it was.
        """
        if self._reasoner is None:
            loaded = self._open("reasoner", self.bundle)
            manifest = self.bundle.manifest
            self._reasoner = TensorRtReasoner(
                self.device, loaded, manifest.cache, manifest.model, self._addresses["reasoner"]
            )
        return self._reasoner

    def generator(self) -> TensorRtGenerator:
        """Return the denoiser, loaded if need be; errors as of :meth:`reasoner`."""
        if self._generator is None:
            loaded = self._open("generator", self.bundle)
            self._generator = TensorRtGenerator(self.device, loaded, self._addresses["generator"])
        return self._generator

    def step_nbytes(self, tokens: int, context: int) -> int:
        """Return 0: activations are in the GPU's memory, and attention is fused.

        Raises:
            ExecutionError: The plan does not take so many tokens; known before anything runs.
        """
        profiles = self._record.profiles("generator")
        whole = "generated" if "generated" in profiles[0].dims else "vision"
        choose_profile("generator", profiles, {whole: tokens, "context": context})
        return 0

    def component(self, contract: EngineContract, file: str) -> OnnxRuntimeEngine:
        """Open another graph of the bundle, on ONNX Runtime."""
        return OnnxRuntimeEngine(
            contract, self.bundle.path(file), providers=self._providers, threads=self._threads
        )

    def close(self) -> None:
        """Let go of both engines and of the device's memory; they load again when asked for."""
        for engine in ENGINES:
            self._drop(engine)
        self._on_device = None
        self.device.arena.release()

    @property
    def is_on_cpu(self) -> bool:
        """False: the probe's reference has other arithmetic."""
        return False

    def run_current(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run an engine once, if it is loaded; None too if its plan does not take these sizes."""
        loaded = self._loaded.get(engine)
        if loaded is None:
            return None
        return run_once(self.device, loaded, self._addresses[engine], feeds)

    def stage(self, bundle: Bundle, changed: frozenset[str]) -> StagedWeights:
        """Hold both engines against a bundle's weights; nothing moves yet.

        Raises:
            ExecutionError: A loaded engine does not take them.
        """
        config = bundle.manifest.model
        engines = tuple(name for name in ENGINES if changed & read_by(config, name))
        if self._record.weights_mode == "refit":
            for name in engines:
                if name in self._loaded:
                    Refit(self.device, self._loaded[name], bundle.weights(), changed)
        return StagedWeights(self, bundle, changed, engines)

    def fill(self, engine: str, bundle: Bundle, changed: frozenset[str]) -> None:
        """Give an engine a bundle's weights: in place if it is loaded, else by loading it.

        Raises:
            ExecutionError: TensorRT or the device refuses; the engine must then be dropped.
        """
        loaded = self._loaded.get(engine)
        if self._record.weights_mode == "inputs":
            loaded = self._open(engine, self.bundle)
            if self._on_device is not None:
                self._on_device.overwrite(changed & set(loaded.weight_names), bundle.weights())
        elif loaded is None:
            self._open(engine, bundle)
        else:
            Refit(self.device, loaded, bundle.weights(), changed)()

    def take_over(self, bundle: Bundle, unfilled: Iterable[str]) -> None:
        """Make a bundle's weights the present ones; assignments alone, which cannot fail."""
        for engine in unfilled:  # they load again, on the new weights
            self._drop(engine)
        self.bundle = bundle
        if self._on_device is not None:
            self._on_device.store = bundle.weights()
        if self._reasoner is not None:
            self._reasoner.weights_changed()
        if self._generator is not None:
            self._generator.weights_changed()

    def drop_filled(self, engines: Iterable[str]) -> None:
        """Drop engines that have other weights than the bundle's."""
        for engine in engines:
            self._drop(engine)
        if self._record.weights_mode == "inputs" and self._on_device is not None:
            # Both engines read these: what one was filled with, the other has too.
            for engine in ENGINES:
                self._drop(engine)
            self._on_device = None

    def _open(self, engine: str, bundle: Bundle) -> Loaded:
        if engine in self._loaded:
            return self._loaded[engine]
        if self.residency == "swap":
            for other in ENGINES:
                self._drop(other)
            self._on_device = None
        loaded = load_engine(self.device, bundle, self._record, engine)
        store = bundle.weights()
        addresses: dict[str, int] = {}
        if self._record.weights_mode == "refit":
            Refit(self.device, loaded, store)()
        else:
            if self._on_device is None:
                self._on_device = DeviceWeights(self.device, store)
            addresses = self._on_device.addresses(loaded.weight_names)
        self._loaded[engine], self._addresses[engine] = loaded, addresses
        return loaded

    def _drop(self, engine: str) -> None:
        if engine == "reasoner":
            self._reasoner = None
        else:
            self._generator = None
        self._loaded.pop(engine, None)
        self._addresses.pop(engine, None)

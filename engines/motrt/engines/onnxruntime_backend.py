"""A bundle's engines on ONNX Runtime: which sessions there are and who holds the weights.

Residency decides how often a weight lies in memory:

* ``separate``: each session loads and packs its own weights. Fastest per step.
* ``shared``: both sessions read one memory map of the store, unpacked. Smallest, and open at once;
  the pages belong to the file, so other processes share them too.
* ``swap``: as ``separate``, but one transformer at a time; opening the other closes this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from motrt.engines._onnxruntime import onnxruntime
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.memory_estimate import denoise_step_nbytes
from motrt.engines.onnxruntime_engine import (
    OnnxRuntimeEngine,
    check_providers,
    check_threads,
    open_session,
    ort_value,
    run_once,
    session_options,
)
from motrt.engines.onnxruntime_staging import StagedSessions
from motrt.engines.onnxruntime_towers import OnnxRuntimeGenerator, OnnxRuntimeReasoner
from motrt.engines.weight_names import ENGINES, read_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.tensors import Array

Residency = Literal["separate", "shared", "swap"]
RESIDENCIES: tuple[str, ...] = get_args(Residency)


class OnnxRuntimeBackend:
    """Opens a bundle's graphs when they are first asked for.

    Args:
        bundle: The bundle.
        residency: See above.
        providers: Execution providers, in order. All must be there.
        threads: Threads inside an operator; ONNX Runtime's default if None.

    Raises:
        ConfigError: An unknown residency, or one that the provider cannot have.
        ExecutionError: A provider is absent, or cannot run the bundle's precision.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    name = "onnxruntime"

    def __init__(
        self,
        bundle: Bundle,
        *,
        residency: Residency = "separate",
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
    ) -> None:
        if residency not in RESIDENCIES:
            raise ConfigError("unknown residency", got=residency, expected=", ".join(RESIDENCIES))
        on_cpu = list(providers) == ["CPUExecutionProvider"]
        if bundle.dtype is DType.BFLOAT16 and on_cpu:
            raise ExecutionError(
                "ONNX Runtime's CPU provider cannot run bfloat16",
                got=f"a {bundle.manifest.precision.value} bundle",
                expected="fp32 or fp16",
                fix="Export with --precision fp32, or use a provider or backend with bfloat16.",
            )
        if residency == "shared" and not on_cpu:
            raise ConfigError(
                "residency 'shared' maps weights into the CPU's memory",
                got=", ".join(providers),
                expected="CPUExecutionProvider alone",
                fix="Use residency='separate'.",
            )
        check_threads(threads)
        check_providers(providers)
        self.bundle = bundle
        self.residency = residency
        self._providers = tuple(providers)
        self._threads = threads
        self._ort = onnxruntime()
        self._reasoner: OnnxRuntimeReasoner | None = None
        self._generator: OnnxRuntimeGenerator | None = None
        self._sessions: dict[str, Any] = {}
        self._store = bundle.weights()
        self._weights: dict[str, Any] = {}
        # What the sessions read without owning it, by engine: stores and OrtValues.
        self._held: dict[str, object] = {}

    def reasoner(self) -> OnnxRuntimeReasoner:
        """Return the causal engine."""
        if self._reasoner is None:
            if self.residency == "swap":
                self._drop("generator")
            contract = self.bundle.reasoner_contract()
            manifest = self.bundle.manifest
            self._reasoner = OnnxRuntimeReasoner(
                self._session(contract), contract, manifest.cache, manifest.model, self._ort
            )
        return self._reasoner

    def generator(self) -> OnnxRuntimeGenerator:
        """Return the denoiser."""
        if self._generator is None:
            if self.residency == "swap":
                self._drop("reasoner")
            contract = self.bundle.generator_contract()
            self._generator = OnnxRuntimeGenerator(self._session(contract), contract, self._ort)
        return self._generator

    def step_nbytes(self, tokens: int, context: int) -> int:
        """Return the least bytes of activations of one denoise step in main memory.

        GPUs have memory of their own and fused kernels: 0.
        """
        if not self.is_on_cpu:
            return 0
        manifest = self.bundle.manifest
        return denoise_step_nbytes(
            manifest.model, self.bundle.dtype, manifest.lowering, tokens, context
        )

    def component(self, contract: EngineContract, file: str) -> OnnxRuntimeEngine:
        """Open another graph of the bundle."""
        return OnnxRuntimeEngine(
            contract, self.bundle.path(file), providers=self._providers, threads=self._threads
        )

    def close(self) -> None:
        """Drop every session; the backend opens them again if it is used again."""
        for engine in ENGINES:
            self._drop(engine)
        self._weights.clear()

    @property
    def is_on_cpu(self) -> bool:
        """Whether the CPU provider alone computes."""
        return self._providers == ("CPUExecutionProvider",)

    def run_current(self, engine: str, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Run an engine's graph once, if it is open; see ``refit/protocol.py``."""
        session = self._sessions.get(engine)
        return None if session is None else run_once(session, engine, feeds)

    def stage(self, bundle: Bundle, changed: frozenset[str]) -> StagedSessions:
        """Open sessions on other weights beside those that run; see ``refit/protocol.py``."""
        if self.residency == "swap":
            self.close()  # they open again when they are needed: three would not fit
        fresh = OnnxRuntimeBackend(
            bundle,
            residency=self.residency,
            providers=self._providers,
            threads=self._threads,
        )
        config = bundle.manifest.model
        engines = tuple(name for name in ENGINES if changed & read_by(config, name))
        if self.residency != "swap":
            for name in engines:
                getattr(fresh, name)()
        return StagedSessions(self, fresh, engines)

    def take_over(self, fresh: OnnxRuntimeBackend, engines: Sequence[str]) -> None:
        """Put another backend's weights, and its sessions of some engines, in the own's place."""
        self.bundle, self._store, self._weights = fresh.bundle, fresh._store, fresh._weights
        if "reasoner" in engines:
            self._reasoner = fresh._reasoner
        if "generator" in engines:
            self._generator = fresh._generator
        for engine in engines:
            self._sessions.pop(engine, None)
            self._held.pop(engine, None)
        self._sessions |= fresh._sessions
        self._held |= fresh._held

    def _drop(self, engine: str) -> None:
        if engine == "reasoner":
            self._reasoner = None
        else:
            self._generator = None
        self._sessions.pop(engine, None)
        self._held.pop(engine, None)

    def _session(self, contract: EngineContract) -> Any:
        options = session_options(self._threads)
        if self.residency == "shared":
            # Prepacking would copy each weight into a layout of the session's own.
            options.add_session_config_entry("session.disable_prepacking", "1")
            names = set(self._store)
        else:
            names = set(self._store.replaced)  # the files give the others
        names &= read_by(self.bundle.manifest.model, contract.name)
        injected = {name for name in names if self._must_inject(name)}
        for name in sorted(names - injected):
            options.add_initializer(name, self._mapped(name))
        if injected:
            values = [self._mapped(name) for name in sorted(injected)]
            options.add_external_initializers(sorted(injected), values)
        path = self.bundle.path(f"{contract.name}.onnx")
        session = open_session(contract.name, str(path), options, self._providers)
        self._sessions[contract.name] = session
        self._held[contract.name] = (self._store, self._weights)
        return session

    def _must_inject(self, name: str) -> bool:
        """Whether a replaced tensor must be put into the graph before it is optimized, as a copy.

        Constant folding reads the graph's own file where ``add_initializer`` was told of another
        tensor: the casts that the CPU provider puts behind 16-bit weights were folded from the old
        ones (1.32). The matrix of a float32 Gemm is never folded, and copying it takes 25 % longer.
        """
        entry = self._store.entries[name]
        is_matrix = entry.dtype is DType.FLOAT32 and len(entry.shape) == 2
        return name in self._store.replaced and not is_matrix

    def _mapped(self, name: str) -> Any:
        """Return a weight as an OrtValue over the map; both sessions get the same one."""
        if name not in self._weights:
            self._weights[name] = ort_value(self._ort, self._store, name)
        return self._weights[name]

"""A TensorRT that runs without a GPU: its plan names a graph, which ONNX Runtime computes.

What it computes is right only if everything before was: weights that were set, addresses that are
owned, shapes within the profile, outputs in place where they must be, activations in memory that
is large enough. What is not makes it return False, as TensorRT does, with a line in the log.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from motrt.engines.bundle import Bundle
from motrt.engines.plans.engine_build import EngineRequest
from scripted_cuda import ScriptedCuda
from tensorrt_api import Strict, api_table, has

VERSION = "1.7.1.116"
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64}
_TYPES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "bfloat16": "BF16"}


def plan_of(request: EngineRequest) -> bytes:
    """Return a plan for :func:`stub_plans.stub_run`; what follows the newline is ignored."""
    bundle = Bundle.open(request.bundle)
    contract = (
        bundle.reasoner_contract() if request.engine == "reasoner" else bundle.generator_contract()
    )
    from motrt.engines.plans.identity import bundle_identity

    identity = bundle_identity(bundle)["engines"][request.engine]
    return json.dumps({
        "graph": str(bundle.path(f"{request.engine}.onnx")),
        "name": request.engine,
        "mode": request.weights,
        "profiles": [profile.dims for profile in request.profiles],
        "inputs": [[s.name, s.dtype.label, list(s.shape)] for s in contract.inputs],
        "outputs": [[s.name, s.dtype.label, list(s.shape)] for s in contract.outputs],
        "weights": identity["weights"],
        "aliases": identity["aliases"],
    }).encode() + b"\n"  # fmt: skip


class ScriptedTensorRt:
    """Stands for the module ``tensorrt_rtx`` or, by its release, ``tensorrt``.

    Attributes:
        faults: How often a call returns False, by ``call:engine`` or ``call:weight``.
        capturable: What ``is_stream_capturable`` says.
        engines: Those that are alive.
    """

    def __init__(self, cuda: ScriptedCuda, release: str = "rtx") -> None:
        self.cuda, self.release = cuda, release
        self.faults: dict[str, int] = {}
        self.capturable = True
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.loads: list[str] = []
        self.edit: Any = lambda plan: plan
        base = type("Base", (), {"__init__": lambda self: None})
        types = {n: n for n in (*_NUMPY, "BF16")}
        members = {"USER_MANAGED": 2, "DEVICE": 0, "HOST": 1, "INPUT": 1, "OUTPUT": 2}
        enums = {
            cls: enum.Enum(cls, {n: members[n] for n in names})
            for cls, names in {
                "ExecutionContextAllocationStrategy": ["USER_MANAGED"],
                "TensorLocation": ["DEVICE", "HOST"],
                "TensorIOMode": ["INPUT", "OUTPUT"],
            }.items()
        }
        severity = enum.IntEnum(
            "severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"], start=0
        )
        self.module: Any = Strict(
            release,
            "",
            **enums,
            __version__=VERSION,
            DataType=enum.Enum("DataType", types),
            ILogger=type("ILogger", (base,), {"Severity": severity}),
            ICudaEngine=self._class("ICudaEngine"),
            IExecutionContext=self._class("IExecutionContext"),
            Weights=Weights,
            Runtime=self._runtime,
            Refitter=lambda engine, logger: Refitter(engine).strict(),
        )

    def _class(self, cls: str) -> type:
        names = [n for owner, n in api_table() if owner == cls and has(self.release, cls, n)]
        return type(cls, (), dict.fromkeys(names))

    def _runtime(self, logger: Any) -> Strict:
        def load(plan: bytes) -> Any:
            if self.fails("deserialize_cuda_engine", "", logger):
                return None
            data = self.edit(json.loads(plan.split(b"\n")[0]))
            engine = Engine(self, data, logger)
            self.engines.add(engine)
            self.loads.append(data["name"])
            return engine.strict()

        return Strict(self.release, "Runtime", deserialize_cuda_engine=load)

    def fails(self, call: str, what: str, logger: Any, why: str = "a fault was injected") -> bool:
        """Whether an injected fault is due; it is logged."""
        key = f"{call}:{what}" if what else call
        if not self.faults.get(key):
            return False
        self.faults[key] -= 1
        return self.refuse(logger, why)

    def refuse(self, logger: Any, why: str) -> bool:
        """Log an error, and return True."""
        logger.log(self.module.ILogger.Severity.ERROR, why)
        return True


@dataclasses.dataclass(frozen=True)
class Weights:
    dtype: Any
    address: int
    size: int


class Engine:
    """One deserialized plan; its constants are empty until they are refitted."""

    def __init__(self, script: ScriptedTensorRt, data: dict[str, Any], logger: Any) -> None:
        self.script, self.data, self.logger = script, data, logger
        self.name = data["name"]
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.version = 0
        self._session: tuple[int, Any] | None = None
        self.weights = {name: (dtype, shape) for name, dtype, shape in data["weights"]}
        self.inputs = {name: (dtype, shape) for name, dtype, shape in data["inputs"]}
        if data["mode"] == "inputs":
            self.inputs |= self.weights
        self.outputs = {name: (dtype, shape) for name, dtype, shape in data["outputs"]}

    def strict(self) -> Strict:
        types = self.script.module.DataType
        names = [*self.inputs, *self.outputs]
        io = {**self.inputs, **self.outputs}
        modes = self.script.module.TensorIOMode
        host = self.data.get("on_host", ())
        locations = self.script.module.TensorLocation
        engine = Strict(
            self.script.release,
            "ICudaEngine",
            num_io_tensors=len(names),
            num_optimization_profiles=len(self.data["profiles"]),
            refittable=self.data["mode"] == "refit",
            get_tensor_name=lambda index: names[index],
            get_tensor_dtype=lambda name: types[_TYPES[io[name][0]]],
            get_tensor_mode=lambda n: modes.INPUT if n in self.inputs else modes.OUTPUT,
            get_tensor_location=lambda n: locations.HOST if n in host else locations.DEVICE,
            is_shape_inference_io=lambda name: False,
            get_aliased_input_tensor=lambda name: self.data["aliases"].get(name, ""),
            create_execution_context=self._context,
        )
        object.__setattr__(engine, "behind", self)
        return engine

    def _context(self, strategy: Any) -> Any:
        if self.script.fails("create_execution_context", self.name, self.logger):
            return None
        return Context(self).strict()

    def compute(
        self, arrays: dict[str, np.ndarray[Any, Any]], given: dict[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run the graph with constants, or with the weights that are inputs."""
        weights = {**self.constants, **given}
        if given or self._session is None or self._session[0] != self.version:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            held = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in weights.items()}
            for name, value in held.items():
                options.add_initializer(name, value)
            session = onnxruntime.InferenceSession(self.data["graph"], options)
            self._session = (self.version, (session, held, weights))
        session = self._session[1][0]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, arrays), strict=True))


class Refitter:
    """Weights are read when the engine is refitted, from the addresses that were set."""

    def __init__(self, engine: Any) -> None:
        self.engine: Engine = engine.behind
        self.set: dict[str, Weights] = {}

    def strict(self) -> Strict:
        script = self.engine.script
        refitter = Strict(
            script.release,
            "Refitter",
            get_all_weights=lambda: list(self.engine.weights),
            get_weights_prototype=self._prototype,
            set_named_weights=self._set_named,
            get_missing_weights=self._missing,
            refit_cuda_engine_async=self._refit,
        )
        object.__setattr__(refitter, "behind", self)
        return refitter

    def _prototype(self, name: str) -> Weights:
        dtype, shape = self.engine.weights[name]
        types = self.engine.script.module.DataType
        return Weights(types[_TYPES[dtype]], 0, int(np.prod(shape)))

    def _set_named(self, name: str, weights: Weights) -> bool:
        engine = self.engine
        if engine.script.fails("set_named_weights", name, engine.logger):
            return False
        prototype = self._prototype(name)
        if (weights.dtype, weights.size) != (prototype.dtype, prototype.size):
            return False
        self.set[name] = weights
        return True

    def _missing(self) -> list[str]:
        if self.engine.script.release == "rtx":  # it does not report them
            return []
        return [n for n in self.engine.weights if n not in self.engine.constants | self.set]

    def _refit(self, stream: int) -> bool:
        engine = self.engine
        half = len(self.set) // 2
        fails = engine.script.fails("refit_cuda_engine_async", engine.name, engine.logger)
        for index, (name, weights) in enumerate(self.set.items()):
            if fails and index >= half:  # a part may have been refitted
                break
            dtype = np.dtype(_NUMPY[weights.dtype.name])
            data = ctypes.string_at(weights.address, weights.size * dtype.itemsize)
            shape = engine.weights[name][1]
            engine.constants[name] = np.frombuffer(data, dtype).reshape(shape).copy()
        engine.version += 1
        return not fails


class Context:
    """One execution context."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile: int | None = None
        self.memory = (0, 0)
        self.is_prepared = False

    def strict(self) -> Strict:
        return Strict(
            self.engine.script.release,
            "IExecutionContext",
            set_optimization_profile_async=self._set_profile,
            set_input_shape=self._set_shape,
            set_tensor_address=self._set_address,
            set_device_memory=self._set_memory,
            update_device_memory_size_for_shapes=self._needed,
            infer_shapes=lambda: [n for n in self._dynamic() if n not in self.shapes],
            get_tensor_shape=lambda name: self._shape(*self.engine.outputs[name]),
            execute_async_v3=self._execute,
            is_stream_capturable=lambda stream: self.engine.script.capturable,
        )

    def _dynamic(self) -> list[str]:
        return [
            n for n, (_, s) in self.engine.inputs.items() if any(isinstance(d, str) for d in s)
        ]

    def _set_profile(self, index: int, stream: int) -> bool:
        if self.engine.script.fails(
            "set_optimization_profile_async", self.engine.name, self.engine.logger
        ):
            return False
        self.profile = index
        return True

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.is_prepared = False
        want = self.engine.inputs[name][1]
        profile = self.engine.data["profiles"][self.profile]
        for dim, size in zip(want, shape, strict=True):
            low, high = (profile[dim][0], profile[dim][2]) if isinstance(dim, str) else (dim, dim)
            if not low <= size <= high:
                self.engine.script.refuse(self.engine.logger, f"{name}: {size} is out of range")
                return False
        self.shapes[name] = tuple(shape)
        return True

    def _set_address(self, name: str, address: int) -> bool:
        self.is_prepared = False
        self.addresses[name] = address
        return address != 0

    def _set_memory(self, address: int, nbytes: int) -> None:
        self.is_prepared = False
        self.memory = (address, nbytes)

    def _needed(self) -> int:
        return 1000 * max(shape[1] for shape in self.shapes.values() if len(shape) > 1)

    def _dims(self) -> dict[str, int]:
        return {
            dim: size
            for name, shape in self.shapes.items()
            for dim, size in zip(self.engine.inputs[name][1], shape, strict=True)
            if isinstance(dim, str)
        }

    def _shape(self, dtype: str, shape: list[Any]) -> tuple[int, ...]:
        dims = self._dims()
        return tuple(dims[d] if isinstance(d, str) else d for d in shape)

    def _execute(self, stream: int) -> bool:
        engine, script = self.engine, self.engine.script
        why = self._fault()
        if why is None and script.fails("execute_async_v3", engine.name, engine.logger):
            return False
        if why is not None:
            script.refuse(engine.logger, why)
            return False
        self.is_prepared = True
        # A recording keeps what it was made with, whatever is set afterwards.
        shapes, addresses, memory = dict(self.shapes), dict(self.addresses), self.memory
        for name, (_, shape) in engine.inputs.items():
            shapes.setdefault(name, tuple(shape))
        outputs = {n: (d, self._shape(d, s)) for n, (d, s) in engine.outputs.items()}
        version = engine.version

        def run() -> None:
            script.cuda.view(memory[0], memory[1])[:] = 0xEE  # scratch
            if version != engine.version:
                raise RuntimeError("a graph of other weights was launched")
            arrays = {
                name: self._read(addresses[name], dtype, shapes[name])
                for name, (dtype, _) in engine.inputs.items()
            }
            given = {n: arrays.pop(n) for n in engine.weights if n in arrays}
            results = engine.compute(arrays, given)
            for name, (_, shape) in outputs.items():
                array = np.ascontiguousarray(results[name])
                assert array.shape == shape, name
                script.cuda.view(addresses[name], array.nbytes)[:] = array.reshape(-1).view(
                    np.uint8
                )

        script.cuda.submit(run)
        return True

    def _read(self, address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        kind = np.dtype(_NUMPY[_TYPES[dtype]])
        nbytes = int(np.prod(shape)) * kind.itemsize
        return self.engine.script.cuda.view(address, nbytes).copy().view(kind).reshape(shape)

    def _fault(self) -> str | None:
        engine = self.engine
        if self.profile is None:
            return "no profile"
        if [n for n in self._dynamic() if n not in self.shapes]:
            return "shapes are missing"
        missing = [n for n in (*engine.inputs, *engine.outputs) if not self.addresses.get(n)]
        if missing:
            return f"no address of {missing[0]}"
        for output, source in engine.data["aliases"].items():
            if self.addresses[output] != self.addresses[source]:
                return f"{output} is not in place"
        unset = [n for n in engine.weights if n not in engine.constants]
        if engine.data["mode"] == "refit" and unset:
            return f"the weight {unset[0]} was never set"
        if self.memory[0] % 256 or self.memory[0] == 0 or self.memory[1] < self._needed():
            return "too little memory for activations"
        if engine.script.cuda.recording is not None and not self.is_prepared:
            return "the first run after a change cannot be captured"
        return None


def link(folder: Path, bundle: Path) -> Path:
    """Return a bundle that shares the files of another, for plans of its own."""
    import shutil

    shutil.copytree(bundle, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))
    manifest = folder / "manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(text)
    return folder

"""Every name of TensorRT's Python API that the code uses is real, and old releases need no other.

The classic TensorRT is not installed here and nothing of it is run: its column of the table is
played by scripted objects that have what that release has, and nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import motrt.engines._tensorrt as accessor
from motrt.engines import tensorrt_backend
from motrt.engines.bundle import Bundle
from motrt.engines.errors import BuildError
from motrt.engines.plans import BuildOptions, BuildShapes, engine_build
from motrt.engines.plans.engine_build import EngineRequest, build_engine
from motrt.engines.plans.identity import plan_profiles
from tensorrt_api import DETECTED, EVERYWHERE, RELEASES, Strict, api_table, has

trt = pytest.importorskip("tensorrt_rtx")

PLANS = Path(engine_build.__file__).parent
RUNTIME = Path(tensorrt_backend.__file__).parent
SOURCES = [Path(accessor.__file__), *sorted(PLANS.glob("*.py")), *sorted(RUNTIME.glob("*.py"))]

# What the variables of the sources hold; a class of TensorRT, "" its module.
VARIABLES = {
    "trt": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "error": "ParserError",
    "profile": "IOptimizationProfile",
    "constant": "IConstantLayer",
    "layer": "ILayer",
    "tensor": "ITensor",
    "attention": "IAttention",
    "severity": "Severity",
}
# The same in one file alone, and attributes of the runtime's objects.
LOCAL: dict[str, dict[str, str | None]] = {
    "loaded.py": {"engine": "ICudaEngine"},
    "execution.py": {"context": "IExecutionContext", "profile": None},
    "weights.py": {"prototype": "Weights"},
}
ATTRIBUTES = {
    "trt": "",
    "engine": "ICudaEngine",
    "runtime": "Runtime",
    "_context": "IExecutionContext",
    "_refitter": "Refitter",
}
# Where else a name of these stands for something of motrt's, or of Python's.
ELSEWHERE = {
    "build.py", "check.py", "child.py", "identity.py", "memory.py", "options.py", "process.py",
    "profiles.py", "record.py", "targets.py", "graph_file.py", "__init__.py",
    "backend.py", "cache.py", "generator.py", "reasoner.py", "run_once.py",
    "staging.py",
}  # fmt: skip
RETURNS = {
    ("ILayer", "get_input"): "ITensor",
    ("IConstantLayer", "get_output"): "ITensor",
    ("ILayer", "attention"): "IAttention",
    ("ILogger", "Severity"): "Severity",
    ("Runtime", "deserialize_cuda_engine"): "ICudaEngine",
}
NESTED = {"ExecutionContextAllocationStrategy", "ICudaEngine", "IExecutionContext", "TensorIOMode",
          "TensorLocation", "LayerType", "BuilderFlag", "DataType", "MemoryPoolType", "ProfilingVerbosity", "ILogger",
          "NetworkDefinitionCreationFlag", "IBuilderConfig", "Refitter", "Runtime"}  # fmt: skip


def _class_of(node: ast.expr, path: Path) -> str | None:
    if isinstance(node, ast.Name):
        local = LOCAL.get(path.name, {}) if path.parent == RUNTIME else {}
        return {**VARIABLES, **local}.get(node.id)
    if isinstance(node, ast.Call):
        return _class_of(node.func, path)
    if isinstance(node, ast.Attribute):
        if path.parent == RUNTIME and node.attr in ATTRIBUTES:
            return ATTRIBUTES[node.attr]
        owner = _class_of(node.value, path)
        if owner == "" and node.attr in NESTED:
            return node.attr
        return RETURNS.get((owner or "?", node.attr))
    return None


def _uses(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (owner := _class_of(node.value, path)) is not None:
            yield owner, node.attr
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "hasattr"
            and isinstance(node.args[1], ast.Constant)
            and (owner := _class_of(node.args[0], path)) is not None
        ):
            yield owner, str(node.args[1].value)


def _all_uses() -> set[tuple[str, str]]:
    found = {use for path in SOURCES if path.name not in ELSEWHERE for use in _uses(path)}
    # pybind hands out the base class; `engine` is also the name of a tower.
    renamed = {("ILayer", "attention"): ("IAttentionInputLayer", "attention")}
    found = {renamed.get(use, use) for use in found}
    found |= {("DataType", name) for name in accessor._DATA_TYPES.values()}
    found |= {("ICudaEngine", "num_io_tensors"), ("ICudaEngine", "get_tensor_name")}
    # Python's own, and the field of motrt's AttentionLayer.
    return found - {("ILayer", "__class__"), ("ILogger", "__init__"), ("ILayer", "name")}


def test_the_table_has_what_the_code_uses_and_no_more() -> None:
    used = _all_uses()
    assert used == set(api_table())
    assert len(used) > 70


def test_no_other_file_touches_tensorrt() -> None:
    for path in SOURCES:
        if path.name in ELSEWHERE:
            names = {
                n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)
            }
            assert not names & {"trt", "tensorrt"}, path


def test_every_name_is_in_the_real_module() -> None:
    for cls, name in api_table():
        owner = trt if cls == "" else trt.ILogger.Severity if cls == "Severity" else None
        owner = getattr(trt, cls) if owner is None else owner
        assert hasattr(owner, name), f"{cls}.{name}"
    for method in ("phase_start", "step_complete", "phase_finish"):
        assert hasattr(trt.IProgressMonitor, method)
    assert not hasattr(trt.Builder, "no_such_method")


def test_what_some_releases_lack_is_asked_for_first() -> None:
    assert len(RELEASES) == 5
    for releases, function in DETECTED.values():
        assert set(releases) < set(RELEASES)
        assert callable(getattr(accessor, function))
    assert set(EVERYWHERE) >= {"Builder", "INetworkDefinition"}


def _enum(release: str, cls: str) -> Any:
    names = [name for owner, name in api_table() if owner == cls and has(release, cls, name)]
    return enum.IntEnum(cls, names, start=0)


class Scripted:
    """A TensorRT of one release: it parses with the onnx package, and builds nothing."""

    def __init__(self, release: str, plan: bytes | None = b"plan") -> None:
        self.calls: list[str] = []
        self.release, self.plan = release, plan
        self.named: dict[str, str] = {}
        self.config: Any = None
        self.module: Any = None
        enums = (
            "LayerType", "DataType", "BuilderFlag", "MemoryPoolType", "ProfilingVerbosity",
            "NetworkDefinitionCreationFlag",
        )  # fmt: skip
        values: dict[str, Any] = {cls: _enum(release, cls) for cls in enums}
        base = type("Base", (), {"__init__": lambda self: None})
        values |= {
            "Builder": self._builder,
            "OnnxParser": self._parser,
            "Weights": _Weights,
            "ILogger": type("ILogger", (base,), {"Severity": _enum(release, "Severity")}),
            "IProgressMonitor": base,
            "IBuilderConfig": self._empty_class("IBuilderConfig"),
            "IAttentionInputLayer": _Attending,
            "Runtime": lambda logger: self._make("Runtime", deserialize_cuda_engine=self._load),
            "Refitter": lambda *_: self._make(
                "Refitter", get_all_weights=lambda: list(self.named)
            ),
        }
        if has(release, "", "ComputeCapability"):
            values["ComputeCapability"] = enum.IntEnum("ComputeCapability", ["SM89"])
        self.module = self._make("", **values)

    def _make(self, cls: str, **values: Any) -> Strict:
        return Strict(self.release, cls, **values)

    def _empty_class(self, cls: str) -> type:
        names = [
            name for owner, name in api_table() if owner == cls and has(self.release, cls, name)
        ]
        return type(cls, (), dict.fromkeys(names))

    def _builder(self, logger: object) -> Strict:
        return self._make(
            "Builder",
            create_network=self._network,
            create_builder_config=self._make_config,
            create_optimization_profile=lambda: self._make(
                "IOptimizationProfile", set_shape=lambda *_: None
            ),
            build_serialized_network=lambda *_: self.plan,
        )

    def _make_config(self) -> Any:
        self.config = self._make(
            "IBuilderConfig",
            set_flag=lambda flag: self.calls.append(f"set {flag.name}"),
            clear_flag=lambda flag: self.calls.append(f"clear {flag.name}"),
            set_memory_pool_limit=lambda pool, n: self.calls.append(f"{pool.name} {n}"),
            add_optimization_profile=lambda _: 0,
            set_compute_capability=lambda *_: self.calls.append("ahead of time"),
        )
        return self.config

    def _network(self, flags: int) -> Strict:
        self.calls.append(f"network {flags}")
        self.inputs: list[Strict] = []
        self.layers: list[Any] = []
        network = self._make(
            "INetworkDefinition",
            get_layer=lambda i: self.layers[i],
            get_input=lambda i: self.inputs[i],
            add_constant=self._constant,
            remove_tensor=lambda tensor: self.inputs.remove(tensor),
            set_weights_name=self._set_name,
            mark_weights_refittable=lambda name: name in self.named,
            num_layers=0,
            num_inputs=0,
        )
        self.network = network
        return network

    def _constant(self, shape: tuple[int, ...], weights: _Weights) -> Strict:
        output = self._make("ITensor", name="constant", dtype=weights.dtype)
        return self._make("IConstantLayer", get_output=lambda _: output, weights=weights)

    def _set_name(self, weights: _Weights, name: str) -> bool:
        self.named[name] = weights.dtype.name
        return True

    def _parser(self, network: Any, logger: object) -> Strict:
        def parse(data: bytes) -> bool:
            model = onnx.load_model_from_string(data)
            types = self.module.DataType
            names = {1: "FLOAT", 7: "INT64", 10: "HALF", 16: "BF16"}
            tensors = {}
            for value in model.graph.input:
                dtype = types[names[value.type.tensor_type.elem_type]]
                tensors[value.name] = self._make("ITensor", name=value.name, dtype=dtype)
            self.inputs = list(tensors.values())
            for node in model.graph.node:
                if node.op_type not in {"Gemm", "MatMul", "Attention", "Gather"}:
                    continue
                self.layers.append(self._layer(node, tensors))
            network.num_layers, network.num_inputs = len(self.layers), len(self.inputs)
            return True

        return self._make("OnnxParser", parse=parse, num_errors=0)

    def _layer(self, node: onnx.NodeProto, tensors: dict[str, Strict]) -> Any:
        half = self._make("ITensor", name="x", dtype=self.module.DataType.HALF)
        inputs = [tensors.get(name, half) for name in node.input]
        kinds = self.module.LayerType
        is_attention = node.op_type == "Attention"
        kind = kinds.ATTENTION_INPUT if is_attention else kinds.MATRIX_MULTIPLY
        layer = self._make(
            "ILayer",
            type=kind,
            num_inputs=len(inputs),
            get_input=lambda i: inputs[i],
            set_input=lambda i, tensor: inputs.__setitem__(i, tensor),
        )
        if is_attention:
            object.__setattr__(layer, "hidden", self._make("IAttention", name=node.name))
        return layer

    def _load(self, plan: bytes) -> Any:
        self.calls.append("deserialize")
        names = [*self.named, *(tensor.name for tensor in self.inputs)]
        return SimpleNamespace(num_io_tensors=len(names), get_tensor_name=lambda i: names[i])


@dataclasses.dataclass(frozen=True)
class _Weights:
    dtype: Any
    address: int
    count: int


class _Attending(Strict):
    @property
    def attention(self) -> Any:
        return object.__getattribute__(self, "hidden")


LOWERING = {"10.3": "portable", "10.13": "portable", "10.16": "native", "11.x": "native"}


@pytest.fixture
def request_for(bundle: Callable[..., Path], tmp_path: Path) -> Callable[..., EngineRequest]:
    def make(release: str, engine: str, **changes: Any) -> EngineRequest:
        opened = Bundle.open(bundle("nano-like", "fp16", LOWERING[release]))
        shapes = BuildShapes(max_context=64, max_tokens=64)
        values: dict[str, Any] = {
            "bundle": str(opened.root),
            "engine": engine,
            "backend": "tensorrt",
            "capability": (8, 7),
            "is_here": True,
            "profiles": plan_profiles(opened, BuildOptions(shapes=shapes))[engine],
            "weights": "refit",
            "with_values": True,
            "decompose": False,
            "workspace_bytes": 1 << 30,
            "optimization_level": 2,
            "output": str(tmp_path / "x.plan"),
        }
        return EngineRequest(**{**values, **changes})

    return make


@pytest.mark.parametrize("release", list(LOWERING))
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
@pytest.mark.parametrize("weights", ["refit", "inputs"])
def test_the_classic_path_asks_an_old_release_for_nothing_that_it_lacks(
    release: str,
    engine: str,
    weights: str,
    request_for: Callable[..., EngineRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Scripted(release)
    monkeypatch.setattr(engine_build, "tensorrt", lambda _: script.module)
    request = request_for(release, engine, weights=weights, with_values=weights == "refit")
    built = build_engine(request)
    assert built.audit.method == "engine"
    assert built.audit.fused_attention == (3 if LOWERING[release] == "native" else 0)
    flags = ["set REFIT_INDIVIDUAL", "set STRIP_PLAN"] if weights == "refit" else []
    pools = [f"{pool} {1 << 30}" for pool in ("WORKSPACE", "TACTIC_DRAM")]
    assert script.calls == ["network 1", "clear TF32", *flags, *pools, "deserialize"]
    assert len(script.named) == (built.audit.weights if weights == "refit" else 0)
    assert script.config.builder_optimization_level == 2


def test_a_name_that_a_release_lacks_is_seen(
    request_for: Callable[..., EngineRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted release is strict: without the questions, the code fails on it."""
    script = Scripted("10.3")
    monkeypatch.setattr(engine_build, "tensorrt", lambda _: script.module)
    monkeypatch.setattr(engine_build, "builds_ahead_of_time", lambda _: True)
    with pytest.raises(AttributeError, match="num_compute_capabilities"):
        build_engine(request_for("10.3", "reasoner"))


def test_an_engine_that_lacks_a_weight_is_refused(
    request_for: Callable[..., EngineRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Scripted("10.16")
    monkeypatch.setattr(engine_build, "tensorrt", lambda _: script.module)
    load = script._load

    def lose(plan: bytes) -> Any:
        script.named.pop("norm.weight")
        script.named["other"] = "HALF"
        return load(plan)

    script.module.Runtime = lambda _: script._make("Runtime", deserialize_cuda_engine=lose)
    with pytest.raises(BuildError, match=r"1 missing \(norm.weight\), 1 foreign \(other\)"):
        build_engine(request_for("10.16", "reasoner"))
    script.module.Runtime = lambda _: script._make(
        "Runtime", deserialize_cuda_engine=lambda _: None
    )
    with pytest.raises(BuildError, match="does not deserialize where it was built"):
        build_engine(request_for("10.16", "reasoner"))


def test_no_plan_and_no_word_is_an_error(
    request_for: Callable[..., EngineRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Scripted("10.16", plan=None)
    monkeypatch.setattr(engine_build, "tensorrt", lambda _: script.module)
    with pytest.raises(BuildError, match="no plan and no message"):
        build_engine(request_for("10.16", "generator"))

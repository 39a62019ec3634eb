"""One engine's plan: network, profiles, the builder, the audit. Runs in a process of its own."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines._tensorrt import (
    Flavour,
    builds_ahead_of_time,
    compute_capability,
    tensorrt,
)
from motrt.engines.bundle import Bundle
from motrt.engines.dtypes import Precision
from motrt.engines.errors import BuildError
from motrt.engines.plans.audit import (
    Audit,
    check_names,
    check_precision,
    names_in_bytes,
    names_of_engine,
    size_bound,
)
from motrt.engines.plans.callbacks import Messages, make_logger, make_progress_monitor
from motrt.engines.plans.graph_file import GraphFile, read_graph
from motrt.engines.plans.network import (
    AttentionLayer,
    attention_layers,
    create_network,
    fill_weights,
    parse,
    products_by_type,
)
from motrt.engines.plans.profiles import Profile
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from motrt.engines.plans.options import WeightsMode

_TYPE_NAMES = {Precision.FP32: "float", Precision.FP16: "half", Precision.BF16: "bf16"}
_NO_KERNEL = ("dedicated kernel", "is_decomposable")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What one engine is built from and for; goes to the builder's process as JSON.

    Attributes:
        bundle: The bundle's folder.
        engine: ``reasoner`` or ``generator``.
        backend: Which TensorRT.
        capability: Of the target.
        is_here: Whether the target's GPU is in this machine.
        profiles: See ``profiles``.
        weights: See ``BuildOptions``.
        with_values: Whether the builder gets the weights' values.
        decompose: Whether attention may fall apart.
        workspace_bytes: Most scratch memory of a tactic, or None.
        optimization_level: TensorRT's, or None.
        output: The plan's file.
    """

    bundle: str
    engine: str
    backend: Flavour
    capability: tuple[int, int]
    is_here: bool
    profiles: tuple[Profile, ...]
    weights: WeightsMode
    with_values: bool
    decompose: bool
    workspace_bytes: int | None
    optimization_level: int | None
    output: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineRequest:
        """Read what :meth:`to_dict` wrote."""
        profiles = tuple(
            Profile(each["name"], {k: (v[0], v[1], v[2]) for k, v in each["dims"].items()})
            for each in data["profiles"]
        )
        capability = (data["capability"][0], data["capability"][1])
        return cls(**{**data, "profiles": profiles, "capability": capability})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """What came out.

    Attributes:
        nbytes: Size of the plan.
        sha256: Of the plan.
        graph_sha256: Of the graph without weights; see ``GraphFile``.
        opset: Of the graph.
        flags: TensorRT's builder flags that were set.
        audit: What the plan holds.
        seconds: Wall time of parsing, building and auditing.
        warnings: What TensorRT warned of.
    """

    nbytes: int
    sha256: str
    graph_sha256: str
    opset: int
    flags: tuple[str, ...]
    audit: Audit
    seconds: float
    warnings: tuple[str, ...]


def build_engine(
    request: EngineRequest,
    *,
    progress: Progress = silent,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> EngineBuild:
    """Build one engine and write its plan.

    Raises:
        BuildError: TensorRT refuses the graph or has no kernel, or the plan fails its audit.
        KeyboardInterrupt: ``is_cancelled`` said so.
        MissingDependencyError: There is no TensorRT.
    """
    started = time.perf_counter()
    trt = tensorrt(request.backend)
    bundle = Bundle.open(request.bundle)
    graph = read_graph(bundle.path(f"{request.engine}.onnx").read_bytes())
    messages = Messages()
    logger = make_logger(trt, messages)
    builder = trt.Builder(logger)
    network = create_network(trt, builder)
    numbers = {k: low for k, (low, _, high) in request.profiles[0].dims.items() if k == "capacity"}
    parse(trt, logger, network, graph.with_dims(numbers), messages)
    # The store's memory map has to outlive the build.
    store = bundle.weights() if request.with_values else None
    if request.weights == "refit":
        fill_weights(trt, network, graph.weights, store)
    attentions = attention_layers(trt, network)
    for layer in attentions if request.decompose else []:
        layer.attention.decomposable = True
    products = products_by_type(trt, network)
    check_precision(request.engine, _TYPE_NAMES[bundle.manifest.precision], products)
    config, flags = _configure(trt, builder, request)
    _add_profiles(builder, config, bundle, request)
    config.progress_monitor = make_progress_monitor(trt, request.engine, progress, is_cancelled)
    built = builder.build_serialized_network(network, config)
    if built is None:
        if is_cancelled():
            raise KeyboardInterrupt
        raise _failed(request.engine, messages, attentions)
    plan = bytes(built)
    del built, store
    Path(request.output).write_bytes(plan)
    layers = bundle.manifest.model.num_hidden_layers
    audit = Audit(
        method="engine" if request.is_here else "bytes",
        weights=len(graph.weights),
        nbytes=len(plan),
        bound_bytes=size_bound(layers, len(request.profiles)),
        products=products,
        fused_attention=0 if request.decompose else len(attentions),
        decomposed_attention=len(attentions) if request.decompose else 0,
    )
    _check_plan(trt, logger, request, graph, plan)
    return EngineBuild(
        nbytes=len(plan),
        sha256=hashlib.sha256(plan).hexdigest(),
        graph_sha256=graph.sha256,
        opset=graph.opset,
        flags=flags,
        audit=audit,
        seconds=time.perf_counter() - started,
        warnings=tuple(dict.fromkeys(messages.warnings)),
    )


def _check_plan(
    trt: Any, logger: Any, request: EngineRequest, graph: GraphFile, plan: bytes
) -> None:
    names = [spec.name for spec in graph.weights]
    if request.is_here:
        found = names_of_engine(trt, logger, plan, request.weights)
        if request.weights == "inputs":
            found &= set(names)
    else:
        found = names_in_bytes(plan, names)
    check_names(request.engine, request.weights, names, found)


def _configure(trt: Any, builder: Any, request: EngineRequest) -> tuple[Any, tuple[str, ...]]:
    config = builder.create_builder_config()
    if builds_ahead_of_time(trt):
        # One each: placeholders build for a single target only. No timing cache: it asks for a GPU.
        config.num_compute_capabilities = 1
        config.set_compute_capability(compute_capability(trt, request.capability), 0)
    # The references multiply float32 as float32.
    config.clear_flag(trt.BuilderFlag.TF32)
    flags: list[Any] = []
    if request.weights == "refit":
        # Not REFIT: it blocks fusions, and TensorRT 11.3 loses biases with it.
        flags = [trt.BuilderFlag.REFIT_INDIVIDUAL, trt.BuilderFlag.STRIP_PLAN]
    for flag in flags:
        config.set_flag(flag)
    if request.workspace_bytes is not None:
        for pool in (trt.MemoryPoolType.WORKSPACE, trt.MemoryPoolType.TACTIC_DRAM):
            config.set_memory_pool_limit(pool, request.workspace_bytes)
    if request.optimization_level is not None:
        config.builder_optimization_level = request.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    return config, tuple(flag.name for flag in flags)


def _add_profiles(builder: Any, config: Any, bundle: Bundle, request: EngineRequest) -> None:
    contract = (
        bundle.reasoner_contract() if request.engine == "reasoner" else bundle.generator_contract()
    )
    for each in request.profiles:
        profile = builder.create_optimization_profile()
        for spec in contract.inputs:
            if any(isinstance(dim, str) for dim in spec.shape):
                profile.set_shape(spec.name, *each.shapes(spec))
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"TensorRT refuses the {request.engine}'s profile {each.name}",
                got=each.dims,
                expected="sizes that fit each other",
                fix="Build with other sizes.",
            )


def _failed(engine: str, messages: Messages, attentions: list[AttentionLayer]) -> BuildError:
    said = messages.errors
    if any(word in text for text in said for word in _NO_KERNEL):
        names = [layer.name for layer in attentions]
        # All attentions of a graph have one head size and one type, so what holds for one does
        # for all; TensorRT does not say which it met first.
        return BuildError(
            f"the {engine}: no fused kernel for {names[0] if names else 'an attention'}"
            + (f" and {len(names) - 1} more like it" if len(names) > 1 else ""),
            got=said[-1],
            expected="float16 or bfloat16 heads of at most 256",
            fix="Pass --allow-decomposed-attention to build it from its operations (slower).",
            messages=said,
        )
    return BuildError(
        f"TensorRT did not build the {engine}",
        got=said[-1] if said else "no plan and no message",
        expected="a plan",
        fix="motrt doctor says what fits this machine.",
        messages=said,
    )

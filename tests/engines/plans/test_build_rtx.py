"""Both graphs of every fixture become plans, for GPUs that are not here.

TensorRT-RTX's builder needs no GPU. That a plan builds proves operators, types, profiles and
kernels for the target, and the audit proves its weights' names; nothing is executed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motrt.engines._tensorrt import tensorrt
from motrt.engines.bundle import Bundle
from motrt.engines.errors import BuildError
from motrt.engines.plans import (
    BuildOptions,
    BuildShapes,
    PlanHost,
    build_plans,
    check_plan,
    read_engine,
    read_plan,
)
from motrt.engines.plans.audit import (
    Audit,
    check_names,
    check_precision,
    names_in_bytes,
    size_bound,
)
from motrt.engines.plans.callbacks import Messages, make_logger
from motrt.engines.plans.engine_build import EngineRequest, build_engine
from motrt.engines.plans.graph_file import read_graph
from motrt.engines.plans.identity import plan_profiles
from motrt.engines.plans.network import create_network, fill_weights, parse
from motrt.engines.plans.targets import Builder
from motrt.engines.weight_names import Part, weight_table
from motrt.export.cli import run

trt = pytest.importorskip("tensorrt_rtx")

KINDS = ("nano-like", "edge-like", "super-like", "shared")
BUILDS = (("fp16", "native"), ("bf16", "native"), ("fp16", "portable"))
TARGETS = ("sm86", "sm89", "sm120")
MODES = ("refit", "inputs")
# One of each kind, precision, lowering, target and way of weights; the product has 72.
SUBSET = {
    ("nano-like", "fp16", "native", "sm89", "refit"),
    ("edge-like", "bf16", "native", "sm86", "refit"),
    ("shared", "fp16", "portable", "sm120", "refit"),
    ("super-like", "bf16", "native", "sm120", "inputs"),
    ("nano-like", "fp16", "portable", "sm86", "inputs"),
    ("shared", "fp16", "native", "sm89", "inputs"),
}
CASES = [
    pytest.param(*case, marks=[] if case in SUBSET else [pytest.mark.full], id="-".join(case))
    for kind in KINDS
    for precision, lowering in BUILDS
    for target in TARGETS
    for mode in MODES
    for case in [(kind, precision, lowering, target, mode)]
]
SHAPES = BuildShapes(max_context=128, max_tokens=256, max_sound=16, max_action=16)
TYPES = {"fp16": "half", "bf16": "bf16", "fp32": "float"}


@pytest.mark.parametrize(("kind", "precision", "lowering", "target", "mode"), CASES)
def test_both_engines_build_without_weights_and_without_a_gpu(
    kind: str,
    precision: str,
    lowering: str,
    target: str,
    mode: str,
    bundle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    root = Path(shutil.copytree(bundle(kind, precision, lowering), tmp_path / "b"))
    options = BuildOptions(shapes=SHAPES, weights=mode)  # type: ignore[arg-type]
    nobody = Builder((), None)
    result = build_plans(root, [target], options, backend="tensorrt-rtx", builder=nobody)
    opened = Bundle.open(root)
    capability = (int(target[2:-1]), int(target[-1]))
    host = PlanHost.here("tensorrt-rtx", trt.__version__, capability)
    record = read_plan(opened, host)
    check_plan(record, opened, host, options)
    assert result.plans[0].record == record
    model = opened.manifest.model
    table = weight_table(model)
    for engine, part in (("reasoner", Part.REASONER), ("generator", Part.GENERATOR)):
        plan = read_engine(opened, record, host, engine)
        wanted = {name for name, spec in table.items() if spec.part in {part, Part.BOTH}}
        assert set(record.weight_names(engine)) == wanted
        assert names_in_bytes(plan, wanted) == wanted
        audit = record.info["audit"][engine]
        profiles = len(record.profiles(engine))
        bound = 2_000_000 * model.num_hidden_layers * profiles + 4_000_000
        assert len(plan) <= bound == audit["bound_bytes"]
        assert audit["products"][TYPES[precision]] > 7 * model.num_hidden_layers
        fused = model.num_hidden_layers if lowering == "native" else 0
        assert (audit["fused_attention"], audit["decomposed_attention"]) == (fused, 0)
        flags = ["REFIT_INDIVIDUAL", "STRIP_PLAN"] if mode == "refit" else []
        assert record.info["builder_flags"][engine] == flags


def test_the_subset_has_one_of_each() -> None:
    ids = {tuple(case.values) for case in CASES}
    assert len(CASES) == 72
    assert ids >= SUBSET
    for column, values in enumerate(
        (KINDS, ("fp16", "bf16"), ("native", "portable"), TARGETS, MODES)
    ):
        assert {case[column] for case in SUBSET} == set(values)


def _request(opened: Bundle, engine: str, output: Path, **changes: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "bundle": str(opened.root),
        "engine": engine,
        "backend": "tensorrt-rtx",
        "capability": (8, 9),
        "is_here": False,
        "profiles": plan_profiles(opened, BuildOptions(shapes=SHAPES))[engine],
        "weights": "inputs",
        "with_values": False,
        "decompose": False,
        "workspace_bytes": 1 << 28,
        "optimization_level": 2,
        "output": str(output / f"{engine}.plan"),
    }
    return EngineRequest(**{**values, **changes})


def test_the_build_shows_its_phases_and_stops_when_asked(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    request = _request(Bundle.open(bundle("nano-like", "fp16")), "generator", tmp_path)
    seen: list[tuple[str, int, int]] = []
    build_engine(request, progress=lambda *step: seen.append(step))
    assert {(stage, total) for stage, _, total in seen} == {("generator", 1000)}
    steps = [done for _, done, _ in seen]
    assert steps == sorted(steps)
    assert (steps[0], len(set(steps)) > 20) == (0, True)
    assert steps[-1] > 600
    asked: list[bool] = []

    def is_cancelled() -> bool:
        asked.append(True)
        return True

    (tmp_path / "generator.plan").unlink()
    with pytest.raises(KeyboardInterrupt):
        build_engine(request, is_cancelled=is_cancelled)
    assert asked
    assert not (tmp_path / "generator.plan").exists()


def test_a_progress_that_fails_does_not_fail_the_build(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    request = _request(Bundle.open(bundle("nano-like", "fp16")), "reasoner", tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("no terminal")

    assert build_engine(request, progress=fail).nbytes > 0


def test_a_missing_kernel_is_an_error_that_names_the_layer(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """No TensorRT fuses attention in float32."""
    opened = Bundle.open(bundle("nano-like", "fp32"))
    with pytest.raises(BuildError) as caught:
        build_engine(_request(opened, "reasoner", tmp_path))
    assert "no fused kernel for layers.0.Attention_" in str(caught.value)
    assert "2 more like it" in str(caught.value)
    assert "--allow-decomposed-attention" in str(caught.value.fix)
    built = build_engine(_request(opened, "reasoner", tmp_path, decompose=True))
    assert (built.audit.fused_attention, built.audit.decomposed_attention) == (0, 3)


def test_a_float32_parity_build_has_attention_in_parts(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    opened = Bundle.open(bundle("nano-like", "fp32", "portable"))
    for engine in ("reasoner", "generator"):
        built = build_engine(_request(opened, engine, tmp_path, decompose=True))
        assert set(built.audit.products) == {"float"}


def test_what_the_parser_refuses_names_the_node(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    opened = Bundle.open(bundle("nano-like", "fp32"))
    with pytest.raises(BuildError, match=r"does not read the graph.*Attention") as caught:
        build_engine(_request(opened, "generator", tmp_path, decompose=True))
    assert caught.value.messages


def test_a_symbolic_capacity_is_what_the_edit_is_for(
    bundle: Callable[..., Path],
) -> None:
    graph = read_graph(Bundle.open(bundle("nano-like", "fp16")).path("reasoner.onnx").read_bytes())
    with pytest.raises(BuildError, match="static sequence length"):
        _network(graph.model)


def _network(model: bytes) -> tuple[Any, list[Any]]:
    module, messages = tensorrt("tensorrt-rtx"), Messages()
    logger = make_logger(module, messages)
    builder = module.Builder(logger)
    network = create_network(module, builder)
    parse(module, logger, network, model, messages)
    return network, [logger, builder]


@pytest.mark.parametrize("swapped", [False, True])
def test_each_constant_feeds_the_nodes_of_its_weight(
    swapped: bool, bundle: Callable[..., Path]
) -> None:
    """What a refit relies on; with two weights of equal shape swapped, the test sees it."""
    import onnx

    data = Bundle.open(bundle("nano-like", "fp16")).path("reasoner.onnx").read_bytes()
    model = onnx.load_model_from_string(data)
    graph = read_graph(data)
    network, keep = _network(graph.with_dims({"capacity": 64}))
    weights = list(graph.weights)
    names = [spec.name for spec in weights]
    one, other = (names.index(f"layers.{i}.self_attn.to_k.weight") for i in range(2))
    if swapped:
        weights[one], weights[other] = weights[other], weights[one]
    before = network.num_layers
    fill_weights(tensorrt("tensorrt-rtx"), network, weights, None)
    layers = [network.get_layer(index) for index in range(before)]
    users: dict[str, list[Any]] = {}
    for layer in layers:
        for tensor in filter(None, (layer.get_input(j) for j in range(layer.num_inputs))):
            users.setdefault(tensor.name, []).append(layer)
    wrong = []
    for position, name in enumerate(names):
        found = _nodes_after(network.get_layer(before + position), users)
        nodes = {f"[ONNX Layer: {node.name}]" for node in model.graph.node if name in node.input}
        if found != nodes:
            wrong.append(name)
    assert wrong == ([names[one], names[other]] if swapped else [])
    assert len(names) == 35
    assert {network.get_input(i).name for i in range(network.num_inputs)}.isdisjoint(names)
    assert all(network.are_weights_marked_refittable(name) for name in names)
    del keep


def _nodes_after(layer: Any, users: dict[str, list[Any]]) -> set[str]:
    """Return the graph's nodes that a layer feeds, through the parser's nameless helpers."""
    found: set[str] = set()
    for user in users.get(layer.get_output(0).name, []):
        found |= {user.metadata} if user.metadata else _nodes_after(user, users)
    return found


def test_values_come_from_the_store(bundle: Callable[..., Path]) -> None:
    """Where the target's GPU is, constants have values; here only the network can be looked at."""
    opened = Bundle.open(bundle("nano-like", "fp16"))
    graph = read_graph(opened.path("generator.onnx").read_bytes())
    network, keep = _network(graph.model)
    before, store = network.num_layers, opened.weights()
    fill_weights(tensorrt("tensorrt-rtx"), network, graph.weights, store)
    for position, spec in enumerate(graph.weights):
        constant = network.get_layer(before + position)
        constant.__class__ = trt.IConstantLayer
        values = constant.weights.reshape(spec.shape)
        assert (values == store[spec.name]).all()
        assert network.are_weights_marked_refittable(spec.name)
    del keep


def test_a_name_is_found_whole_or_not_at_all() -> None:
    def stored(name: bytes) -> bytes:
        return len(name).to_bytes(8, "little") + name

    plan = b"code" + stored(b"layers.0.post_attention_layernorm.weight") + stored(b"a.weight")
    names = {"a.weight", "norm.weight", "layers.0.post_attention_layernorm.weight"}
    assert names_in_bytes(plan, names) == names - {"norm.weight"}
    with pytest.raises(BuildError, match=r"1 missing \(norm.weight\)"):
        check_names("reasoner", "refit", names, names - {"norm.weight"})
    with pytest.raises(BuildError, match=r"1 foreign \(other\)"):
        check_names("reasoner", "refit", names, names | {"other"})
    check_names("reasoner", "refit", names, names)


def test_an_audit_sees_another_precision_and_another_size() -> None:
    check_precision("generator", "half", {"half": 3, "float": 2})
    with pytest.raises(BuildError, match="got 3 x float; expected fp8"):
        check_precision("generator", "fp8", {"float": 3})
    audit = {"method": "bytes", "weights": 1, "products": {}, "fused_attention": 0}
    for nbytes, fits in ((16_000_000, True), (16_000_001, False)):
        bound = size_bound(3, 2)
        made = Audit(**audit, decomposed_attention=0, nbytes=nbytes, bound_bytes=bound)  # type: ignore[arg-type]
        assert made.is_within_bound == fits


def test_the_program_builds_and_says_what(
    bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(bundle("nano-like", "fp16"), tmp_path / "b"))
    words = ["build", str(root), "--target", "sm89,sm86", "--backend", "tensorrt-rtx"]
    words += ["--weights", "inputs", "--sizes", "64x64", "--max-context", "64"]
    assert run([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [Path(plan["folder"]).name for plan in report["plans"]] == ["sm89", "sm86"]
    for plan in report["plans"]:
        for engine in plan["engines"].values():
            assert (root / engine["file"]).stat().st_size == engine["bytes"]
            assert engine["peak_rss_bytes"] > 1 << 26
    vision = report["plans"][0]["engines"]["generator"]["profiles"][0]["dims"]["vision"]
    assert vision == [4, 4, 4]
    assert run([*words[:4], *words[6:]]) == 1  # sm89 alone does not say which TensorRT
    assert "no --backend" in capsys.readouterr().err

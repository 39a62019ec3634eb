"""Both graphs parse and build with TensorRT-RTX, whose builder needs no GPU.

A smoke test: it shows that the contract can be built (operators, types, profiles, the static
capacity), nothing about numbers or speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from motrt.engines.bundle import Bundle

trt = pytest.importorskip("tensorrt_rtx")

CAPACITY = 64
# min, opt, max of each named dimension; zero where the contract allows it.
RANGES = {
    "batch": (1, 1, 2),
    "tokens": (1, 16, 32),
    "past": (0, 16, 32),
    "total": (1, 32, 64),
    "logits": (1, 1, 4),
    "context": (0, 32, 64),
    "vision": (1, 32, 128),
    "sound": (0, 4, 16),
    "action": (0, 4, 16),
}
CASES = [
    ("nano-like", "fp16", "native"),
    ("edge-like", "fp16", "native"),
    ("nano-like", "fp16", "portable"),
    ("edge-like", "bf16", "portable"),
]


@pytest.mark.parametrize(("kind", "precision", "lowering"), CASES)
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_graph_builds(
    engine: str, kind: str, precision: str, lowering: str, bundle: Callable[..., Path]
) -> None:
    plan = _build(Bundle.open(bundle(kind, precision, lowering)), engine)
    assert plan is not None
    assert len(plan) > 100_000


def test_a_symbolic_capacity_is_refused(bundle: Callable[..., Path]) -> None:
    """Why ``build`` must write the capacity into a copy of the graph."""
    with pytest.raises(RuntimeError, match="static sequence length"):
        _build(Bundle.open(bundle("nano-like", "fp16", "native")), "reasoner", capacity=None)


def _build(opened: Bundle, engine: str, capacity: int | None = CAPACITY) -> bytes | None:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    path = opened.path(f"{engine}.onnx")
    model = onnx.load(path, load_external_data=False)
    if capacity is not None:
        _write_capacity(model.graph, capacity)
    parsed = parser.parse(model.SerializeToString(), str(path))
    errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
    if not parsed:
        raise RuntimeError("; ".join(errors))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    contract = getattr(opened, f"{engine}_contract")()
    ranges = dict(RANGES)
    parts = [RANGES[modality.value] for modality in opened.manifest.modalities]
    ranges["generated"] = (
        sum(low for low, _, _ in parts),
        sum(best for _, best, _ in parts),
        sum(high for _, _, high in parts),
    )
    for spec in contract.inputs:
        dims = ["capacity" if dim == "capacity" else dim for dim in spec.shape]
        if any(isinstance(dim, str) for dim in dims):
            profile.set_shape(spec.name, *(_shape(dims, ranges, k) for k in range(3)))
    config.add_optimization_profile(profile)
    plan: Any = builder.build_serialized_network(network, config)
    return None if plan is None else bytes(plan)


def _shape(
    dims: list[Any], ranges: dict[str, tuple[int, int, int]], which: int
) -> tuple[int, ...]:
    return tuple(
        CAPACITY if dim == "capacity" else ranges[dim][which] if isinstance(dim, str) else dim
        for dim in dims
    )


def _write_capacity(graph: onnx.GraphProto, capacity: int) -> None:
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity

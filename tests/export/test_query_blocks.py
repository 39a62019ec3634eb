"""The native float32 generator takes many queries in blocks, and computes what it does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from motrt.calibration.parity.metrics import difference
from motrt.engines.bundle import Bundle
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.tensors import Array
from motrt.export.graphs import native
from motrt.export.pipeline import export_checkpoint
from omni_fixtures.checkpoints import build_transformer
from omni_fixtures.configs import SUPER_LIKE

SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_axes_dim": [4, 2, 2], "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 80,
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OnnxRuntimeEngine]:
    """The same weights with blocks, and without."""
    folder = tmp_path_factory.mktemp("blocks")
    source = build_transformer(folder / "checkpoint", SUPER_LIKE | SMALL)
    made = {}
    for name, start in (("blocks", native._BLOCKS_FROM), ("plain", 1 << 40)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_BLOCKS_FROM", start)
            bundle = Bundle.open(export_checkpoint(source, folder / name).bundle)
        made[name] = OnnxRuntimeEngine(bundle.generator_contract(), bundle.path("generator.onnx"))
    return made


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [(1, 1), (1, 7), (1, 8), (1, 2047), (1, 2048), (1, 2052), (2, 2056), (1, 2049), (1, 4104)],
)
def test_blocks_change_nothing(
    batch: int, tokens: int, engines: dict[str, OnnxRuntimeEngine]
) -> None:
    feeds = _feeds(engines["blocks"], batch, tokens)
    have, want = (engines[name].run(feeds)["velocity"] for name in ("blocks", "plain"))
    assert difference(have, want).max_abs <= 1e-5 * np.abs(want).max()


def test_sixteen_bit_graphs_have_none(bundle: Callable[..., Path]) -> None:
    counts = {}
    for precision in ("fp32", "fp16"):
        path = bundle("super-like", precision) / "generator.onnx"
        nodes = onnx.load(path, load_external_data=False).graph.node
        counts[precision] = sum(node.op_type == "Clip" for node in nodes)
    assert counts == {"fp32": 2, "fp16": 0}


def _feeds(engine: OnnxRuntimeEngine, batch: int, tokens: int) -> dict[str, Array]:
    random = np.random.RandomState(tokens)
    sizes = {"batch": batch, "vision": tokens, "generated": tokens, "context": 5}
    return {
        spec.name: random.standard_normal(
            [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        ).astype(spec.dtype.numpy)
        for spec in engine.contract.inputs
    }

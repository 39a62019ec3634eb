"""``validate`` passes what is right and fails what is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from motrt.calibration.parity.compare import validate
from motrt.calibration.parity.reference_process import ENGINES
from motrt.calibration.parity.report import ParityReport
from motrt.engines.bundle import Bundle, record_small
from motrt.engines.dtypes import Precision
from motrt.engines.errors import ConfigError
from motrt.export.cli import run
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from omni_fixtures.checkpoints import build_transformer
from omni_fixtures.configs import EDGE_LIKE, NANO_LIKE

pytestmark = pytest.mark.usefixtures("one_reference_per_checkpoint")

KINDS = ("nano-like", "edge-like", "super-like", "shared")
# Each kind meets each precision and each lowering, and each precision each lowering.
COVERING = {
    ("nano-like", "fp32", "native"),
    ("nano-like", "bf16", "portable"),
    ("edge-like", "fp16", "native"),
    ("edge-like", "fp32", "portable"),
    ("super-like", "bf16", "native"),
    ("super-like", "fp16", "portable"),
    ("shared", "fp32", "portable"),
    ("shared", "fp16", "native"),
}


def _matrix() -> Iterator[Any]:
    for case in product(KINDS, ("fp32", "fp16", "bf16"), ("native", "portable")):
        marks = () if case in COVERING else (pytest.mark.full,)
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("kind", "precision", "lowering"), _matrix())
def test_every_fixture_equals_its_reference(
    kind: str,
    precision: str,
    lowering: str,
    checkpoint: Callable[..., Path],
    bundle: Callable[..., Path],
) -> None:
    report = validate(bundle(kind, precision, lowering), checkpoint(kind))
    _require_ok(report)
    # A shared checkpoint is a transformer alone.
    alone = {"reasoner", "generator", "text"}
    assert _engines(report) == (alone if kind == "shared" else set(ENGINES))
    assert {item.engine for item in report.outcome.skipped} == set(ENGINES) - _engines(report)
    assert not report.outcome.notes


# Dimensions that the fixtures do not have: odd head sizes, one K/V head, H·D ≠ E, patch size 1.
OTHERS = {
    "one-kv-head": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 24,
        "rope_axes_dim": [4, 4, 4], "num_hidden_layers": 5, "intermediate_size": 176,
        "latent_channel": 12, "latent_patch_size": 1, "patch_latent_dim": 12,
        "sound_gen": True, "sound_dim": 10, "vocab_size": 301,
    },
    "head-dim-20": {
        "hidden_size": 128, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20,
        "rope_axes_dim": [4, 3, 3], "num_hidden_layers": 1, "intermediate_size": 96,
        "latent_channel": 16, "latent_patch_size": 2, "patch_latent_dim": 64,
        "action_gen": True, "action_dim": 7, "num_embodiment_domains": 1, "vocab_size": 97,
        "hidden_act": "relu2", "qk_norm_for_text": True, "attention_bias": True,
        "timestep_scale": 0.01, "base_fps": 16,
    },
    "no-qk-norm-patch-3": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rope_axes_dim": [2, 1, 1], "num_hidden_layers": 2, "intermediate_size": 48,
        "latent_channel": 4, "latent_patch_size": 3, "patch_latent_dim": 36, "vocab_size": 64,
        "qk_norm_for_text": False, "use_und_k_norm_for_gen": True, "rms_norm_eps": 1e-5,
        "enable_fps_modulation": False, "unified_3d_mrope_temporal_modality_margin": 100,
        "unified_3d_mrope_reset_spatial_ids": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("lowering", ["native", "portable"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_dimensions_hold_too(name: str, lowering: str, tmp_path: Path) -> None:
    source = build_transformer(tmp_path / "checkpoint", OTHERS[name], dtype="bfloat16")
    precision = Precision.BF16 if lowering == "native" else Precision.FP32
    options = ExportOptions(precision=precision, lowering=lowering)
    export_checkpoint(source, tmp_path / "bundle", options)
    _require_ok(validate(tmp_path / "bundle", source))


SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_axes_dim": [4, 2, 2], "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 80,
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one architecture, and an Edge-like one."""
    folder = tmp_path_factory.mktemp("small")
    return {
        "own": build_transformer(folder / "own", NANO_LIKE | SMALL, seed=1),
        "other": build_transformer(folder / "other", NANO_LIKE | SMALL, seed=2),
        "edge": build_transformer(folder / "edge", EDGE_LIKE | SMALL, seed=3),
    }


Breaker = Callable[[Path], None]


def _edit_graph(folder: Path, file: str, edit: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(folder / file, load_external_data=False)
    edit(model.graph)
    (folder / file).write_bytes(model.SerializeToString())
    opened = json.loads((folder / "manifest.json").read_text())
    record = record_small(folder / file)
    opened["files"][file] = {"bytes": record.nbytes, "sha256": record.sha256}
    (folder / "manifest.json").write_text(json.dumps(opened))
    Bundle.open(folder)  # the damage is numeric: nothing else may stop it


def _edit_model(folder: Path, **values: object) -> None:
    opened = json.loads((folder / "manifest.json").read_text())
    opened["model"] |= values
    (folder / "manifest.json").write_text(json.dumps(opened))


def _scale_tensor(name: str, factor: float) -> Breaker:
    def breaker(folder: Path) -> None:
        entry = Bundle.open(folder).manifest.weights["transformer"][name]
        data = np.memmap(folder / entry.file, entry.dtype.numpy, "r+", entry.offset, entry.shape)
        data[:] = (data.astype(np.float32) * factor).astype(entry.dtype.numpy)
        data.flush()

    return breaker


def _swap_keys_and_values(folder: Path) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        swap = {"context.1.key": "context.1.value", "context.1.value": "context.1.key"}
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = swap.get(name, name)

    _edit_graph(folder, "generator.onnx", edit)


def _stale_cache(folder: Path) -> None:
    """Layer 1 hands out the keys that were there before: its present is its past."""

    def edit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            for index, name in enumerate(node.output):
                if name == "present.1.key":
                    node.output[index] = "fresh"
            for index, name in enumerate(node.input):
                if name == "present.1.key":
                    node.input[index] = "fresh"
        graph.node.append(
            onnx.helper.make_node("Identity", ["past_key_values.1.key"], ["present.1.key"])
        )

    _edit_graph(folder, "reasoner.onnx", edit)


def _stale_context(folder: Path) -> None:
    """The generator's layer 1 reads layer 0's keys."""

    def edit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name == "context.1.key":
                    node.input[index] = "context.0.key"

    _edit_graph(folder, "generator.onnx", edit)


def _wrong_timestep_scale(folder: Path) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        found = 0
        for node in graph.node:
            if node.op_type == "Constant":
                value = onnx.numpy_helper.to_array(node.attribute[0].t)
                if value.shape == () and value.dtype == np.float32 and np.isclose(value, 0.001):
                    node.attribute[0].t.CopyFrom(
                        onnx.numpy_helper.from_array(np.float32(0.00101), node.attribute[0].t.name)
                    )
                    found += 1
        assert found == 1

    _edit_graph(folder, "generator.onnx", edit)


def _shifted_positions(folder: Path) -> None:
    _edit_model(folder, unified_3d_mrope_temporal_modality_margin=15001)


BREAKERS: dict[str, Breaker] = {
    "swapped K and V": _swap_keys_and_values,
    "stale cache": _stale_cache,
    "stale context": _stale_context,
    "wrong timestep scale": _wrong_timestep_scale,
    "shifted positions": _shifted_positions,
    "other frame rate": lambda folder: _edit_model(folder, base_fps=25),
    "other sound rate": lambda folder: _edit_model(folder, sound_latent_fps=24.0),
    **{
        f"{name} off by 1 %": _scale_tensor(name, 1.01)
        for name in (
            "embed_tokens.weight",
            "lm_head.weight",
            "norm.weight",
            "layers.1.self_attn.to_v.weight",
            "layers.0.self_attn.norm_k.weight",
            "layers.1.mlp.gate_proj.weight",
            "layers.1.self_attn.norm_added_q.weight",
            "layers.0.self_attn.to_add_out.weight",
            "layers.1.mlp_moe_gen.down_proj.weight",
            "time_embedder.linear_1.bias",
            "proj_in.bias",
            "proj_out.weight",
            "audio_modality_embed",
            "action_proj_in.fc.weight",
            "action_proj_out.bias.weight",
        )
    },
}


@pytest.mark.parametrize("name", BREAKERS)
def test_a_broken_bundle_fails(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    # Precision and lowering alternate, so that each sort of damage meets more than one form.
    index = list(BREAKERS).index(name)
    precision = (Precision.FP32, Precision.BF16, Precision.FP16)[index % 3]
    # A static cache cannot be stale in this way: its past and present are one memory.
    lowering = "portable" if name != "stale cache" and index % 2 else "native"
    folder = tmp_path / "bundle"
    options = ExportOptions(precision=precision, lowering=lowering, copy_weights=True)
    export_checkpoint(sources["own"], folder, options)
    _require_ok(validate(folder, sources["own"]))
    BREAKERS[name](folder)
    assert not validate(folder, sources["own"]).ok


def test_a_missing_context_norm_fails(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export_checkpoint(sources["edge"], folder, ExportOptions(copy_weights=True))
    _require_ok(validate(folder, sources["edge"]))
    _scale_tensor("layers.0.self_attn.k_norm_und_for_gen.weight", 1.01)(folder)
    assert not validate(folder, sources["edge"]).ok


def test_the_program_says_3_and_keeps_the_evidence(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    export_checkpoint(sources["other"], folder)
    assert run(["validate", str(folder), "--against", str(sources["own"]), "--json"]) == 3
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed["ok"] is False
    assert any(not row["ok"] for row in printed["rows"])
    assert captured.err.startswith("parity: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert json.loads((folder / "parity.json").read_text()) == printed
    evidence = Bundle.open(folder).manifest.parity
    assert evidence is not None
    assert evidence["ok"] is False

    assert run(["validate", str(folder), "--against", str(sources["other"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    evidence = Bundle.open(folder).manifest.parity
    assert evidence is not None
    assert evidence["ok"] is True


def test_no_record_leaves_the_bundle_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export_checkpoint(sources["own"], folder)
    before = (folder / "manifest.json").read_bytes()
    command = ["validate", str(folder), "--against", str(sources["own"]), "--no-record", "--quiet"]
    assert run(command) == 0
    assert (folder / "manifest.json").read_bytes() == before
    assert not (folder / "parity.json").exists()


def test_two_bundles_are_compared(sources: dict[str, Path], tmp_path: Path) -> None:
    folders = {
        (precision, lowering): tmp_path / f"{precision}-{lowering}"
        for precision, lowering in (("fp32", "native"), ("fp32", "portable"), ("bf16", "native"))
    }
    for (precision, lowering), folder in folders.items():
        options = ExportOptions(precision=Precision(precision), lowering=lowering)
        export_checkpoint(sources["own"], folder, options)
    export_checkpoint(sources["other"], tmp_path / "other")
    base = folders["fp32", "native"]
    equal = validate(folders["fp32", "portable"], base)
    _require_ok(equal)
    assert _engines(equal) == {"reasoner", "generator", "text", "scheduler"}
    rounded = validate(folders["bf16", "native"], base)
    _require_ok(rounded)
    assert _engines(rounded) == {"reasoner", "generator", "scheduler"}
    reasons = {item.engine: item.reason for item in rounded.outcome.skipped}
    assert "other weights" in reasons["text"]
    assert reasons["prompt"] == "a bundle has no tokenizer"
    assert not validate(tmp_path / "other", base).ok
    assert not validate(tmp_path / "other", folders["bf16", "native"]).ok


def test_another_architecture_is_refused_before_the_work(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(sources["own"], tmp_path / "bundle")
    with pytest.raises(ConfigError, match=r"not the same architecture.*hidden_act"):
        validate(tmp_path / "bundle", sources["edge"])


def test_a_nonfinite_output_fails(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export_checkpoint(sources["own"], folder, ExportOptions(copy_weights=True))
    _scale_tensor("proj_out.weight", float("nan"))(folder)
    report = validate(folder, sources["own"])
    assert not report.ok
    assert report.worst.to_dict()["max_abs"] is None  # JSON has no infinity


def test_the_reference_judges_nothing_when_it_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = build_transformer(tmp_path / "checkpoint", NANO_LIKE | SMALL)
    export_checkpoint(source, tmp_path / "bundle")
    shutil.rmtree(source)
    assert run(["validate", str(tmp_path / "bundle"), "--against", str(source)]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err


def _engines(report: ParityReport) -> set[str]:
    return {row.engine for row in report.rows}


def _require_ok(report: ParityReport) -> None:
    failed = [dataclasses.asdict(row) for row in report.rows if not row.ok]
    assert report.ok, failed[:5]

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from motrt.engines.atomic import write_atomic
from motrt.engines.bundle import MANIFEST, Bundle, record_small, record_weights
from motrt.engines.contract import Cache, available_modalities
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import BundleError, CheckpointError, ConfigError
from motrt.engines.finite import check_finite, pieces, refuse_nonfinite
from motrt.engines.inspection import inspect_bundle
from motrt.engines.manifest import FileRecord, Manifest
from motrt.engines.memory_estimate import Shapes
from motrt.engines.model_config import ModelConfig
from motrt.engines.rotary import rotary_axes
from motrt.engines.safetensors_header import read_header
from motrt.engines.safetensors_writer import write_safetensors
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.verification import verify_bundle
from motrt.engines.weight_names import Part, weight_table
from motrt.export.cli import run
from omni_fixtures.configs import EDGE_LIKE, NANO_LIKE, SHARED

VAE_TENSORS = {"encoder.conv.weight": (4, 3), "decoder.conv.weight": (3, 4), "decoder.bias": (3,)}
CONFIGS = {"nano": NANO_LIKE, "edge": EDGE_LIKE, "shared": SHARED}


def write_part(
    folder: Path, part: str, shapes: dict[str, tuple[int, ...]], dtype: DType
) -> dict[str, WeightEntry]:
    file = f"weights/{part}/model.safetensors"
    (folder / file).parent.mkdir(parents=True)
    random = np.random.RandomState(7)
    write_safetensors(
        folder / file,
        {name: (dtype, shape) for name, shape in shapes.items()},
        lambda name: iter([random.standard_normal(shapes[name]).astype(dtype.numpy)]),
    )
    return {
        name: WeightEntry(file, item.offset, item.dtype, item.shape)
        for name, item in read_header(folder / file).tensors.items()
    }


def write_graph(path: Path, entries: dict[str, WeightEntry]) -> None:
    """Write a graph that computes nothing and points at tensors as an exported one does."""
    graph = onnx.GraphProto(name=path.stem)
    for name, entry in entries.items():
        tensor = graph.initializer.add(name=name, data_type=entry.dtype.onnx, dims=entry.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": entry.file, "offset": entry.offset, "length": entry.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(onnx.ModelProto(ir_version=8, graph=graph).SerializeToString())


def write_bundle(
    folder: Path, kind: str = "nano", precision: Precision = Precision.FP32, **changes: Any
) -> Bundle:
    config = ModelConfig.from_dict(CONFIGS[kind])
    folder.mkdir()
    table = weight_table(config)
    entries = write_part(
        folder, "transformer", {name: spec.shape for name, spec in table.items()}, precision.dtype
    )
    vae = write_part(folder, "vae", VAE_TENSORS, DType.FLOAT32)
    for graph, part in (("reasoner", Part.REASONER), ("generator", Part.GENERATOR)):
        used = {n: e for n, e in entries.items() if table[n].part in (part, Part.BOTH)}
        write_graph(folder / f"{graph}.onnx", used)
    write_graph(folder / "vae_decoder_first.onnx", vae)
    manifest = Manifest(
        model=config,
        precision=precision,
        lowering="native",
        cache=Cache.STATIC,
        modalities=available_modalities(config),
        inv_freq=(1.0,) * (config.head_dim // 2),
        rotary_axes=rotary_axes(config),
        files={},
        weights={"transformer": entries, "vae": vae},
        components={"vae": {"graphs": {"decoder_first": "vae_decoder_first.onnx"}}},
        absent={"vision_encoder": "not in the checkpoint"},
        scheduler={"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0},
        probe={"status": "passed", "reason": "equal to the PyTorch modules"},
    )
    return save(folder, dataclasses.replace(manifest, **changes))


def save(folder: Path, manifest: Manifest) -> Bundle:
    files: dict[str, FileRecord] = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            record = record_weights if path.suffix == ".safetensors" else record_small
            files[path.relative_to(folder).as_posix()] = record(path)
    manifest = dataclasses.replace(manifest, files=files)
    write_atomic(folder / MANIFEST, manifest.to_json().encode())
    return Bundle.open(folder)


def poison(bundle: Bundle, part: str, name: str, value: float) -> None:
    entry = bundle.manifest.weights[part][name]
    with (bundle.root / entry.file).open("r+b") as file:
        file.seek(entry.offset + entry.nbytes - entry.dtype.itemsize)
        file.write(np.array([value], entry.dtype.numpy).tobytes())


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_is_counted_for_its_reader(tmp_path: Path, kind: str) -> None:
    bundle = write_bundle(tmp_path / "b", kind)
    weights = inspect_bundle(bundle).weights
    table = weight_table(bundle.manifest.model)
    for part in Part:
        specs = [spec for spec in table.values() if spec.part is part]
        assert weights[part.value].tensors == len(specs)
        assert weights[part.value].nbytes == sum(4 * int(np.prod(s.shape)) for s in specs)
    assert weights["other"].tensors == 0
    assert (weights["both"].nbytes > 0) is (kind == "shared")
    data = inspect_bundle(bundle).to_dict()["weights"]
    assert data["total"]["bytes"] == sum(amount.nbytes for amount in weights.values())
    assert data["shared_bytes"] == weights["both"].nbytes


def test_dropped_heads_are_not_counted(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    entries = bundle.manifest.weights["transformer"]
    kept = {name: entry for name, entry in entries.items() if not name.startswith("audio_")}
    weights = {**bundle.manifest.weights, "transformer": kept}
    less = Bundle(bundle.root, dataclasses.replace(bundle.manifest, weights=weights))
    whole, part = inspect_bundle(bundle).weights, inspect_bundle(less).weights
    assert part["generator"].nbytes < whole["generator"].nbytes
    assert part["reasoner"] == whole["reasoner"]


def test_tensors_that_the_config_does_not_call_for_are_shown(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    entries = dict(bundle.manifest.weights["transformer"])
    entries["surprise"] = entries.pop("norm.weight")
    weights = {**bundle.manifest.weights, "transformer": entries}
    odd = Bundle(bundle.root, dataclasses.replace(bundle.manifest, weights=weights))
    assert inspect_bundle(odd).weights["other"].tensors == 1


def test_the_vae_is_shown_by_its_parts(tmp_path: Path) -> None:
    vae = inspect_bundle(write_bundle(tmp_path / "b")).components["vae"]
    assert {name: part.parameters for name, part in vae.parts.items()} == {
        "encoder": 12,
        "decoder": 15,
    }
    assert vae.weights.nbytes == 27 * 4
    assert vae.graphs == {"decoder_first": "vae_decoder_first.onnx"}


def test_both_contracts_are_shown(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", "edge")
    engines = inspect_bundle(bundle).to_dict()["engines"]
    for name, contract in (
        ("reasoner", bundle.reasoner_contract()),
        ("generator", bundle.generator_contract()),
    ):
        names = [spec["name"] for spec in engines[name]["inputs"]]
        assert names == [spec.name for spec in contract.inputs]
        assert len(engines[name]["outputs"]) == len(contract.outputs)
    assert {"name": "logits", "dtype": "float32", "shape": ["batch", "logits", 512]} in engines[
        "reasoner"
    ]["outputs"]


def test_hard_links_are_recognized(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    weights = bundle.root / "weights/transformer/model.safetensors"
    assert inspect_bundle(bundle).linked_nbytes == 0
    os.link(weights, tmp_path / "checkpoint.safetensors")
    data = inspect_bundle(bundle).to_dict()
    linked = [file["path"] for file in data["files"] if file["hard_linked"]]
    assert linked == ["weights/transformer/model.safetensors"]
    assert data["file_bytes"]["linked"] == weights.stat().st_size


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_memory_is_added_up(tmp_path: Path, kind: str, precision: Precision) -> None:
    bundle = write_bundle(tmp_path / "b", kind, precision)
    shapes = Shapes(batch=2, context=10, capacity=100, tokens=30)
    inspection = inspect_bundle(bundle, shapes)
    memory, size = inspection.memory, precision.dtype.itemsize
    # 3 layers, 2 KV heads of 64, patches of 192: the fixtures' numbers.
    assert memory.kv_cache == 2 * 3 * 2 * 100 * 64 * 2 * size
    assert memory.context_key_cache == (3 * 2 * 100 * 64 * 2 * size if kind == "edge" else 0)
    assert memory.context == 2 * 3 * 2 * 10 * 64 * 2 * size
    assert memory.context_all == 2 * memory.context
    assert memory.latents == 2 * 30 * 192 * 4
    assert memory.denoise_step_full > 1000 * memory.denoise_step > 0
    weights = {name: amount.nbytes for name, amount in inspection.weights.items()}
    assert memory.reasoner_weights == weights["reasoner"] + weights["both"]
    assert memory.generator_weights == weights["generator"] + weights["both"]
    run_bytes = memory.kv_cache + memory.context_key_cache + memory.context_all + memory.latents
    once = sum(weights.values()) + 27 * 4 + run_bytes
    assert memory.total_one_copy == once
    assert memory.total == once + weights["both"]
    advice = inspection.weights_advice
    # Embedding rows stay with the host; the VAE's 27 values are no plan's.
    assert advice.inputs == once - 27 * 4 - weights["host"]
    assert advice.refit == advice.inputs + weights["both"]
    assert advice.recommended == ("inputs" if kind == "shared" else "refit")


def test_a_small_saving_is_not_worth_slower_weights(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", "shared")
    advice = inspect_bundle(bundle, Shapes(capacity=1)).weights_advice
    assert (advice.recommended, advice.inputs < advice.refit) == ("inputs", True)
    advice = inspect_bundle(bundle, Shapes(capacity=10**6)).weights_advice
    assert (advice.recommended, advice.inputs < advice.refit) == ("refit", True)
    assert advice.reason.startswith("only ")


@pytest.mark.parametrize("name", ["batch", "context", "capacity", "tokens", "guidance_branches"])
def test_shapes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be right; got 0"):
        Shapes(**{name: 0})


@pytest.mark.parametrize("precision", Precision)
def test_a_sound_bundle_verifies(tmp_path: Path, precision: Precision) -> None:
    bundle = write_bundle(tmp_path / "b", "shared", precision)
    seen: list[tuple[str, int, int]] = []
    result = verify_bundle(bundle, progress=lambda *step: seen.append(step))
    stores = [bundle.weights(part) for part in ("transformer", "vae")]
    assert result.tensors == sum(len(store) for store in stores)
    assert result.nbytes == sum(store.nbytes for store in stores)
    assert seen[-1] == ("verify", result.nbytes, result.nbytes)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert result.graphs_skipped is None
    table = weight_table(bundle.manifest.model)
    readers = [spec.part for spec in table.values()]
    assert result.graphs == {
        "reasoner.onnx": readers.count(Part.REASONER) + readers.count(Part.BOTH),
        "generator.onnx": readers.count(Part.GENERATOR) + readers.count(Part.BOTH),
        "vae_decoder_first.onnx": 3,
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("part", "name"),
    [("transformer", "layers.1.self_attn.to_q.weight"), ("vae", "decoder.conv.weight")],
)
def test_a_value_that_is_not_finite_is_named(
    tmp_path: Path, part: str, name: str, value: float
) -> None:
    bundle = write_bundle(tmp_path / "b")
    poison(bundle, part, name, value)
    with pytest.raises(BundleError, match=f"tensor {name} holds NaN or infinity; got 1 such"):
        verify_bundle(Bundle.open(bundle.root))


@pytest.mark.parametrize("change", ["location", "offset", "length", "dims", "inline", "name"])
def test_a_graph_that_points_elsewhere_is_refused(tmp_path: Path, change: str) -> None:
    bundle = write_bundle(tmp_path / "b")
    path = bundle.root / "generator.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[3]
    name = tensor.name
    if change == "dims":
        tensor.dims[0] += 1
    elif change == "inline":
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    elif change == "name":
        tensor.name = name = "nobody"
    else:
        (item,) = (item for item in tensor.external_data if item.key == change)
        item.value = "1" + item.value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=f"generator.onnx does not read tensor {name} where"):
        verify_bundle(save(bundle.root, bundle.manifest))


def test_a_pointer_inside_a_branch_is_looked_at(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    path = bundle.root / "generator.onnx"
    model = onnx.load(path, load_external_data=False)
    branch = onnx.GraphProto(name="branch")
    branch.initializer.add().CopyFrom(model.graph.initializer[0])
    node = model.graph.node.add(op_type="If", output=["x"])
    node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH, g=branch)
    path.write_bytes(model.SerializeToString())
    counts = verify_bundle(save(bundle.root, bundle.manifest)).graphs
    assert counts["generator.onnx"] == len(model.graph.initializer) + 1


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    (bundle.root / "reasoner.onnx").write_bytes(b"\xff\xff\xff\xff not a protobuf")
    with pytest.raises(BundleError, match=r"reasoner.onnx is not an ONNX graph"):
        verify_bundle(save(bundle.root, bundle.manifest))


def test_without_onnx_the_weights_are_still_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle(tmp_path / "b")
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = verify_bundle(bundle)
    assert result.graphs == {}
    assert "motrt[export]" in str(result.graphs_skipped)
    assert result.tensors > 0


@pytest.mark.parametrize(
    "dtype", [t for t in DType if t.name.startswith(("FLOAT", "BFLOAT"))], ids=lambda t: t.label
)
def test_finite_values_pass_and_others_do_not(dtype: DType) -> None:
    top = np.array([1.0], dtype.numpy)
    info: Any = np.finfo if dtype in {DType.FLOAT64, DType.FLOAT32, DType.FLOAT16} else None
    highest = (
        info(dtype.numpy).max
        if info
        else {"bfloat16": 3e38, "float8_e4m3": 448.0}.get(dtype.label, 57344.0)
    )
    refuse_nonfinite("w", np.array([0.0, -0.0, 1.0, highest, -highest]).astype(dtype.numpy))
    for value in (np.nan, -np.nan):
        bad = np.concatenate([top, np.array([value], dtype.numpy)])
        with pytest.raises(CheckpointError, match="tensor w holds NaN"):
            refuse_nonfinite("w", bad)


def test_integers_pass(tmp_path: Path) -> None:
    refuse_nonfinite("w", np.arange(-3, 3, dtype=np.int8))
    refuse_nonfinite("w", np.array([True, False]))
    shapes: dict[str, tuple[int, ...]] = {"q": (5,), "empty": (0, 4)}
    entries = write_part(tmp_path, "p", shapes, DType.INT64)
    done: list[int] = []
    check_finite(WeightStore(tmp_path, entries), done.append)
    assert sum(done) == 40


def test_pieces_cover_an_array_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motrt.engines.finite._CHUNK", 4)
    array = np.arange(10.0).reshape(2, 5)
    parts = list(pieces(array))
    assert [part.size for part in parts] == [4, 4, 2]
    assert np.concatenate(parts).tolist() == array.reshape(-1).tolist()


def test_inspect_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parity = {"ok": True, "against": "Cosmos3-Edge", "rows": [1, 2, 3]}
    bundle = write_bundle(tmp_path / "b", "edge", parity=parity)
    code = run(["inspect", str(bundle.root), "--json", "--verify", "--capacity", "64"])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.err == ""
    data = json.loads(captured.out)
    assert (data["precision"], data["lowering"], data["cache"]) == ("fp32", "native", "static")
    assert data["modalities"] == ["vision", "action"]
    assert data["memory"]["shapes"]["capacity"] == 64
    assert data["scheduler"] == "UniPCMultistepScheduler"
    assert data["absent"] == {"vision_encoder": "not in the checkpoint"}
    assert data["parity"] == {"ok": True, "against": "Cosmos3-Edge"}
    assert data["guardrail"] == "not exported"
    assert data["verification"]["bytes"] > 0


def test_inspect_prints_tables_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "b[dim]", "shared")
    assert run(["inspect", "b[dim]", "--verify", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "past_key_values.{i}.key float32 [batch, 2, capacity, 64]  x 3 layers" in captured.out
    assert "verified 57 tensors" in captured.out
    assert "b[dim]" in captured.out
    assert "both engines (shared)" in captured.out
    assert max(len(line) for line in captured.out.splitlines()) <= 100


@pytest.mark.parametrize("damage", ["no bundle", "graph", "header", "value"])
def test_a_damaged_bundle_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    bundle = write_bundle(tmp_path / "b")
    if damage == "no bundle":
        (bundle.root / MANIFEST).unlink()
    elif damage == "graph":
        (bundle.root / "reasoner.onnx").write_bytes(b"short")
    elif damage == "header":
        with (bundle.root / "weights/vae/model.safetensors").open("r+b") as file:
            file.seek(20)
            file.write(b"\0")
    else:
        poison(bundle, "transformer", "proj_in.bias", np.nan)
    assert run(["inspect", str(bundle.root), "--verify", "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert "expected" in captured.err


def test_a_shape_of_zero_is_a_usage_error(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    assert run(["inspect", str(bundle.root), "--batch", "0"]) == 2

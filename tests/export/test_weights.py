"""Weights arrive in a bundle as links, as copies, or cast as torch would cast them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx_ir")

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from motrt.engines.bundle import Bundle
from motrt.engines.casting import cast_piece
from motrt.engines.checkpoint import open_checkpoint, open_weights
from motrt.engines.contract import Modality
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import CheckpointError, ExportError, MotrtError
from motrt.engines.store import WeightStore
from motrt.engines.weight_names import TIME_EMBEDDER
from motrt.export import weights as module
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from motrt.export.weights import WeightPlan, place_weights, plan_transformer
from tiny_checkpoints import (
    DTYPES,
    FILE,
    STEM,
    edit_tensors,
    tiny_tensors,
    tree,
    write_checkpoint,
    write_vae,
)

OPTIONS = ExportOptions(probe="never")
NATIVE = {"float32": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}


def _export(root: Path, **options: Any) -> Bundle:
    output = root.parent / "b"
    export_checkpoint(root, output, dataclasses.replace(OPTIONS, **options))
    return Bundle.open(output)


def _place(plan: WeightPlan, folder: Path, *, copy: bool = False) -> WeightStore:
    folder.mkdir()
    entries = place_weights(
        plan,
        folder,
        copy=copy,
        cast_name="cast.safetensors",
        advance=lambda _: None,
        copy_nbytes=1,
    )
    return WeightStore(folder, entries)


def _cast(folder: Path, value: Any, dtype: DType) -> WeightStore:
    """Cast one tensor ``x`` of a file of its own."""
    folder.mkdir(parents=True)
    save_file({"x": value}, folder / "model.safetensors")
    plan = WeightPlan("part", open_weights(folder), {"x": dtype})
    return _place(plan, folder / "b")


# --- links ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_the_right_type_are_links(tmp_path: Path, dtype: str) -> None:
    root = write_vae(write_checkpoint(tmp_path / "c", dtype=dtype, shards=2), dtype)
    bundle = _export(root, precision=NATIVE[dtype])
    files = [path for path in (bundle.root / "weights").rglob("*") if path.is_file()]
    assert len(files) == 3
    for file in files:
        part = file.parent.name
        source = (root / part / file.name).stat()
        assert (file.stat().st_ino, file.stat().st_nlink) == (source.st_ino, 2)
    want = tiny_tensors(dtype=dtype)
    assert set(bundle.weights()) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(bundle.weights()[name], value)


def test_a_linked_export_writes_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a weight was written")

    monkeypatch.setattr(module, "write_safetensors", refused)
    monkeypatch.setattr(shutil, "copyfile", refused)
    root = write_checkpoint(tmp_path / "c")
    result = export_checkpoint(root, tmp_path / "b", OPTIONS)
    size = (root / "transformer" / FILE).stat().st_size
    assert (result.weights["linked_bytes"], result.weights["cast_bytes"]) == (size, 0)
    assert result.weights["copied_bytes"] == 0
    own = sum(p.stat().st_size for p in (tmp_path / "b").rglob("*") if p.stat().st_nlink == 1)
    assert own < size


def test_links_go_to_what_a_hubs_symlinks_name(tmp_path: Path) -> None:
    root = write_vae(write_checkpoint(tmp_path / "c", shards=2))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate([p for p in root.rglob("*") if p.is_file()]):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    bundle = _export(root)
    for file in (bundle.root / "weights").rglob("*.safetensors"):
        assert not file.is_symlink()
        blob = (root / file.parent.name / file.name).resolve()
        assert blob.parent == blobs
        assert file.stat().st_ino == blob.stat().st_ino
    np.testing.assert_array_equal(bundle.weights()["norm.weight"], tiny_tensors()["norm.weight"])


def test_a_bundle_outlives_its_checkpoint(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    bundle = _export(root)
    for path in (root / "transformer").iterdir():
        path.unlink()
    for name, value in tiny_tensors().items():
        np.testing.assert_array_equal(Bundle.open(bundle.root).weights()[name], value)


def test_copies_are_files_of_their_own(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=2)
    before = tree(root)
    bundle = _export(root, copy_weights=True)
    for file in (bundle.root / "weights").rglob("*.safetensors"):
        assert file.stat().st_nlink == 1
        assert file.read_bytes() == (root / "transformer" / file.name).read_bytes()
    assert tree(root) == before


# --- casts ---


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_round_as_torch_does(tmp_path: Path, dtype: str, precision: Precision) -> None:
    root = write_checkpoint(tmp_path / "c", dtype=dtype)
    before = tree(root)
    bundle = _export(root, precision=precision)
    wide = load_torch(root / "transformer" / FILE)
    target = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    store = bundle.weights()
    assert set(store) == set(wide)
    for name, tensor in wide.items():
        kept = {target[precision.value], torch.float32} & {tensor.dtype}
        is_time = name.startswith(TIME_EMBEDDER)
        want = (
            tensor
            if is_time and kept
            else tensor.to(torch.float32 if is_time else target[precision.value])
        )
        have = store[name]
        assert DType[str(want.dtype).removeprefix("torch.").upper()].numpy == have.dtype
        assert have.tobytes() == want.view(torch.uint8).numpy().tobytes(), name
    assert tree(root) == before


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    dtype=st.sampled_from([DType.FLOAT16, DType.BFLOAT16]),
)
@settings(deadline=None, max_examples=150)
def test_any_value_is_rounded_as_by_torch_or_refused(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], dtype: DType
) -> None:
    value = np.array(values, np.float32)
    name = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}[dtype]
    want = torch.from_numpy(value).to(name)
    largest = torch.finfo(name).max
    folder = tmp_path_factory.mktemp("cast") / "c"
    if np.abs(value).max() > largest:
        with pytest.raises(ExportError, match="x does not fit"):
            _cast(folder, value, dtype)
        return
    have = _cast(folder, value, dtype)["x"]
    assert bool(torch.isfinite(want).all())
    assert have.tobytes() == want.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_a_tensor_of_several_pieces_is_cast_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    from motrt.engines import finite

    monkeypatch.setattr(finite, "_CHUNK", 7)
    value = np.arange(60, dtype=np.float32).reshape(3, 20)
    have = _cast(tmp_path / "c", value, dtype)["x"]
    np.testing.assert_array_equal(have.astype(np.float32), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", Precision)
def test_the_time_embedder_computes_from_float32_or_the_precision(
    tmp_path: Path, dtype: str, precision: Precision
) -> None:
    store = open_checkpoint(write_checkpoint(tmp_path / "c", dtype=dtype)).weights
    plan = plan_transformer(store, precision)
    for name, entry in store.entries.items():
        if not name.startswith(TIME_EMBEDDER):
            assert plan.casts.get(name, entry.dtype) is precision.dtype
        else:
            kept = entry.dtype if entry.dtype in (DType.FLOAT32, precision.dtype) else None
            assert plan.casts.get(name, entry.dtype) is (kept or DType.FLOAT32)


def test_a_file_is_not_carried_for_the_few_tensors_that_could_stay(tmp_path: Path) -> None:
    bundle = _export(write_checkpoint(tmp_path / "c", dtype="float32"), precision=Precision.BF16)
    entries = bundle.manifest.weights["transformer"]
    assert len({entry.file for entry in entries.values()}) == 1
    time = {n: e.dtype for n, e in entries.items() if n.startswith(TIME_EMBEDDER)}
    assert set(time.values()) == {DType.FLOAT32}
    assert len([f for f in bundle.manifest.files if f.endswith(".safetensors")]) == 1


def test_tensors_of_unused_modalities_are_neither_cast_nor_read(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    bad = np.full(64, np.nan, np.float32)
    edit_tensors(
        root / "transformer" / FILE, action_modality_embed=bad, audio_proj_in__bias=bad * 2
    )
    bundle = _export(root, precision=Precision.BF16, modalities=(Modality.VISION,))
    unused = ("action_", "audio_")
    want = {name for name in tiny_tensors() if not name.startswith(unused)}
    assert set(bundle.weights()) == want
    for file in (bundle.root / "weights").rglob("*.safetensors"):
        if file.stat().st_nlink == 1:
            assert not any(name.startswith(unused) for name in load_file(file))


def test_a_shard_of_unused_tensors_is_left_out(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    tensors = load_file(root / "transformer" / FILE)
    sound = {name: tensors.pop(name) for name in list(tensors) if name.startswith("audio_")}
    save_file(tensors, root / "transformer" / FILE)
    save_file(sound, root / "transformer" / f"{STEM}_sound.safetensors")
    bundle = _export(root, modalities=(Modality.VISION, Modality.ACTION))
    assert bundle.weights().files == [f"weights/transformer/{FILE}"]
    assert not (bundle.root / f"weights/transformer/{STEM}_sound.safetensors").exists()


def test_a_mixed_checkpoint_is_linked_and_cast(tmp_path: Path) -> None:
    tensors = tiny_tensors(dtype="bfloat16")
    tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)
    root = write_checkpoint(tmp_path / "c", tensors=tensors)
    bundle = _export(root, precision=Precision.BF16)
    entries = bundle.manifest.weights["transformer"]
    cast = {name for name, entry in entries.items() if not entry.file.endswith(FILE)}
    assert cast == {"norm.weight"}
    np.testing.assert_array_equal(
        bundle.weights()["norm.weight"], tensors["norm.weight"].astype(ml_dtypes.bfloat16)
    )


def test_a_linked_file_may_have_the_casts_name(tmp_path: Path) -> None:
    tensors = tiny_tensors(dtype="float16")
    tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)
    folder = write_checkpoint(tmp_path / "c", tensors=tensors) / "transformer"
    (folder / FILE).rename(folder / "model-fp16.safetensors")
    bundle = _export(folder, precision=Precision.FP16)
    for name, value in tensors.items():
        np.testing.assert_array_equal(bundle.weights()[name], value.astype(np.float16))


# --- values ---


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", Precision)
def test_nan_and_infinity_are_named(
    tmp_path: Path, dtype: str, precision: Precision, value: float
) -> None:
    root = write_checkpoint(tmp_path / "c", dtype=dtype)
    bad = tiny_tensors(dtype=dtype)["layers.1.mlp.down_proj.weight"]
    bad[-1, -1] = value
    edit_tensors(root / "transformer" / FILE, layers__1__mlp__down_proj__weight=bad)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN"):
        _export(root, precision=precision)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_the_vae_is_named(tmp_path: Path, dtype: str) -> None:
    root = write_vae(write_checkpoint(tmp_path / "c"), dtype)
    bad = load_file(root / "vae" / FILE)["decoder.conv_in.bias"]
    bad[0] = np.nan
    edit_tensors(root / "vae" / FILE, decoder__conv_in__bias=bad)
    with pytest.raises(CheckpointError, match=r"decoder\.conv_in\.bias"):
        _export(root)


@pytest.mark.parametrize(
    ("dtype", "precision", "value", "fits"),
    [
        ("float32", Precision.FP16, 65504.0, True),
        ("float32", Precision.FP16, 65505.0, False),
        ("float32", Precision.FP16, -1e30, False),
        ("bfloat16", Precision.FP16, 1e5, False),
        ("float32", Precision.BF16, 3.3895e38, True),
        ("float32", Precision.BF16, 3.4e38, False),
        ("float32", Precision.BF16, -3.4028235e38, False),
        ("float16", Precision.BF16, 65504.0, True),
    ],
)
def test_overflow_is_named(
    tmp_path: Path, dtype: str, precision: Precision, value: float, fits: bool
) -> None:
    root = write_checkpoint(tmp_path / "c", dtype=dtype)
    bad = tiny_tensors(dtype=dtype)["lm_head.weight"]
    bad[3, 5] = value
    edit_tensors(root / "transformer" / FILE, lm_head__weight=bad)
    if fits:
        assert np.isfinite(_export(root, precision=precision).weights()["lm_head.weight"]).all()
        return
    with pytest.raises(ExportError, match=r"lm_head\.weight does not fit") as caught:
        _export(root, precision=precision)
    assert "--precision" in (caught.value.fix or "")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_, np.float64])
@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_weights_of_odd_types_are_refused(tmp_path: Path, dtype: Any, part: str) -> None:
    root = write_vae(write_checkpoint(tmp_path / "c"))
    name = {"transformer": "proj_in.bias", "vae": "decoder.conv_in.bias"}[part]
    value = load_file(root / part / FILE)[name].astype(dtype)
    edit_tensors(root / part / FILE, **{name.replace(".", "__"): value})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        _export(root)


# --- other file systems, full disks ---


def _other_file_system(tmp_path: Path) -> Path:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    return shm


def test_a_refused_link_names_the_way_out_and_its_price(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_other_file_system(tmp_path)) as other:
        root = write_vae(write_checkpoint(Path(other) / "c", shards=2))
        total = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
        with pytest.raises(ExportError) as caught:
            export_checkpoint(root, tmp_path / "b", OPTIONS)
        assert f"--copy-weights to copy {total:,} bytes" in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        options = dataclasses.replace(OPTIONS, copy_weights=True)
        result = export_checkpoint(root, tmp_path / "b", options)
        assert result.weights["copied_bytes"] == total
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize("number", [1, 18, 31, 95])  # EPERM, EXDEV, EMLINK, ENOTSUP
def test_every_refusal_of_a_link_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    root = write_checkpoint(tmp_path / "c")
    with pytest.raises(ExportError, match="--copy-weights") as caught:
        _export(root)
    assert os.strerror(number) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    _export(root, copy_weights=True)


def test_too_little_space_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_checkpoint(tmp_path / "c")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(module, "write_safetensors", lambda *_: pytest.fail("began to write"))
    with pytest.raises(ExportError, match="1,000 bytes free"):
        _export(root, precision=Precision.BF16)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("error", [ExportError, MotrtError])
def test_a_cast_that_fails_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[MotrtError]
) -> None:
    calls: list[Any] = []

    def breaking(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 20:
            raise error("stop")
        return cast_piece(*args)

    monkeypatch.setattr(module, "cast_piece", breaking)
    root = write_checkpoint(tmp_path / "c")
    with pytest.raises(error, match="stop"):
        _export(root, precision=Precision.FP16)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

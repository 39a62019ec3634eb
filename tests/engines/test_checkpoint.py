"""Checkpoints as hubs and people leave them: sound ones open, others are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motrt.engines.checkpoint import Checkpoint, open_checkpoint, open_weights, read_json
from motrt.engines.errors import CheckpointError, ConfigError, MotrtError
from tiny_checkpoints import (
    DTYPES,
    FILE,
    INDEX,
    STEM,
    TINY,
    edit_json,
    tiny_tensors,
    tree,
    write_checkpoint,
)

FIRST = f"{STEM}-00001-of-00003.safetensors"
SECOND = f"{STEM}-00002-of-00003.safetensors"


def _refusal(root: Path, kind: type[MotrtError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(root)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.got
    assert caught.value.expected
    return message


def _same_values(checkpoint: Checkpoint, dtype: str = "float32") -> None:
    want = tiny_tensors(dtype=dtype)
    assert set(checkpoint.weights) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(checkpoint.weights[name], value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_opens(tmp_path: Path, dtype: str, shards: int) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "c", dtype=dtype, shards=shards))
    _same_values(checkpoint, dtype)
    assert checkpoint.components == {}
    assert "vae" in checkpoint.absent
    assert checkpoint.pipeline == {}


def test_a_folder_without_the_pipeline_around_it_opens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c") / "transformer"
    _same_values(open_checkpoint(folder))
    (folder / FILE).rename(folder / "model.safetensors")
    _same_values(open_checkpoint(folder))


def test_symbolic_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path / "real", shards=3)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/0123"
    blobs.mkdir()
    (snapshot / "transformer").mkdir(parents=True)
    for number, path in enumerate((real / "transformer").iterdir()):
        path.rename(blobs / f"{number:064x}")
        (snapshot / "transformer" / path.name).symlink_to(f"../../../blobs/{number:064x}")
    _same_values(open_checkpoint(snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    _same_values(open_checkpoint(tmp_path / "link"))
    for link in [p for p in (snapshot / "transformer").iterdir() if p.name != INDEX]:
        blob = link.resolve()
        blob.rename(blob.with_suffix(".gone"))
        _refusal(snapshot)
        blob.with_suffix(".gone").rename(blob)


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "a/" * 3000, "file", "file/below"])
def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    _refusal(tmp_path / name)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in _refusal(tmp_path)
    root = write_checkpoint(tmp_path / "c")
    (root / "transformer/config.json").unlink()
    assert "transformer/config.json" in _refusal(root)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'\xef\xbb\xbf{"hidden_size": 64}',
        b'{"hidden_act": "\xff"}',
        json.dumps(TINY).encode("utf-16"),
        b'{"a":' * 100_000,
        b'{"rope_theta": NaN}',
        b'{"rope_theta": Infinity}',
        b'{"rope_theta": 1e999}',
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
@pytest.mark.parametrize("file", ["transformer/config.json", "model_index.json"])
def test_a_config_that_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes, file: str
) -> None:
    root = write_checkpoint(tmp_path / "c")
    (root / file).write_bytes(content)
    assert Path(file).name in _refusal(root)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"hiden_size": 64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"weight_layout": "tied"}, "weight_layout"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    root = write_checkpoint(tmp_path / "c")
    edit_json(root / "transformer/config.json", **values)
    assert word in _refusal(root, ConfigError)


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["norm.weight"]
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["surprise"] = tensors["another.weight"] = np.zeros(2, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()[:, :60]
    tensors["proj_in.bias"] = np.zeros((1, 64), np.float32)
    tensors["proj_out.bias"] = np.zeros(16, np.float64)
    tensors["proj_out.weight"] = np.zeros((16, 64), np.int8)
    message = _refusal(write_checkpoint(tmp_path / "c", tensors=tensors))
    for words in (
        "2 missing: layers.1.mlp.up_proj.weight, norm.weight",
        "2 unexpected: another.weight, surprise",
        "2 misshapen: lm_head.weight [64, 60] for [64, 64], proj_in.bias [1, 64] for [64]",
        "proj_out.bias float64, proj_out.weight int8",
    ):
        assert words in message


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 4096},
        {"hidden_size": 128},
        {"hidden_size": 10**12},
        {"attention_bias": True},
        {"hidden_act": "relu2"},
        {"qk_norm_for_text": False},
        {"sound_gen": False},
        {"weight_layout": "shared"},
        {"num_embodiment_domains": 10**15},
        {"head_dim": 10**9},
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    root = write_checkpoint(tmp_path / "c")
    edit_json(root / "transformer/config.json", **values)
    assert "config.json that belongs to these weights" in _refusal(root)


def test_edges_leaked_duplicates_are_dropped(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["layers.layers.0.self_attn.k_norm_und_for_gen.weight"] = np.zeros(16, np.float32)
    _same_values(open_checkpoint(write_checkpoint(tmp_path / "c", tensors=tensors)))


def test_pickles_alone_are_refused_and_never_read(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    for name in ("diffusion_pytorch_model.bin", "model.pt", "x.pth", "y.ckpt"):
        shutil.copy(root / "transformer" / FILE, root / "transformer" / name)
    (root / "transformer" / FILE).unlink()
    message = _refusal(root)
    assert "diffusion_pytorch_model.bin" in message
    assert "never read" in message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    (root / "transformer" / FILE).unlink()
    assert "no weight files" in _refusal(root)
    (root / "transformer" / FILE).mkdir()
    assert FILE in _refusal(root)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 200, -1, -4000])
def test_a_cut_off_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path / "c") / "transformer" / FILE
    path.write_bytes(path.read_bytes()[:keep])
    assert FILE in _refusal(tmp_path / "c")


def test_absent_shards_are_named(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    (root / "transformer" / SECOND).unlink()
    message = _refusal(root)
    assert SECOND in message
    assert "Complete the download" in message
    # Without the index there is no list of shards, but the tensors are missed.
    (root / "transformer" / INDEX).unlink()
    assert "missing" in _refusal(root)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    weight_map = read_json(root / "transformer" / INDEX)["weight_map"]
    name = next(name for name, file in weight_map.items() if file == FIRST)
    edit_json(root / "transformer" / INDEX, weight_map={**weight_map, name: SECOND})
    assert name in _refusal(root)


def test_an_index_that_knows_too_much_or_too_little_is_refused(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    weight_map = read_json(root / "transformer" / INDEX)["weight_map"]
    edit_json(root / "transformer" / INDEX, weight_map={**weight_map, "surprise": FIRST})
    assert "surprise" in _refusal(root)
    fewer = {name: file for name, file in weight_map.items() if file != SECOND}
    edit_json(root / "transformer" / INDEX, weight_map=fewer)
    assert "missing" in _refusal(root)
    edit_json(root / "transformer" / INDEX, weight_map={})
    assert "missing" in _refusal(root)


def test_a_shard_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    wide = write_checkpoint(tmp_path / "wide", {**TINY, "hidden_size": 128}, shards=3)
    shutil.copy(wide / "transformer" / SECOND, root / "transformer" / SECOND)
    assert "misshapen" in _refusal(root)
    two = write_checkpoint(tmp_path / "two", shards=2)
    shutil.copy(
        two / "transformer" / f"{STEM}-00002-of-00002.safetensors", root / "transformer" / SECOND
    )
    assert "where it says" in _refusal(root) or "two files" in _refusal(root)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    name = f"{STEM}.fp16.safetensors"
    save_file({"norm.weight": np.zeros(64, np.float16)}, root / "transformer" / name)
    message = _refusal(root)
    assert "norm.weight" in message
    assert name in message


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/inside.safetensors",
        "..",
        ".",
        "",
        "\x00",
        "\ud800",
        "x" * 300,
        "../transformer/" + FIRST,
    ],
    ids=repr,
)
def test_an_index_cannot_leave_its_folder(tmp_path: Path, file: str) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    folder = root / "transformer"
    (folder / "sub").mkdir()
    shutil.copy(folder / FIRST, folder / "sub/inside.safetensors")
    shutil.copy(folder / FIRST, root / "outside.safetensors")
    weight_map = read_json(folder / INDEX)["weight_map"]
    moved = {name: file if where == FIRST else where for name, where in weight_map.items()}
    edit_json(folder / INDEX, weight_map=moved)
    _refusal(root)


@pytest.mark.parametrize("weight_map", [None, [], "x", {"a": 1}, {"a": None}, {"a": ["x"]}])
def test_an_index_without_a_usable_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    edit_json(root / "transformer" / INDEX, weight_map=weight_map)
    assert "weight_map" in _refusal(root)
    (root / "transformer" / INDEX).write_text("{}")
    assert "weight_map" in _refusal(root)
    (root / "transformer" / INDEX).write_text("[]")
    assert INDEX in _refusal(root)


def test_opening_changes_nothing_and_maps_nothing(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c", shards=3)
    before = tree(root)
    open_checkpoint(root)
    assert tree(root) == before


def test_a_pipe_in_place_of_weights_does_not_hang(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    (root / "transformer" / FILE).unlink()
    os.mkfifo(root / "transformer" / FILE)
    assert FILE in _refusal(root)


def test_a_single_component_opens_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", shards=3) / "transformer"
    store = open_weights(folder)
    files = sorted(folder.glob("*.safetensors"))
    want = {name: value for file in files for name, value in load_file(file).items()}
    assert set(store) == set(want)
    assert store.files == [file.name for file in files]
    assert store.nbytes == sum(value.nbytes for value in want.values())

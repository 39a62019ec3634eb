"""The header reader agrees with the safetensors library and refuses what lies."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save, save_file

from motrt.engines.dtypes import DType
from motrt.engines.errors import CheckpointError
from motrt.engines.safetensors_header import read_header
from motrt.engines.safetensors_writer import write_safetensors
from motrt.engines.tensors import Array
from tiny_checkpoints import raw_safetensors

TYPES = [t for t in DType if not t.name.startswith("FLOAT8")]
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 1000
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.fix
    return message


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, Array]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True))
    tensors = {}
    for name in names:
        dtype = draw(st.sampled_from(TYPES)).numpy
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        tensors[name] = np.zeros(shape, dtype)
    return {name: value for name, value in tensors.items() if name != "__metadata__"}


@given(tensors=_tensors(), metadata=st.dictionaries(st.text("abc"), st.text("xyz é\n")))
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_agrees_with_the_library(
    tmp_path: Path, tensors: dict[str, Array], metadata: dict[str, str]
) -> None:
    path = tmp_path / "m.safetensors"
    for value in tensors.values():
        value.reshape(-1).view(np.uint8)[:] = np.arange(value.nbytes) % 2
    save_file(tensors, path, metadata or None)  # of {} and no tensors the library makes no JSON
    header, content = read_header(path), path.read_bytes()
    assert header.metadata == metadata
    assert header.file_bytes == len(content)
    assert (
        header.sha256
        == hashlib.sha256(content[: 8 + int.from_bytes(content[:8], "little")]).hexdigest()
    )
    assert header.tensors.keys() == tensors.keys()
    for name, value in load_file(path).items():
        entry = header.tensors[name]
        assert entry.dtype.numpy == value.dtype
        assert entry.shape == value.shape
        assert content[entry.offset : entry.offset + entry.nbytes] == value.tobytes()


def test_the_writer_is_read_by_the_library(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    tensors = {
        f"t.{dtype.label}": random.randint(0, 2, (3, 5)).astype(dtype.numpy) for dtype in TYPES
    }
    tensors["empty"], tensors["scalar"] = np.zeros((0, 3), np.float32), np.array(7.0, np.float32)
    kinds = {t.numpy: t for t in DType}
    path = tmp_path / "m.safetensors"
    write_safetensors(
        path,
        {name: (kinds[value.dtype], value.shape) for name, value in tensors.items()},
        lambda name: iter(np.array_split(tensors[name].reshape(-1), 2)),
    )
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
    for entry in read_header(path).tensors.values():
        assert entry.offset % entry.dtype.itemsize == 0
    with pytest.raises(FileExistsError):
        write_safetensors(path, {}, lambda _: iter(()))


def test_float8_is_read_by_its_code(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    entry = {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}
    path.write_bytes(raw_safetensors({"x": entry}, bytes(4)))
    assert read_header(path).tensors["x"].dtype.numpy == ml_dtypes.float8_e4m3fn


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = save({"a": np.arange(6.0), "b": np.zeros((0, 2)), "c": np.ones(3, np.float32)})
    for length in range(len(whole)):
        _refusal(tmp_path / "m.safetensors", whole[:length])
    assert "longer than its header says" in _refusal(tmp_path / "m.safetensors", whole + b"\0")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weights": [1.0] * 100}))
    for content in (
        b"",
        (tmp_path / "x.zip").read_bytes(),
        pickle.dumps({"weights": list(range(1000))}),
        b'{"weights": "text renamed to safetensors"}' * 10,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4\n",
        b"\0" * 64,
    ):
        _refusal(tmp_path / "m.safetensors", content)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"{",
        b"{} x",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        "{}".encode("utf-32-le"),
        b"{" + b'"a":{' * 100_000,
        b"[" * 200_000,
        b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_headers_that_are_no_json_objects_are_refused(tmp_path: Path, header: bytes) -> None:
    _refusal(tmp_path / "m.safetensors", raw_safetensors(header))


@pytest.mark.parametrize("length", [9, 100, 100_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    message = _refusal(tmp_path / "m.safetensors", raw_safetensors({}, b"123", length=length))
    assert str(length) in message


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F4"},
        {"dtype": "float32"},
        {"dtype": None},
        {"dtype": 3},
        {"dtype": ["F32"]},
        {"shape": [-2]},
        {"shape": [-1, -2]},
        {"shape": [True, 2]},
        {"shape": [2.0]},
        {"shape": ["2"]},
        {"shape": "2"},
        {"shape": None},
        {"shape": 2},
        {"shape": [3]},
        {"shape": []},
        {"shape": [1 << 62, 4]},
        {"shape": [1 << 64]},
        {"shape": [1 << 64, 0]},
        {"shape": [2] * 3000},
        {"data_offsets": [0, 4]},
        {"data_offsets": [0, 12]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 8, 16]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": None},
        {"data_offsets": [4, 12]},
        {"data_offsets": [1 << 60, (1 << 60) + 8]},
        {"extra": 1},
    ],
    ids=str,
)
def test_lying_entries_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "m.safetensors"
    content = raw_safetensors({"x": {**ENTRY, **change}}, bytes(8))
    _refusal(path, content)
    if change != {"extra": 1}:
        with pytest.raises((SafetensorError, OverflowError)):
            safe_open(path, "numpy")


@pytest.mark.parametrize("entry", [None, [], "x", 3, {}, {"dtype": "F32"}])
def test_entries_of_another_form_are_refused(tmp_path: Path, entry: object) -> None:
    _refusal(tmp_path / "m.safetensors", raw_safetensors({"x": entry}, bytes(8)))


@pytest.mark.parametrize(
    "offsets", [([0, 8], [4, 12]), ([0, 8], [0, 8]), ([0, 8], [12, 20]), ([8, 16], [16, 24])]
)
def test_overlaps_and_gaps_are_refused(
    tmp_path: Path, offsets: tuple[list[int], list[int]]
) -> None:
    header = {
        name: {**ENTRY, "data_offsets": where} for name, where in zip("ab", offsets, strict=True)
    }
    size = max(end for _, end in offsets)
    assert "no gap, no overlap" in _refusal(
        tmp_path / "m.safetensors", raw_safetensors(header, bytes(size))
    )


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    text = b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2)
    assert "twice" in _refusal(tmp_path / "m.safetensors", raw_safetensors(text, bytes(8)))


@pytest.mark.parametrize("metadata", [None, [], "x", {"a": 1}, {"a": {}}])
def test_metadata_that_is_not_text_is_refused(tmp_path: Path, metadata: object) -> None:
    _refusal(
        tmp_path / "m.safetensors",
        raw_safetensors({"__metadata__": metadata, "x": ENTRY}, bytes(8)),
    )


def test_a_shape_of_millions_of_numbers_does_not_hang(tmp_path: Path) -> None:
    text = b'{"x": {"dtype": "F32", "data_offsets": [0, 8], "shape": [%s]}}'
    started = time.perf_counter()
    for number in (b"2", b"9223372036854775807", b"9" * 4000):
        shape = b",".join([number] * (4_000_000 // len(number)))
        _refusal(tmp_path / "m.safetensors", raw_safetensors(text % shape, bytes(8)))
    assert time.perf_counter() - started < 20


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for path in tmp_path.iterdir():
        with pytest.raises(CheckpointError, match=path.name):
            read_header(path)


def test_terminal_escapes_and_long_names_are_not_repeated_raw(tmp_path: Path) -> None:
    header = {"\x1b[2J" + "n" * 5000: {**ENTRY, "dtype": "F4"}}
    message = _refusal(tmp_path / "m.safetensors", raw_safetensors(header, bytes(8)))
    assert "\x1b" not in message

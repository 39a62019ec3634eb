"""A store's views are the file's bytes, and nobody can write through them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from motrt.engines.checkpoint import open_weights
from motrt.engines.dtypes import DType
from motrt.engines.errors import CheckpointError
from motrt.engines.safetensors_writer import write_safetensors
from motrt.engines.store import WeightEntry, WeightStore
from tiny_checkpoints import DTYPES, FILE, raw_safetensors, write_checkpoint


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_equal_what_the_library_reads(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "c", dtype=dtype) / "transformer"
    store, want = open_weights(folder), load_file(folder / FILE)
    assert set(store) == set(want)
    assert len(store) == len(want)
    for name, value in want.items():
        assert name in store
        assert store[name].dtype == value.dtype
        assert store[name].shape == value.shape
        np.testing.assert_array_equal(store[name], value)


def test_views_are_read_only_and_no_copies(tmp_path: Path) -> None:
    store = open_weights(write_checkpoint(tmp_path / "c") / "transformer")
    view = store["lm_head.weight"]
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert np.shares_memory(view, store["lm_head.weight"])
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        view.flags.writeable = True


def test_odd_offsets_and_shapes_are_viewed(tmp_path: Path) -> None:
    # The header's length is odd, so nothing is aligned; the last two have no elements and no axes.
    header = {
        "b": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F64", "shape": [2, 1], "data_offsets": [1, 17]},
        "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [17, 17]},
        "one": {"dtype": "I16", "shape": [], "data_offsets": [17, 19]},
    }
    data = b"\1" + np.array([1.5, -2.5]).tobytes() + np.int16(-3).tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, data))
    store = open_weights(tmp_path)
    np.testing.assert_array_equal(store["x"], [[1.5], [-2.5]])
    assert store["b"].tolist() == [True]
    assert store["none"].shape == (0, 5)
    assert store["one"].shape == ()
    assert store["one"] == -3
    for name in store:
        assert not store[name].flags.writeable


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    store = open_weights(write_checkpoint(tmp_path / "c") / "transformer")
    with pytest.raises(CheckpointError, match=r"nothing\.weight"):
        store["nothing.weight"]


def test_a_subset_shares_files_and_knows_its_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", shards=3) / "transformer"
    store = open_weights(folder)
    part = store.subset({"norm.weight", "lm_head.weight", "not there"})
    assert set(part) == {"norm.weight", "lm_head.weight"}
    assert part.nbytes == 4 * (64 + 64 * 64)
    assert set(part.files) == {store.entries[name].file for name in part}
    np.testing.assert_array_equal(part["norm.weight"], store["norm.weight"])


def test_bytes_beyond_32_bits_are_counted(tmp_path: Path) -> None:
    entry = WeightEntry("f", 0, DType.FLOAT32, (1 << 20, 1 << 20))
    assert entry.nbytes == 1 << 42
    assert WeightEntry("f", 0, DType.FLOAT32, (0, 1 << 40)).nbytes == 0


def test_a_store_over_a_hole_reads_zeros_without_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {}, lambda _: iter(()))
    size = 1 << 40
    header = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path.write_bytes(raw_safetensors(header))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    view = WeightStore.from_files(tmp_path, [path.name])["x"]
    assert view.nbytes == size
    assert view[size - 1] == 0

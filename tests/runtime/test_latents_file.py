"""Latents come back as they were saved; what is no file of latents is refused by name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError, ExportError
from motrt.runtime.latents_file import Latents, load_latents, save_latents


def _normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _all() -> Latents:
    return Latents(
        latents=_normal(1, 4, 3, 5, 6), sound_latents=_normal(8, 7), action_latents=_normal(16, 9)
    )


def test_round_trip(tmp_path: Path) -> None:
    for latents in (_all(), Latents(latents=_normal(1, 48, 1, 2, 2))):
        save_latents(tmp_path / "latents.npz", latents)
        loaded = load_latents(str(tmp_path / "latents.npz"))
        assert loaded.arrays().keys() == latents.arrays().keys()
        for name, array in latents.arrays().items():
            assert np.array_equal(loaded.arrays()[name], array)
    assert [path.name for path in tmp_path.iterdir()] == ["latents.npz"]


def test_numpy_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    latents = _all()
    save_latents(tmp_path / "ours.npz", latents)
    with np.load(tmp_path / "ours.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {"latents", "sound_latents", "action_latents"}
        assert np.array_equal(archive["sound_latents"], latents.arrays()["sound_latents"])
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "theirs.npz", **latents.arrays())  # type: ignore[arg-type]
        assert np.array_equal(load_latents(tmp_path / "theirs.npz").latents, latents.latents)
    turned = np.asfortranarray(latents.latents)
    np.savez(tmp_path / "turned.npz", latents=turned)
    assert np.array_equal(load_latents(tmp_path / "turned.npz").latents, latents.latents)


def test_equal_latents_make_equal_files(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        save_latents(tmp_path / name, _all())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


GOOD = _normal(1, 4, 3, 5, 6)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"latents": GOOD.astype(np.float64)}, r"got float64 \[1, 4, 3, 5, 6\]; expected float32"),
        ({"latents": GOOD.astype(">f4")}, "got >f4"),
        ({"latents": GOOD[0]}, r"got float32 \[4, 3, 5, 6\]; expected float32 \[1, C, T, h, w\]"),
        ({"latents": np.repeat(GOOD, 2, axis=0)}, r"got float32 \[2, "),
        ({"latents": GOOD[:, :, :0]}, r"\[1, 4, 0, 5, 6\]"),
        ({"latents": np.float32(1)}, r"got float32 \[\]"),
        (
            {"latents": GOOD * np.float32(np.nan)},
            "latents hold NaN or infinity; got 360 such values",
        ),
        ({"latents": GOOD, "sound_latents": GOOD}, r"sound_latents .* expected float32 \[C, T\]"),
        ({"latents": GOOD, "action_latents": GOOD[0, 0]}, r"action_latents .* \[T, A\]"),
        ({"latents": GOOD, "noise": GOOD}, "unknown array; got noise; expected among latents, "),
        ({"sound_latents": GOOD[0, 0, 0]}, "lacks an array; got only sound_latents"),
        ({}, "lacks an array; got only nothing"),
        ({"latents": np.array([{"a": 1}])}, "pickled objects"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: Any, message: str) -> None:
    path = tmp_path / "latents.npz"
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=message) as caught:
        load_latents(path)
    assert str(path) in str(caught.value)


def _damaged() -> dict[str, bytes]:
    whole = io.BytesIO()
    np.savez(whole, latents=GOOD)
    data = whole.getvalue()
    bare = io.BytesIO()
    np.save(bare, GOOD)
    flipped = bytearray(data)
    flipped[600] ^= 1
    lying = io.BytesIO()  # a header that promises 4 TB
    with zipfile.ZipFile(lying, "w") as archive, archive.open("latents.npy", "w") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1, 1 << 40, 1, 1, 1)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(16))
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("latents.npy", "no array")
    return {
        "half": data[: len(data) // 2],
        "flipped": bytes(flipped),
        "bare array": bare.getvalue(),
        "text": b"latents",
        "empty": b"",
        "lying": lying.getvalue(),
        "no array": text.getvalue(),
    }


@pytest.mark.parametrize("kind", list(_damaged()))
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "latents.npz").write_bytes(_damaged()[kind])
    with pytest.raises(ConfigError, match=r"cannot read .*latents\.npz"):
        load_latents(tmp_path / "latents.npz")


def test_an_array_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latents.npz"
    member = io.BytesIO()
    np.save(member, GOOD)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("latents.npy", member.getvalue())
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("latents.npy", member.getvalue())
    with pytest.raises(ConfigError, match="twice"):
        load_latents(path)


def test_absent_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.npz", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_latents(path)
    with pytest.raises(ExportError, match="cannot write"):
        save_latents(tmp_path / "absent" / "latents.npz", _all())


def test_a_failing_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latents.npz"
    save_latents(path, _all())
    old = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("motrt.runtime.latents_file.write_member", fail)
    with pytest.raises(KeyboardInterrupt):
        save_latents(path, Latents(latents=GOOD))
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["latents.npz"]

"""A bundle opens if it is whole, and is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.atomic import write_atomic
from motrt.engines.bundle import MANIFEST, Bundle, record_small
from motrt.engines.bundle_writer import new_bundle
from motrt.engines.errors import BundleError, ExportError
from tiny_checkpoints import edit_json, tiny_tensors, tree, write_bundle

WEIGHTS = "weights/transformer/model.safetensors"
SMALL = (
    "reasoner.onnx",
    "generator.onnx",
    "vae_decoder_first.onnx",
    "vae_decoder_next.onnx",
    "tokenizer/tokenizer.json",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "b")


def _refusal(root: Path) -> str:
    before = tree(root)
    with pytest.raises(BundleError) as caught:
        Bundle.open(root)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.got
    assert caught.value.fix
    assert tree(root) == before
    return message


def _edit(root: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((root / MANIFEST).read_text())
    edit(data)
    (root / MANIFEST).write_text(json.dumps(data))


def test_a_whole_bundle_opens(root: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(root)
    want = tiny_tensors()
    assert set(bundle.weights()) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(bundle.weights()[name], value)
    assert bundle.graphs == SMALL[:4]
    with pytest.raises(BundleError, match="no vae"):
        bundle.weights("vae")
    (tmp_path / "link").symlink_to(root)
    assert Bundle.open(tmp_path / "link").manifest == bundle.manifest


def test_a_moved_bundle_opens(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    assert Bundle.open(tmp_path / "copy").weights()["norm.weight"].shape == (64,)


@pytest.mark.parametrize(
    "name", ["nothing", "x" * 300, "a/" * 3000, "file", "file/below", "empty"]
)
def test_a_place_without_a_bundle_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="there is no bundle"):
        Bundle.open(tmp_path / name)


@pytest.mark.parametrize("file", SMALL)
def test_every_small_file_is_guarded(root: Path, file: str) -> None:
    path = root / file
    content = path.read_bytes()
    for other in (
        content[:-1] + bytes([content[-1] ^ 1]),
        bytes([content[0] ^ 0x80]) + content[1:],
        content[:-1],
        content + b"\n",
        b"",
    ):
        path.write_bytes(other)
        assert file in _refusal(root)
    path.unlink()
    assert file in _refusal(root)
    path.mkdir()
    assert file in _refusal(root)
    path.rmdir()
    os.mkfifo(path)
    assert file in _refusal(root)
    path.unlink()
    path.symlink_to(path.name)
    _refusal(root)
    path.unlink()
    path.write_bytes(content)
    Bundle.open(root)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{}", b"\0" * 100, b"[" * 200_000])
def test_a_damaged_manifest_is_refused(root: Path, content: bytes) -> None:
    (root / MANIFEST).write_bytes(content)
    assert MANIFEST in _refusal(root)
    (root / MANIFEST).unlink()
    _refusal(root)


def test_every_cut_of_the_manifest_is_refused(root: Path) -> None:
    text = (root / MANIFEST).read_bytes()
    for length in range(0, len(text) - 2, 997):
        (root / MANIFEST).write_bytes(text[:length])
        _refusal(root)


def test_a_weight_file_of_another_size_or_header_is_refused(root: Path) -> None:
    path = root / WEIGHTS
    content = path.read_bytes()
    for other in (content[:-1], content + b"\0", content[: len(content) // 2], b""):
        path.write_bytes(other)
        assert WEIGHTS in _refusal(root)
    # Of the same size: two tensors of one shape trade places.
    first, second = b"layers.0.mlp.up_proj.weight", b"layers.1.mlp.up_proj.weight"
    aside = b"?" * len(first)
    swapped = content.replace(first, aside).replace(second, first).replace(aside, second)
    assert len(swapped) == len(content)
    path.write_bytes(swapped)
    assert "header sha256" in _refusal(root)
    path.unlink()
    assert WEIGHTS in _refusal(root)


def test_an_entry_that_the_header_contradicts_is_refused(root: Path) -> None:
    def with_entry(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda data: data["weights"]["transformer"]["norm.weight"].update(values)

    text = (root / MANIFEST).read_text()
    entry = json.loads(text)["weights"]["transformer"]["norm.weight"]
    for values in (
        {"offset": entry["offset"] + 4},
        {"offset": 10**30},
        {"shape": [32]},
        {"shape": [64, 1]},
        {"shape": [1 << 40, 1 << 40]},
        {"dtype": "int32"},
        {"file": "reasoner.onnx"},
        {"file": "nowhere"},
        {"file": "weights/transformer/../transformer/model.safetensors"},
        {"file": "./" + WEIGHTS},
    ):
        _edit(root, with_entry(**values))
        assert "norm.weight" in _refusal(root)
        (root / MANIFEST).write_text(text)

    def rename(data: dict[str, Any]) -> None:
        entries = data["weights"]["transformer"]
        entries["surprise"] = entries.pop("norm.weight")

    _edit(root, rename)
    assert "surprise" in _refusal(root)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "../outside",
        "tokenizer/../../outside",
        "tokenizer/../reasoner.onnx",
        "..",
        "..\\outside",
        "tokenizer\\x",
        "C:\\x",
        "link",
        "folder-link/outside",
        "loop",
        "\x00",
        "\ud800",
        "x" * 300,
        "",
        ".",
        "tokenizer",
    ],
    ids=repr,
)
def test_no_path_leaves_the_bundle(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("secret")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "folder-link").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    hashed = {"bytes": 6, "sha256": record_small(tmp_path / "outside").sha256}
    for record in (hashed, {"bytes": os.stat(root).st_size, "sha256": "0"}):
        data = json.loads((root / MANIFEST).read_text())
        edit_json(root / MANIFEST, files={**data["files"], name: record})
        _refusal(root)


def test_a_link_that_stays_inside_is_followed(root: Path) -> None:
    (root / "tokenizer/tokenizer.json").rename(root / "real.json")
    (root / "tokenizer/tokenizer.json").symlink_to("../real.json")
    Bundle.open(root)


@pytest.mark.parametrize("graph", SMALL[:4])
def test_a_graph_without_a_record_is_refused(root: Path, graph: str) -> None:
    _edit(root, lambda data: data["files"].pop(graph))
    assert graph in _refusal(root)


def test_the_manifest_is_replaced_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(root)
    changed = dataclasses.replace(bundle.manifest, parity={"ok": True})
    before = tree(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full_disk)
        with pytest.raises(BundleError, match="unchanged"):
            bundle.commit(changed)
    assert tree(root) == before
    bundle.commit(changed)
    assert Bundle.open(root).manifest.parity == {"ok": True}
    assert tree(root).keys() == before.keys()
    assert (root / MANIFEST).stat().st_mode & 0o777 == 0o644


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


# --- new_bundle ---


def _beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_bundle_appears_when_it_is_done(tmp_path: Path) -> None:
    target = tmp_path / "deep/er/b"
    with new_bundle(target) as folder:
        (folder / "x").write_text("x")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "x").read_text() == "x"
    assert target.stat().st_mode & 0o777 == 0o755
    assert _beside(target.parent) == ["b"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("name", ["b", "deep/er/b"])
def test_whatever_stops_it_leaves_nothing(
    tmp_path: Path, error: type[BaseException], name: str
) -> None:
    with pytest.raises(error), new_bundle(tmp_path / name) as folder:  # noqa: PT012
        (folder / "sub").mkdir()
        (folder / "sub/x").write_text("x")
        raise error
    assert _beside(tmp_path) == []


def test_the_disks_refusal_is_an_export_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="No space left"), new_bundle(tmp_path / "b"):
        _full_disk()
    assert _beside(tmp_path) == []


@pytest.mark.parametrize("name", ["file/b", "file/deep/b", "x" * 300, "x" * 255, "x" * 300 + "/b"])
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(ExportError) as caught, new_bundle(tmp_path / name):
        pass
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.fix
    assert _beside(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "content"


def test_what_exists_is_replaced_only_on_demand(root: Path) -> None:
    before = tree(root.parent)
    with pytest.raises(ExportError, match="--overwrite"), new_bundle(root):
        pass
    assert tree(root.parent) == before
    with new_bundle(root, overwrite=True) as folder:
        (folder / "x").write_text("x")
        assert tree(root) == {name[2:]: v for name, v in before.items() if name.startswith("b/")}
    assert _beside(root.parent) == ["b"]
    assert _beside(root) == ["x"]


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b'{"name": "a web app"}', b"[", b"\xff", b"[" * 200_000]
)
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, content: bytes | None) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    if content is not None:
        (target / MANIFEST).write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(ExportError, match="not a bundle"), new_bundle(target, overwrite=True):
        pass
    assert tree(tmp_path) == before


def test_files_and_dangling_links_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link", "loop", "pipe"):
        for overwrite in (False, True):
            with pytest.raises(ExportError), new_bundle(tmp_path / name, overwrite=overwrite):
                pass
    assert _beside(tmp_path) == ["file", "link", "loop", "pipe"]


def test_a_link_to_a_bundle_is_replaced_and_the_bundle_kept(root: Path, tmp_path: Path) -> None:
    before = tree(root)
    (tmp_path / "link").symlink_to("b")
    with new_bundle(tmp_path / "link", overwrite=True) as folder:
        (folder / "x").write_text("x")
    assert tree(root) == before
    assert not (tmp_path / "link").is_symlink()


def test_the_working_folder_can_be_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with new_bundle(Path("."), overwrite=True) as folder:
        (folder / "x").write_text("x")
    assert _beside(root.parent) == ["b"]
    assert _beside(root) == ["x"]


def test_an_empty_folder_may_become_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with new_bundle(tmp_path / "b") as folder:
        (folder / "x").write_text("x")
    assert _beside(tmp_path) == ["b"]
    assert _beside(tmp_path / "b") == ["x"]


def test_a_folder_that_cannot_be_listed_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError

    (tmp_path / "b").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ExportError, match="exists already"), new_bundle(tmp_path / "b"):
        pass


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="somebody else"), new_bundle(tmp_path / "b"):
        write_bundle(tmp_path / "b")
    Bundle.open(tmp_path / "b")
    assert _beside(tmp_path) == ["b"]


def test_an_overwrite_that_fails_keeps_the_old_bundle(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(root.parent)
    with pytest.raises(ZeroDivisionError), new_bundle(root, overwrite=True) as folder:
        (folder / "x").write_text(str(1 // 0))
    assert tree(root.parent) == before
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".b.") and target == root:
            _full_disk()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(ExportError, match="No space left"), new_bundle(root, overwrite=True):
        pass
    assert tree(root.parent) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["mkdtemp", "rename", "rmtree"])
def test_a_signal_at_a_delicate_point_is_put_off(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    before = tree(root)
    owner: Any = {"mkdtemp": "tempfile", "rename": Path, "rmtree": shutil}[where]
    if owner == "tempfile":
        import tempfile as owner
    original, calls = getattr(owner, where), []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        signal.raise_signal(number)
        result = original(*args, **options)
        signal.raise_signal(number)
        return result

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, where, interrupted)
    previous = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), new_bundle(root, overwrite=True) as folder:
            (folder / "x").write_text("new")
    finally:
        assert signal.signal(number, previous) is interrupt
    monkeypatch.undo()
    assert calls
    assert _beside(root.parent) == ["b"]
    assert tree(root) in (before, {"x": b"new"})


def test_bundles_are_written_outside_the_main_thread_too(tmp_path: Path) -> None:
    def write() -> None:
        with new_bundle(tmp_path / "b") as folder:
            (folder / "x").write_text("x")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert _beside(tmp_path) == ["b"]


def test_atomic_writes_leave_the_old_file_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full_disk)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert _beside(tmp_path) == ["f"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_manifest_with_other_values_still_opens(root: Path) -> None:
    edit_json(root / MANIFEST, provenance={"by": "another exporter"}, extra="ignored")
    assert Bundle.open(root).manifest.provenance == {"by": "another exporter"}

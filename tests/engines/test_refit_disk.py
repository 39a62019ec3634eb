"""A bundle on disk takes other weights: both engines or neither, always from the base."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motrt.engines.bundle import MANIFEST, REVISIONS, Bundle
from motrt.engines.dtypes import Precision
from motrt.engines.errors import BundleError, ConfigError, RefitError
from motrt.engines.refit import revision
from motrt.engines.refit.disk import refit_bundle
from motrt.engines.refit.probe import by_file
from motrt.engines.refit.recipe import Recipe
from motrt.engines.verification import verify_bundle
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from refit_cases import KINDS, edit_checkpoint, same, tensors_of, weight_file
from tiny_checkpoints import tree

Checkpoint = Callable[..., Path]
TENSOR = "layers.0.mlp.up_proj.weight"


def _export(source: Path, target: Path, precision: str = "fp32", lowering: str = "native") -> Path:
    options = ExportOptions(precision=Precision(precision), lowering=lowering, probe="never")
    return export_checkpoint(source, target, options).bundle


@pytest.fixture
def root(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return _export(checkpoint("edge-like"), tmp_path / "bundle")


@pytest.fixture
def other(checkpoint: Checkpoint) -> Path:
    return checkpoint("edge-like", seed=1)


CASES = [
    (kind, precision, dtype)
    for kind in KINDS
    for precision in ("fp32", "fp16", "bf16")
    for dtype in ("float32", "bfloat16")
]
QUICK = {
    ("nano-like", "fp32", "float32"),
    ("edge-like", "fp16", "float32"),
    ("super-like", "bf16", "bfloat16"),
    ("shared", "fp32", "bfloat16"),
}


@pytest.mark.parametrize(
    ("kind", "precision", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full, id="-".join(case))
        for case in CASES
    ],
)
def test_a_refit_equals_an_export_of_the_new_weights(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, precision: str, dtype: str
) -> None:
    old, new = (checkpoint(kind, seed=seed, dtype=dtype) for seed in (0, 1))
    bundle = _export(old, tmp_path / "bundle", precision)
    before = tree(bundle)
    tensors = tensors_of(bundle)
    result = refit_bundle(bundle, new)
    assert result.changed
    assert result.tensors["touched"] == result.tensors["moved"] == len(tensors)
    assert result.probe["status"] == ("skipped" if precision == "bf16" else "passed")
    assert same(tensors_of(bundle), tensors_of(_export(new, tmp_path / "fresh", precision)))
    verify_bundle(Bundle.open(bundle))
    back = refit_bundle(bundle, restore=True)
    assert back.changed
    assert same(tensors_of(bundle), tensors)
    assert tree(bundle).keys() == before.keys()
    after, first = (json.loads(t) for t in (tree(bundle).pop(MANIFEST), before.pop(MANIFEST)))
    assert after == first


def test_the_same_weights_change_nothing(root: Path, other: Path, checkpoint: Checkpoint) -> None:
    before = tree(root)
    assert not refit_bundle(root, checkpoint("edge-like")).changed
    assert tree(root) == before
    assert not refit_bundle(root, restore=True).changed
    assert tree(root) == before
    assert refit_bundle(root, other).changed
    before = tree(root)
    again = refit_bundle(root, other)
    assert not again.changed
    assert again.revision == Bundle.open(root).manifest.revision.id  # type: ignore[union-attr]
    assert tree(root) == before


def test_one_tensor_moves_one_tensor(root: Path, tmp_path: Path, checkpoint: Checkpoint) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[TENSOR] = tensors[TENSOR] + np.float32(1e-3)

    new = edit_checkpoint(checkpoint("edge-like"), tmp_path / "new", edit)
    result = refit_bundle(root, new)
    assert result.tensors["moved"] == 1
    assert result.moved == {"reasoner": 1}
    record = Bundle.open(root).manifest.revision
    assert record is not None
    assert record.record["tensors"] == [TENSOR]
    assert result.probe["reasoner"]["before"] != result.probe["reasoner"]["after"]
    assert result.probe["generator"]["before"] == result.probe["generator"]["after"]


def test_there_and_back_is_exact_from_any_revision(
    root: Path, other: Path, checkpoint: Checkpoint
) -> None:
    first = tensors_of(root)
    refit_bundle(root, other)
    second = tensors_of(root)
    refit_bundle(root, checkpoint("edge-like", seed=2))
    refit_bundle(root, other)
    assert same(tensors_of(root), second)
    result = refit_bundle(root, checkpoint("edge-like"))
    assert result.changed
    assert result.revision is None  # equal to the base: so it is the base
    assert same(tensors_of(root), first)
    assert not (root / REVISIONS).exists()


def test_a_file_of_the_same_layout_is_linked_and_a_cast_is_written(
    root: Path, other: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    result = refit_bundle(root, other)
    assert result.written_bytes == 0
    name = weight_file(other).name
    mine = Bundle.open(root).path(f"weights/transformer/{name}")
    assert mine.stat().st_ino == weight_file(other).stat().st_ino
    cast = refit_bundle(root, checkpoint("edge-like", seed=1, dtype="bfloat16"))
    assert cast.linked_bytes == 0
    assert cast.written_bytes == weight_file(other).stat().st_size
    assert refit_bundle(root, restore=True).changed


def test_files_without_a_touched_tensor_stay_linked(tmp_path: Path) -> None:
    from omni_fixtures.checkpoints import build_shared

    old = build_shared(tmp_path / "old", max_shard_size="100KB")
    bundle = _export(old, tmp_path / "bundle")
    name = "layers.1.mlp.up_proj.weight"
    new = tmp_path / "new"
    shutil.copytree(old, new)
    index = json.loads((new / "model.safetensors.index.json").read_text())
    shard = new / index["weight_map"][name]
    tensors = load_file(shard)
    tensors[name] = -tensors[name]
    save_file(tensors, shard, metadata={"format": "other"})  # so that its header is another one
    result = refit_bundle(bundle, new)
    assert result.moved == {"both": 1}
    opened = Bundle.open(bundle)
    inodes = {p.name: p.stat().st_ino for p in old.glob("*.safetensors")}
    links = {
        path.name: path.stat().st_ino == inodes[path.name]
        for path in (opened.content / "weights/transformer").iterdir()
    }
    assert [name for name, linked in links.items() if not linked] == [shard.name]
    assert result.written_bytes == (old / shard.name).stat().st_size
    assert len(links) > 2


# --- what is refused, with the bundle as it was ---


def _refused(root: Path, match: str, *arguments: Any, **options: Any) -> RefitError:
    before = tree(root)
    with pytest.raises(RefitError, match=match) as caught:
        refit_bundle(root, *arguments, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.got
    assert tree(root) == before
    return caught.value


def _edited(source: Path, target: Path, **values: Any) -> Path:
    def edit(tensors: dict[str, Any]) -> None:
        for name, value in values.items():
            key = name.replace("__", ".")
            tensors[key] = value(tensors[key]) if callable(value) else value
            if tensors[key] is None:
                del tensors[key]

    return edit_checkpoint(source, target, edit)


def _poison(value: float) -> Callable[[Any], Any]:
    def edit(tensor: Any) -> Any:
        tensor = tensor.copy()
        tensor[-1, -1] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("match", "edit"),
    [
        ("1 missing", {"layers__0__mlp__up_proj__weight": lambda _: None}),
        ("1 unexpected: a stranger", {"a stranger": np.zeros(3, np.float32)}),
        ("1 misshapen", {"layers__0__mlp__up_proj__weight": lambda t: t.T.copy()}),
        ("float64", {"layers__0__mlp__up_proj__weight": lambda t: t.astype(np.float64)}),
        ("int8", {"layers__0__mlp__up_proj__weight": lambda t: t.astype(np.int8)}),
        ("NaN or infinity", {"layers__0__mlp__up_proj__weight": _poison(np.nan)}),
        ("NaN or infinity", {"layers__1__mlp_moe_gen__up_proj__weight": _poison(-np.inf)}),
    ],
)
def test_wrong_tensors_are_refused(
    root: Path, other: Path, tmp_path: Path, match: str, edit: dict[str, Any]
) -> None:
    _refused(root, match, _edited(other, tmp_path / "new", **edit))


def test_a_value_beyond_float16_is_refused(
    checkpoint: Checkpoint, other: Path, tmp_path: Path
) -> None:
    bundle = _export(checkpoint("edge-like"), tmp_path / "bundle", "fp16")
    new = _edited(other, tmp_path / "new", layers__0__mlp__up_proj__weight=_poison(1e5))
    _refused(bundle, "does not fit float16", new)


def test_another_models_weights_are_refused(root: Path, checkpoint: Checkpoint) -> None:
    _refused(root, "another model's", checkpoint("nano-like"))
    _refused(root, "cannot be used", root / "nothing")


def test_a_model_of_the_same_shapes_is_another_model(
    root: Path, other: Path, tmp_path: Path
) -> None:
    new = _edited(other, tmp_path / "new")
    config = new / "transformer/config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "rope_theta": 1234.0}))
    assert "rope_theta" in str(_refused(root, "another model's", new))


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_short_file_is_refused(root: Path, other: Path, tmp_path: Path, cut: int) -> None:
    new = _edited(other, tmp_path / "new")
    file = weight_file(new)
    file.write_bytes(file.read_bytes()[:-cut])
    _refused(root, "truncated", new)


@pytest.mark.parametrize("options", [{}, {"restore": True, "weights": "x"}])
def test_a_request_for_nothing_or_two_things_is_refused(
    root: Path, options: dict[str, Any]
) -> None:
    before = tree(root)
    with pytest.raises(ConfigError, match="a refit takes"):
        refit_bundle(root, **options)
    with pytest.raises(ConfigError, match="unknown probe"):
        refit_bundle(root, "x", probe="maybe")  # type: ignore[arg-type]
    assert tree(root) == before


# --- faults ---


def test_a_full_disk_leaves_the_old_state(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    fsync = os.fsync

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    _refused(root, "No space left", checkpoint("edge-like", seed=1, dtype="bfloat16"))
    assert calls


def test_too_little_space_is_seen_before_the_work(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(revision, "_write", lambda *_: pytest.fail("began to write"))
    _refused(root, "1,000 bytes free", checkpoint("edge-like", seed=1, dtype="bfloat16"))


def test_a_manifest_that_cannot_be_written_leaves_the_old_state(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("motrt.engines.bundle.write_atomic", full)
    before = tree(root)
    with pytest.raises(BundleError, match="No space left"):
        refit_bundle(root, other)
    assert tree(root) == before


def _writes(monkeypatch: pytest.MonkeyPatch, damage: Callable[[str, str], str]) -> None:
    """Let the writer take tensors under other names than it should."""
    pieces = Recipe.pieces
    write = revision._write

    def wrong(self: Recipe, name: str) -> Any:
        return pieces(self, damage(name, "pieces"))

    def breaking(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recipe, "pieces", wrong)
            write(*arguments)

    monkeypatch.setattr(revision, "_write", breaking)


def test_swapped_tensors_of_equal_shape_are_seen(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = {TENSOR: "layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight": TENSOR}
    _writes(monkeypatch, lambda name, _: swap.get(name, name))
    new = checkpoint("edge-like", seed=1, dtype="bfloat16")
    _refused(root, "2 wrong tensors", new)


def test_a_stale_tensor_is_seen(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = revision._write

    def stale(base: Path, target: Path, recipe: Recipe, names: Any, advance: Any) -> None:
        write(base, target, recipe, names - {TENSOR}, advance)  # so the base's is copied

    monkeypatch.setattr(revision, "_write", stale)
    new = checkpoint("edge-like", seed=1, dtype="bfloat16")
    _refused(root, f"1 wrong tensors: {TENSOR}", new)


def test_equal_valued_tensors_are_each_their_own(
    root: Path, other: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, second = TENSOR, "layers.1.mlp.up_proj.weight"

    def equal(tensors: dict[str, Any]) -> None:
        tensors[second] = tensors[first].copy()

    new = edit_checkpoint(other, tmp_path / "new", equal)
    refit_bundle(root, new)
    have = tensors_of(root)
    assert have[first].tobytes() == have[second].tobytes()

    def apart(tensors: dict[str, Any]) -> None:
        equal(tensors)
        tensors[second] = tensors[second] * np.float32(2)

    result = refit_bundle(root, edit_checkpoint(other, tmp_path / "apart", apart))
    assert result.tensors["moved"] == 1
    have = tensors_of(root)
    np.testing.assert_array_equal(have[second], have[first] * np.float32(2))


def test_a_stop_after_the_first_engine_leaves_both_old(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(bundle: Bundle, engine: str) -> Any:
        if bundle.manifest.revision is not None and engine == "generator":
            raise RefitError("stop", got="after the first engine")
        return by_file(bundle, engine)

    monkeypatch.setattr("motrt.engines.refit.disk.by_file", stop)
    _refused(root, "stop", other)


def test_an_edit_of_the_base_is_seen_at_the_way_back(
    checkpoint: Checkpoint, tmp_path: Path, other: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("edge-like"), source)
    bundle = _export(source, tmp_path / "bundle")
    refit_bundle(bundle, other)
    entry = Bundle.open(bundle).manifest.weights["transformer"][TENSOR]
    with weight_file(source).open("r+b") as file:  # in place: the bundle's file is a link to it
        file.seek(entry.offset)
        file.write(np.full(64, 3.0, np.float32).tobytes())
    _refused(bundle, "exported weights of the reasoner are not what they were", restore=True)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from motrt.engines.refit.disk import refit_bundle
when, bundle, weights = sys.argv[1:]
real = Path.replace
def replace(self, target):
    if Path(target).name != "manifest.json":
        return real(self, target)
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.replace = replace
refit_bundle(bundle, weights)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("has_revision", [False, True])
def test_kill_9_around_the_commit_leaves_one_state(
    root: Path, checkpoint: Checkpoint, when: str, has_revision: bool
) -> None:
    if has_revision:
        refit_bundle(root, checkpoint("edge-like", seed=2))
    old = tensors_of(root)
    new = checkpoint("edge-like", seed=1, dtype="bfloat16")
    command = [sys.executable, "-c", SCRIPT, when, str(root), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = list((root / REVISIONS).iterdir())
    assert len(left) == 1 + has_revision  # something was left behind, or the test shows nothing
    now = tensors_of(root)
    assert same(now, old) == (when == "before")
    verify_bundle(Bundle.open(root))
    result = refit_bundle(root, new)
    assert result.changed == (when == "before")
    assert len(list((root / REVISIONS).iterdir())) == 1
    assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []
    if when == "after":
        assert same(tensors_of(root), now)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_the_commit_leaves_the_new_state_whole(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    replace = Path.replace

    def interrupt(self: Path, target: Path) -> Path:
        result = replace(self, target)
        signal.raise_signal(number)
        return result

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(Path, "replace", interrupt)
            refit_bundle(root, other)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Bundle.open(root).manifest.revision is not None
    assert not refit_bundle(root, other).changed
    assert refit_bundle(root, restore=True).changed


def test_an_interrupt_before_the_commit_leaves_the_old_state(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = tree(root)
    monkeypatch.setattr("motrt.engines.refit.disk._verify", stop)
    with pytest.raises(KeyboardInterrupt):
        refit_bundle(root, other)
    assert tree(root) == before


def test_one_writer_at_a_time(root: Path, other: Path) -> None:
    from motrt.engines.atomic import writing_alone

    with writing_alone(root), pytest.raises(BundleError, match="locked"):
        refit_bundle(root, other)
    assert refit_bundle(root, other).changed


def test_a_writer_who_opened_the_old_revision_is_refused(root: Path, other: Path) -> None:
    opened = Bundle.open(root)
    refit_bundle(root, other)
    with pytest.raises(BundleError, match="refitted meanwhile"):
        opened.commit(opened.manifest)
    assert Bundle.open(root).manifest.revision is not None


def test_a_revision_is_guarded_like_the_base(root: Path, other: Path) -> None:
    refit_bundle(root, other)
    opened = Bundle.open(root)
    (opened.content / "generator.onnx").unlink()
    with pytest.raises(BundleError, match=r"generator\.onnx"):
        Bundle.open(root)
    data = json.loads((root / MANIFEST).read_text())
    for name in ("../weights", "", "A" * 12, 7):
        (root / MANIFEST).write_text(
            json.dumps({**data, "revision": {**data["revision"], "id": name}})
        )
        with pytest.raises(BundleError, match=r"manifest\.json is not sound"):
            Bundle.open(root)

"""A plan is recognized from plan.json: whole, of this bundle, for this machine, or refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from motrt.engines.bundle import MANIFEST, Bundle, record_small
from motrt.engines.errors import BundleError, ForeignPlanError, PlanError, StalePlanError
from motrt.engines.plans import (
    BuildOptions,
    BuildShapes,
    PlanHost,
    PlanRecord,
    build_plans,
    check_plan,
    read_engine,
    read_plan,
)
from motrt.engines.plans.targets import Builder
from tiny_checkpoints import tree

pytest.importorskip("tensorrt_rtx")
from stub_plans import stub_run

OPTIONS = BuildOptions(shapes=BuildShapes(max_context=256))
PLAN_JSON = "plan.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, bundle: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("check") / "b"
    shutil.copytree(bundle("nano-like", "fp16"), root)
    build_plans(
        root,
        ["sm89"],
        OPTIONS,
        backend="tensorrt-rtx",
        builder=Builder((), None),
        run=stub_run(),
    )
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "b"))


def _host(root: Path, **changes: Any) -> PlanHost:
    version = next((root / "plans").iterdir()).name.removeprefix("tensorrt-rtx-")
    host = PlanHost.here("tensorrt-rtx", version, (8, 9))
    return dataclasses.replace(host, **changes)


def _load(root: Path, options: BuildOptions | None = None) -> dict[str, bytes]:
    return _read_all(Bundle.open(root), _host(root), options)


def _read_all(
    opened: Bundle, host: PlanHost, options: BuildOptions | None = None
) -> dict[str, bytes]:
    """What a runtime does before TensorRT sees a byte."""
    record = read_plan(opened, host)
    check_plan(record, opened, host, options)
    return {name: read_engine(opened, record, host, name) for name in record.engines}


def _refusal(root: Path, kind: type[PlanError] = PlanError, **changes: Any) -> str:
    before = tree(root)
    opened, host = Bundle.open(root), _host(root, **changes)
    with pytest.raises(PlanError) as caught:
        _read_all(opened, host)
    assert type(caught.value) is kind
    assert caught.value.fields
    assert "motrt build" in str(caught.value.fix)
    assert "\n" not in str(caught.value)
    assert tree(root) == before
    return str(caught.value)


def test_a_whole_plan_is_read(root: Path) -> None:
    assert _load(root) == {"reasoner": b"no codereasoner", "generator": b"no codegenerator"}
    assert _load(root, OPTIONS)


def test_the_record_says_what_a_runtime_needs(root: Path) -> None:
    opened, host = Bundle.open(root), _host(root)
    record = read_plan(opened, host)
    assert PlanRecord.from_json(record.to_json().encode()) == record
    assert record.weights_mode == "refit"
    assert [profile.name for profile in record.profiles("reasoner")] == ["prefill", "decode"]
    assert record.profiles("reasoner")[1].dims["tokens"] == (1, 1, 16)
    assert record.aliases("reasoner")["present.2.value"] == "past_key_values.2.value"
    assert record.aliases("generator") == {}
    assert "norm.weight" in record.weight_names("reasoner")
    assert set(record.weight_names("reasoner")) <= set(opened.weights())


@pytest.mark.parametrize("file", [PLAN_JSON, "reasoner.plan", "generator.plan"])
def test_every_byte_of_a_plan_is_vouched_for(root: Path, file: str) -> None:
    path = root / _host(root).folder / file
    content = path.read_bytes()
    flipped = bytes([content[-2] ^ 1])
    for other in (content[:-2] + flipped + content[-1:], content[:-1], content + b" ", b""):
        path.write_bytes(other)
        assert file in _refusal(root)
    path.unlink()
    assert file in _refusal(root)
    path.mkdir()
    assert file in _refusal(root)


def test_a_plan_that_the_manifest_does_not_name_is_not_read(root: Path) -> None:
    manifest = json.loads((root / MANIFEST).read_text())
    plans = manifest.pop("plans")
    (root / MANIFEST).write_text(json.dumps(manifest))  # as one from before there were plans
    assert "no plans" in _refusal(root)
    folder = _host(root).folder
    (root / MANIFEST).write_text(json.dumps({**manifest, "plans": {folder: "0" * 64}}))
    assert "vouches for" in _refusal(root)
    elsewhere = {"plans/../../x": next(iter(plans.values()))}
    (root / MANIFEST).write_text(json.dumps({**manifest, "plans": elsewhere}))
    assert "no plan for this machine" in _refusal(root, ForeignPlanError)


def test_a_link_out_of_the_bundle_is_not_followed(root: Path, tmp_path: Path) -> None:
    path = root / _host(root).folder / "reasoner.plan"
    path.rename(tmp_path / "outside.plan")
    path.symlink_to(tmp_path / "outside.plan")
    with pytest.raises(BundleError, match="outside"):
        _load(root)


@pytest.mark.parametrize(
    "changes", [{"capability": (8, 6)}, {"version": "1.8.0"}, {"backend": "tensorrt"}]
)
def test_a_plan_for_another_machine_has_another_place(root: Path, changes: dict[str, Any]) -> None:
    assert "sm89" in _refusal(root, ForeignPlanError, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"capability": (8, 6)}, "capability"),
        ({"version": "1.8.0"}, "backend.version"),
        ({"backend": "tensorrt"}, "backend.name"),
        ({"system": "Windows"}, "system"),
        ({"machine": "aarch64"}, "machine"),
    ],
)
def test_a_plan_in_the_wrong_place_is_foreign(
    root: Path, changes: dict[str, Any], field: str
) -> None:
    """The folder's name alone proves nothing: somebody may have renamed it."""
    opened, host = Bundle.open(root), _host(root)
    record = read_plan(opened, host)
    with pytest.raises(ForeignPlanError) as caught:
        check_plan(record, opened, dataclasses.replace(host, **changes))
    assert caught.value.fields == (field,)


def test_a_plan_of_another_graph_is_stale(root: Path) -> None:
    model = onnx.load(root / "reasoner.onnx", load_external_data=False)
    model.graph.node[5].name = "another"
    _replace_graph(root, model)
    assert "engines.reasoner.graph_sha256" in _refusal(root, StalePlanError)


def test_new_weights_in_the_same_places_or_others_keep_a_plan(root: Path) -> None:
    """A refit writes new files and points the graphs at them: the plan holds no value."""
    model = onnx.load(root / "reasoner.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "weights/new.safetensors" if entry.key == "location" else entry.value
    _replace_graph(root, model)
    assert _load(root, OPTIONS)


def _replace_graph(root: Path, model: onnx.ModelProto) -> None:
    path = root / "reasoner.onnx"
    path.write_bytes(model.SerializeToString())
    manifest = json.loads((root / MANIFEST).read_text())
    record = record_small(path)
    manifest["files"]["reasoner.onnx"] = {"bytes": record.nbytes, "sha256": record.sha256}
    (root / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (BuildOptions(), "engines.reasoner.profiles"),
        (dataclasses.replace(OPTIONS, weights="inputs"), "weights.mode"),
        (dataclasses.replace(OPTIONS, workspace_mib=5), "builder.workspace_bytes"),
        (dataclasses.replace(OPTIONS, optimization_level=5), "builder.optimization_level"),
        (
            dataclasses.replace(OPTIONS, allow_decomposed_attention=True),
            "builder.decomposed_attention",
        ),
        (dataclasses.replace(OPTIONS, placeholders="never"), "builder.with_values"),
    ],
)
def test_other_options_make_a_plan_stale(root: Path, options: BuildOptions, field: str) -> None:
    opened, host = Bundle.open(root), _host(root)
    record = read_plan(opened, host)
    check_plan(record, opened, host)
    with pytest.raises(StalePlanError) as caught:
        check_plan(record, opened, host, options)
    assert field in caught.value.fields


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in an identity, long lists cut to their ends."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
        items = items if len(items) < 4 else items[:2] + items[-1:]
    if not items:
        yield path
    for key, each in items:
        yield from _leaves(each, (*path, key))


def test_every_field_of_the_identity_is_in_the_key(root: Path) -> None:
    record = read_plan(Bundle.open(root), _host(root))
    keys = {record.key}
    leaves = list(_leaves(record.identity))
    assert len(leaves) > 100
    for path in leaves:
        identity = copy.deepcopy(record.identity)
        place = identity
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = ["something else", place[path[-1]]]
        keys.add(dataclasses.replace(record, identity=identity).key)
    assert len(keys) == 1 + len(leaves)
    assert dataclasses.replace(record, info={}).key == record.key


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.update(format="other"),
        lambda data: data.update(schema=2),
        lambda data: data.pop("identity"),
        lambda data: data.update(key="0" * 64),
        lambda data: data["identity"]["builder"].update(tf32=True),
        lambda data: data["engines"].pop("generator"),
        lambda data: data["engines"]["reasoner"].update(file="../reasoner.plan"),
        lambda data: data["engines"]["reasoner"].update(bytes=True),
        lambda data: data["engines"]["reasoner"].update(sha256=None),
        lambda data: data["identity"]["engines"]["reasoner"].pop("profiles"),
        lambda data: data["identity"]["engines"]["reasoner"].update(aliases=3),
    ],
)
def test_a_record_that_is_not_sound_is_refused(
    root: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    """Also where the manifest vouches for it: a newer or older motrt may have written it."""
    path = root / _host(root).folder / PLAN_JSON
    data = json.loads(path.read_text())
    PlanRecord.from_json(json.dumps(data).encode())
    edit(data)
    with pytest.raises(PlanError):
        PlanRecord.from_json(json.dumps(data).encode())
    for text in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(PlanError):
            PlanRecord.from_json(text)

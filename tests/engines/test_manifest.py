"""A manifest is read back as it was written, and anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import BundleError
from motrt.engines.manifest import Manifest
from tiny_checkpoints import write_bundle

NAME = "norm.weight"
FILE = "weights/transformer/model.safetensors"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = write_bundle(tmp_path_factory.mktemp("manifest") / "b")
    return (root / "manifest.json").read_text()


def _refusal(text: str) -> str:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(text)
    message = str(caught.value)
    assert "\n" not in message
    assert "manifest.json" in message or "contract version" in message
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.fix
    return message


def test_it_survives_the_round_trip(text: str) -> None:
    manifest = Manifest.from_json(text)
    assert manifest.to_json() == text
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        "\ufeff{}",
        '{"format": "other"}',
        '{"format": null}',
        '{"a":' * 100_000,
        "9" * 5000,
        "\x00",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_garbage_is_refused(text: str) -> None:
    _refusal(text)


def test_a_newer_contract_asks_for_a_newer_motrt(text: str) -> None:
    data = json.loads(text)
    message = _refusal(json.dumps({**data, "contract_version": 2}))
    assert "Upgrade motrt" in message
    # Whatever else a newer format may hold.
    assert "Upgrade" in _refusal('{"format": "motrt-bundle", "contract_version": 7, "model": 1}')
    others: tuple[Any, ...] = (0, -1, None, "1", "2", [], 1.5)
    for other in others:
        assert "Export" in _refusal(json.dumps({**data, "contract_version": other}))


def test_every_key_is_needed(text: str) -> None:
    data = json.loads(text)
    for key in data.keys() - {"guardrail", "revision", "plans"}:  # older bundles lack the last two
        _refusal(json.dumps({name: value for name, value in data.items() if name != key}))


@pytest.mark.parametrize("part", ["weights", "files"])
def test_every_key_of_a_record_is_needed(text: str, part: str) -> None:
    data = json.loads(text)
    record = data["weights"]["transformer"][NAME] if part == "weights" else data["files"][FILE]
    for key in list(record):
        kept = record.pop(key)
        _refusal(json.dumps(data))
        record[key] = kept
    Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("value", [3, "text", True, [1], [[1, 2, 3]], None, 10**400, float("inf")])
def test_no_key_takes_another_type(text: str, value: Any) -> None:
    data = json.loads(text)
    for key in data.keys() - {"guardrail", "lowering", "contract_version"}:
        if not (key in {"parity", "revision"} and value is None):
            _refusal(json.dumps({**data, key: value}))


def _set(*path: Any, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return edit


FREQUENCIES: tuple[Any, ...] = (
    float("nan"),
    float("inf"),
    0,
    -1.0,
    10**400,
    1e39,
    "1.0",
    None,
    True,
    [],
)
AXES: tuple[Any, ...] = (3, -1, 1.0, "1", None, True, float("nan"), 10**400)
COUNTS: tuple[Any, ...] = (-1, 1.5, "10", None, True, float("inf"), float("nan"))
TEXTS: tuple[Any, ...] = (5, None, [], {})
SHAPES: tuple[Any, ...] = ([-1], [1.5], "64", None, 64, [True], [[64]])
TYPES: tuple[Any, ...] = ("F32", "float7", "", 1, None, [])

EDITS: dict[str, Edit] = {
    "unknown model key": _set("model", "surprise", value=1),
    "impossible model": _set("model", "head_dim", value=-2),
    "wide model": _set("model", "head_dim", value=1 << 40),
    "precision": _set("precision", value="fp8"),
    "cache": _set("cache", value="paged"),
    "lowering": _set("lowering", value=3),
    "layout": _set("weight_layout", value="shared"),
    "no vision": _set("modalities", value=["sound"]),
    "text": _set("modalities", value=["vision", "text"]),
    "unknown modality": _set("modalities", value=["vision", "smell"]),
    "few frequencies": lambda data: data["inv_freq"].pop(),
    "many frequencies": lambda data: data["inv_freq"].append(0.5),
    "few axes": lambda data: data["rotary_axes"].pop(),
    "many axes": lambda data: data["rotary_axes"].append(0),
    **{f"frequency {value}": _set("inv_freq", 1, value=value) for value in FREQUENCIES},
    **{f"axis {value}": _set("rotary_axes", 1, value=value) for value in AXES},
    **{f"bytes {value}": _set("files", FILE, "bytes", value=value) for value in COUNTS},
    **{f"hash {value}": _set("files", FILE, "header_sha256", value=value) for value in TEXTS},
    "file record": _set("files", FILE, value=None),
    **{
        f"offset {value}": _set("weights", "transformer", NAME, "offset", value=value)
        for value in COUNTS
    },
    **{
        f"shape {value}": _set("weights", "transformer", NAME, "shape", value=value)
        for value in SHAPES
    },
    **{
        f"type {value}": _set("weights", "transformer", NAME, "dtype", value=value)
        for value in TYPES
    },
    **{
        f"file {value}": _set("weights", "transformer", NAME, "file", value=value)
        for value in TEXTS
    },
    "entry": _set("weights", "transformer", NAME, value=[]),
    "graphs": _set("components", "vae", "graphs", value=["vae.onnx"]),
    "graph": _set("components", "vae", "graphs", "decoder_first", value=["vae.onnx"]),
    "component": _set("components", "vae", value=None),
    "absent": _set("absent", "scheduler", value=False),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_contradicts_itself_is_refused(text: str, name: str) -> None:
    data = json.loads(text)
    EDITS[name](data)
    _refusal(json.dumps(data))


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_value_anywhere_is_read_or_refused(text: str, data: st.DataObject) -> None:
    manifest = json.loads(text)
    node, path = manifest, []
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        path.append(data.draw(st.sampled_from(keys)))
        inner = node[path[-1]]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        node = inner
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    node[path[-1]] = data.draw(
        leaf | st.lists(leaf, max_size=2) | st.dictionaries(st.text(), leaf, max_size=2)
    )
    try:
        Manifest.from_json(json.dumps(manifest))
    except BundleError:
        return

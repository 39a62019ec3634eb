"""The tokenizer against transformers, for both classes that published checkpoints name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.bundle import MANIFEST, Bundle, record_small
from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.tokenizer import StreamDecoder, Tokenizer
from omni_fixtures.tokenizer import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, save_tokenizer
from tiny_checkpoints import edit_json, write_bundle

CLASSES = ("Qwen2Tokenizer", "PreTrainedTokenizerFast")
TEXTS = (
    "",
    " ",
    "A red square moves left.",
    "  two  spaces\n\n and\ttabs \r\n",
    "e\u0301 becomes \u00e9",
    "日本語 🤖👩‍👩‍👧 \u0000 \ufffd",
    "a<|im_end|>b<|vision_start|> <think>c</think><|endoftext|>",
    "<|im_end",
    "x" * 3000,
)


@pytest.fixture(scope="module", params=CLASSES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / name, tokenizer_class=name)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer")


def test_ids_and_texts_equal_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(deadline=None, max_examples=80)
@given(text=st.text(max_size=60), data=st.data())
def test_any_text_and_any_ids_equal_transformers(
    text: str, data: st.DataObject, tokenizer: Tokenizer, reference: Any
) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


def test_names_and_numbers_equal_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.special_tokens["pad_token"] == reference.pad_token
    for token in (*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS):
        assert tokenizer.token_id(token) == reference.convert_tokens_to_ids(token)


@pytest.mark.parametrize("name", CLASSES)
def test_what_surrounds_a_text_equals_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path, tokenizer_class=name)
    edit_json(folder / "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=True)
    for processor in (None, "<|im_start|>"):
        data = json.loads((folder / "tokenizer.json").read_text())
        if processor is not None:
            token_id = Tokenizer.from_folder(folder).token_id(processor)
            token = {"id": processor, "ids": [token_id], "tokens": [processor]}
            first = {"SpecialToken": {"id": processor, "type_id": 0}}
            parts = [{"Sequence": {"id": side, "type_id": 0}} for side in "AB"]
            data["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [first, parts[0]],
                "pair": [first, *parts],
                "special_tokens": {processor: token},
            }
            (folder / "tokenizer.json").write_text(json.dumps(data))
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer = Tokenizer.from_folder(folder)
        for special in (True, False):
            ids = tokenizer.encode("a b", add_special_tokens=special)
            assert ids == reference("a b", add_special_tokens=special)["input_ids"]
            assert len(ids) == 2 + (special and processor is not None)


def test_tokens_that_only_the_config_lists_are_added(copy: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = copy / "tokenizer_config.json"
    table = json.loads(config.read_text())["added_tokens_decoder"]
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    table[str(len(table) + 480)] = {"content": "<extra>", "special": True, **flags}
    edit_json(config, added_tokens_decoder=table)
    reference = transformers.AutoTokenizer.from_pretrained(copy)
    tokenizer = Tokenizer.from_folder(copy)
    ids = tokenizer.encode("a<extra>b")
    assert ids == reference("a<extra>b")["input_ids"]
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_truncation_and_padding_of_the_file_do_not_apply(copy: Path) -> None:
    data = json.loads((copy / "tokenizer.json").read_text())
    data["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (copy / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer.from_folder(copy).encode("abcxyzabcxyz")) > 2


def test_the_end_comes_from_generation_config_too(copy: Path) -> None:
    assert len(Tokenizer.from_folder(copy).eos_token_ids) == 1
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    tokenizer = Tokenizer.from_folder(copy)
    assert tokenizer.eos_token_ids == (7, 3, tokenizer.eos_token_id)


# Streams.


@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_a_stream_gives_what_decode_gives(
    data: st.DataObject, skip: bool, tokenizer: Tokenizer
) -> None:
    text = data.draw(st.text(max_size=30))
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    ids = tokenizer.encode(text) + data.draw(anything)
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    given = ""
    for token_id in ids:
        given += decoder.push(token_id)
        # What is out is never taken back.
        assert tokenizer.decode(ids, skip_special_tokens=skip).startswith(given)
    assert given + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_stream_keeps_parts_of_a_character_back(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("é🤖!")
    assert len(ids) == 7
    assert [decoder.push(token_id) for token_id in ids] == ["", "é", "", "", "", "🤖", "!"]
    assert decoder.flush() == ""


def test_a_stream_that_ends_within_a_character_shows_that(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    first = tokenizer.encode("🤖")[0]
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("a")[0]) == "a"


def test_a_stream_survives_a_bad_id(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    with pytest.raises(ConfigError):
        decoder.push(-1)
    assert decoder.push(tokenizer.encode("a")[0]) == "a"


# Damage.


@pytest.mark.parametrize("bad", [-1, 2**40, "x", None])
def test_an_impossible_id_is_refused(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(ConfigError, match="token id makes no sense"):
        tokenizer.decode([bad])


@pytest.mark.parametrize("bad", [None, 3, b"bytes", ["a"], "\ud800"])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"no text|no Unicode"):
        tokenizer.encode(bad)


def test_a_missing_token_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(BundleError, match=r"lacks a token; got '<\|nothing\|>'"):
        tokenizer.token_id("<|nothing|>")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"model": {}}',
        '{"version": "1.0", "model": {"type": "BPE"}}',
        "null",
        "[" * 100_000,
    ],
)
def test_a_broken_tokenizer_file_is_refused(copy: Path, text: str) -> None:
    (copy / "tokenizer.json").write_text(text)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not sound"):
        Tokenizer.from_folder(copy)


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token": 3},
        {"eos_token": ""},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"3": {"content": "<new>"}}},
        {"added_tokens_decoder": {"3": 5}},
        {"additional_special_tokens": "x"},
        {"chat_template": 3},
    ],
)
def test_a_broken_config_is_refused(copy: Path, values: dict[str, Any]) -> None:
    edit_json(copy / "tokenizer_config.json", **values)
    with pytest.raises(BundleError, match=r"tokenizer_config\.json is not sound"):
        Tokenizer.from_folder(copy)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[1]", b"{"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_what_is_no_json_object_is_refused(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name} is not sound"):
        Tokenizer.from_folder(copy)


def test_a_tokenizer_without_end_says_so_when_asked(copy: Path) -> None:
    edit_json(copy / "tokenizer_config.json", eos_token=None)
    tokenizer = Tokenizer.from_folder(copy)
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(BundleError, match="no eos_token"):
        _ = tokenizer.eos_token_id


def test_a_bundle_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    manifest = json.loads((root / MANIFEST).read_text())
    edit_json(
        root / MANIFEST,
        components={k: v for k, v in manifest["components"].items() if k != "tokenizer"},
        absent={"text_tokenizer": "not in the checkpoint"},
    )
    with pytest.raises(BundleError, match="no tokenizer; got text_tokenizer: not in the check"):
        Tokenizer.open(Bundle.open(root))


def test_only_recorded_files_of_a_bundle_are_read(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    save_tokenizer(root / "tokenizer")
    (root / "tokenizer/generation_config.json").write_text('{"eos_token_id": 3}')
    manifest = json.loads((root / MANIFEST).read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        record = record_small(root / "tokenizer" / name)
        manifest["files"][f"tokenizer/{name}"] = {"bytes": record.nbytes, "sha256": record.sha256}
    edit_json(root / MANIFEST, files=manifest["files"])
    tokenizer = Tokenizer.open(Bundle.open(root))
    assert tokenizer.eos_token_ids == (tokenizer.eos_token_id,)

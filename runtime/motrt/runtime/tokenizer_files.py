"""What the files of a ``tokenizer/`` folder say, put together as transformers does.

Source: transformers ``tokenization_utils_tokenizers.py``, ``TokenizersBackend.__init__``
and ``_post_init`` (5.24). As there, ``add_bos_token`` and ``add_eos_token`` of the config mean
nothing beside a ``tokenizer.json``, whose post-processor says what surrounds a text.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from motrt.engines.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from pathlib import Path

NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_MAX_BYTES = 256 << 20
_AGAIN = "Export a checkpoint with an undamaged text_tokenizer/ again."


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer's parts.

    Attributes:
        backend: The tokenizer proper, without truncation or padding.
        special_tokens: Names and texts of the special tokens that are set.
        chat_template: The Jinja text, or None.
        generation_eos_ids: ``eos_token_id`` of ``generation_config.json``, or none.
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_template: str | None
    generation_eos_ids: tuple[int, ...]


def read_tokenizer_files(folder: Path, recorded: Container[str] | None = None) -> TokenizerFiles:
    """Read a tokenizer folder; only ``tokenizer.json`` must be there.

    Args:
        folder: Where the files are.
        recorded: Names of the files that may be read, or None for all: what a bundle's manifest
            does not list, nobody has checked.

    Raises:
        BundleError: A file is absent, unreadable, or contradicts another.
    """
    texts = {
        name: text
        for name in _FILES
        if (recorded is None or name in recorded) and (text := _text(folder, name)) is not None
    }
    if "tokenizer.json" not in texts:
        raise BundleError(
            "there is no tokenizer",
            got=f"no tokenizer.json in {folder}",
            expected="tokenizer.json, as the tokenizers package writes it",
            fix="Save the tokenizer with transformers' save_pretrained and export again.",
        )
    config = _json(texts, "tokenizer_config.json")
    named = {**_json(texts, "special_tokens_map.json"), **config}
    special = {name: _content(name, named[name]) for name in NAMES if named.get(name) is not None}
    extra = [token for key in _EXTRA for token in _extra(key, named.get(key))]
    backend = _backend(texts["tokenizer.json"])
    _add_tokens(backend, config.get("added_tokens_decoder", {}))
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys((*special.values(), *extra))
        ]
    )
    return TokenizerFiles(
        backend=backend,
        special_tokens=special,
        chat_template=_chat_template(texts, config),
        generation_eos_ids=_eos_ids(_json(texts, "generation_config.json").get("eos_token_id")),
    )


def _backend(text: str) -> Backend:
    try:
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as err:  # a panic of the Rust code is no Exception
        raise _bad("tokenizer.json", err) from err
    return backend


def _add_tokens(backend: Backend, table: object) -> None:
    """Add the tokens that only ``tokenizer_config.json`` lists; refuse one with another id."""
    if not isinstance(table, dict):
        raise _bad("tokenizer_config.json", "added_tokens_decoder is no object")
    try:
        entries = sorted((int(index), dict(entry)) for index, entry in table.items())
        for index, entry in entries:
            content = _content("added_tokens_decoder", entry)
            if backend.token_to_id(content) is None:
                flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
                options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
                backend.add_tokens([AddedToken(content, **options)])
            if backend.token_to_id(content) != index:
                raise _bad(
                    "tokenizer_config.json",
                    f"{content!r} has id {index} there and {backend.token_to_id(content)} in "
                    "tokenizer.json",
                )
    except (TypeError, ValueError) as err:
        raise _bad("tokenizer_config.json", err) from err


def _chat_template(texts: Mapping[str, str], config: dict[str, Any]) -> str | None:
    """Return the template; a file of its own comes before the config's, as in transformers."""
    template = texts.get("chat_template.jinja", config.get("chat_template"))
    if isinstance(template, list):  # several, with names
        templates = {
            item["name"]: item["template"]
            for item in template
            if isinstance(item, dict) and {"name", "template"} <= set(item)
        }
        template = templates.get("default")
    if template is not None and not isinstance(template, str):
        raise _bad("tokenizer_config.json", f"chat_template is of type {type(template).__name__}")
    return template


def _eos_ids(value: object) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in values):
        raise _bad("generation_config.json", f"eos_token_id {value!r}")
    return tuple(values)


def _extra(key: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, dict):  # model-specific names and their tokens
        value = list(value.values())
    if not isinstance(value, list):
        raise _bad("tokenizer_config.json", f"{key} is of type {type(value).__name__}")
    return [_content(key, item) for item in value]


def _content(name: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise _bad("tokenizer_config.json", f"{name} is {value!r}")
    return text


def _json(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        data = json.loads(texts.get(name, "{}"))
    except (ValueError, RecursionError) as err:
        raise _bad(name, err) from err
    if not isinstance(data, dict):
        raise _bad(name, f"a JSON {type(data).__name__}")
    return data


def _text(folder: Path, name: str) -> str | None:
    path = folder / name
    if not os.path.isfile(path):
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(name, f"over {_MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise _bad(name, err) from err


def _bad(name: str, got: object) -> BundleError:
    return BundleError(f"{name} is not sound", got=got, expected="the published form", fix=_AGAIN)

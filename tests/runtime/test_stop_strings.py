"""Stop texts against a search character by character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError
from motrt.runtime.stop_strings import StopStrings
from motrt.runtime.tokenizer import StreamDecoder, Tokenizer


def _naive(text: str, stop: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [item for item in stop if text[:end].endswith(item)]
        if found:
            best = max(found, key=len)
            return text[: end - len(best)], best
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab.", max_size=20),
    stop=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_texts_are_found_however_the_text_is_cut(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    stops = StopStrings(stop)
    given, rest = "", text
    while rest:
        size = data.draw(st.integers(0, len(rest)))
        size = size or 1
        given += stops.push(rest[:size])
        rest = rest[size:]
        assert _naive(text, stop)[0].startswith(given)
    given += stops.flush()
    assert (given, stops.stopped_by) == _naive(text, stop)


def test_text_is_held_only_while_it_may_be_a_stop() -> None:
    stops = StopStrings(("\nUser:",))
    assert stops.push("Hello\nUs") == "Hello"
    assert stops.push("ed") == "\nUsed"
    assert stops.push("\n") == ""
    assert stops.push("User: x") == ""
    assert stops.stopped_by == "\nUser:"
    assert stops.push("more") == ""
    assert stops.flush() == ""


@pytest.mark.parametrize("stop", ["text", ("",), (3,)])
def test_bad_stop_texts_are_refused(stop: Any) -> None:
    with pytest.raises(ConfigError, match="stop makes no sense"):
        StopStrings(stop)


def test_a_stop_across_tokens_within_a_character(tmp_path: Path) -> None:
    from omni_fixtures.tokenizer import save_tokenizer

    tokenizer = Tokenizer.from_folder(save_tokenizer(tmp_path))
    decoder, stops = StreamDecoder(tokenizer), StopStrings(("é🤖",))
    given = ""
    for token_id in tokenizer.encode("One é, two é🤖 three"):
        given += stops.push(decoder.push(token_id))
        if stops.stopped_by:
            break
    assert given == "One é, two "

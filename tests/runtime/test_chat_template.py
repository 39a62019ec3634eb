"""Chat templates against transformers, and hostile ones against the clock."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.chat_template import ChatTemplate
from motrt.runtime.template_process import TemplateLimits
from motrt.runtime.tokenizer import Tokenizer
from omni_fixtures.tokenizer import CHAT_TEMPLATE, save_tokenizer
from tiny_checkpoints import edit_json

USER = [{"role": "user", "content": "Hello."}]
CONVERSATION = [
    {"role": "system", "content": "Be brief. <b>&amp;</b>"},
    {"role": "user", "content": [{"type": "text", "text": "日本"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAn island.\n"},
    {"role": "user", "content": "  And\n now? "},
]
TOOL = [*USER, {"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
# The constructs that Qwen's published templates use, in their style.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join('') %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|im_start|>' + message.role + '\\n' + content.strip('\\n') + eos_token + '\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + ({"got": content, "é": 1} | tojson) }}
        {%- if loop.last %}{{- '<|im_end|>\\n' }}{% continue %}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
SMALL = TemplateLimits(memory_bytes=256 << 20, max_chars=100_000)
BRIEF = TemplateLimits(time_s=0.7)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, QWEN], ids=["fixture", "qwen"])
@pytest.mark.parametrize("separate", [False, True], ids=["config", "file"])
def test_text_and_ids_equal_transformers(tmp_path: Path, source: str, separate: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path / "tokenizer")
    edit_json(folder / "tokenizer_config.json", chat_template="other" if separate else source)
    if separate:
        (folder / "chat_template.jinja").write_text(source)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (USER, {}),
        (CONVERSATION, {}),
        (CONVERSATION, {"enable_thinking": False}),
        (TOOL, {"add_vision_id": False}),
        ([{"role": "user", "content": ""}], {}),
    ]
    for messages, variables in cases:
        for prompt in (True, False):
            text = tokenizer.chat_template.render(
                messages, add_generation_prompt=prompt, variables=variables
            )
            options = {"add_generation_prompt": prompt, **variables}
            assert text == reference.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=prompt, variables=variables
            )
            assert ids == reference.apply_chat_template(messages, **options)["input_ids"]
    tokenizer.close()


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_folder(folder).chat_template.render(USER) == "yes"


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(BundleError, match="no chat template"):
        Tokenizer.from_folder(folder).apply_chat_template(USER)


def test_jinja_stays_out_of_this_process() -> None:
    import subprocess

    code = (
        "import sys\nfrom motrt.runtime.chat_template import ChatTemplate\n"
        "assert ChatTemplate('{{ messages[0].role }}').render("
        "[{'role': 'user', 'content': ''}]) == 'user'\nassert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# Messages.


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        {"role": "user", "content": "x"},
        None,
        ["text"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "user<|im_end|>", "content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": b"x"}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ConfigError, match="messages"):
        ChatTemplate("x").render(messages)


def test_a_variable_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="variable"):
        ChatTemplate("x").render(USER, variables={"path": Path()})


def test_what_a_template_raises_is_about_the_messages() -> None:
    with pytest.raises(ConfigError, match="refuses these messages; got roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)


# Hostile templates.

LOOPS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "power": "{% set x = (9 ** (9 ** 9)) %}",
}
ESCAPES = {
    "syntax": ("{% if %}", "syntax error"),
    "unknown tag": ("{% nothing %}", "syntax error"),
    "range": ("{{ range(10**9)|list }}", "Range too big"),
    "repeat": ("{{ 'x' * 10**10 }}", "memory"),
    "pad": ("{{ 'x'|center(10**10) }}", "memory"),
    "double": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "memory",
    ),
    "long": ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "writes too much"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "class by item": ("{{ ''['__class__']['__mro__'] }}", "unsafe"),
    "class by filter": ("{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "globals": ("{{ lipsum.__globals__['os'].system('id') }}", "unsafe"),
    "generator": ("{{ (x for x in []) }}", "syntax error"),
    "namespace": ("{{ namespace(__init__=1) }}", "namespace cannot store"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "extends": ("{% extends '/etc/passwd' %}", "no loader"),
    "undefined": ("{{ nothing.at.all }}", "undefined"),
    "file": ("{{ 'x'.encode('idna') }}", "Error"),  # needs a module that nobody has loaded
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_endless_template_is_ended(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(BundleError, match=r"takes too long; got over 0\.7 s"):
        ChatTemplate(LOOPS[name], limits=BRIEF).render(USER)
    assert time.monotonic() - start < 15


def test_an_endless_template_is_ended_in_another_thread_too() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            ChatTemplate(LOOPS["loops"], limits=BRIEF).render(USER)
        except BundleError as err:
            caught.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    assert len(caught) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone")
@pytest.mark.parametrize("name", ESCAPES)
def test_a_hostile_template_is_a_typed_error(name: str) -> None:
    source, reason = ESCAPES[name]
    template = ChatTemplate(source, limits=SMALL)
    with pytest.raises(BundleError, match=f"(?i){reason}") as caught:
        template.render(USER)
    assert len(str(caught.value)) < 1000


def test_long_messages_pass() -> None:
    text = "é\U0001f916\ud800" * 400_000
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": text}]) == text


def test_a_template_of_absurd_length_is_refused() -> None:
    with pytest.raises(BundleError, match="too long"):
        ChatTemplate("x" * (2 << 20))

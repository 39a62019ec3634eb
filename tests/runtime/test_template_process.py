"""The process that renders templates: it can be ended, dies, and comes back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest

from motrt.engines.errors import BundleError, ConfigError, ExecutionError
from motrt.runtime.chat_template import ChatTemplate
from motrt.runtime.template_process import TemplateLimits

USER = [{"role": "user", "content": "Hello."}]
BRIEF = TemplateLimits(time_s=0.7)


def test_the_process_serves_again_after_every_end() -> None:
    template = ChatTemplate(
        "{% if messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}ok",
        limits=BRIEF,
    )
    empty = [{"role": "user", "content": ""}]
    assert template.render(empty) == "ok"
    with pytest.raises(BundleError, match="too long"):
        template.render(USER)
    assert template.render(empty) == "ok"
    process = template._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)  # as the system does when memory runs out
    process.wait()
    assert template.render(empty) == "ok"
    template.close()
    assert template.render(empty) == "ok"
    template.close()


def test_many_threads_share_one_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            text = f"{number}-{turn}"
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_process_dies_with_its_template() -> None:
    template = ChatTemplate("x")
    template.render(USER)
    process = template._process._process
    assert process is not None
    assert process.poll() is None
    del template
    assert process.poll() is not None


def test_a_process_that_cannot_start_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ExecutionError, match="cannot start"):
        ChatTemplate("x").render(USER)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(ExecutionError, match="cannot start"):
        ChatTemplate("x").render(USER)


@pytest.mark.parametrize(
    "values", [{"time_s": 0}, {"time_s": float("inf")}, {"max_chars": -1}, {"memory_bytes": "x"}]
)
def test_limits_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="makes no sense"):
        TemplateLimits(**values)

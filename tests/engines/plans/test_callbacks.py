"""TensorRT's nested phases become one bar that never goes back; its log keeps what matters."""

from __future__ import annotations

import logging

import pytest

from motrt.engines.plans.callbacks import Messages, Phases


def test_nested_phases_are_one_fraction() -> None:
    phases = Phases()
    assert phases.fraction() == 0
    phases.start("build", None, 4)
    phases.step("build", 0)
    assert phases.fraction() == 0.25
    phases.start("compile", "build", 2)
    phases.step("compile", 0)
    assert phases.fraction() == pytest.approx(0.375)
    phases.start("tactics", "compile", 10)
    phases.step("tactics", 4)
    assert phases.fraction() == pytest.approx(0.25 + 0.25 * (1 + 0.5) / 2)
    phases.finish("tactics")
    assert phases.fraction() == pytest.approx(0.25 + 0.25 * (1 + 0.5) / 2)  # it never falls
    phases.finish("compile")
    phases.step("build", 3)
    phases.finish("build")
    assert phases.fraction() == 1


def test_phases_out_of_order_do_no_harm() -> None:
    phases = Phases()
    phases.step("nobody", 3)
    phases.finish("nobody")
    phases.start("lost", "nobody", 0)
    phases.start("own", "own", 5)
    phases.start("build", None, 0)
    phases.step("build", 9)
    assert phases.fraction() == 1


def test_the_log_is_kept_by_level(caplog: pytest.LogCaptureFixture) -> None:
    messages = Messages()
    with caplog.at_level(logging.DEBUG, "motrt.tensorrt"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, 50):
            messages.add(level, str(level))
    assert (messages.warnings, messages.errors) == (["30"], ["40", "50"])
    assert len(caplog.records) == 5
    for index in range(200):
        messages.add(logging.ERROR, str(index))
    assert messages.errors[-1] == "199"
    assert len(messages.errors) < 100

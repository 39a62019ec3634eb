"""Euler over a flow, plain, stochastic and distilled, equals diffusers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError, SchedulerError
from motrt.runtime.schedulers import (
    FlowMatchEulerConfig,
    FlowMatchEulerDiscreteScheduler,
    check_guidance_scale,
)

SHAPE = (1, 3, 4, 4)
BAR = 1e-6
STEPS = [1, 2, 4, 10, 20, 35, 50, 1000]
DISTILLED = (1.0, 0.9375, 0.8333333333333334, 0.625)
SETTINGS = settings(deadline=None, max_examples=60)


def _pair(
    config: dict[str, Any],
    num_steps: int | None,
    *,
    mu: float | None = None,
    distilled: tuple[float, ...] | None = None,
    native: bool = False,
) -> tuple[FlowMatchEulerDiscreteScheduler, Any]:
    ours = FlowMatchEulerDiscreteScheduler(
        FlowMatchEulerConfig.from_dict(config), distilled_sigmas=distilled, is_native=native
    )
    ours.set_timesteps(num_steps, mu=mu)
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    sigmas: Any = None if distilled is None else list(distilled)
    if native:
        assert num_steps is not None
        total = theirs.config.num_train_timesteps
        sigmas = np.linspace(1.0 - 1.0 / total, 0.0, num_steps + 1)[:-1]
    theirs.set_timesteps(num_steps, sigmas=sigmas, mu=mu)
    return ours, theirs


def _equal_schedules(ours: FlowMatchEulerDiscreteScheduler, theirs: Any) -> bool:
    return (
        ours.sigmas.dtype == ours.timesteps.dtype == np.float32
        and np.array_equal(ours.sigmas, theirs.sigmas.numpy())
        and np.array_equal(ours.timesteps, theirs.timesteps.numpy())
    )


@given(
    num_steps=st.one_of(st.sampled_from(STEPS), st.integers(1, 200)),
    shift=st.one_of(st.sampled_from([1.0, 3.0, 5.0, 10.0]), st.floats(0.2, 20)),
    total=st.sampled_from([1000, 500, 1234]),
    space=st.sampled_from([None, "use_karras_sigmas", "use_exponential_sigmas"]),
    native=st.booleans(),
)
@SETTINGS
def test_schedules_equal_diffusers(
    num_steps: int, shift: float, total: int, space: str | None, native: bool
) -> None:
    config = {"shift": shift, "num_train_timesteps": total, **({space: True} if space else {})}
    assert _equal_schedules(*_pair(config, num_steps, native=native))


@given(
    num_steps=st.integers(2, 200),
    mu=st.floats(0.1, 3),
    kind=st.sampled_from(["exponential", "linear"]),
    terminal=st.sampled_from([None, 0.02, 0.1]),
)
@SETTINGS
def test_schedules_shifted_by_resolution_equal_diffusers(
    num_steps: int, mu: float, kind: str, terminal: float | None
) -> None:
    config = {
        "use_dynamic_shifting": True,
        "time_shift_type": kind,
        "shift_terminal": terminal,
        "base_shift": 0.5,
    }
    assert _equal_schedules(*_pair(config, num_steps, mu=mu))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_distilled_schedule_equals_diffusers_and_keeps_fractions(shift: float) -> None:
    ours, theirs = _pair({"shift": shift, "stochastic_sampling": True}, None, distilled=DISTILLED)
    assert _equal_schedules(ours, theirs)
    if shift == 1.0:
        assert ours.timesteps.tolist() == [1000.0, 937.5, float(np.float32(833.33333)), 625.0]


def test_a_schedule_rounded_to_whole_timesteps_is_not_equal() -> None:
    ours, theirs = _pair({"stochastic_sampling": True}, None, distilled=DISTILLED)
    assert _equal_schedules(ours, theirs)
    ours._start(ours.sigmas, np.trunc(ours.timesteps))
    assert not _equal_schedules(ours, theirs)


def _errors(ours: FlowMatchEulerDiscreteScheduler, theirs: Any) -> list[float]:
    """Relative errors of a whole run, each side from its own sample, with the same noise."""
    random = np.random.RandomState(0)
    mix = random.standard_normal((4, 4)) / 3
    sample = random.standard_normal(SHAPE).astype(np.float32)
    their_sample, errors = torch.from_numpy(sample), []
    for index, timestep in enumerate(theirs.timesteps):
        noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(index))
        velocity = (sample - np.tanh(sample @ mix)).astype(np.float32)
        theirs_velocity = their_sample.numpy()
        theirs_velocity = (theirs_velocity - np.tanh(theirs_velocity @ mix)).astype(np.float32)
        their_sample = theirs.step(
            torch.from_numpy(theirs_velocity),
            timestep,
            their_sample,
            generator=torch.Generator().manual_seed(index),
        ).prev_sample
        sample = ours.step(velocity, index, sample, noise.numpy())
        want = their_sample.numpy()
        errors.append(float(np.abs(sample - want).max() / np.abs(want).max()))
    return errors


@pytest.mark.parametrize("num_steps", [1, 4, 35])
@pytest.mark.parametrize("stochastic", [False, True])
def test_runs_equal_diffusers(num_steps: int, stochastic: bool) -> None:
    config = {"shift": 3.0, "stochastic_sampling": stochastic}
    ours, theirs = _pair(config, num_steps)
    assert ours.is_stochastic == stochastic
    assert max(_errors(ours, theirs)) <= BAR


def test_a_distilled_run_equals_diffusers() -> None:
    pair = _pair({"stochastic_sampling": True}, None, distilled=DISTILLED)
    assert max(_errors(*pair)) <= BAR


def test_a_step_at_the_next_sigma_exceeds_the_tolerance() -> None:
    ours, theirs = _pair({"stochastic_sampling": True}, None, distilled=DISTILLED)
    ours._start(np.append(ours.sigmas[1:], 0), ours.timesteps)
    assert max(_errors(ours, theirs)) > 100 * BAR


def test_a_velocity_of_zero_keeps_clean_tokens_unless_noise_is_renewed() -> None:
    clean, zero = np.array([0.3, -2.7, 5e-4], np.float32), np.zeros(3, np.float32)
    ours, _ = _pair({"shift": 3.0}, 20)
    sample = clean
    for index in range(20):
        sample = ours.step(zero, index, sample)
    assert np.array_equal(sample, clean)
    ours, _ = _pair({"stochastic_sampling": True}, None, distilled=DISTILLED)
    assert not np.array_equal(ours.step(zero, 0, clean, zero), clean)  # put back by the caller


def test_noise_is_needed_except_in_the_last_step() -> None:
    ours, _ = _pair({"stochastic_sampling": True}, 2)
    sample = np.ones(3, np.float32)
    with pytest.raises(SchedulerError, match="needs noise"):
        ours.step(sample, 0, sample)
    with pytest.raises(SchedulerError, match="noise does not fit"):
        ours.step(sample, 0, sample, np.ones(2, np.float32))
    sample = ours.step(sample, 0, sample, sample)  # the refused calls have not counted
    ours.step(sample, 1, sample)


def test_a_distilled_checkpoint_fixes_steps_and_guidance() -> None:
    ours, _ = _pair({"stochastic_sampling": True}, None, distilled=DISTILLED)
    ours.set_timesteps(4)
    assert len(ours.timesteps) == 4
    with pytest.raises(ConfigError, match="number of steps is fixed"):
        ours.set_timesteps(8)
    check_guidance_scale(ours, 1.0)
    with pytest.raises(ConfigError, match="distilled"):
        check_guidance_scale(ours, 6.0)
    free, _ = _pair({}, 4)
    check_guidance_scale(free, 6.0)
    with pytest.raises(ConfigError, match="num_inference_steps"):
        free.set_timesteps(None)


@pytest.mark.parametrize("sigmas", [(), (0.5, 0.9), (1.5, 0.5), (1.0, 0.0), (1.0, float("nan"))])
def test_wrong_distilled_sigmas_are_refused(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="distilled_sigmas"):
        FlowMatchEulerDiscreteScheduler(FlowMatchEulerConfig(), distilled_sigmas=sigmas)


def test_mu_is_needed_where_it_is_read_and_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="no effect"):
        _pair({}, 4, mu=1.0)
    with pytest.raises(ConfigError, match="needs mu"):
        _pair({"use_dynamic_shifting": True}, 4)

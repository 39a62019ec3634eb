"""UniPC equals diffusers' step by step, over whole runs, and exactly where diffusers is in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError, SchedulerError
from motrt.runtime.schedulers import UniPCConfig, UniPCMultistepScheduler, unipc

SHAPE = (2, 3, 4, 4)
BAR = 1e-6  # of the largest absolute value of the sample
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
KARRAS = {**FLOW, "use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.147}
CONFIGS: dict[str, dict[str, Any]] = {
    "karras": KARRAS,
    "flow": {**FLOW, "flow_shift": 10.0},
    "native": {**FLOW, "flow_shift": 3.0},
    "epsilon": {},
    "v": {"prediction_type": "v_prediction", "beta_schedule": "scaled_linear"},
    "sample": {"prediction_type": "sample", "beta_schedule": "squaredcos_cap_v2"},
}


def _pair(
    name: str, num_steps: int, *, in_float64: bool = False, **options: Any
) -> tuple[UniPCMultistepScheduler, Any]:
    """Ours and diffusers', their σ the same (see test_sigmas for how far they are anyway)."""
    config = {**CONFIGS[name], **options}
    is_native = name == "native"
    ours = UniPCMultistepScheduler(UniPCConfig.from_dict(config), is_native=is_native)
    ours.set_timesteps(num_steps)
    theirs = diffusers.UniPCMultistepScheduler(**config)
    theirs.set_timesteps(num_steps)
    # Where the first two timesteps are equal, diffusers starts at the second.
    theirs.set_begin_index(0)
    theirs.sigmas = torch.from_numpy(ours.sigmas.astype(np.float64 if in_float64 else np.float32))
    theirs.timesteps = torch.from_numpy(ours.timesteps.copy())
    return ours, theirs


def _network(seed: int) -> Any:
    """A smooth function of a sample, different at each seed: what a trained network looks like."""
    random = np.random.RandomState(seed)
    mix, data = random.standard_normal((4, 4)) / 3, random.standard_normal(SHAPE)
    return lambda sample: (sample - np.tanh(sample @ mix + data)).astype(np.float32)


def _their_step(theirs: Any, prediction: np.ndarray, index: int, sample: np.ndarray) -> np.ndarray:
    dtype = theirs.sigmas.dtype
    try:
        output = theirs.step(
            torch.from_numpy(prediction).to(dtype),
            theirs.timesteps[index],
            torch.from_numpy(sample).to(dtype),
        )
    except torch.linalg.LinAlgError:  # order 3 at σ = 0
        return np.full_like(sample, np.nan)
    return np.asarray(output.prev_sample.float().numpy())


def _step_errors(ours: UniPCMultistepScheduler, theirs: Any, *, own: bool = False) -> list[float]:
    """Relative errors of each step; ``own``: each side goes on from its own sample."""
    network = _network(1)
    sample = np.random.RandomState(0).standard_normal(SHAPE).astype(np.float32)
    their_sample, errors = sample, []
    for index in range(len(ours.timesteps)):
        want = _their_step(theirs, network(their_sample), index, their_sample)
        sample = ours.step(network(sample), index, sample)
        assert np.isfinite(sample).all()
        largest = float(np.abs(want).max())
        error = float(np.abs(sample - want).max()) if np.isfinite(want).all() else math.nan
        errors.append(error / largest)
        their_sample = want
        sample = sample if own else want
    return errors


@pytest.mark.parametrize("solver_type", ["bh2", "bh1"])
@pytest.mark.parametrize("solver_order", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 10, 35])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_diffusers(
    name: str, num_steps: int, solver_order: int, solver_type: str
) -> None:
    options: dict[str, Any] = {"solver_order": solver_order, "solver_type": solver_type}
    errors = _step_errors(*_pair(name, num_steps, **options))
    if solver_type == "bh1":  # diffusers multiplies infinity by 0 in the last step
        assert math.isnan(errors.pop())
    # Two steps from σ 157 to 0 with ε: diffusers' own rounding, divided by α = 0.006.
    bar = 4 * BAR if name == "epsilon" and num_steps == 2 else BAR
    assert max(errors, default=0.0) <= bar


@pytest.mark.parametrize("solver_order", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [2, 35, 50, 200])
@pytest.mark.parametrize("name", CONFIGS)
def test_runs_equal_diffusers_in_float64(name: str, num_steps: int, solver_order: int) -> None:
    """The same σ in double: what remains elsewhere is the rounding of diffusers' float32."""
    pair = _pair(name, num_steps, in_float64=True, solver_order=solver_order)
    # One unit in the last place of float32, for the history of the two differs by float64 noise.
    assert max(_step_errors(*pair, own=True)) <= 2**-23


@pytest.mark.parametrize("name", ["karras", "flow", "native"])
def test_whole_runs_equal_diffusers(name: str) -> None:
    assert max(_step_errors(*_pair(name, 35), own=True)) <= BAR


@given(
    num_steps=st.integers(1, 40),
    shift=st.floats(1, 12),
    solver_order=st.integers(1, 3),
    lower_order_final=st.booleans(),
    disabled=st.lists(st.integers(0, 10), max_size=3, unique=True),
    is_bh1=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_options_equal_diffusers(
    num_steps: int,
    shift: float,
    solver_order: int,
    lower_order_final: bool,
    disabled: list[int],
    is_bh1: bool,
) -> None:
    ours, theirs = _pair(
        "flow",
        num_steps,
        in_float64=True,
        flow_shift=shift,
        solver_order=solver_order,
        solver_type="bh1" if is_bh1 else "bh2",
        lower_order_final=lower_order_final,
        disable_corrector=disabled,
    )
    errors = _step_errors(ours, theirs)
    if math.isnan(errors[-1]):
        # diffusers' last step at σ = 0: order above 1, or bh1. Ours is the prediction itself.
        assert is_bh1 or not lower_order_final
        errors.pop()
    assert max(errors, default=0.0) <= 2**-23


@pytest.mark.parametrize("solver_type", ["bh2", "bh1"])
@pytest.mark.parametrize("lower_order_final", [True, False])
def test_the_last_step_returns_the_data_prediction(
    solver_type: str, lower_order_final: bool
) -> None:
    options: dict[str, Any] = {"solver_type": solver_type, "lower_order_final": lower_order_final}
    scheduler, _ = _pair("karras", 4, **options)
    network = _network(1)
    sample = np.random.RandomState(0).standard_normal(SHAPE).astype(np.float32)
    for index in range(4):
        velocity, before = network(sample), sample
        sample = scheduler.step(velocity, index, before)
    x0 = before - scheduler.sigmas[3].astype(np.float64) * velocity
    assert np.array_equal(sample, x0.astype(np.float32))


@given(
    name=st.sampled_from(["karras", "flow", "native"]),
    num_steps=st.integers(1, 60),
    solver_order=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_a_velocity_of_zero_keeps_clean_tokens(
    name: str, num_steps: int, solver_order: int, seed: int
) -> None:
    scheduler, _ = _pair(name, num_steps, solver_order=solver_order)
    random = np.random.RandomState(seed)
    clean = (3 * random.standard_normal(40)).astype(np.float32)
    sample = clean
    for index in range(num_steps):
        sample = scheduler.step(np.zeros_like(clean), index, sample)
        assert np.array_equal(sample, clean)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1, 2, 3, 4, 5)])
def test_any_shape_is_stepped(shape: tuple[int, ...]) -> None:
    scheduler, _ = _pair("karras", 3)
    sample = np.ones(shape, np.float32)
    for index in range(3):
        sample = scheduler.step(np.full(shape, 0.5, np.float32), index, sample)
        assert sample.shape == shape
        assert sample.dtype == np.float32


def test_inputs_are_not_changed() -> None:
    scheduler, _ = _pair("karras", 3)
    sample, velocity = np.ones(4, np.float32), np.full(4, 0.5, np.float32)
    for index in range(3):
        scheduler.step(velocity, index, sample)
    assert sample.tolist() == [1] * 4
    assert velocity.tolist() == [0.5] * 4


def test_a_clone_goes_its_own_way() -> None:
    first, _ = _pair("karras", 6)
    network, sample = _network(1), np.ones(SHAPE, np.float32)
    for index in range(3):
        sample = first.step(network(sample), index, sample)
    second = first.clone()
    other = second.step(network(sample), 3, sample)
    for index in range(4, 6):  # must not reach the first's history
        other = second.step(-other, index, other)
    alone = first.step(network(sample), 3, sample)
    again, _ = _pair("karras", 6)
    sample = np.ones(SHAPE, np.float32)
    for index in range(4):
        sample = again.step(network(sample), index, sample)
    assert np.array_equal(alone, sample)


def test_a_new_schedule_forgets_the_history() -> None:
    used, _ = _pair("karras", 4)
    network, start = _network(1), np.ones(SHAPE, np.float32)
    runs = []
    for _ in range(2):
        used.set_timesteps(4)
        sample = start
        for index in range(4):
            sample = used.step(network(sample), index, sample)
        runs.append(sample)
    assert np.array_equal(runs[0], runs[1])


def test_steps_out_of_order_are_refused() -> None:
    scheduler = UniPCMultistepScheduler(UniPCConfig.from_dict(KARRAS))
    sample = np.ones(3, np.float32)
    with pytest.raises(SchedulerError, match="no schedule yet"):
        scheduler.step(sample, 0, sample)
    with pytest.raises(SchedulerError, match="no schedule yet"):
        _ = scheduler.sigmas
    scheduler.set_timesteps(2)
    with pytest.raises(SchedulerError, match="expected index 0 of 2"):
        scheduler.step(sample, 1, sample)
    with pytest.raises(SchedulerError, match="does not fit"):
        scheduler.step(sample[:1], 0, sample)
    scheduler.step(sample, 0, sample)
    scheduler.step(sample, 1, sample)
    with pytest.raises(SchedulerError, match="no step after 2"):
        scheduler.step(sample, 2, sample)


@pytest.mark.parametrize("num_steps", [0, -1, None, 2.5, True, "4"])
def test_a_wrong_number_of_steps_is_refused(num_steps: Any) -> None:
    scheduler = UniPCMultistepScheduler(UniPCConfig.from_dict(KARRAS))
    with pytest.raises(ConfigError, match="num_inference_steps"):
        scheduler.set_timesteps(num_steps)


def test_mu_is_needed_where_it_is_read_and_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="no effect"):
        UniPCMultistepScheduler(UniPCConfig.from_dict(FLOW)).set_timesteps(4, mu=1.0)
    config = UniPCConfig.from_dict({**FLOW, "use_dynamic_shifting": True})
    with pytest.raises(ConfigError, match="needs mu"):
        UniPCMultistepScheduler(config).set_timesteps(4)


def _swapped(rho: list[float], d: list[Any]) -> Any:
    return sum(r * d_k for r, d_k in zip(rho, reversed(d), strict=True))


def _newest_only(rho: list[float], d: list[Any]) -> Any:
    return rho[-1] * d[-1]


@pytest.mark.parametrize("broken", [_swapped, _newest_only])
def test_mixed_up_differences_exceed_the_tolerance(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unipc, "_weighted", broken)
    assert max(_step_errors(*_pair("karras", 35))) > 100 * BAR


def test_a_missing_corrector_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniPCMultistepScheduler, "_correct", lambda self, i, m: self._last_sample)
    assert max(_step_errors(*_pair("karras", 35))) > 100 * BAR

"""The denoise loop over formulas in place of networks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.tensors import Array
from motrt.runtime import Guidance, Scheduler, StepState, denoise, scheduler_from_config

STEPS = 6
VISION = np.random.RandomState(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
ACTION = np.random.RandomState(1).standard_normal((5, 3)).astype(np.float32)
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
RENEWING = {**EULER, "stochastic_sampling": True}
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


class Formula:
    """A velocity that depends on latents, timestep and prompt; counts its calls."""

    def __init__(self, prompt: float) -> None:
        self.prompt = prompt
        self.timesteps: list[float] = []

    def __call__(self, latents: Mapping[str, Array], timestep: float) -> dict[str, Array]:
        self.timesteps.append(timestep)
        shift = np.float32(self.prompt + timestep / 1000)
        return {name: np.tanh(array + shift) for name, array in latents.items()}


def schedule(config: dict[str, Any] = UNIPC, steps: int = STEPS) -> Scheduler:
    made = scheduler_from_config(config)
    made.set_timesteps(steps)
    return made


def run(
    guidance: Guidance = Guidance(1.0),  # noqa: B008 (frozen)
    *,
    config: dict[str, Any] = UNIPC,
    latents: dict[str, Array] | None = None,
    positive: Any = None,
    negative: Any = None,
    noisy: dict[str, Array] | None = None,
    clean: dict[str, Array] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Array]:
    latents = {"vision": VISION} if latents is None else latents
    first = schedule(config)
    random = np.random.RandomState(seed)
    return denoise(
        positive or Formula(0.3),
        negative,
        {name: first if i == 0 else first.clone() for i, name in enumerate(latents)},
        latents,
        guidance,
        noisy=noisy or {name: np.ones((1,) * a.ndim, np.float32) for name, a in latents.items()},
        clean=clean or {name: np.zeros_like(array) for name, array in latents.items()},
        noise=lambda shape: random.standard_normal(shape).astype(np.float32),
        **options,
    )


def test_the_loop_is_the_schedule_and_the_formula() -> None:
    """Euler written out: x ← x + (σ' - σ) v."""
    sigmas, sample = schedule(EULER).sigmas.astype(np.float64), VISION.astype(np.float64)
    for sigma, following in itertools.pairwise(sigmas):
        sample = sample + (following - sigma) * np.tanh(sample + 0.3 + sigma)
    np.testing.assert_allclose(run(config=EULER)["vision"], sample, atol=1e-5)


def test_guidance_is_the_formula_and_nothing_at_1() -> None:
    plus, minus = (np.array([number], np.float32) for number in (3.0, 1.0))
    assert Guidance(4.0).combine({"a": plus}, {"a": minus}) == {"a": np.float32(9.0)}
    positive, negative = Formula(0.3), Formula(-0.5)
    guided = run(Guidance(4.0), positive=positive, negative=negative)
    assert positive.timesteps == negative.timesteps == schedule().timesteps.tolist()
    plain = run(negative=(unused := Formula(-0.5)))
    assert unused.timesteps == []
    assert np.abs(guided["vision"] - plain["vision"]).max() > 0.1


def test_an_interval_is_exclusive() -> None:
    timesteps = schedule().timesteps.tolist()
    negative = Formula(-0.5)
    run(Guidance(4.0, (timesteps[4], timesteps[1])), negative=negative)
    assert negative.timesteps == timesteps[2:4]
    assert not Guidance(4.0, (10.0, 20.0)).is_on(20.0)
    assert not Guidance(1.0, (10.0, 20.0)).is_on(15.0)


def test_modalities_do_not_share_a_solvers_history() -> None:
    both = run(latents={"vision": VISION, "action": ACTION})
    for name, alone in (("vision", VISION), ("action", ACTION)):
        np.testing.assert_array_equal(both[name], run(latents={name: alone})[name])


@pytest.mark.parametrize("config", [UNIPC, EULER, RENEWING])
def test_what_is_clean_stays_to_the_bit(config: dict[str, Any]) -> None:
    mask = np.ones((1, 3, 1, 1), np.float32)
    mask[:, 1] = 0
    clean = np.full_like(VISION, 0.7)
    seen: list[Array] = []

    def note(step: int, timestep: float, state: StepState) -> None:
        seen.append(state.latents["vision"][:, 1].copy())

    made = run(config=config, noisy={"vision": mask}, clean={"vision": clean}, callback=note)
    for array in [*seen, made["vision"][:, 1]]:
        np.testing.assert_array_equal(array, clean[:, 1])
    assert np.abs(made["vision"][:, 0] - 0.7).max() > 0.1


def test_a_modality_without_scheduler_is_left_alone() -> None:
    first = schedule()
    made = denoise(
        Formula(0.3),
        None,
        {"vision": first},
        {"vision": VISION, "action": ACTION},
        Guidance(1.0),
        noisy={"vision": np.ones((1, 1, 1, 1), np.float32)},
        clean={"vision": np.zeros_like(VISION)},
        noise=np.zeros,
    )
    np.testing.assert_array_equal(made["action"], ACTION)


def test_fresh_noise_goes_to_schedulers_that_want_it() -> None:
    first = run(config=RENEWING, seed=1)["vision"]
    np.testing.assert_array_equal(first, run(config=RENEWING, seed=1)["vision"])
    assert np.abs(first - run(config=RENEWING, seed=2)["vision"]).max() > 0.01
    np.testing.assert_array_equal(run(seed=1)["vision"], run(seed=2)["vision"])


def test_what_was_given_is_not_modified() -> None:
    latents = {"vision": VISION.copy()}

    def edit(step: int, timestep: float, state: StepState) -> None:
        state.latents["vision"] *= np.float32(0.5)

    run(latents=latents, callback=edit)
    np.testing.assert_array_equal(latents["vision"], VISION)


def test_a_callback_sees_each_step_and_steers() -> None:
    calls: list[tuple[int, float]] = []

    def halve(step: int, timestep: float, state: StepState) -> None:
        calls.append((step, timestep))
        if step == 2:
            state.latents = {"vision": state.latents["vision"].astype(np.float64) / 2}

    steered = run(callback=halve)["vision"]
    assert calls == list(enumerate(schedule().timesteps.tolist()))
    assert steered.dtype == np.float32
    assert np.abs(steered - run()["vision"]).max() > 0.1


def test_a_callback_stops() -> None:
    seen: list[Array] = []

    def stop(step: int, timestep: float, state: StepState) -> None:
        seen.append(state.latents["vision"].copy())
        state.should_stop = step == 2

    stopped = run(callback=stop)["vision"]
    assert len(seen) == 3
    np.testing.assert_array_equal(stopped, seen[-1])


@pytest.mark.parametrize(
    "left",
    [
        {},
        {"vision": VISION[:, :1]},
        {"vision": VISION, "sound": VISION},
        {"sound": VISION},
    ],
    ids=["nothing", "fewer frames", "one more", "another"],
)
def test_a_callback_cannot_change_what_is_denoised(left: dict[str, Array]) -> None:
    def replace(step: int, timestep: float, state: StepState) -> None:
        state.latents = left

    def edit(step: int, timestep: float, state: StepState) -> None:
        state.latents.clear()
        state.latents.update(left)

    for callback in (replace, edit):
        with pytest.raises(ConfigError, match="callback's latents do not fit after step 0"):
            run(callback=callback)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_callbacks_nan_is_named_also_after_the_last_step(value: float) -> None:
    def spoil(step: int, timestep: float, state: StepState) -> None:
        if step == STEPS - 1:
            state.latents["vision"][0, 0, 0, 0] = value

    with pytest.raises(ExecutionError, match=f"vision latents .* 1 NaN .* at step {STEPS - 1}"):
        run(callback=spoil)


def test_a_prediction_that_is_not_finite_is_named() -> None:
    class Bad(Formula):
        def __call__(self, latents: Mapping[str, Array], timestep: float) -> dict[str, Array]:
            made = super().__call__(latents, timestep)
            if len(self.timesteps) == 4:
                made["action"][:2, 0] = np.nan
            return made

    both = {"vision": VISION, "action": ACTION}
    with pytest.raises(ExecutionError, match=r"action prediction .* 2 NaN .* at step 3"):
        run(latents=both, positive=Bad(0.3))
    with pytest.raises(ExecutionError, match=r"action prediction .* at step 3"):
        run(Guidance(4.0), latents=both, negative=Bad(0.3))

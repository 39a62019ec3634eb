"""DDPM and DDIM equal diffusers' step by step with the same noise."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from hypothesis import example, given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError, SchedulerError
from motrt.runtime.schedulers import DDIMConfig, DDIMScheduler, DDPMConfig, DDPMScheduler, ddim

SHAPE = (2, 3, 4, 4)
BAR = 1e-6
OPTIONS: dict[str, Any] = {
    "beta_schedule": st.sampled_from(["linear", "scaled_linear", "squaredcos_cap_v2"]),
    "prediction_type": st.sampled_from(["epsilon", "sample", "v_prediction"]),
    "timestep_spacing": st.sampled_from(["leading", "trailing", "linspace"]),
    "clip_sample": st.booleans(),
    "clip_sample_range": st.sampled_from([1.0, 2.5]),
}
DDPM = st.fixed_dictionaries(
    {**OPTIONS, "variance_type": st.sampled_from(["fixed_small", "fixed_large"])}
)
DDIM = st.fixed_dictionaries(
    {**OPTIONS, "set_alpha_to_one": st.booleans(), "steps_offset": st.sampled_from([0, 1])}
)
STEPS = st.sampled_from([1, 2, 4, 10, 20, 35, 50, 100])
SETTINGS = settings(deadline=None, max_examples=60)


def _errors(ours: Any, theirs: Any, num_steps: int, *, eta: float | None = None) -> list[float]:
    """Relative errors of each step from diffusers' own sample."""
    ours.set_timesteps(num_steps)
    theirs.set_timesteps(num_steps)
    assert ours.timesteps.dtype == np.int64
    assert np.array_equal(ours.timesteps, theirs.timesteps.numpy())
    assert len(ours.sigmas) == num_steps + 1
    sample, errors = torch.randn(SHAPE, generator=torch.Generator().manual_seed(99)), []
    for index, timestep in enumerate(theirs.timesteps):
        output = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 + index))
        noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(index))
        stepped = {"model_output": output, "timestep": timestep, "sample": sample}
        if eta is None:
            stepped["generator"] = torch.Generator().manual_seed(index)
        else:
            stepped |= {"eta": eta, "variance_noise": noise}
        want = theirs.step(**stepped).prev_sample
        got = ours.step(output.numpy(), index, sample.numpy(), noise.numpy())
        assert got.dtype == np.float32
        assert np.isfinite(got).all()
        if not want.isfinite().all():  # see the test of the direction below
            sample = torch.from_numpy(got)
            continue
        largest = float(want.abs().max())
        error = float(np.abs(got - want.numpy()).max()) - _rounding(theirs, want, stepped)
        errors.append(max(error, 0.0) / largest)
        sample = want / max(1.0, largest / 4)  # random predictions blow up; a network's do not
    return errors or [0.0]


def _rounding(theirs: Any, want: Any, stepped: dict[str, Any]) -> float:
    """How far DDIM's float32 step is from the same step in float64.

    Near η = 1 the direction's 1 - ᾱ' - σ² is a small difference of large numbers.
    """
    if "variance_noise" not in stepped:
        return 0.0
    exact = copy.deepcopy(theirs)
    exact.alphas_cumprod = theirs.alphas_cumprod.double()
    exact.final_alpha_cumprod = theirs.final_alpha_cumprod.double()
    doubled = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in stepped.items()
    }
    return float((exact.step(**doubled).prev_sample - want).abs().max())


@given(config=DDPM, num_steps=STEPS)
@SETTINGS
def test_ddpm_steps_equal_diffusers(config: dict[str, Any], num_steps: int) -> None:
    ours = DDPMScheduler(DDPMConfig.from_dict(config))
    assert ours.is_stochastic
    assert max(_errors(ours, diffusers.DDPMScheduler(**config), num_steps)) <= BAR


CANCELS = {
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
    "timestep_spacing": "trailing",
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "set_alpha_to_one": False,
    "steps_offset": 0,
}


@given(config=DDIM, num_steps=STEPS, eta=st.sampled_from([0.0, 0.5, 1.0]))
@example(config=CANCELS, num_steps=2, eta=1.0)
@SETTINGS
def test_ddim_steps_equal_diffusers(config: dict[str, Any], num_steps: int, eta: float) -> None:
    ours = DDIMScheduler(DDIMConfig.from_dict(config), eta=eta)
    assert ours.is_stochastic == (eta > 0)
    theirs = diffusers.DDIMScheduler(**config)
    assert max(_errors(ours, theirs, num_steps, eta=eta)) <= BAR


def test_a_direction_below_zero_by_rounding_is_none() -> None:
    """√(1 - ᾱ' - σ²) at η = 1: NaN in diffusers, for both ᾱ are next to nothing."""
    config = {
        "beta_schedule": "squaredcos_cap_v2",
        "timestep_spacing": "trailing",
        "clip_sample": False,
        "set_alpha_to_one": False,
    }
    ours, theirs = (
        DDIMScheduler(DDIMConfig.from_dict(config), eta=1.0),
        diffusers.DDIMScheduler(**config),
    )
    ours.set_timesteps(1)
    theirs.set_timesteps(1)
    sample = torch.ones(SHAPE)
    assert theirs.step(sample, theirs.timesteps[0], sample, eta=1.0).prev_sample.isnan().all()
    ones = np.ones(SHAPE, np.float32)
    assert np.isfinite(ours.step(ones, 0, ones, ones)).all()


def test_ddpm_over_all_timesteps_equals_diffusers() -> None:
    ours = DDPMScheduler(DDPMConfig(clip_sample=False))
    theirs = diffusers.DDPMScheduler(clip_sample=False)
    assert max(_errors(ours, theirs, 1000)) <= BAR


def test_another_previous_timestep_exceeds_the_tolerance() -> None:
    """DDIM counts back; taking the next of the list is right for leading alone."""
    config = {"timestep_spacing": "linspace", "clip_sample": False}
    ours = DDIMScheduler(DDIMConfig.from_dict(config))
    theirs = diffusers.DDIMScheduler(**config)
    assert max(_errors(ours, theirs, 7)) <= BAR
    theirs.config["timestep_spacing"] = "leading"
    ours.set_timesteps(7)
    sample = torch.ones(SHAPE)
    theirs.set_timesteps(7)
    want = theirs.step(sample, ours.timesteps[0], sample).prev_sample.numpy()
    assert np.abs(ours.step(sample.numpy(), 0, sample.numpy()) - want).max() <= BAR * want.max()
    ours.set_timesteps(7)
    ours.config = DDIMConfig.from_dict({**config, "num_train_timesteps": 1200})
    wrong = ours.step(sample.numpy(), 0, sample.numpy())
    assert np.abs(wrong - want).max() > 100 * BAR * want.max()


def test_data_for_noise_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddim, "predicted_x0", lambda kind, output, x, alpha_bar: output)
    ours = DDIMScheduler(DDIMConfig(clip_sample=False))
    assert max(_errors(ours, diffusers.DDIMScheduler(clip_sample=False), 10)) > 100 * BAR


def test_noise_is_needed_except_at_timestep_0() -> None:
    scheduler = DDPMScheduler(DDPMConfig())
    scheduler.set_timesteps(2)
    sample = np.ones(3, np.float32)
    with pytest.raises(SchedulerError, match="needs noise"):
        scheduler.step(sample, 0, sample)
    sample = scheduler.step(sample, 0, sample, sample)
    scheduler.step(sample, 1, sample)
    plain = DDIMScheduler(DDIMConfig())
    plain.set_timesteps(2)
    plain.step(sample, 0, sample)


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
def test_a_wrong_eta_is_refused(eta: float) -> None:
    with pytest.raises(ConfigError, match="eta"):
        DDIMScheduler(DDIMConfig(), eta=eta)


def test_wrong_numbers_of_steps_are_refused() -> None:
    for scheduler in (DDPMScheduler(DDPMConfig()), DDIMScheduler(DDIMConfig())):
        with pytest.raises(ConfigError, match="1 to 1000"):
            scheduler.set_timesteps(1001)
        with pytest.raises(ConfigError, match="mu"):
            scheduler.set_timesteps(10, mu=1.0)
    offset = DDIMScheduler(DDIMConfig(steps_offset=1))
    with pytest.raises(ConfigError, match="from 1000"):  # diffusers: IndexError in the first step
        offset.set_timesteps(1000)

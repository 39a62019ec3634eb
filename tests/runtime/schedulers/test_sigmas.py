"""σ equal diffusers' float32 values bit for bit, and timesteps equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers import DDIMConfig, DDPMConfig, UniPCConfig
from motrt.runtime.schedulers import sigmas as grids
from motrt.runtime.schedulers.betas import alphas_cumprod, betas, edm_sigmas, spread_timesteps
from motrt.runtime.schedulers.unipc_schedule import unipc_schedule
from omni_fixtures.configs import SCHEDULERS

STEPS = [1, 2, 4, 10, 20, 35, 50, 1000]
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
KARRAS = {**FLOW, "use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.147}
BETAS = ["linear", "scaled_linear", "squaredcos_cap_v2"]
SETTINGS = settings(deadline=None, max_examples=60)


def _unipc(
    config: dict[str, Any],
    num_steps: int,
    *,
    native: bool = False,
    mu: float | None = None,
    correct_roots: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """σ and timesteps by diffusers, set as the Cosmos pipeline sets them."""
    kwargs = {key: value for key, value in config.items() if key != "_class_name"}
    scheduler = diffusers.UniPCMultistepScheduler(**kwargs)
    if correct_roots:
        scheduler.alphas_cumprod = scheduler.alphas_cumprod.numpy()
    arguments: dict[str, Any] = {}
    if native:
        first = 1.0 - 1.0 / scheduler.config.num_train_timesteps
        arguments["sigmas"] = np.linspace(first, 0.0, num_steps + 1)[:-1]
    if mu is not None:
        arguments["mu"] = mu
    scheduler.set_timesteps(num_steps, **arguments)
    return scheduler.sigmas.numpy(), scheduler.timesteps.numpy()


def _equal(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_published_schedules(kind: str, num_steps: int) -> None:
    native = kind == "edge-like"
    options = UniPCConfig.from_dict(SCHEDULERS[kind])
    got = unipc_schedule(options, num_steps, is_native=native)
    assert _equal(got, _unipc(SCHEDULERS[kind], num_steps, native=native))


@given(
    num_steps=st.one_of(st.sampled_from(STEPS), st.integers(1, 200)),
    shift=st.one_of(st.sampled_from([1.0, 3.0, 5.0, 10.0]), st.floats(0.5, 20)),
    native=st.booleans(),
    total=st.sampled_from([1000, 500, 1234]),
)
@SETTINGS
def test_flow_schedules(num_steps: int, shift: float, native: bool, total: int) -> None:
    config = {**FLOW, "flow_shift": shift, "num_train_timesteps": total}
    got = unipc_schedule(UniPCConfig.from_dict(config), num_steps, is_native=native)
    assert _equal(got, _unipc(config, num_steps, native=native))


@given(
    num_steps=st.integers(1, 200),
    low=st.floats(0.01, 1),
    high=st.floats(2, 300),
    is_flow=st.booleans(),
)
@SETTINGS
def test_karras_schedules(num_steps: int, low: float, high: float, is_flow: bool) -> None:
    config = {**KARRAS, "sigma_min": low, "sigma_max": high, "use_flow_sigmas": is_flow}
    got = unipc_schedule(UniPCConfig.from_dict(config), num_steps)
    assert _equal(got, _unipc(config, num_steps))


@given(
    num_steps=st.integers(2, 100),
    mu=st.floats(0.1, 3),
    kind=st.sampled_from(["exponential", "linear"]),
    terminal=st.sampled_from([None, 0.02, 0.1]),
)
@SETTINGS
def test_schedules_shifted_by_resolution(
    num_steps: int, mu: float, kind: str, terminal: float | None
) -> None:
    config = {
        **FLOW,
        "use_dynamic_shifting": True,
        "time_shift_type": kind,
        "shift_terminal": terminal,
    }
    got = unipc_schedule(UniPCConfig.from_dict(config), num_steps, mu=mu)
    assert _equal(got, _unipc(config, num_steps, mu=mu))


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10, 20, 35, 50, 999])
@pytest.mark.parametrize("spacing", ["linspace", "leading", "trailing"])
@pytest.mark.parametrize("beta_schedule", BETAS)
def test_diffusion_schedules(beta_schedule: str, spacing: str, num_steps: int) -> None:
    """With roots by NumPy; torch's, where MKL takes them, are not correctly rounded."""
    config = {"beta_schedule": beta_schedule, "timestep_spacing": spacing}
    got = unipc_schedule(UniPCConfig.from_dict(config), num_steps)
    assert _equal(got, _unipc(config, num_steps, correct_roots=True))
    as_installed = _unipc(config, num_steps)
    assert np.array_equal(got[1], as_installed[1])
    np.testing.assert_array_max_ulp(got[0], as_installed[0], maxulp=2)


@pytest.mark.parametrize("num_steps", [1, 2, 10, 35, 200])
@pytest.mark.parametrize("option", ["use_karras_sigmas", "use_exponential_sigmas"])
@pytest.mark.parametrize("beta_schedule", BETAS)
def test_diffusion_schedules_in_sigma(beta_schedule: str, option: str, num_steps: int) -> None:
    config = {"beta_schedule": beta_schedule, option: True}
    got = unipc_schedule(UniPCConfig.from_dict(config), num_steps)
    assert _equal(got, _unipc(config, num_steps, correct_roots=True))


@given(
    schedule=st.sampled_from(BETAS),
    total=st.integers(2, 2000),
    start=st.floats(1e-5, 1e-3),
    end=st.floats(2e-3, 0.03),
)
@SETTINGS
def test_betas_and_their_product_equal_torch(
    schedule: str, total: int, start: float, end: float
) -> None:
    kwargs = {
        "beta_schedule": schedule,
        "num_train_timesteps": total,
        "beta_start": start,
        "beta_end": end,
    }
    theirs = diffusers.DDPMScheduler(**kwargs)
    config = DDPMConfig.from_dict(kwargs)
    assert np.array_equal(betas(config), theirs.betas.numpy())
    assert np.array_equal(alphas_cumprod(config), theirs.alphas_cumprod.numpy())
    assert edm_sigmas(alphas_cumprod(config)).dtype == np.float32


def test_trained_betas_are_taken() -> None:
    values = [0.001 * (1 + i) for i in range(20)]
    theirs = diffusers.DDIMScheduler(num_train_timesteps=20, trained_betas=values)
    config = DDIMConfig.from_dict({"num_train_timesteps": 20, "trained_betas": values})
    assert np.array_equal(alphas_cumprod(config), theirs.alphas_cumprod.numpy())


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("spacing", ["linspace", "leading", "trailing"])
def test_spread_timesteps_equal_diffusers_for_every_number_of_steps(
    spacing: str, offset: int
) -> None:
    options = {"timestep_spacing": spacing, "steps_offset": offset}
    ours = DDPMConfig.from_dict(options)
    ddpm, ddim = diffusers.DDPMScheduler(**options), diffusers.DDIMScheduler(**options)
    refused = []
    for num_steps in range(1, 1001):
        ddpm.set_timesteps(num_steps)
        ddim.set_timesteps(num_steps)
        assert torch.equal(ddpm.timesteps, ddim.timesteps)
        want = ddpm.timesteps.numpy()
        try:
            assert np.array_equal(spread_timesteps(ours, num_steps), want)
        except ConfigError:
            assert len(want) != num_steps or want.max() > 999 or want.min() < 0
            refused.append(num_steps)
    # There diffusers takes one step too many, at timestep -1; or fails, at timestep 1000.
    assert refused == [] or refused[0] == {"trailing": 61, "leading": 1000}[spacing]


def _in_float32(num_steps: int, total: int) -> np.ndarray:
    return np.linspace(1, 1 / total, num_steps + 1, dtype=np.float32)[:-1]


def _with_the_end(num_steps: int, total: int) -> np.ndarray:
    return np.linspace(1, 1 / total, num_steps)


@pytest.mark.parametrize("broken", [_in_float32, _with_the_end, grids.native_flow_sigmas])
def test_another_grid_is_not_equal(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**FLOW, "flow_shift": 3.0}
    want = _unipc(config, 35)
    assert _equal(unipc_schedule(UniPCConfig.from_dict(config), 35), want)
    monkeypatch.setattr("motrt.runtime.schedulers.unipc_schedule.flow_sigmas", broken)
    assert not _equal(unipc_schedule(UniPCConfig.from_dict(config), 35), want)


def test_a_sigma_that_is_off_in_the_last_bit_is_not_equal() -> None:
    sigmas, timesteps = unipc_schedule(UniPCConfig.from_dict(KARRAS), 35)
    want = _unipc(KARRAS, 35)
    assert _equal((sigmas, timesteps), want)
    off = sigmas.copy()
    off[17] = np.nextafter(off[17], np.float32(1))
    assert not _equal((off, timesteps), want)


@pytest.mark.parametrize(
    ("config", "num_steps"),
    [
        ({"timestep_spacing": "leading"}, 1000),  # all timesteps 0
        ({}, 1000),  # one timestep twice
        ({**FLOW, "shift_terminal": 0.02}, 1),  # 0 / 0
        ({**FLOW, "flow_shift": 1e9}, 10),  # 1 in float32, more than once
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused(
    config: dict[str, Any], num_steps: int
) -> None:
    with pytest.raises(ConfigError, match="noise levels"):
        unipc_schedule(UniPCConfig.from_dict(config), num_steps)

"""A checkpoint's files choose the scheduler; whatever would change the arithmetic unread is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from motrt.engines.errors import ConfigError
from motrt.runtime.schedulers import (
    SCHEDULER_CLASSES,
    DDIMScheduler,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    scheduler_from_config,
)
from omni_fixtures.configs import MODEL_INDEXES, SCHEDULERS

UNIPC = {"_class_name": "UniPCMultistepScheduler"}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
KARRAS = SCHEDULERS["nano-like"]
EDGE = SCHEDULERS["edge-like"]
FLOW = {**UNIPC, "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5}
DISTILLED = {"is_distilled": True, "distilled_sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625]}


def _sigmas(config: Any, pipeline: Any = None, **overrides: Any) -> list[float]:
    scheduler = scheduler_from_config(config, pipeline, **overrides)
    scheduler.set_timesteps(None if scheduler.fixed_guidance_scale else 35)
    return [round(sigma, 6) for sigma in scheduler.sigmas.tolist()]


def test_published_files_give_the_documented_schedules() -> None:
    nano = _sigmas(KARRAS, MODEL_INDEXES["nano-like"])
    assert nano[:3] == [0.995025, 0.994317, 0.993493]
    assert nano[34:] == [0.12816, 0.0]
    edge = _sigmas(EDGE, MODEL_INDEXES["edge-like"])
    assert edge[:3] == [0.999666, 0.989955, 0.979858]
    assert edge[34:] == [0.081004, 0.0]
    docs = _sigmas(KARRAS, MODEL_INDEXES["nano-like"], flow_shift=10, use_karras_sigmas=False)
    assert docs[:2] == [0.999999, 0.99707]
    assert docs[34] == 0.233377


def test_edge_is_native_by_its_class_and_by_its_pipeline() -> None:
    by_class = _sigmas(EDGE)
    plain = {**EDGE, "_class_name": "UniPCMultistepScheduler"}
    assert _sigmas(plain, {"use_native_flow_schedule": True}) == by_class
    assert _sigmas(plain) != by_class
    assert _sigmas({"_class_name": EDGE["_class_name"]}) == by_class


def test_an_empty_config_is_what_is_published_for_the_pipeline() -> None:
    assert _sigmas({}) == _sigmas(KARRAS)
    assert _sigmas({"_diffusers_version": "0.39.0"}, {}) == _sigmas(KARRAS)
    assert _sigmas({}, MODEL_INDEXES["edge-like"]) == _sigmas(EDGE)
    distilled = scheduler_from_config({}, DISTILLED)
    assert isinstance(distilled, FlowMatchEulerDiscreteScheduler)
    assert distilled.is_stochastic


def test_the_schedulers_own_shift_wins_over_the_pipelines() -> None:
    """diffusers reads native_flow_shift nowhere."""
    pipeline = {"use_native_flow_schedule": True, "native_flow_shift": 7.0}
    assert _sigmas({**FLOW, "flow_shift": 3.0}, pipeline) == _sigmas(EDGE)
    without = {key: value for key, value in FLOW.items() if key != "flow_shift"}
    assert _sigmas(without, pipeline) == _sigmas(FLOW, pipeline, flow_shift=7.0)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("UniPCMultistepScheduler", UniPCMultistepScheduler),
        ("FlowMatchEulerDiscreteScheduler", FlowMatchEulerDiscreteScheduler),
        ("DDPMScheduler", DDPMScheduler),
        ("DDIMScheduler", DDIMScheduler),
    ],
)
def test_every_default_config_that_diffusers_saves_is_read(name: str, cls: type) -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = getattr(diffusers, name)()
    scheduler = scheduler_from_config({"_class_name": name, **theirs.config})
    assert isinstance(scheduler, cls)
    scheduler.set_timesteps(10)
    theirs.set_timesteps(10)
    assert np.array_equal(scheduler.timesteps, theirs.timesteps.numpy())


def test_distilled_pipelines_fix_the_schedule() -> None:
    config = {**EULER, "shift": 1.0, "stochastic_sampling": True}
    scheduler = scheduler_from_config(config, DISTILLED)
    assert scheduler.fixed_guidance_scale == 1.0
    assert _sigmas(config, DISTILLED) == [1.0, 0.9375, 0.833333, 0.625, 0.0]
    free = scheduler_from_config(config, {**DISTILLED, "is_distilled": False})
    assert free.fixed_guidance_scale is None
    for wrong in ({"flow_shift": 3.0}, {"use_karras_sigmas": True}):
        with pytest.raises(ConfigError, match="schedule is fixed"):
            scheduler_from_config(config, DISTILLED, **wrong)
    with pytest.raises(ConfigError, match="schedule is fixed"):
        scheduler_from_config(KARRAS, DISTILLED)
    with pytest.raises(ConfigError, match="no distilled_sigmas"):
        scheduler_from_config(config, {"is_distilled": True})


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    for config in ({"_class_name": "HeunDiscreteScheduler"}, {"prediction_type": "epsilon"}):
        with pytest.raises(ConfigError, match="unknown class") as caught:
            scheduler_from_config(config)
        for name in SCHEDULER_CLASSES:
            assert name in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**UNIPC, "flow_shif": 3.0}, "nearest is 'flow_shift'"),
        ({**UNIPC, "shift": 3.0}, "unknown key"),
        ({**EULER, "flow_shift": 3.0}, "nearest is 'shift'"),
        ({"_class_name": "DDIMScheduler", "beta_stat": 0.1}, "nearest is 'beta_start'"),
        ({**UNIPC, "thresholding": True}, "thresholding is not implemented"),
        ({**UNIPC, "predict_x0": False}, "predict_x0 is not implemented"),
        ({**UNIPC, "solver_p": {}}, "solver_p is not implemented"),
        ({**UNIPC, "final_sigmas_type": "sigma_min"}, "final_sigmas_type is not implemented"),
        ({**UNIPC, "solver_type": "midpoint"}, "one of bh1, bh2"),
        ({**UNIPC, "use_beta_sigmas": True}, "use_beta_sigmas is not implemented"),
        ({**UNIPC, "prediction_type": "velocity"}, "flow_prediction"),
        ({**UNIPC, "solver_order": 4}, "1 to 3"),
        ({**UNIPC, "solver_order": 2.5}, "wrong type"),
        ({**UNIPC, "flow_shift": None}, "wrong type"),
        ({**UNIPC, "flow_shift": float("inf")}, "wrong type"),
        ({**UNIPC, "num_train_timesteps": 10**400}, "wrong type"),
        ({**UNIPC, "flow_shift": -1}, "flow_shift"),
        ({**UNIPC, "use_flow_sigmas": "yes"}, "wrong type"),
        ({**KARRAS, "sigma_max": 0.1}, "sigma_max"),
        ({**KARRAS, "use_exponential_sigmas": True}, "only one"),
        ({**FLOW, "use_exponential_sigmas": True}, "no flow sigmas"),
        ({**UNIPC, "shift_terminal": 0.1}, "shift_terminal"),
        ({**UNIPC, "disable_corrector": ["0"]}, "disable_corrector has the wrong type"),
        ({**UNIPC, "beta_schedule": "sigmoid"}, "squaredcos_cap_v2"),
        ({**UNIPC, "beta_end": 1.5}, "beta_end"),
        ({**UNIPC, "trained_betas": [0.1]}, "trained_betas"),
        ({**UNIPC, "beta_end": 0.9, "use_karras_sigmas": True}, "no signal"),
        ({**EULER, "invert_sigmas": True}, "invert_sigmas is not implemented"),
        ({**EULER, "shift": 0}, "shift"),
        ({"_class_name": "DDPMScheduler", "variance_type": "learned"}, "fixed_small"),
        ({"_class_name": "DDPMScheduler", "thresholding": True}, "thresholding"),
        ({"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}, "rescale_betas"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "flow_prediction"}, "epsilon"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_from_config(config).set_timesteps(10)


def test_public_keys_without_meaning_are_accepted() -> None:
    for extra in ({"clip_sample": False}, {"sample_max_value": 2.0}, {"_anything": 1}):
        assert _sigmas({**KARRAS, **extra}) == _sigmas(KARRAS)


@pytest.mark.parametrize(
    ("config", "pipeline", "overrides", "message"),
    [
        (KARRAS, None, {"flow_shift": 10.0}, "flow_shift has no effect"),
        (UNIPC, None, {"flow_shift": 10.0}, "flow_shift has no effect"),
        ({**EULER, "use_dynamic_shifting": True}, None, {"flow_shift": 2.0}, "has no effect"),
        ({"_class_name": "DDPMScheduler"}, None, {"flow_shift": 2.0}, "no effect on DDPM"),
        ({"_class_name": "DDIMScheduler"}, None, {"use_karras_sigmas": True}, "no effect on DDIM"),
        (KARRAS, None, {"eta": 0.5}, "eta has no effect"),
        (FLOW, None, {"flow_shift": -3.0}, "flow_shift"),
        (FLOW, None, {"flow_shift": "3"}, "wrong type"),
        (FLOW, None, {"use_karras_sigmas": 1}, "wrong type"),
        (EDGE, None, {"use_karras_sigmas": True}, "sigma_min None"),
        (UNIPC, {"use_native_flow_schedule": True}, {}, "needs flow sigmas"),
        ({"_class_name": "DDIMScheduler"}, {"use_native_flow_schedule": True}, {}, "of flows"),
        (FLOW, {"use_native_flow_schedule": "yes"}, {}, "wrong type"),
        (EDGE, {"native_flow_shift": [3]}, {}, "wrong type"),
    ],
)
def test_overrides_and_pipelines_are_checked(
    config: Any, pipeline: Any, overrides: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_from_config(config, pipeline, **overrides)


def test_overrides_are_taken() -> None:
    assert _sigmas(FLOW, flow_shift=10) == _sigmas({**FLOW, "flow_shift": 10.0})
    assert _sigmas(EULER, flow_shift=3) == _sigmas({**EULER, "shift": 3.0})
    assert _sigmas(KARRAS, use_karras_sigmas=True) == _sigmas(KARRAS)
    stochastic = scheduler_from_config({"_class_name": "DDIMScheduler"}, eta=1.0)
    assert stochastic.is_stochastic

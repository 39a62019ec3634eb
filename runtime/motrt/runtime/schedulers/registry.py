"""From a checkpoint's files to its scheduler.

Source: the public converter of NVIDIA/cosmos-framework (which scheduler is published for which
model); diffusers ``Cosmos3OmniPipeline`` and ``modular_pipelines/cosmos`` (what pipelines add).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ConfigError
from motrt.engines.json_fields import typed
from motrt.runtime.schedulers.ddim import DDIMConfig, DDIMScheduler
from motrt.runtime.schedulers.ddpm import DDPMConfig, DDPMScheduler
from motrt.runtime.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    FlowMatchEulerDiscreteScheduler,
)
from motrt.runtime.schedulers.unipc import UniPCMultistepScheduler
from motrt.runtime.schedulers.unipc_schedule import UniPCConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.runtime.schedulers.protocol import Scheduler

_UNIPC = "UniPCMultistepScheduler"
# Named by Edge's files; diffusers 0.42 lacks it and has use_native_flow_schedule instead.
_EDGE = "Cosmos3EdgeUniPCMultistepScheduler"
_EULER = "FlowMatchEulerDiscreteScheduler"
_DDPM = "DDPMScheduler"
_DDIM = "DDIMScheduler"
SCHEDULER_CLASSES = (_UNIPC, _EDGE, _EULER, _DDPM, _DDIM)

_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
_EDGE_SHIFT = 3.0
# What is published for Nano and Super.
_DEFAULT = {
    "_class_name": _UNIPC,
    **_FLOW,
    "use_karras_sigmas": True,
    "sigma_max": 200.0,
    "sigma_min": 0.147,
}
_DEFAULT_EDGE = {"_class_name": _EDGE}
_DEFAULT_DISTILLED = {"_class_name": _EULER, "stochastic_sampling": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """What a pipeline's ``model_index.json`` says about sampling; other keys are not read.

    Attributes:
        use_native_flow_schedule: Start σ just below 1 and end above 0, in even steps.
        native_flow_shift: Edge's shift, for a scheduler config without ``flow_shift``.
        distilled_sigmas: The only σ that a distilled checkpoint can sample at, else None.

    Raises:
        ConfigError: A wrong value, or ``is_distilled`` without σ.
    """

    use_native_flow_schedule: bool = False
    native_flow_shift: float | None = None
    distilled_sigmas: tuple[float, ...] | None = None

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, source: str = "model_index.json"
    ) -> PipelineSchedule:
        """Read a ``model_index.json`` or ``modular_model_index.json``."""

        def read(key: str, annotation: str) -> Any:
            return typed(key, f"{annotation} | None", data.get(key), source)

        sigmas = read("distilled_sigmas", "tuple[float, ...]")
        is_distilled = read("is_distilled", "bool")
        if is_distilled and not sigmas:
            raise ConfigError(
                f"{source} says is_distilled and has no distilled_sigmas",
                got=repr(data.get("distilled_sigmas")),
                expected="the list of σ that the checkpoint was distilled for",
            )
        return cls(
            use_native_flow_schedule=bool(read("use_native_flow_schedule", "bool")),
            native_flow_shift=read("native_flow_shift", "float"),
            distilled_sigmas=None if is_distilled is False else sigmas or None,
        )


def scheduler_from_config(
    config: Mapping[str, Any],
    pipeline: Mapping[str, Any] | None = None,
    *,
    flow_shift: float | None = None,
    use_karras_sigmas: bool | None = None,
    eta: float | None = None,
) -> Scheduler:
    """Return the scheduler that a checkpoint's files name, its schedule not yet set.

    Args:
        config: ``scheduler_config.json``. Empty: what is published for such a pipeline.
        pipeline: ``model_index.json`` or ``modular_model_index.json``, or None.
        flow_shift: Instead of the config's ``flow_shift`` (UniPC) or ``shift`` (Euler).
        use_karras_sigmas: Instead of the config's.
        eta: DDIM's η, which no config has.

    Raises:
        ConfigError: An unknown class or key, an option that is not implemented, an override that
            would have no effect.
    """
    schedule = PipelineSchedule.from_dict(pipeline or {})
    if all(key.startswith("_") for key in config) and "_class_name" not in config:
        config = _published(schedule)
    name = config.get("_class_name")
    overrides = _overrides(name, flow_shift, use_karras_sigmas, eta)
    if schedule.distilled_sigmas is not None and (name != _EULER or overrides):
        raise ConfigError(
            "the checkpoint is distilled: its schedule is fixed",
            got=f"{name} with {', '.join(overrides) or 'no overrides'}",
            expected=f"{_EULER} without overrides",
        )
    if schedule.use_native_flow_schedule and name in {_DDPM, _DDIM}:
        raise ConfigError(
            "use_native_flow_schedule needs a scheduler of flows",
            got=name,
            expected=f"{_UNIPC}, {_EDGE} or {_EULER}",
        )
    if name in {_UNIPC, _EDGE}:
        return _unipc(config, schedule, overrides)
    if name == _EULER:
        return _euler(config, schedule, overrides)
    if name == _DDPM:
        return DDPMScheduler(DDPMConfig.from_dict(config))
    if name == _DDIM:
        return DDIMScheduler(DDIMConfig.from_dict(config), eta=eta or 0.0)
    raise ConfigError(
        "the scheduler is of an unknown class",
        got=repr(name),
        expected=f"one of {', '.join(SCHEDULER_CLASSES)}",
    )


def _published(schedule: PipelineSchedule) -> Mapping[str, Any]:
    """The scheduler config of the public checkpoints of such a pipeline."""
    if schedule.distilled_sigmas is not None:
        return _DEFAULT_DISTILLED
    return _DEFAULT_EDGE if schedule.use_native_flow_schedule else _DEFAULT


def _overrides(
    name: Any, flow_shift: float | None, use_karras_sigmas: bool | None, eta: float | None
) -> dict[str, Any]:
    """Return a user's settings under the config's names."""
    given = {"flow_shift": flow_shift, "use_karras_sigmas": use_karras_sigmas, "eta": eta}
    given = {key: value for key, value in given.items() if value is not None}
    allowed = {
        _UNIPC: {"flow_shift", "use_karras_sigmas"},
        _EDGE: {"flow_shift", "use_karras_sigmas"},
        _EULER: {"flow_shift", "use_karras_sigmas"},
        _DDIM: {"eta"},
    }.get(name, set())
    for key, value in given.items():
        if key not in allowed and name in SCHEDULER_CLASSES:
            raise ConfigError(
                f"{key} has no effect on {name}", got=f"{key} {value!r}", expected=f"no {key}"
            )
        typed(key, "bool" if key == "use_karras_sigmas" else "float", value, "the override")
    if name == _EULER and "flow_shift" in given:
        given["shift"] = given.pop("flow_shift")
    return given


def _unipc(
    config: Mapping[str, Any], schedule: PipelineSchedule, overrides: Mapping[str, Any]
) -> UniPCMultistepScheduler:
    own_shift = schedule.native_flow_shift
    if config["_class_name"] == _EDGE:
        config = {**_FLOW, "flow_shift": _EDGE_SHIFT if own_shift is None else own_shift, **config}
        is_native = True
    else:
        is_native = schedule.use_native_flow_schedule
        if is_native and own_shift is not None:
            config = {"flow_shift": own_shift, **config}
    options = UniPCConfig.from_dict({**config, **overrides})
    _require_effect(overrides, "flow_shift", options.shifts_flow)
    return UniPCMultistepScheduler(options, is_native=is_native)


def _euler(
    config: Mapping[str, Any], schedule: PipelineSchedule, overrides: Mapping[str, Any]
) -> FlowMatchEulerDiscreteScheduler:
    options = FlowMatchEulerConfig.from_dict({**config, **overrides})
    _require_effect(overrides, "shift", not options.use_dynamic_shifting)
    return FlowMatchEulerDiscreteScheduler(
        options,
        distilled_sigmas=schedule.distilled_sigmas,
        is_native=schedule.use_native_flow_schedule,
    )


def _require_effect(overrides: Mapping[str, Any], key: str, has_effect: bool) -> None:
    if key in overrides and not has_effect:
        raise ConfigError(
            "flow_shift has no effect on this schedule",
            got=f"flow_shift {overrides[key]}",
            expected="flow sigmas, neither Karras nor shifted by resolution",
            fix="Override use_karras_sigmas with false too, or leave flow_shift out.",
        )

"""Noise schedules and the solvers that step along them: NumPy alone, equal to diffusers'.

A schedule's σ are lists (:mod:`.sigmas`, :mod:`.betas`); a solver reads them and knows no network.
"""

from motrt.runtime.schedulers.ddim import DDIMConfig, DDIMScheduler
from motrt.runtime.schedulers.ddpm import DDPMConfig, DDPMScheduler
from motrt.runtime.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    FlowMatchEulerDiscreteScheduler,
)
from motrt.runtime.schedulers.protocol import Scheduler, check_guidance_scale
from motrt.runtime.schedulers.registry import (
    SCHEDULER_CLASSES,
    PipelineSchedule,
    scheduler_from_config,
)
from motrt.runtime.schedulers.unipc import UniPCMultistepScheduler
from motrt.runtime.schedulers.unipc_schedule import UniPCConfig

__all__ = [
    "SCHEDULER_CLASSES",
    "DDIMConfig",
    "DDIMScheduler",
    "DDPMConfig",
    "DDPMScheduler",
    "FlowMatchEulerConfig",
    "FlowMatchEulerDiscreteScheduler",
    "PipelineSchedule",
    "Scheduler",
    "UniPCConfig",
    "UniPCMultistepScheduler",
    "check_guidance_scale",
    "scheduler_from_config",
]

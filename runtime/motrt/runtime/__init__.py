"""Both modes of a bundle, without torch: ask it, let it generate."""

from motrt.engines.contract import Modality
from motrt.engines.refit.lora import Lora
from motrt.engines.refit.result import RefitResult
from motrt.runtime.answering import ReasonStream
from motrt.runtime.denoise import Guidance, StepState, denoise
from motrt.runtime.embodiments import EMBODIMENTS, Embodiment
from motrt.runtime.generation_params import ActionCondition, GenerationParams
from motrt.runtime.latents_file import Latents, load_latents, save_latents
from motrt.runtime.params import SamplingParams
from motrt.runtime.patches import patchify, unpatchify
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    text_positions,
    vision_positions,
)
from motrt.runtime.results import GenerationResult, ReasonResult
from motrt.runtime.schedulers import Scheduler, scheduler_from_config
from motrt.runtime.session import Runtime

__all__ = [
    # The runtime
    "Runtime",
    "Lora",
    "RefitResult",
    "SamplingParams",
    "ReasonResult",
    "ReasonStream",
    "GenerationParams",
    "ActionCondition",
    "GenerationResult",
    "StepState",
    # Latents and schedules
    "Guidance",
    "Latents",
    "Scheduler",
    "denoise",
    "load_latents",
    "save_latents",
    "scheduler_from_config",
    # Sequences
    "EMBODIMENTS",
    "Embodiment",
    "Modality",
    "action_positions",
    "generator_offset",
    "patchify",
    "sound_positions",
    "text_positions",
    "unpatchify",
    "vision_positions",
]

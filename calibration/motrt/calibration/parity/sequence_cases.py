"""Inputs of comparisons in which one result leads to the next: tokens, steps of a schedule, a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from motrt.engines.manifest import Manifest
    from motrt.engines.tensors import Array

NUM_TOKENS = 64
NUM_STEPS = 10
GUIDANCE_SCALE = 4.0


@dataclass(frozen=True, slots=True)
class TextCase:
    """Greedy tokens after a prompt, whatever they are; ``prompt`` names token ids."""

    name: str
    prompt: str
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    """A schedule from ``sample`` ``[C, T, H, W]`` along ``predictions`` ``[N, C, T, H, W]``.

    ``noise``, of the predictions' shape, is what a stochastic scheduler is given at each step.
    """

    name: str
    sample: Array
    predictions: Array
    noise: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCase:
    """A generator's prompt as text; ``use_system_prompt`` None is the pipeline's default."""

    name: str
    prompt: str
    negative_prompt: str | None = None
    num_frames: int
    height: int
    width: int
    fps: float = 24.0
    use_system_prompt: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCase(PromptCase):
    """A guided run from ``latents`` ``[1, C, T, h, w]``."""

    latents: Array
    num_inference_steps: int = NUM_STEPS
    guidance_scale: float = GUIDANCE_SCALE


def scheduler_cases(random: np.random.RandomState) -> list[SchedulerCase]:
    """Return one schedule; predictions and noise are seeded."""
    shape = (2, 1, 4, 4)
    sample, predictions, noise = (
        random.standard_normal(size).astype(np.float32)
        for size in (shape, (NUM_STEPS, *shape), (NUM_STEPS, *shape))
    )
    return [SchedulerCase(f"{NUM_STEPS} steps", sample, predictions, noise)]


def prompt_cases() -> list[PromptCase]:
    """Return prompts for each sentence that may be added, and what tokenizers stumble over."""
    image: dict[str, Any] = {"num_frames": 1, "height": 256, "width": 320}
    clip: dict[str, Any] = {"num_frames": 17, "height": 480, "width": 832}
    caption = '{"actions": [{"time": "0:00-0:07", "description": "push…"}], "fps": 24}'
    return [
        PromptCase(name="image prompt", prompt="A red square moves left.", **image),
        PromptCase(
            name="clip prompt",
            prompt="Wait... the robot's arm lifts 12 cups, and then?",
            negative_prompt="Blurry, low quality.",
            fps=16.0,
            **clip,
        ),
        PromptCase(name="empty prompt", prompt="", num_frames=189, height=720, width=1280),
        PromptCase(
            name="with system prompt", prompt="日本語 🤖 é", use_system_prompt=True, **clip
        ),
        PromptCase(
            name="without system prompt",
            prompt="Two\nlines <|im_end|> {height}",
            negative_prompt="...",
            use_system_prompt=False,
            **image,
        ),
        PromptCase(name="JSON prompt", prompt=caption, fps=29.97, **clip),
    ]


def trajectory_cases(manifest: Manifest, random: np.random.RandomState) -> list[TrajectoryCase]:
    """Return a guided image and a guided clip, both small."""
    config = manifest.components.get("vae", {}).get("config", {})
    space = int(config.get("scale_factor_spatial") or 16)
    time = int(config.get("scale_factor_temporal") or 4)
    shape = (manifest.model.latent_channel, 4, 4)
    image, clip = (
        random.standard_normal((1, shape[0], frames, *shape[1:])).astype(np.float32)
        for frames in (1, 2)
    )
    size: dict[str, Any] = {"height": 4 * space, "width": 4 * space}
    return [
        TrajectoryCase(
            name="guided image",
            prompt="A red square moves left.",
            num_frames=1,
            latents=image,
            **size,
        ),
        TrajectoryCase(
            name="guided clip",
            prompt="The robot's arm lifts a cup.",
            negative_prompt="Blurry, low quality.",
            num_frames=1 + time,
            fps=16.0,
            latents=clip,
            **size,
        ),
    ]

"""From a prompt and conditions to latents: prompt K/V once per branch, then the denoise loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from motrt.runtime.denoise import Guidance, denoise
from motrt.runtime.network import branch
from motrt.runtime.prompt_templates import PromptTemplates
from motrt.runtime.prompts import generation_prompt
from motrt.runtime.results import GenerationResult
from motrt.runtime.sampling_plan import plan_run
from motrt.runtime.schedulers import check_guidance_scale, scheduler_from_config
from motrt.runtime.step_memory import check_step_memory
from motrt.runtime.text_model import TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.runtime.denoise import Callback
    from motrt.runtime.generation_params import GenerationParams
    from motrt.runtime.protocols import Backend, Context
    from motrt.runtime.results import ReasonResult
    from motrt.runtime.sampling_plan import Conditioning, Plan
    from motrt.runtime.schedulers import Scheduler
    from motrt.runtime.text_model import TextModel
    from motrt.runtime.tokenizer import Tokenizer
    from motrt.runtime.vae import Vae

# diffusers' defaults, for schedules that leave the choice.
DEFAULT_STEPS = 35
DEFAULT_GUIDANCE_SCALE = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRun:
    """What a generation works with.

    Attributes:
        bundle: The bundle.
        backend: Gives the engines.
        text: The reasoner.
        tokenizer: The bundle's.
        vae: The bundle's, or None.
        conversation: The tokens of a conversation to go on from, or None.
        decode: Turns latents ``[1, C, T, h, w]`` into frames, when they are asked for.
    """

    bundle: Bundle
    backend: Backend
    text: TextModel
    tokenizer: Tokenizer
    vae: Vae | None
    conversation: TokenSequence | None
    decode: Callable[[Array], Iterator[Array]]

    def __call__(
        self,
        prompt: str,
        params: GenerationParams,
        given: Conditioning,
        history: ReasonResult | None,
        callback: Callback | None,
    ) -> GenerationResult:
        """Generate; see :meth:`motrt.runtime.Runtime.generate`."""
        started = time.perf_counter()
        scheduler, guidance = self._schedule(params)
        positive_ids, negative_ids = self._prompt_ids(prompt, params, given, history)
        for ids in (positive_ids, negative_ids):
            self.text.check_length(len(ids))
        plan = plan_run(
            self.bundle,
            self.vae,
            params,
            given,
            partial(
                check_step_memory, self.backend, context=max(len(positive_ids), len(negative_ids))
            ),
        )
        random = np.random.RandomState(params.seed)
        latents = plan.start(random, given.latents)
        encoded = time.perf_counter()

        contexts = [self._context(positive_ids, self.conversation)]
        if any(guidance.is_on(timestep) for timestep in scheduler.timesteps.tolist()):
            contexts.append(self._context(negative_ids, None))
        prompted = time.perf_counter()

        engine = self.backend.generator()
        branches = [
            branch(self.bundle, engine, self.text, context, plan.sample, latents)
            for context in contexts
        ]
        denoised = denoise(
            branches[0],
            branches[1] if len(branches) > 1 else None,
            _one_each(scheduler, plan),
            latents,
            guidance,
            noisy=plan.sample.noisy,
            clean=plan.clean,
            noise=lambda shape: random.standard_normal(shape).astype(np.float32),
            callback=callback,
        )
        ended = time.perf_counter()
        timings = {
            "encode": encoded - started,
            "prompt": prompted - encoded,
            "denoise": ended - prompted,
            "total": ended - started,
            "steps": float(len(scheduler.timesteps)),
        }
        return self._result(params, given, plan, denoised, timings)

    def _schedule(self, params: GenerationParams) -> tuple[Scheduler, Guidance]:
        manifest = self.bundle.manifest
        scheduler = scheduler_from_config(
            manifest.scheduler,
            manifest.pipeline,
            flow_shift=params.flow_shift,
            use_karras_sigmas=params.use_karras_sigmas,
        )
        fixed = scheduler.fixed_guidance_scale
        scale, steps = params.guidance_scale, params.num_inference_steps
        if scale is None:
            scale = DEFAULT_GUIDANCE_SCALE if fixed is None else fixed
        check_guidance_scale(scheduler, scale)
        # A distilled checkpoint fixes its steps; where nothing is asked for, nothing is overridden.
        scheduler.set_timesteps(DEFAULT_STEPS if steps is None and fixed is None else steps)
        return scheduler, Guidance(scale, params.guidance_interval)

    def _prompt_ids(
        self,
        prompt: str,
        params: GenerationParams,
        given: Conditioning,
        history: ReasonResult | None,
    ) -> tuple[list[int], list[int]]:
        action = given.action
        made = generation_prompt(
            self.tokenizer,
            prompt,
            params.negative_prompt,
            num_frames=params.num_frames if action is None else action.chunk_size + 1,
            height=params.height,
            width=params.width,
            fps=params.fps,
            use_system_prompt=params.use_system_prompt,
            add_resolution_template=params.add_resolution_template,
            add_duration_template=params.add_duration_template,
            action_mode=None if action is None else action.mode,
            action_view_point=None if action is None else action.view_point,
            pipeline=self.bundle.manifest.pipeline,
            templates=PromptTemplates.from_dict(self.bundle.manifest.prompt_templates),
        )
        positive = made.positive_ids.tolist()
        if history is not None:
            # The conversation takes the system prompt's place; the two closing tokens stay.
            messages = [*history.messages, {"role": "user", "content": made.positive_text}]
            positive = [*self.tokenizer.apply_chat_template(messages), *positive[-2:]]
        return positive, made.negative_ids.tolist()

    def _context(self, ids: list[int], conversation: TokenSequence | None) -> Context:
        """Run a prompt, from the cache only where a conversation is continued.

        So a generation alone does not depend, to the last bit, on what was asked before.
        """
        sequence = TokenSequence(self.text) if conversation is None else conversation
        kept = sequence.rewind_to_prefix_of(ids)
        sequence.extend(ids[kept:])
        return sequence.context()

    def _result(
        self,
        params: GenerationParams,
        given: Conditioning,
        plan: Plan,
        latents: Mapping[str, Array],
        timings: dict[str, float],
    ) -> GenerationResult:
        vision = latents["vision"][None]
        decode = self.decode  # alone: a result must not keep engines and caches alive
        return GenerationResult(
            latents=vision,
            sound_latents=latents.get("sound"),
            action_latents=latents.get("action"),
            raw_action_dim=None if given.action is None else given.action.raw_action_dim,
            seed=params.seed,
            fps=params.fps,
            num_frames=plan.num_frames,
            timings=timings,
            _decode=lambda: decode(vision),
        )


def _one_each(scheduler: Scheduler, plan: Plan) -> dict[str, Scheduler]:
    """A scheduler for each modality that has anything to denoise; each keeps its own history."""
    moving = [name for name, mask in plan.sample.noisy.items() if mask.any()] or ["vision"]
    return {name: scheduler if i == 0 else scheduler.clone() for i, name in enumerate(moving)}

"""The bundle's side of sequences: the runtime's own loops over a candidate's engines."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.parity.backend import OpenedBackend
from motrt.engines.errors import MotrtError
from motrt.runtime.generation_params import GenerationParams
from motrt.runtime.latents_file import Latents
from motrt.runtime.params import SamplingParams
from motrt.runtime.prompt_templates import PromptTemplates
from motrt.runtime.prompts import generation_prompt
from motrt.runtime.sampling import Sampler
from motrt.runtime.schedulers import scheduler_from_config
from motrt.runtime.session import Runtime
from motrt.runtime.text_model import TextModel, TokenSequence
from motrt.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from motrt.calibration.parity.cases import Cases
    from motrt.calibration.parity.sequence_cases import (
        PromptCase,
        SchedulerCase,
        TextCase,
        TrajectoryCase,
    )
    from motrt.engines.bundle import Bundle
    from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
    from motrt.engines.tensors import Array

_CAPACITY = 4096
_CHUNK_SIZE = 512


class Sequences:
    """Runs sequence cases; results have the reference process's names and shapes.

    Args:
        bundle: The bundle, of the precision in which the engines compute.
        reasoner: Its causal engine, open.
        generator: Its denoiser, open.

    Attributes:
        failures: What the runtime said to a case that it refused, by the case's name.
    """

    def __init__(
        self, bundle: Bundle, reasoner: OnnxRuntimeEngine, generator: OnnxRuntimeEngine
    ) -> None:
        self._bundle = bundle
        self._backend = OpenedBackend(bundle, reasoner, generator)
        self._tokenizer: Tokenizer | None = None
        self.failures: dict[str, str] = {}

    def run(
        self, cases: Cases, advance: Callable[[], None], along: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Run every sequence case.

        Args:
            cases: The cases.
            advance: Called after each.
            along: The reference's arrays: a schedule is stepped from the reference's states, so
                that each step is judged alone. From its own where they are absent.
        """
        runtime = Runtime(
            self._bundle,
            self._backend,
            capacity=_CAPACITY,
            chunk_size=_CHUNK_SIZE,
            on_busy="raise",
            output_filter=None,
        )
        jobs: list[tuple[str, Callable[[], dict[str, Array]]]] = [
            *((case.name, partial(self._greedy, case, cases.prompts)) for case in cases.text),
            *((case.name, partial(self._steps, case, along)) for case in cases.scheduler),
            *((case.name, partial(self._tokenized, case)) for case in cases.prompt),
            *((case.name, partial(self._denoised, case, runtime)) for case in cases.trajectory),
        ]
        results: dict[str, Array] = {}
        try:
            for name, job in jobs:
                try:
                    results |= {f"{name}/{tensor}": array for tensor, array in job().items()}
                except MotrtError as err:  # a bundle that cannot run is a wrong bundle
                    self.failures[name] = str(err)
                advance()
        finally:
            runtime.close()
            if self._tokenizer is not None:
                self._tokenizer.close()
        return results

    def _greedy(self, case: TextCase, prompts: Mapping[str, Array]) -> dict[str, Array]:
        """Decode token by token; ``top`` and ``top_ids`` are the two largest logits of each step."""
        prompt = prompts[case.prompt].tolist()
        capacity = len(prompt) + case.max_new_tokens
        model = TextModel(self._bundle, self._backend, capacity=capacity)
        sequence, sampler = TokenSequence(model), Sampler(SamplingParams(), prompt)
        ids: list[int] = []
        best: list[Array] = []
        top: list[Array] = []
        logits = sequence.extend(prompt)
        while True:
            ids.append(sampler.sample(logits))
            best.append(np.argsort(-logits, kind="stable")[:2])
            top.append(logits[best[-1]])
            if len(ids) == case.max_new_tokens:
                chosen = np.array(ids, np.int64)
                return {"ids": chosen, "top": np.stack(top), "top_ids": np.stack(best)}
            logits = sequence.extend(ids[-1:])

    def _steps(self, case: SchedulerCase, along: Mapping[str, Array]) -> dict[str, Array]:
        manifest = self._bundle.manifest
        scheduler = scheduler_from_config(manifest.scheduler, manifest.pipeline)
        is_distilled = scheduler.fixed_guidance_scale is not None
        scheduler.set_timesteps(None if is_distilled else len(case.predictions))
        given = along.get(f"{case.name}/states", np.empty((0, *case.sample.shape)))
        states = [case.sample]
        count = min(len(scheduler.timesteps), len(case.predictions))
        for index in range(count):
            state = given[index] if index < len(given) else states[-1]
            noise = case.noise[index] if scheduler.is_stochastic else None
            states.append(scheduler.step(case.predictions[index], index, state, noise))
        return {
            "sigmas": scheduler.sigmas,
            "timesteps": scheduler.timesteps,
            "states": np.stack(states),
        }

    def _tokenized(self, case: PromptCase) -> dict[str, Array]:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.open(self._bundle)
        manifest = self._bundle.manifest
        made = generation_prompt(
            self._tokenizer,
            case.prompt,
            case.negative_prompt,
            num_frames=case.num_frames,
            height=case.height,
            width=case.width,
            fps=case.fps,
            use_system_prompt=case.use_system_prompt,
            pipeline=manifest.pipeline,
            templates=PromptTemplates.from_dict(manifest.prompt_templates),
        )
        return {"positive_ids": made.positive_ids, "negative_ids": made.negative_ids}

    def _denoised(self, case: TrajectoryCase, runtime: Runtime) -> dict[str, Array]:
        params = GenerationParams(
            num_frames=case.num_frames,
            height=case.height,
            width=case.width,
            fps=case.fps,
            num_inference_steps=case.num_inference_steps,
            guidance_scale=case.guidance_scale,
            negative_prompt=case.negative_prompt,
            use_system_prompt=case.use_system_prompt,
        )
        made = runtime.generate(case.prompt, params, latents=Latents(latents=case.latents))
        return {"latents": made.latents}

"""Prompt and trajectory cases: diffusers' ``Cosmos3OmniPipeline`` over a transformer that is loaded already.

Nothing is downloaded and no code of the checkpoint runs but its chat template, in transformers' sandbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, UniPCMultistepScheduler
from transformers import AutoTokenizer

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.checkpoint import load_config
from motrt.calibration.reference.errors import UnavailableError
from motrt.calibration.reference.schedule import load_schedule, pipeline_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from motrt.calibration.reference.sequence_cases import PromptCase, TrajectoryCase


class _GivenLatents(Cosmos3OmniPipeline):  # type: ignore[misc]
    """The pipeline where latents are given: it reads the shape of an encoded clip, and no value of it.

    So no weights of the VAE are loaded. NaN would show, should a value ever be read.
    """

    latent_shape: tuple[int, ...] = ()

    def _encode_video(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full(self.latent_shape, float("nan"), device=x.device)


def run_prompts(
    transformer: Any, checkpoint: Path, cases: Sequence[PromptCase]
) -> dict[str, NDArray[Any]]:
    """Return ``positive_ids`` and ``negative_ids``, int64, of every case.

    Raises:
        UnavailableError: The checkpoint has no tokenizer that transformers can use.
    """
    # Prompts need no scheduler, but the pipeline's constructor does.
    pipeline = _assemble(transformer, checkpoint, UniPCMultistepScheduler(), is_native=False)
    arrays: dict[str, NDArray[Any]] = {}
    for case in cases:
        positive, negative = _tokenized(pipeline, case)
        arrays[f"{case.name}/positive_ids"] = positive
        arrays[f"{case.name}/negative_ids"] = negative
    return arrays


def run_trajectories(
    transformer: Any, checkpoint: Path, cases: Sequence[TrajectoryCase]
) -> dict[str, NDArray[np.float32]]:
    """Return the ``latents`` ``[1, C, T, h, w]`` at the end of every case.

    Raises:
        UnavailableError: The checkpoint lacks a part, or the pipeline cannot run what it has.
    """
    if not (checkpoint / "vae" / "config.json").is_file():
        raise UnavailableError("the checkpoint has no vae/")
    arrays: dict[str, NDArray[np.float32]] = {}
    for case in cases:
        schedule = load_schedule(checkpoint)
        scheduler = schedule.scheduler
        if schedule.distilled_sigmas is not None:
            raise UnavailableError(
                "the checkpoint is distilled, which Cosmos3OmniPipeline is not for"
            )
        if scheduler.config.get("stochastic_sampling") or "DDPM" in type(scheduler).__name__:
            raise UnavailableError(
                "its scheduler draws noise that Cosmos3OmniPipeline does not seed"
            )
        pipeline = _assemble(transformer, checkpoint, scheduler, is_native=schedule.is_native)
        vocab_size = transformer.config.vocab_size
        if max(ids.max() for ids in _tokenized(pipeline, case)) >= vocab_size:
            raise UnavailableError(f"the tokenizer goes beyond the vocabulary of {vocab_size}")
        pipeline.latent_shape = case.latents.shape
        output = pipeline(
            prompt=case.prompt,
            negative_prompt=case.negative_prompt,
            num_frames=case.num_frames,
            height=case.height,
            width=case.width,
            fps=case.fps,
            num_inference_steps=case.num_inference_steps,
            guidance_scale=case.guidance_scale,
            use_system_prompt=case.use_system_prompt,
            latents=torch.from_numpy(case.latents),
            output_type="latent",
        )
        arrays[f"{case.name}/latents"] = to_float32(output.video)
    return arrays


def _assemble(transformer: Any, checkpoint: Path, scheduler: Any, *, is_native: bool) -> Any:
    folder = checkpoint / "text_tokenizer"
    if not folder.is_dir():
        raise UnavailableError("the checkpoint has no text_tokenizer/")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as err:  # a stranger's files fail in as many ways as there are classes
        raise UnavailableError(f"transformers cannot open the tokenizer: {err}") from err
    has_vae = (checkpoint / "vae" / "config.json").is_file()
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(load_config(checkpoint / "vae") if has_vae else {})
    index = pipeline_config(checkpoint)
    pipeline = _GivenLatents(
        transformer=transformer,
        text_tokenizer=tokenizer,
        vae=vae,
        scheduler=scheduler,
        enable_safety_checker=False,
        default_use_system_prompt=index.get("default_use_system_prompt", True),
        use_native_flow_schedule=is_native,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _tokenized(pipeline: Any, case: PromptCase) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    try:
        positive, negative = pipeline.tokenize_prompt(
            case.prompt,
            case.negative_prompt,
            num_frames=case.num_frames,
            height=case.height,
            width=case.width,
            fps=case.fps,
            use_system_prompt=case.use_system_prompt,
        )
    except Exception as err:  # so does a stranger's chat template
        raise UnavailableError(f"transformers cannot use the tokenizer: {err}") from err
    if None in positive:  # how an absent special token looks there
        raise UnavailableError("the tokenizer lacks eos_token or <|vision_start|>")
    return np.array(positive, np.int64), np.array(negative, np.int64)

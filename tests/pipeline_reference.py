"""diffusers' pipeline run from our seeds: what a generation is compared with.

The pipeline is not changed. It draws its noise from the NumPy generator that the runtime draws from,
and its sound tokenizer is a stand-in that hands latents through.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers.pipelines.cosmos import pipeline_cosmos3_omni
from diffusers.schedulers import scheduling_ddpm
from PIL import Image

from motrt.engines.tensors import Array
from omni_fixtures.reference import load_pipeline

PROMPT = "A red square moves left."
NEGATIVE = "The camera shakes, and two people walk along the beach at night."


class SoundTokenizer(torch.nn.Module):
    """Numbers of the published tokenizer; latents for a waveform."""

    _hop_size = 1920
    config = SimpleNamespace(sampling_rate=48000)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


class Reference:
    """diffusers over a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.pipeline = load_pipeline(checkpoint)
        if self.pipeline.transformer.config.sound_gen:
            self.pipeline.sound_tokenizer = SoundTokenizer()

    def __call__(
        self, seed: int = 0, *, scheduler: Any = None, **options: Any
    ) -> dict[str, Array]:
        """Return what the pipeline makes of the noise of a seed, by modality."""
        random = np.random.RandomState(seed)

        def noise(shape: tuple[int, ...], **_: Any) -> torch.Tensor:
            return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

        given = {
            "prompt": PROMPT,
            "negative_prompt": NEGATIVE,
            "num_inference_steps": 10,
            "output_type": "latent",
        } | options
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these are too small to share; on a busy machine 20x faster
        try:
            with (
                mock.patch.object(pipeline_cosmos3_omni, "randn_tensor", noise),
                mock.patch.object(scheduling_ddpm, "randn_tensor", noise),
                mock.patch.object(
                    self.pipeline, "scheduler", scheduler or self.pipeline.scheduler
                ),
            ):
                made = self.pipeline(**given)
        finally:
            torch.set_num_threads(threads)
        arrays = {"vision": np.asarray(made.video)}
        if made.sound is not None:
            arrays["sound"] = made.sound.numpy()
        if made.action is not None:
            arrays["action"] = made.action[0].numpy()
        return arrays


def action_condition(**options: Any) -> Any:
    """Return the pipeline's own; at 192 x 320 pixels its canvas is the picture itself."""
    return pipeline_cosmos3_omni.CosmosActionCondition(resolution_tier=256, **options)


def frames(count: int, height: int = 64, width: int = 64) -> list[Image.Image]:
    """Return a smooth clip of Pillow images: waves whose phase moves."""
    rows, columns = np.mgrid[:height, :width, :1][:2] / 16.0
    waves = (np.sin(rows + columns * np.arange(3) + 0.4 * i) for i in range(count))
    return [Image.fromarray(np.rint(127.5 + 127.5 * wave).astype(np.uint8)) for wave in waves]

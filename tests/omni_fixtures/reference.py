"""Opening a fixture with diffusers' own pipeline, to compare against."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import AutoTokenizer

from omni_fixtures.configs import Config

_OPTIONS = ("enable_safety_checker", "default_use_system_prompt", "use_native_flow_schedule")


def load_pipeline(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return diffusers' ``Cosmos3OmniPipeline`` over ``directory``, progress bar off.

    Where the checkpoint names a scheduler class that diffusers lacks (Edge), a UniPC scheduler
    with the same config takes its place; together with ``use_native_flow_schedule`` it gives the
    schedule that Edge was published with.
    """
    index = _read_json(directory / "model_index.json")
    if hasattr(diffusers, index["scheduler"][1]):
        pipeline = diffusers.Cosmos3OmniPipeline.from_pretrained(directory, dtype=dtype)
    else:
        pipeline = _assemble(directory, index, dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _assemble(directory: Path, index: Config, dtype: torch.dtype) -> Any:
    # diffusers 0.42.1 looks the class in model_index.json up even when a scheduler is passed to
    # from_pretrained, and fails; so the parts are put together here.
    scheduler = _read_json(directory / "scheduler" / "scheduler_config.json")
    scheduler["_class_name"] = "UniPCMultistepScheduler"
    return diffusers.Cosmos3OmniPipeline(
        transformer=diffusers.Cosmos3OmniTransformer.from_pretrained(
            directory, subfolder="transformer", dtype=dtype
        ),
        vae=diffusers.AutoencoderKLWan.from_pretrained(directory, subfolder="vae", dtype=dtype),
        text_tokenizer=AutoTokenizer.from_pretrained(directory / "text_tokenizer"),
        scheduler=diffusers.UniPCMultistepScheduler.from_config(scheduler),
        **{key: index[key] for key in _OPTIONS if key in index},
    )


def _read_json(path: Path) -> Config:
    value: Config = json.loads(path.read_text(encoding="utf-8"))
    return value

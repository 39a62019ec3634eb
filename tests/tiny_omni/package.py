"""Writing a trained model as a checkpoint: diffusers' folders, bfloat16 safetensors."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from diffusers import Cosmos3OmniTransformer, UniPCMultistepScheduler
from huggingface_hub import save_torch_state_dict

from motrt.calibration.demo.tiny_omni import COMMON
from omni_fixtures.checkpoints import cast_
from omni_fixtures.configs import MODEL_INDEXES, transformer_kwargs
from omni_fixtures.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffusers import AutoencoderKLWan
    from torch import Tensor

_SCHEDULER: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vae: AutoencoderKLWan,
    tokenizer: Path,
    *,
    flow_shift: float,
) -> Path:
    """Write a whole pipeline, in place of what is there, and return its folder.

    Args:
        folder: Where to.
        config: Of the transformer, ``weight_layout`` included.
        tensors: Of the transformer, each once, by the checkpoint's names.
        vae: Its weights are rounded already.
        tokenizer: Folder of a tokenizer's files.
        flow_shift: Of the scheduler.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # A config through diffusers' class has every key, as published files do.
    with torch.random.fork_rng(devices=[]):
        model = Cosmos3OmniTransformer(**transformer_kwargs(config))
    rounded = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    if config.get("weight_layout") == "shared":
        target = folder / "transformer"
        target.mkdir(parents=True)
        save_torch_state_dict(
            rounded, target, filename_pattern="diffusion_pytorch_model{suffix}.safetensors"
        )
        write_json(
            target / "config.json",
            {**transformer_kwargs(model.config), "weight_layout": "shared"},
        )
    else:
        # Assigned, so that the time embedder is bfloat16 too, as in files on the Hub.
        model.load_state_dict(rounded, strict=True, assign=True)
        model.save_pretrained(folder / "transformer")
    cast_(vae, torch.bfloat16)
    vae.save_pretrained(folder / "vae")
    vae.float()
    shutil.copytree(tokenizer, folder / "text_tokenizer")
    UniPCMultistepScheduler(**_SCHEDULER, flow_shift=flow_shift).save_config(folder / "scheduler")
    write_json(folder / "model_index.json", MODEL_INDEXES["nano-like"])
    return folder


def split_checkpoint(checkpoint: Path, target: Path, layout: str) -> None:
    """Copy a checkpoint as it is packaged: its transformer by layout, the rest as common to both."""
    for part in checkpoint.iterdir():
        place = target / (layout if part.name == "transformer" else COMMON) / part.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if part.is_dir():
            shutil.copytree(part, place, dirs_exist_ok=True)
        else:
            shutil.copy(part, place)

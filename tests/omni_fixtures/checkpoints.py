"""Checkpoints small enough to run: transformers alone, whole pipelines, shared weights.

Every builder takes the directory of the whole checkpoint and returns it. Values depend on the
seed only; a lower dtype holds the same values rounded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer, UniPCMultistepScheduler
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn

from omni_fixtures.configs import (
    MODEL_INDEXES,
    PIPELINES,
    SCHEDULERS,
    SHARED,
    VAE,
    transformer_kwargs,
)
from omni_fixtures.files import write_json
from omni_fixtures.names import generator_name
from omni_fixtures.randomize import randomize_
from omni_fixtures.tokenizer import save_tokenizer

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_transformer(
    directory: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
) -> Path:
    """Write ``directory/transformer`` in diffusers' layout and return ``directory``.

    Args:
        max_shard_size: Such as ``"4MB"``; several files and an index then. ``None``: one file.
    """
    _save(_transformer(config, seed, dtype), directory / "transformer", max_shard_size)
    return directory


def build_pipeline(directory: Path, kind: str, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a whole pipeline, ``kind`` one of nano-like, edge-like and super-like."""
    if kind not in PIPELINES:
        raise ValueError(f"no pipeline fixture {kind!r}; expected one of {', '.join(PIPELINES)}")
    build_transformer(directory, PIPELINES[kind], seed=seed, dtype=dtype)
    # Half the gain, or the decoder's clamp to [-1, 1] would cut off a sixth of the pixels.
    vae = _randomized(AutoencoderKLWan, VAE, seed + 1, dtype, gain=0.5)
    _save(vae, directory / "vae", None)
    index = MODEL_INDEXES[kind]
    save_tokenizer(directory / "text_tokenizer", tokenizer_class=index["text_tokenizer"][1])
    # Through the public class, so that the file has all of its keys; then the class' name, which
    # for Edge is one that diffusers lacks.
    scheduler = UniPCMultistepScheduler.from_config(SCHEDULERS[kind])
    scheduler.save_config(directory / "scheduler")
    path = directory / "scheduler" / "scheduler_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**saved, "_class_name": SCHEDULERS[kind]["_class_name"]})
    write_json(directory / "model_index.json", index)
    return directory


def build_shared(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
) -> Path:
    """Write a checkpoint whose one set of layer weights serves both modes.

    ``config.json`` and ``model.safetensors`` (with ``max_shard_size``: numbered files and an
    index), layers and final norm under the reasoner's names.
    """
    model = _transformer(SHARED, seed, dtype)
    tensors: dict[str, torch.Tensor] = model.state_dict()
    for name in [generator_name(name) for name in tensors]:
        if name is not None:
            del tensors[name]
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        tensors,
        directory,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size or "5GB",
    )
    write_json(
        directory / "config.json",
        {**transformer_kwargs(model.config), "weight_layout": "shared"},
    )
    return directory


def shared_as_separate(shared_directory: Path, directory: Path) -> Path:
    """Write the weights of a shared checkpoint into both halves of a diffusers transformer."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(shared_directory.glob("model*.safetensors")):
        tensors.update(load_file(path))
    for name in list(tensors):
        other = generator_name(name)
        if other is not None:
            # A copy: diffusers drops all but one of the tensors that share memory.
            tensors[other] = tensors[name].clone()
    config = json.loads((shared_directory / "config.json").read_text(encoding="utf-8"))
    model = _construct(Cosmos3OmniTransformer, transformer_kwargs(config))
    model.load_state_dict(tensors, strict=True, assign=True)
    _save(model, directory / "transformer", None)
    return directory


def _transformer(config: Mapping[str, Any], seed: int, dtype: str) -> Any:
    return _randomized(Cosmos3OmniTransformer, transformer_kwargs(config), seed, dtype)


def _randomized(
    model_class: Any, config: Mapping[str, Any], seed: int, dtype: str, *, gain: float = 1.0
) -> Any:
    model = _construct(model_class, config)
    randomize_(model, seed, gain=gain)
    cast_(model, _dtype(dtype))
    return model


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"no dtype {name!r}; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _construct(model_class: Any, config: Mapping[str, Any]) -> Any:
    # Constructors draw from torch's global generator; a test's own draws must not move.
    with torch.random.fork_rng(devices=[]):
        return model_class(**config)


def cast_(model: nn.Module, dtype: torch.dtype) -> None:
    """Round every parameter."""
    # Parameter by parameter, since files on the Hub are bfloat16 throughout, time_embedder
    # included, while diffusers' own ``to`` warns about the modules it wants in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _save(model: Any, directory: Path, max_shard_size: str | None) -> None:
    model.save_pretrained(directory, max_shard_size=max_shard_size or "5GB")

"""Checkpoints to measure with: random weights, or none at all behind a real header.

Names and shapes come from motrt's own table, which the tests hold against diffusers' class; the
reference side loads the same files strictly, so a wrong name would stop it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.dtypes import DType
from motrt.engines.model_config import ModelConfig
from motrt.engines.safetensors_writer import write_safetensors
from motrt.engines.weight_names import EMBED_TOKENS, weight_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from motrt.engines.tensors import Array

_FILE = "diffusion_pytorch_model.safetensors"


def write_checkpoint(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write ``folder/transformer`` in diffusers' layout, float32, and return ``folder``.

    Linear maps keep the variance of their input, so that attention is neither flat nor saturated.
    """
    random = np.random.RandomState(seed)

    def values(name: str) -> Iterator[Array]:
        shape = table[name].shape
        noise = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            yield np.float32(0.1) * noise + np.float32(name.endswith(".weight"))
        else:
            fan_in = 1 if name == EMBED_TOKENS else shape[-1]
            yield noise / np.float32(math.sqrt(fan_in))

    table = weight_table(ModelConfig.from_dict(config))
    target = _begin(folder / "transformer", config)
    shapes = {name: (DType.FLOAT32, spec.shape) for name, spec in table.items()}
    write_safetensors(target / _FILE, shapes, values)
    return folder


def write_shared_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint whose one set of layer weights serves both modes; return its folder."""
    return write_checkpoint(folder, {**config, "weight_layout": "shared"}) / "transformer"


def write_sparse_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write ``folder/transformer`` as a bfloat16 header over a hole, and return ``folder``.

    Raises:
        OSError: The file system has no holes.
    """
    table = weight_table(ModelConfig.from_dict(config))
    target = _begin(folder / "transformer", config) / _FILE
    shapes = {name: (DType.BFLOAT16, spec.shape) for name, spec in table.items()}
    write_safetensors(target, shapes, lambda _name: iter(()))
    nbytes = sum(2 * math.prod(spec.shape) for spec in table.values())
    with target.open("r+b") as file:
        file.truncate(target.stat().st_size + nbytes)
    return folder


def _begin(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder

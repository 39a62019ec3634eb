"""Checkpoints and bundles of a few hundred kilobytes, written without torch and easily broken.

Their tensors come from motrt's own table, which ``engines/test_weight_names.py`` holds against
diffusers; their files are written by the safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from motrt.engines.bundle import MANIFEST, record_small, record_weights
from motrt.engines.contract import Cache, available_modalities
from motrt.engines.dtypes import Precision
from motrt.engines.manifest import Manifest
from motrt.engines.model_config import ModelConfig
from motrt.engines.rotary import rotary_axes
from motrt.engines.safetensors_header import read_header
from motrt.engines.store import WeightEntry
from motrt.engines.tensors import Array
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_tensors import vae_weight_table
from motrt.engines.weight_names import weight_table

STEM = "diffusion_pytorch_model"
FILE = f"{STEM}.safetensors"
INDEX = f"{FILE}.index.json"
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "patch_latent_dim": 16,
    "rope_axes_dim": [4, 2, 2],
    "action_gen": True,
    "action_dim": 8,
    "num_embodiment_domains": 3,
    "sound_gen": True,
    "sound_dim": 8,
}
VAE: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "temperal_downsample": [True],
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
    "scale_factor_temporal": 2,
    "scale_factor_spatial": 2,
}


def tiny_tensors(config: Mapping[str, Any] = TINY, dtype: str = "float32") -> dict[str, Array]:
    """Return a tensor of every name; norms near one, the rest small."""
    random = np.random.RandomState(3)
    return {
        name: (
            random.standard_normal(spec.shape) * 0.1 + (1.0 if len(spec.shape) == 1 else 0.0)
        ).astype(DTYPES[dtype])
        for name, spec in weight_table(ModelConfig.from_dict(config)).items()
    }


def write_checkpoint(
    root: Path,
    config: Mapping[str, Any] = TINY,
    tensors: Mapping[str, Array] | None = None,
    *,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write ``root/transformer`` and return ``root``; with several shards, an index too."""
    tensors = tiny_tensors(config, dtype) if tensors is None else tensors
    folder = root / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / FILE)
        return root
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"{STEM}-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def write_vae(root: Path, dtype: str = "float32") -> Path:
    """Write ``root/vae`` and return ``root``."""
    random = np.random.RandomState(4)
    (root / "vae").mkdir(parents=True)
    (root / "vae/config.json").write_text(json.dumps(VAE))
    tensors = {
        name: (random.standard_normal(shape) * 0.1).astype(DTYPES[dtype])
        for name, shape in vae_weight_table(VaeConfig.from_dict(VAE)).items()
    }
    save_file(tensors, root / "vae" / FILE)
    return root


def write_bundle(root: Path) -> Path:
    """Write a bundle that opens, with a few bytes in place of its graphs; no onnx needed."""
    model = ModelConfig.from_dict(TINY)
    place = "weights/transformer/model.safetensors"
    for folder in ("weights/transformer", "tokenizer"):
        (root / folder).mkdir(parents=True)
    save_file(tiny_tensors(), root / place)
    graphs = {name: f"vae_{name}.onnx" for name in ("decoder_first", "decoder_next")}
    small = ("reasoner.onnx", "generator.onnx", *graphs.values(), "tokenizer/tokenizer.json")
    for file in small:
        (root / file).write_text(f"stands for {file}")
    entries = {
        name: WeightEntry(place, item.offset, item.dtype, item.shape)
        for name, item in read_header(root / place).tensors.items()
    }
    manifest = Manifest(
        model=model,
        precision=Precision.FP32,
        lowering="native",
        cache=Cache.STATIC,
        modalities=available_modalities(model),
        inv_freq=tuple(float(np.float32(0.3) ** j) for j in range(model.head_dim // 2)),
        rotary_axes=rotary_axes(model),
        files={place: record_weights(root / place)}
        | {file: record_small(root / file) for file in small},
        weights={"transformer": entries},
        components={"vae": {"graphs": graphs}, "tokenizer": {"files": [small[-1]]}},
        absent={"scheduler": "not in the checkpoint"},
        probe={"status": "skipped"},
    )
    (root / MANIFEST).write_text(manifest.to_json())
    return root


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(path: Path, **values: Array) -> None:
    """Replace tensors of a safetensors file; a dot in a name is written ``__``."""
    tensors = load_file(path)
    save_file({**tensors, **{n.replace("__", "."): v for n, v in values.items()}}, path)


def raw_safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file of any header, honest or not; ``header`` is an object or JSON text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tree(folder: Path) -> dict[str, Any]:
    """Return everything under a folder: content, or where a link points."""
    return {
        path.relative_to(folder).as_posix(): (
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in sorted(folder.rglob("*"))
    }

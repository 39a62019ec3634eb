"""What the refit tests share: checkpoints that differ, adapters in every naming, outputs as bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from motrt.engines.bundle import Bundle
from motrt.engines.tensors import Array
from motrt.engines.weight_names import weight_table

KINDS = ("nano-like", "edge-like", "super-like", "shared")


def weight_file(checkpoint: Path) -> Path:
    """Return the one weight file of a fixture's transformer."""
    folder = checkpoint / "transformer" if (checkpoint / "transformer").is_dir() else checkpoint
    (file,) = folder.glob("*.safetensors")
    return file


def tensors_of(bundle: Path) -> dict[str, Array]:
    """Return copies of all tensors that a bundle's engines read."""
    store = Bundle.open(bundle).weights()
    return {name: np.array(store[name]) for name in store}


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether two sets of tensors hold the same bits."""
    return one.keys() == other.keys() and all(
        one[n].tobytes() == other[n].tobytes() and one[n].dtype == other[n].dtype for n in one
    )


def linears(bundle: Path, *, wanted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the modules of a bundle that a LoRA can target, without ``.weight``."""
    table = weight_table(Bundle.open(bundle).manifest.model)
    return [
        name.removesuffix(".weight")
        for name, spec in table.items()
        if len(spec.shape) == 2 and name.startswith("layers.") and wanted(name)
    ]


def factors(
    bundle: Path, modules: Iterable[str], rank: int = 2, seed: int = 0
) -> dict[str, tuple[Array, Array]]:
    """Return A ``[r, in]`` and B ``[out, r]`` by module."""
    table = weight_table(Bundle.open(bundle).manifest.model)
    random = np.random.RandomState(seed)
    made = {}
    for module in modules:
        out, width = table[f"{module}.weight"].shape
        a = random.standard_normal((rank, width)).astype(np.float32) * 0.2
        b = random.standard_normal((out, rank)).astype(np.float32) * 0.2
        made[module] = (a, b)
    return made


def write_peft(
    folder: Path, made: Mapping[str, tuple[Array, Array]], alpha: float = 4.0, **config: Any
) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in made.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    first = next(iter(made.values()))
    data = {
        "peft_type": "LORA",
        "r": first[0].shape[0],
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in made}),
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(data))
    return folder


def write_diffusers(
    path: Path,
    made: Mapping[str, tuple[Array, Array]],
    *,
    style: str = "lora_A",
    alpha: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter as diffusers does, or did (``style`` ``lora.down``)."""
    ends = {
        "lora_A": ("lora_A.weight", "lora_B.weight"),
        "lora.down": ("lora.down.weight", "lora.up.weight"),
        "lora_down": ("lora_down.weight", "lora_up.weight"),
    }[style]
    tensors: dict[str, Array] = {}
    for module, (a, b) in made.items():
        tensors[f"transformer.{module}.{ends[0]}"] = a
        tensors[f"transformer.{module}.{ends[1]}"] = b
        if alpha is not None:
            tensors[f"transformer.{module}.alpha"] = np.array(alpha, np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = None
    if metadata is not None:
        packed = {f"transformer.{key}": value for key, value in metadata.items()}
        about = {"lora_adapter_metadata": json.dumps(packed)}
    save_file(tensors, path, metadata=about)
    return path


def edit_checkpoint(source: Path, target: Path, edit: Callable[[dict[str, Array]], None]) -> Path:
    """Copy a checkpoint's transformer with other tensors."""
    file = weight_file(source)
    tensors = load_file(file)
    edit(tensors)
    place = target / file.relative_to(source)
    place.parent.mkdir(parents=True)
    (place.parent / "config.json").write_text((file.parent / "config.json").read_text())
    save_file(tensors, place, metadata={"format": "pt"})
    return target

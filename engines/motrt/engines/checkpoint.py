"""Finding and checking a checkpoint on disk, without reading a weight.

Two layouts: a diffusers pipeline folder (``transformer/`` and its neighbours; a folder with only
``transformer/`` will do), or one folder with ``config.json`` and safetensors files (custom and
``shared`` models). Symbolic links are followed: model hubs' caches consist of them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from motrt.engines.arguments import as_path
from motrt.engines.dtypes import DType
from motrt.engines.errors import CheckpointError
from motrt.engines.model_config import ModelConfig
from motrt.engines.store import WeightStore
from motrt.engines.weight_names import weight_table

# Components of a public pipeline folder. Their absence is reported, and matters only to a mode
# that needs them.
COMPONENTS = ("vae", "scheduler", "text_tokenizer", "sound_tokenizer", "vision_encoder")
_INDEXES = ("model_index.json", "modular_model_index.json")
_STEMS = ("diffusion_pytorch_model", "model")
FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint.

    Attributes:
        root: The folder that the user named.
        config: The transformer's architecture.
        weights: The transformer's tensors; exactly those of the config.
        components: Folder of each component that is there.
        absent: Components that are not there.
        pipeline: The content of ``model_index.json`` and, where that is silent, of
            ``modular_model_index.json`` (distilled checkpoints); or empty.
    """

    root: Path
    config: ModelConfig
    weights: WeightStore
    components: dict[str, Path]
    absent: tuple[str, ...]
    pipeline: dict[str, Any]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Locate a checkpoint and account for every tensor of its transformer.

    Raises:
        CheckpointError: Nothing there, damaged files, or tensors that do not fit the config;
            all missing, unexpected and misshapen ones are named at once.
        ConfigError: The config has unknown keys or impossible values, or ``path`` is no path.
    """
    path = as_path("the checkpoint", path)
    if not os.path.isdir(path):  # Path.is_dir raises where a name is too long
        raise CheckpointError(
            "there is no checkpoint",
            got=path,
            expected="a folder with transformer/config.json or config.json",
        )
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            "there is no transformer config",
            got=f"{path} without {config_file.relative_to(path)}",
            expected="a folder with transformer/config.json or config.json",
        )
    config = ModelConfig.from_dict(read_json(config_file), source=config_file.name)
    store = open_weights(folder)
    check_weights(config, store)
    components = {name: path / name for name in COMPONENTS if (path / name).is_dir()}
    pipeline: dict[str, Any] = {}
    for name in _INDEXES:
        if (path / name).is_file():
            pipeline = read_json(path / name) | pipeline
    return Checkpoint(
        root=path,
        config=config,
        weights=store,
        components=components,
        absent=tuple(name for name in COMPONENTS if name not in components),
        pipeline=pipeline,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file cannot be read or holds something else.
    """
    try:
        data = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_finite, parse_float=_finite
        )
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(
            f"cannot read {path.name}", got=err, expected="a JSON object", fix=f"Check {path}."
        ) from err
    if not isinstance(data, dict):
        raise CheckpointError(
            f"cannot read {path.name}",
            got=type(data).__name__,
            expected="a JSON object",
            fix=f"Check {path}.",
        )
    return data


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")  # and the manifest could not repeat it
    return value


def open_weights(folder: Path) -> WeightStore:
    """Open a component's safetensors: by its index file if there is one, else all its files.

    Raises:
        CheckpointError: No safetensors, a shard or an indexed tensor is absent, or a damaged file.
    """
    for stem in _STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            return _open_sharded(folder, index)
        files = sorted(file.name for file in folder.glob(f"{stem}*.safetensors"))
        if files:
            return WeightStore.from_files(folder, files)
    others = sorted(
        f.name for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".ckpt"}
    )
    raise CheckpointError(
        f"{folder.name}/ has no safetensors weights",
        got=", ".join(others[:4]) or "no weight files",
        expected=" or ".join(f"{stem}*.safetensors" for stem in _STEMS),
        fix="Convert the weights to safetensors; pickled files are never read."
        if others
        else "Name the folder of a checkpoint.",
    )


def _open_sharded(folder: Path, index: Path) -> WeightStore:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError(
            f"{index.name} has no usable weight_map",
            got=type(weight_map).__name__,
            expected="an object of tensor name → file",
            fix="Download the folder again.",
        )
    files = sorted(set(weight_map.values()))
    for file in files:
        if not file or PurePosixPath(file).name != file:
            raise CheckpointError(
                f"{index.name} names a file outside its folder",
                got=repr(file),
                expected="a file name",
                fix="Do not use this checkpoint.",
            )
    absent = [file for file in files if not os.path.isfile(folder / file)]
    if absent:
        raise CheckpointError(
            f"{index.name} names shards that are absent",
            got=", ".join(absent[:4]),
            expected=f"{len(files)} files in {folder}",
            fix="Complete the download.",
        )
    store = WeightStore.from_files(folder, files)
    lost = sorted(name for name, file in weight_map.items() if not _is_in(store, name, file))
    if lost:
        raise CheckpointError(
            f"{index.name} does not match the shards",
            got=f"{len(lost)} tensors that are not where it says: {', '.join(lost[:4])}",
            expected="shards and index of one checkpoint",
            fix="Download the folder again.",
        )
    return store


def _is_in(store: WeightStore, name: str, file: str) -> bool:
    entry = store.entries.get(name)
    return entry is not None and entry.file == file


def check_weights(config: ModelConfig, store: WeightStore) -> None:
    """Account for every tensor; removes the malformed duplicates that Edge repositories carry.

    Raises:
        CheckpointError: Names every missing, unexpected and misshapen tensor.
    """
    # Edge-Policy-DROID leaks entries under a doubled prefix; the proper ones are there as well.
    for name in [name for name in store if name.startswith("layers.layers.")]:
        del store.entries[name]
    table = weight_table(config)
    problems: list[str] = []
    _report(problems, "missing", sorted(table.keys() - store.entries.keys()))
    _report(problems, "unexpected", sorted(store.entries.keys() - table.keys()))
    common = sorted(table.keys() & store.entries.keys())
    _report(
        problems,
        "misshapen",
        [
            f"{name} {list(store.entries[name].shape)} for {list(table[name].shape)}"
            for name in common
            if store.entries[name].shape != table[name].shape
        ],
    )
    _report(
        problems,
        "neither float32, float16 nor bfloat16",
        [
            f"{name} {store.entries[name].dtype.label}"
            for name in common
            if store.entries[name].dtype not in FLOATS
        ],
    )
    if problems:
        raise CheckpointError(
            "the checkpoint's tensors do not fit its config",
            got="; ".join(problems),
            expected=f"the {len(table)} tensors of a {config.weight_layout} model with "
            f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}",
            fix="Use the config.json that belongs to these weights.",
        )


def _report(problems: list[str], kind: str, names: list[str]) -> None:
    if names:
        problems.append(f"{len(names)} {kind}: {', '.join(names)}")

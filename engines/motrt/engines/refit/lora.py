"""A LoRA file, read and checked against a bundle's tensors. Safetensors only."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.arguments import as_path
from motrt.engines.checkpoint import FLOATS, read_json
from motrt.engines.errors import CheckpointError, ConfigError, RefitError
from motrt.engines.finite import pieces, refuse_nonfinite
from motrt.engines.refit.adapter_config import (
    AdapterConfig,
    config_of_metadata,
    read_adapter_config,
)
from motrt.engines.refit.lora_names import Role, role_of, tensor_of, without_wrapper
from motrt.engines.safetensors_header import read_header
from motrt.engines.store import WeightEntry, WeightStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.tensors import Array

_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter to apply.

    Attributes:
        path: A safetensors file, or a folder with one.
        scale: Multiplies the whole update; 0 leaves the weights, −1 takes a merged one out.

    Raises:
        ConfigError: ``path`` is no path, or the scale no finite number.
    """

    path: str | Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no adapter can be."""
        as_path("the adapter", self.path)
        is_number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool)
        if not is_number or not math.isfinite(self.scale):
            raise ConfigError("a LoRA's scale is no number", got=self.scale, expected="finite")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One update of one matrix: ``factor · up @ down``.

    Attributes:
        up: float32 ``[out, r]``.
        down: float32 ``[r, in]``.
        factor: The user's scale times alpha / r.
    """

    up: Array
    down: Array
    factor: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter.

    Attributes:
        name: Of the file, for messages and records.
        scale: The user's.
        sha256: Of the file.
        updates: By the checkpoint's tensor name.
    """

    name: str
    scale: float
    sha256: str
    updates: dict[str, LowRank]

    def to_dict(self) -> dict[str, object]:
        """Return what a manifest records."""
        ranks = sorted({update.down.shape[0] for update in self.updates.values()})
        return {
            "lora": self.name,
            "scale": self.scale,
            "sha256": self.sha256,
            "tensors": len(self.updates),
            "ranks": ranks,
        }


def open_lora(lora: Lora, table: Mapping[str, WeightEntry]) -> Adapter:
    """Read an adapter and account for every tensor of it.

    Args:
        lora: What the user named.
        table: The bundle's tensors.

    Raises:
        RefitError: It is absent, damaged, holds NaN, is of another rank than its config says, or
            is for modules that the bundle lacks or shapes that they have not.
    """
    path = _file_of(Path(lora.path))
    try:
        header = read_header(path)
        store = WeightStore.from_files(path.parent, [path.name])
        config = config_of_metadata(header.metadata, path.name)
        beside = path.parent / _CONFIG
        if config is None and beside.is_file():
            config = read_adapter_config(read_json(beside), _CONFIG)
        if config is None and any(key.startswith("base_model.model.") for key in store):
            raise RefitError(
                f"PEFT's {_CONFIG} is not beside {path.name}",
                got="factors without rank and alpha",
                expected=f"both files in {path.parent}",
                fix="Copy the whole folder of the adapter.",
            )
        found = _modules(store, path.name)
        updates = _updates(found, store, config, lora.scale, path.name, table)
    except CheckpointError as err:
        raise RefitError(
            err.message, got=err.got, expected=err.expected, fix="Replace the adapter."
        ) from err
    return Adapter(path.name, float(lora.scale), _digest(path), updates)


def _file_of(path: Path) -> Path:
    """Find the file in a folder."""
    if os.path.isfile(path) and path.suffix == ".safetensors":
        return path
    files: list[Path] = []
    if os.path.isdir(path):
        files = [path / name for name in _FILES if (path / name).is_file()]
        files = files or sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise RefitError(
            "there is no LoRA file" if not files else "the folder has several LoRA files",
            got=", ".join(file.name for file in files[:4]) or path,
            expected=f"a .safetensors file, or a folder with {' or '.join(_FILES)}",
            fix="Name the file; pickled adapters are never read.",
        )
    return files[0]


def _modules(store: WeightStore, file: str) -> dict[str, dict[Role, str]]:
    """Sort the file's tensors by module."""
    modules: dict[str, dict[Role, str]] = {}
    for key in store:
        module, role = role_of(key, file)
        if role in modules.setdefault(module, {}):
            raise RefitError(f"{file} has a factor twice", got=key, expected="one of each")
        modules[module][role] = key
    halves = [m for m, roles in modules.items() if not {Role.DOWN, Role.UP} <= roles.keys()]
    if halves or not modules:
        raise RefitError(
            f"{file} lacks factors",
            got=f"{len(halves)} modules without A or B: {', '.join(halves[:4])}"
            if modules
            else "no tensor",
            expected="lora_A and lora_B of each module",
            fix="Replace the adapter.",
        )
    return modules


def _updates(
    modules: Mapping[str, Mapping[Role, str]],
    store: WeightStore,
    config: AdapterConfig | None,
    scale: float,
    file: str,
    table: Mapping[str, WeightEntry],
) -> dict[str, LowRank]:
    names = {module: tensor_of(module, table) for module in modules}
    foreign = [module for module, name in names.items() if name is None]
    if foreign:
        raise RefitError(
            f"{file} is for modules that the bundle lacks",
            got=f"{len(foreign)} of {len(names)}: {', '.join(foreign[:4])}",
            expected="linear maps of the bundle's transformer",
            fix="Use an adapter that was trained on this model.",
        )
    if config is not None:
        config.check_targets(map(without_wrapper, modules), file)
    updates: dict[str, LowRank] = {}
    for module, roles in modules.items():
        name = names[module] or ""
        if name in updates:
            raise RefitError(f"{file} names one matrix twice", got=name, expected="once each")
        down = _factor(store, roles[Role.DOWN])
        up = _factor(store, roles[Role.UP])
        rank = _check_shapes(file, module, up, down, table[name].shape)
        own = without_wrapper(module)
        if config is not None and config.rank_of(own) != rank:
            raise RefitError(
                f"{file}: {module} has another rank than its config says",
                got=rank,
                expected=config.rank_of(own),
                fix=f"Use the {_CONFIG} that belongs to this file.",
            )
        scaling = 1.0 if config is None else config.scaling_of(own)
        if Role.ALPHA in roles:
            alpha = _factor(store, roles[Role.ALPHA], size=1)
            scaling = float(alpha.reshape(())) / rank
        updates[name] = LowRank(up, down, scale * scaling)
    return updates


def _factor(store: WeightStore, key: str, *, size: int | None = None) -> Array:
    entry = store.entries[key]
    if entry.dtype not in FLOATS or (size is not None and math.prod(entry.shape) != size):
        raise RefitError(
            f"the adapter's {key} has the wrong type or shape",
            got=f"{entry.dtype.label} {list(entry.shape)}",
            expected="one number" if size else ", ".join(dtype.label for dtype in FLOATS),
            fix="Replace the adapter.",
        )
    for piece in pieces(store[key]):
        refuse_nonfinite(key, piece)
    return np.asarray(store[key], np.float32)


def _check_shapes(file: str, module: str, up: Array, down: Array, shape: tuple[int, ...]) -> int:
    fits = up.ndim == down.ndim == 2 and (up.shape[0], down.shape[1]) == shape
    if not fits or up.shape[1] != down.shape[0] or not down.shape[0]:
        raise RefitError(
            f"{file}: the factors of {module} do not fit its matrix",
            got=f"A {list(down.shape)}, B {list(up.shape)}",
            expected=f"A [r, {shape[1]}], B [{shape[0]}, r]",
            fix="Use an adapter that was trained on this model.",
        )
    return int(down.shape[0])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

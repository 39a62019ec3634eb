"""Where a checkpoint keeps its config and tensors, and how one tensor is read.

Knows the folder layouts (diffusers root, bare transformer folder, ``shared`` folder) and safetensors, no model.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from motrt.calibration.reference.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

_STEMS = ("diffusion_pytorch_model", "model")
_FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor as its safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def component_folder(checkpoint: Path, component: str) -> Path:
    """Return the folder of ``component``, or ``checkpoint`` itself where it has no such subfolder.

    The subfolder wins: the root ``config.json`` of the published repositories describes another model.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"checkpoint {checkpoint} is not a folder")
    folder = checkpoint / component
    return folder if (folder / "config.json").is_file() else checkpoint


def load_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of ``folder``."""
    return load_json(folder / "config.json")


def load_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"cannot read {path}: {err}") from err
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return data


class TensorFiles:
    """The safetensors files of one folder, opened together and read tensor by tensor; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Open every weight file of ``folder`` and read the headers."""
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            for path in _weight_files(folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor as it is in the file."""
        tensor = self._owner[name].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                # Published Edge repositories leak copies of k_norm_und_for_gen under a doubled prefix.
                if "layers.layers." in name:
                    continue
                if name in self._owner:
                    raise CheckpointError(f"{path} repeats tensor {name!r} of another weight file")
                header = handle.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _FLOAT_DTYPES:
                    raise CheckpointError(
                        f"tensor {name!r} of {path} is {dtype}; expected one of {', '.join(_FLOAT_DTYPES)}"
                    )
                self._owner[name] = handle
                self.tensors[name] = TensorInfo(
                    shape=tuple(header.get_shape()), dtype=_FLOAT_DTYPES[dtype]
                )
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"cannot read {path}: {err}") from err


def _weight_files(folder: Path) -> list[Path]:
    for stem in _STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            return _indexed_files(index)
        paths = sorted(folder.glob(f"{stem}*.safetensors"))
        if paths:
            return paths
    raise CheckpointError(
        f"{folder} has no weights; expected {' or '.join(f'{stem}*.safetensors' for stem in _STEMS)}"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"cannot read the weight map of {index}: {err}") from err
    for name in names:
        if name != index.parent.joinpath(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}; expected safetensors files of its folder"
            )
    return [index.parent / name for name in names]

"""Filling the PyTorch modules from a weights store."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from motrt.engines.errors import CheckpointError
from motrt.engines.weight_names import TIME_EMBEDDER
from motrt.export.torch_generator import Generator
from motrt.export.torch_reasoner import Reasoner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.contract import Modality
    from motrt.engines.dtypes import DType
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.store import WeightEntry, WeightStore

Tower = TypeVar("Tower", bound=nn.Module)


def load_reasoner(config: ModelConfig, store: WeightStore, dtype: torch.dtype) -> Reasoner:
    """Return the causal tower in evaluation mode, parameters without gradient.

    Parameters whose stored dtype is ``dtype`` are mapped from the checkpoint's files, the others are
    converted copies. A mapped parameter may be written to: the file stays as it is.

    Raises:
        CheckpointError: The store lacks a parameter, or holds it in another shape.
    """
    with torch.device("meta"):
        reasoner = Reasoner(config)
    return _fill(reasoner, store, dtype)


def load_generator(
    config: ModelConfig,
    store: WeightStore,
    dtype: torch.dtype,
    modalities: Iterable[Modality] | None = None,
) -> Generator:
    """Return the denoising tower; see :func:`load_reasoner`. Its time embedder is float32.

    Args:
        config: The architecture.
        store: The checkpoint's tensors; those of other parts are left alone.
        dtype: Compute type.
        modalities: As :class:`Generator` takes them.

    Raises:
        CheckpointError: The store lacks a parameter, or holds it in another shape.
        ConfigError: The config lacks a modality.
    """
    with torch.device("meta"):
        generator = Generator(config, modalities)
    return _fill(generator, store, dtype)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's name for a floating-point element type."""
    found = getattr(torch, dtype.label)
    assert isinstance(found, torch.dtype)
    return found


def _fill(module: Tower, store: WeightStore, dtype: torch.dtype) -> Tower:
    wanted: dict[str, Tensor] = module.state_dict()
    wrong = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name not in store or store.entries[name].shape != tuple(tensor.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"the weights store does not fill the {type(module).__name__}",
            got=f"{len(wrong)} tensors missing or misshapen: {', '.join(wrong[:4])}",
            expected=f"{len(wanted)} tensors",
            fix="Open the checkpoint with the config.json that belongs to it.",
        )
    files = {file: _map(store, file) for file in {store.entries[name].file for name in wanted}}
    state = {}
    for name in wanted:
        entry = store.entries[name]
        keeps_float32 = name.startswith(TIME_EMBEDDER)
        tensor = _view(files[entry.file], entry)
        state[name] = tensor.to(torch.float32 if keeps_float32 else dtype)
    module.load_state_dict(state, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def _map(store: WeightStore, file: str) -> Tensor:
    """Map a whole file, uint8 ``[bytes]``.

    Copy on write, for a parameter is an object that people write to: the store's own map is read-only,
    and torch, which cannot know that, would crash the process.
    """
    path = store.root / file
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _view(raw: Tensor, entry: WeightEntry) -> Tensor:
    data = raw[entry.offset : entry.offset + entry.nbytes]
    if entry.offset % entry.dtype.itemsize:
        data = data.clone()  # torch has no unaligned views; safetensors' writer pads its header
    return data.view(torch_dtype(entry.dtype)).view(entry.shape)

"""The published models' tensor tables over files that are holes on disk.

For tests of scale: every header is real and every byte of weights is a zero that no disk stores.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from huggingface_hub import split_torch_state_dict_into_shards

from omni_fixtures.configs import PUBLISHED, transformer_kwargs
from omni_fixtures.files import write_json

_WEIGHTS = "diffusion_pytorch_model"


def build_sparse(name: str, directory: Path) -> Path:
    """Write ``directory/transformer`` for edge, nano or super and return ``directory``.

    The file system has to support holes: Super is 128 GB long.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no published model {name!r}; expected one of {', '.join(PUBLISHED)}")
    folder = directory / "transformer"
    write_json(folder / "config.json", PUBLISHED[name])
    tensors = _tensor_table(name)
    split = split_torch_state_dict_into_shards(
        tensors, max_shard_size="5GB", filename_pattern=_WEIGHTS + "{suffix}.safetensors"
    )
    for filename, names in split.filename_to_tensors.items():
        _write_hole(folder / filename, {key: tensors[key] for key in names})
    write_json(
        folder / f"{_WEIGHTS}.safetensors.index.json",
        {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
    )
    return directory


def _tensor_table(name: str) -> dict[str, torch.Tensor]:
    # From the public class, on the device that has shapes and no storage.
    with torch.device("meta"):
        model = Cosmos3OmniTransformer(**transformer_kwargs(PUBLISHED[name]))
    return {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items()}


def _write_hole(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # By hand, because safetensors can only write tensors that exist. Its own order within one
    # dtype is by name, and its header is padded with spaces to a multiple of eight bytes.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(tensors.items()):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)

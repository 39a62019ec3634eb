"""Writing a safetensors file tensor by tensor, so that memory does not grow with the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from motrt.engines.store import WeightEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from motrt.engines.dtypes import DType
    from motrt.engines.tensors import Array

_ALIGNMENT = 64  # of the first byte of data: mapped views are then aligned for any kernel


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[DType, tuple[int, ...]]],
    chunks: Callable[[str], Iterator[Array]],
) -> None:
    """Write a file whose tensors are produced one piece at a time.

    Args:
        path: The file; it must not exist.
        tensors: Type and shape of each tensor.
        chunks: Yields a tensor's elements in order, in pieces of the tensor's type.

    Raises:
        OSError: The disk refuses.
    """
    # Widest type first, as the safetensors library does: every tensor is then aligned to its type.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        dtype, shape = tensors[name]
        nbytes = WeightEntry("", 0, dtype, shape).nbytes
        header[name] = {
            "dtype": dtype.value,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for name in names:
            for piece in chunks(name):
                file.write(piece.tobytes())

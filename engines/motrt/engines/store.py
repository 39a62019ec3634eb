"""The weights store: where each tensor lies, and a mapped view of it.

A store never copies a tensor and never reads one that nobody asks for. The same entries tell an
ONNX graph where its initializers are, a session what to map, and a refit what to upload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import CheckpointError
from motrt.engines.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from motrt.engines.dtypes import DType
    from motrt.engines.tensors import Array


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor's place: ``offset`` bytes from the start of ``file`` (relative, ``/``)."""

    file: str
    offset: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class WeightStore:
    """Tensors by name over memory-mapped safetensors files.

    Args:
        root: The directory that the entries' files are relative to.
        entries: Place of each tensor. Trusted: whoever makes a store has checked the headers.
        replaced: Tensors that count instead of the files' own, each of its entry's type and shape.
    """

    def __init__(
        self,
        root: Path,
        entries: Mapping[str, WeightEntry],
        replaced: Mapping[str, Array] | None = None,
    ) -> None:
        self.root = root
        self.entries = dict(entries)
        self.replaced = dict(replaced or {})
        self._maps: dict[str, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    @classmethod
    def from_files(cls, root: Path, files: list[str]) -> WeightStore:
        """Index safetensors files by their headers.

        Raises:
            CheckpointError: A file is damaged, or a tensor is in two of them.
        """
        entries: dict[str, WeightEntry] = {}
        for file in files:
            for name, item in read_header(root / file).tensors.items():
                if name in entries:
                    raise CheckpointError(
                        f"tensor {name} is in two files",
                        got=f"{entries[name].file} and {file}",
                        expected="one place for each tensor",
                        fix="Remove the file that does not belong to this checkpoint.",
                    )
                entries[name] = WeightEntry(file, item.offset, item.dtype, item.shape)
        return cls(root, entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Array:
        """Return a read-only view of a tensor; it is valid as long as the store lives.

        Raises:
            CheckpointError: There is no such tensor.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(
                "the weights store lacks a tensor", got=name, expected=f"one of {len(self)} names"
            )
        if name in self.replaced:
            return self.replaced[name]
        if entry.nbytes == 0:
            empty = np.empty(entry.shape, entry.dtype.numpy)
            empty.flags.writeable = False
            return empty
        raw = self._map(entry.file)[entry.offset : entry.offset + entry.nbytes]
        return raw.view(entry.dtype.numpy).reshape(entry.shape)

    def subset(self, names: set[str]) -> WeightStore:
        """Return a store over some of the tensors."""
        return WeightStore(
            self.root, {n: e for n, e in self.entries.items() if n in names}, self.replaced
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def files(self) -> list[str]:
        """The files in use, in the order of their first tensor."""
        return list(dict.fromkeys(entry.file for entry in self.entries.values()))

    def _map(self, file: str) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        if file not in self._maps:
            self._maps[file] = np.memmap(self.root / file, np.uint8, mode="r")
        return self._maps[file]

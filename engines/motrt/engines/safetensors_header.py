"""The header of a safetensors file, read without touching the tensors.

The safetensors package gives no byte offsets, and the offsets are what lets an ONNX graph point
into a checkpoint. So the header is parsed here, and every promise that it makes is checked
against the file before anyone maps a byte. Format: one little-endian u64, the header's length;
that many bytes of JSON; then the data, to which ``data_offsets`` are relative.
"""

from __future__ import annotations

import hashlib
import json
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.dtypes import DType
from motrt.engines.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

# The reference implementation refuses longer headers, so no honest file has one.
MAX_HEADER_BYTES = 100_000_000
_MAX_QUOTED = 200  # characters of a stranger's header in a message


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: ``offset`` is counted from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header and the facts that identify its file."""

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    sha256: str
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``.

    Returns:
        The tensors in file order, the metadata, the sha256 of the length field and the JSON
        together, and the file's size in bytes.

    Raises:
        CheckpointError: The file is not safetensors, is truncated, or its header lies.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise _bad(path, "something else than a file", "a safetensors file")
        file_bytes = status.st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _bad(path, f"{file_bytes} bytes", "a safetensors file (at least 8 bytes)")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
                raise _bad(
                    path,
                    f"a header of {length} bytes in a file of {file_bytes}",
                    "a safetensors file whose header fits into it",
                )
            raw = file.read(length)
    except OSError as err:
        raise CheckpointError(
            f"cannot read {path.name}",
            got=err.strerror or err,
            expected="a safetensors file",
            fix=f"Check {path}.",
        ) from err
    try:
        # Decoded here: given bytes, json would accept UTF-16 and a byte order mark too.
        table = json.loads(raw.decode(), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as err:
        raise _bad(path, f"a header that is not JSON ({err})", "a safetensors file") from err
    if not isinstance(table, dict):
        raise _bad(path, f"a header that is a {type(table).__name__}", "a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, f"__metadata__ = {metadata!r}", "an object of strings")
    data_start = 8 + length
    tensors = {
        name: _entry(path, name, item, data_start, file_bytes) for name, item in table.items()
    }
    _check_layout(path, tensors, data_start, file_bytes)
    return Header(
        tensors=tensors,
        metadata=metadata,
        sha256=hashlib.sha256(prefix + raw).hexdigest(),
        file_bytes=file_bytes,
    )


def _entry(path: Path, name: str, item: object, data_start: int, file_bytes: int) -> HeaderEntry:
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"entry {name!r} = {item!r}", "dtype, shape and data_offsets")
    try:
        dtype = DType(item["dtype"])
    except ValueError:
        raise _bad(
            path, f"{name!r} of type {item['dtype']!r}", ", ".join(t.value for t in DType)
        ) from None
    shape, offsets = item["shape"], item["data_offsets"]
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _bad(path, f"{name!r} with shape {shape} and offsets {offsets}", "natural numbers")
    begin, end = offsets
    nbytes = _nbytes(shape, dtype, file_bytes)
    if nbytes is None or end - begin != nbytes:
        raise _bad(
            path,
            f"{name!r} {dtype.label}{shape} over {end - begin} bytes",
            "more bytes than the file has" if nbytes is None else f"{nbytes} bytes",
        )
    return HeaderEntry(dtype, tuple(shape), data_start + begin, nbytes)


def _check_layout(
    path: Path, tensors: dict[str, HeaderEntry], data_start: int, file_bytes: int
) -> None:
    """Refuse overlaps, holes and tails: the format promises that the data is one gapless run."""
    position = data_start
    for name, entry in sorted(tensors.items(), key=lambda pair: (pair[1].offset, pair[1].nbytes)):
        if entry.offset != position:
            raise _bad(
                path, f"{name!r} at byte {entry.offset}", f"byte {position} (no gap, no overlap)"
            )
        position += entry.nbytes
    if position != file_bytes:
        kind = "truncated" if position > file_bytes else "longer than its header says"
        raise CheckpointError(
            f"{path.name} is {kind}",
            got=f"{file_bytes} bytes",
            expected=f"{position} bytes by its header",
            fix="Download or copy the file again.",
        )


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _nbytes(shape: list[int], dtype: DType, limit: int) -> int | None:
    """Multiply no further than the limit: a lying shape can be millions of numbers long."""
    if 0 in shape:
        return 0
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
        if nbytes > limit:
            return None
    return nbytes


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value
    )


def _bad(path: Path, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not a sound safetensors file",
        got=got if len(got) <= _MAX_QUOTED else f"{got[:_MAX_QUOTED]}…",
        expected=expected,
        fix="Download or copy the file again.",
    )

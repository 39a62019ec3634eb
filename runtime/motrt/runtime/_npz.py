"""NPZ files, read without trust and written without the time of day in them."""

from __future__ import annotations

import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from motrt.engines.tensors import Array

_CHUNK = 1 << 16  # bytes


def read_npz(path: Path, *, names: Collection[str]) -> dict[str, Array]:
    """Read all arrays of a file; nothing is ever unpickled.

    Args:
        path: The file.
        names: Names that may be in it.

    Raises:
        ConfigError: It is absent, damaged, no NPZ, or holds another name or objects.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in names or name in arrays:
                    raise ConfigError(
                        f"{path} holds an unknown array"
                        if name not in names
                        else f"{path} holds an array twice",
                        got=name,
                        expected=f"among {', '.join(names)}",
                    )
                arrays[name] = _read_member(archive, info)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,  # encrypted, or compressed in a way of which Python knows nothing
        zipfile.BadZipFile,
        zlib.error,
    ) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(
            f"cannot read {path}",
            got=getattr(err, "strerror", None) or err,
            expected="an NPZ file of NumPy's",
        ) from err
    return arrays


def write_member(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    """Add an array to an open archive."""
    with archive.open(_info(name), "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def copy_member(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: Any, data: IO[bytes]
) -> None:
    """Add an array whose bytes lie in a file, without holding them."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with archive.open(_info(name), "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        while chunk := data.read(_CHUNK):
            file.write(chunk)


def _info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy")  # dated 1980: equal arrays make equal files


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """Read an array after a look at whether the member has as many bytes as its header says."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"{info.filename} is of NPY version {version}")
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds pickled objects")
        size = dtype.itemsize
        for side in shape:
            size *= side
        if size != info.file_size - file.tell():
            raise ValueError(f"{info.filename} has another size than its header says")
    with archive.open(info) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array

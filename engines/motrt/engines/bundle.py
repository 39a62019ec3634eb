"""A bundle on disk: opened with its integrity checked, written all or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from motrt.engines.contract import EngineContract, generator_contract, reasoner_contract
from motrt.engines.errors import BundleError, CheckpointError, ExportError
from motrt.engines.manifest import FileRecord, Manifest
from motrt.engines.safetensors_header import read_header
from motrt.engines.store import WeightEntry, WeightStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from motrt.engines.dtypes import DType

MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 256 << 20
_AGAIN = "Copy the bundle again, or export the checkpoint again."


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; every small file's hash and every weight file's header was checked."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, root: Path) -> Bundle:
        """Open a bundle.

        Raises:
            BundleError: It is absent, damaged, newer than this motrt, or reaches outside its
                folder.
        """
        path = root / MANIFEST
        if not path.is_file():
            raise BundleError(
                "there is no bundle",
                got=root,
                expected=f"a folder with {MANIFEST}",
                fix="Write one with: motrt export CHECKPOINT -o BUNDLE",
            )
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise BundleError("manifest.json is not sound", got="over 256 MiB", fix=_AGAIN)
            manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as err:
            raise BundleError("cannot read manifest.json", got=err, fix=_AGAIN) from err
        bundle = cls(root, manifest)
        for name, record in manifest.files.items():
            bundle._check_file(name, record)
        for entries in manifest.weights.values():
            bundle._check_weights(entries)
        for graph in bundle.graphs:
            if graph not in manifest.files:
                raise BundleError(
                    "the bundle lacks a graph", got=f"no record of {graph}", fix=_AGAIN
                )
        return bundle

    @property
    def graphs(self) -> tuple[str, ...]:
        """File names of all graphs."""
        parts = [
            graph
            for component in self.manifest.components.values()
            for graph in component.get("graphs", {}).values()
        ]
        return ("reasoner.onnx", "generator.onnx", *parts)

    @property
    def dtype(self) -> DType:
        """The compute type of both transformers."""
        return self.manifest.precision.dtype

    def weights(self, part: str = "transformer") -> WeightStore:
        """Return the store of a part.

        Raises:
            BundleError: The bundle has no such part.
        """
        if part not in self.manifest.weights:
            raise BundleError(
                f"the bundle has no {part}",
                got=self.manifest.absent.get(part, "nothing of that name"),
                expected=f"one of {', '.join(self.manifest.weights)}",
            )
        return WeightStore(self.root, self.manifest.weights[part])

    def reasoner_contract(self) -> EngineContract:
        """Return the contract of ``reasoner.onnx``."""
        return reasoner_contract(self.manifest.model, self.dtype, self.manifest.cache)

    def generator_contract(self) -> EngineContract:
        """Return the contract of ``generator.onnx``."""
        return generator_contract(self.manifest.model, self.dtype, self.manifest.modalities)

    def commit(self, manifest: Manifest) -> Bundle:
        """Replace the manifest by one rename: readers see the old bundle or the new one.

        Raises:
            BundleError: The disk refuses.
        """
        try:
            write_atomic(self.root / MANIFEST, manifest.to_json().encode())
        except OSError as err:
            raise BundleError(
                "cannot replace manifest.json; the bundle is unchanged", got=err.strerror
            ) from err
        return Bundle(self.root, manifest)

    def path(self, name: str) -> Path:
        """Return the path of a file of the bundle.

        Raises:
            BundleError: ``name`` is absolute, climbs out, or is a link that leaves the folder.
        """
        pure = PurePosixPath(name)
        path = self.root / name
        if (
            pure.is_absolute()
            or ".." in pure.parts
            or "\\" in name
            or not path.resolve().is_relative_to(self.root.resolve())
        ):
            raise BundleError(
                "the bundle reaches outside its folder",
                got=name,
                expected="paths inside the bundle",
                fix="Do not use this bundle; export the checkpoint again.",
            )
        return path

    def _check_file(self, name: str, record: FileRecord) -> None:
        path = self.path(name)
        try:
            size = path.stat().st_size
        except OSError as err:
            raise BundleError(f"the bundle lacks {name}", got=err.strerror, fix=_AGAIN) from err
        if size != record.nbytes:
            raise _changed(name, f"{size} bytes", f"{record.nbytes} bytes")
        if record.sha256 is not None:
            have = sha256_of(path)
            if have != record.sha256:
                raise _changed(name, f"sha256 {have[:12]}…", f"{record.sha256[:12]}…")
        if record.header_sha256 is not None:
            try:
                have = read_header(path).sha256
            except CheckpointError as err:
                raise BundleError(
                    f"{name} is damaged", got=err.got, expected=err.expected, fix=_AGAIN
                ) from err
            if have != record.header_sha256:
                raise _changed(
                    name, f"header sha256 {have[:12]}…", f"{record.header_sha256[:12]}…"
                )

    def _check_weights(self, entries: Mapping[str, WeightEntry]) -> None:
        headers = {}
        for name, entry in entries.items():
            if entry.file not in headers:
                if self.manifest.files.get(entry.file, FileRecord(0)).header_sha256 is None:
                    raise BundleError(
                        f"tensor {name} lies in an unrecorded file", got=entry.file, fix=_AGAIN
                    )
                headers[entry.file] = read_header(self.path(entry.file)).tensors
            item = headers[entry.file].get(name)
            have = None if item is None else (item.offset, item.dtype, item.shape)
            if have != (entry.offset, entry.dtype, entry.shape):
                raise _changed(
                    f"the place of tensor {name}",
                    f"{have} in {entry.file}",
                    f"{(entry.offset, entry.dtype, entry.shape)}",
                )


@contextmanager
def new_bundle(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder beside ``target`` that becomes ``target`` if the block succeeds.

    Nothing is left behind if it does not, whatever stopped it.

    Raises:
        ExportError: ``target`` exists and may not be replaced, or the disk refuses.
    """
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise ExportError(
                "the output exists already",
                got=target,
                expected="a new name",
                fix="Choose another -o, or pass --overwrite.",
            )
        if not (target / MANIFEST).is_file():
            raise ExportError(
                "the output is not a bundle, so it is not replaced",
                got=target,
                expected=f"a folder with {MANIFEST}",
                fix="Choose another -o.",
            )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as err:
        raise ExportError(f"cannot write beside {target}", got=err.strerror or err) from err
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes 0700
        _swap(folder, target)
    except OSError as err:
        raise ExportError(
            "cannot write the bundle; nothing was kept",
            got=err.strerror or err,
            fix="Check free space and permissions of the output folder.",
        ) from err
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "bundle")
    try:
        folder.rename(target)
    except BaseException:  # Ctrl-C included: the old bundle must come back before `old` goes
        (old / "bundle").rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old bytes or the new ones."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp makes 0600
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def record_small(path: Path) -> FileRecord:
    """Return the record of a file that is hashed whole."""
    return FileRecord(path.stat().st_size, sha256=sha256_of(path))


def record_weights(path: Path) -> FileRecord:
    """Return the record of a safetensors file: size and header hash."""
    header = read_header(path)
    return FileRecord(header.file_bytes, header_sha256=header.sha256)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _changed(name: str, got: str, expected: str) -> BundleError:
    return BundleError(
        f"{name} is not what the manifest recorded", got=got, expected=expected, fix=_AGAIN
    )

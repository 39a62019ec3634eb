"""A bundle on disk: opened with its integrity checked, written all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from motrt.engines.arguments import as_path
from motrt.engines.contract import (
    EngineContract,
    Modality,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.errors import BundleError, CheckpointError, ExportError
from motrt.engines.manifest import FORMAT, FileRecord, Manifest
from motrt.engines.safetensors_header import read_header
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.weight_names import weight_table

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
    def open(cls, root: str | Path) -> Bundle:
        """Open a bundle.

        Raises:
            BundleError: It is absent, damaged, newer than this motrt, or reaches outside its
                folder.
            ConfigError: ``root`` is no path.
        """
        root = as_path("the bundle", root)
        path = root / MANIFEST
        if not os.path.isfile(path):  # Path.is_file raises where a name is too long
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
        bundle._check_complete()
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
        try:
            stays = path.resolve().is_relative_to(self.root.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL in the name
            stays = False
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or not stays:
            raise BundleError(
                "the bundle reaches outside its folder",
                got=name,
                expected="paths inside the bundle",
                fix="Do not use this bundle; export the checkpoint again.",
            )
        return path

    def _check_file(self, name: str, record: FileRecord) -> None:
        path = self.path(name)
        if not os.path.isfile(path):  # a folder, or a pipe that would block its reader
            raise BundleError(f"the bundle lacks {name}", got="no such file", fix=_AGAIN)
        size = path.stat().st_size
        if size != record.nbytes:
            raise _changed(name, f"{size} bytes", f"{record.nbytes} bytes")
        if record.sha256 is not None:
            try:
                have = sha256_of(path)
            except OSError as err:
                raise BundleError(f"cannot read {name}", got=err.strerror, fix=_AGAIN) from err
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

    def _check_complete(self) -> None:
        """Every tensor of the modalities that the bundle names is in the store."""
        manifest = self.manifest
        heads = {Modality.SOUND: "audio_", Modality.ACTION: "action_"}
        unused = tuple(p for kind, p in heads.items() if kind not in manifest.modalities)
        wanted = {
            name: spec.shape
            for name, spec in weight_table(manifest.model).items()
            if not (unused and name.startswith(unused))
        }
        have = manifest.weights.get("transformer", {})
        wrong = [n for n, shape in wanted.items() if n not in have or have[n].shape != shape]
        if wrong:
            raise BundleError(
                "the bundle's weights do not fit its model",
                got=f"{len(wrong)} tensors missing or misshapen: {', '.join(wrong[:4])}",
                expected=f"{len(wanted)} tensors",
                fix=_AGAIN,
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
    target = Path(os.path.abspath(target))  # "." has no name, and no place beside it
    if os.path.lexists(target) and not _is_empty_folder(target):
        if not overwrite:
            raise ExportError(
                "the output exists already",
                got=target,
                expected="a new name",
                fix="Choose another -o, or pass --overwrite.",
            )
        if not _is_bundle(target):
            raise ExportError(
                "the output is not a bundle, so it is not replaced",
                got=target,
                expected=f"a folder with a {MANIFEST} of motrt's",
                fix="Choose another -o.",
            )
    absent = [parent for parent in target.parents if not os.path.lexists(parent)]
    folder = None
    try:
        with uninterrupted():
            folder = _make_folder(target)
        yield folder
        folder.chmod(0o755)  # mkdtemp makes 0700
        with uninterrupted():
            _swap(folder, target, overwrite=overwrite)
            absent = []
    except OSError as err:
        if err.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise ExportError(
                "somebody else has written the output meanwhile; theirs was kept",
                got=target,
                expected="one export to a name at a time",
                fix="Choose another -o.",
            ) from err
        raise ExportError(
            "cannot write the bundle; nothing was kept",
            got=err.strerror or err,
            expected=f"room for it in {target.parent}",
            fix="Check free space and permissions there, or choose another -o.",
        ) from err
    finally:
        with uninterrupted():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # somebody else may have put something there by now
                for parent in absent:
                    parent.rmdir()


def _is_empty_folder(path: Path) -> bool:
    with suppress(OSError):  # one that cannot be listed is not known to be empty
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    return False


def _is_bundle(folder: Path) -> bool:
    """Whether motrt, of whatever version, wrote it: any other manifest.json is none of ours."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes()) if os.path.isfile(path) else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def _make_folder(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as err:
        raise ExportError(
            f"cannot write beside {target}",
            got=err.strerror or err,
            expected=f"a folder {target.parent} that can be written to",
            fix="Choose another -o.",
        ) from err


def _swap(folder: Path, target: Path, *, overwrite: bool) -> None:
    if not (overwrite and os.path.lexists(target)):
        folder.rename(target)  # refuses what somebody else has put there meanwhile
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        target.rename(old / "bundle")
        try:
            folder.rename(target)
        except OSError:
            (old / "bundle").rename(target)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C and ``kill`` off to the end of a block that must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    caught: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: caught.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if caught:
            signal.raise_signal(caught[0])


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

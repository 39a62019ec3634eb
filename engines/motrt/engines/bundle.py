"""A bundle on disk: opened with its integrity checked, written all or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from motrt.engines.arguments import as_path
from motrt.engines.atomic import sync_folder, write_atomic, writing_alone
from motrt.engines.contract import (
    EngineContract,
    Modality,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.errors import BundleError, CheckpointError
from motrt.engines.manifest import FileRecord, Manifest
from motrt.engines.safetensors_header import read_header
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.weight_names import weight_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.dtypes import DType
    from motrt.engines.tensors import Array

MANIFEST = "manifest.json"
REVISIONS = "revisions"
TRANSFORMER = "transformer"  # the part that both engines are made of
GRAPHS = ("reasoner.onnx", "generator.onnx")
_MAX_MANIFEST_BYTES = 256 << 20
_AGAIN = "Copy the bundle again, or export the checkpoint again."


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; every small file's hash and every weight file's header was checked.

    Attributes:
        root: The folder.
        manifest: What it is.
        replaced: Tensors of the transformer that a running process was given instead of the files'
            own; see ``Runtime.refit``.
    """

    root: Path
    manifest: Manifest
    replaced: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, root: str | Path) -> Bundle:
        """Open a bundle.

        Raises:
            BundleError: It is absent, damaged, newer than this motrt, or reaches outside its
                folder.
            ConfigError: ``root`` is no path.
        """
        root = as_path("the bundle", root)
        while True:
            manifest = read_manifest(root)
            bundle = cls(root, manifest)
            try:
                bundle.check()
            except BundleError:
                # A refit may have put another revision in place of the one that was just read.
                if read_manifest(root).revision == manifest.revision:
                    raise
            else:
                return bundle

    def check(self) -> None:
        """Compare every file with its record.

        Raises:
            BundleError: A file is absent or another one, or the bundle lacks a tensor or a graph.
        """
        for name, record in self.manifest.files.items():
            self._check_file(name, record)
        for entries in self.manifest.weights.values():
            self._check_weights(entries)
        self._check_complete()
        for graph in self.graphs:
            if graph not in self.manifest.files:
                raise BundleError(
                    "the bundle lacks a graph", got=f"no record of {graph}", fix=_AGAIN
                )

    @property
    def graphs(self) -> tuple[str, ...]:
        """File names of all graphs."""
        parts = [
            graph
            for component in self.manifest.components.values()
            for graph in component.get("graphs", {}).values()
        ]
        return (*GRAPHS, *parts)

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
        entries = self.manifest.weights[part]
        if part != TRANSFORMER:
            return WeightStore(self.root, entries)
        return WeightStore(self.content, entries, self.replaced)

    @property
    def content(self) -> Path:
        """The folder of the transformer's graphs and weights: the bundle, or its revision."""
        revision = self.manifest.revision
        return self.root if revision is None else self.root / REVISIONS / revision.id

    def base(self) -> Bundle:
        """Return the bundle as it was exported, whatever it was refitted with since."""
        return Bundle(self.root, dataclasses.replace(self.manifest, revision=None))

    def reasoner_contract(self) -> EngineContract:
        """Return the contract of ``reasoner.onnx``."""
        return reasoner_contract(self.manifest.model, self.dtype, self.manifest.cache)

    def generator_contract(self) -> EngineContract:
        """Return the contract of ``generator.onnx``."""
        return generator_contract(self.manifest.model, self.dtype, self.manifest.modalities)

    def commit(self, manifest: Manifest) -> Bundle:
        """Replace the manifest by one rename: readers see the old bundle or the new one.

        Raises:
            BundleError: The disk refuses, or the bundle was refitted since it was opened.
        """
        with writing_alone(self.root):
            if read_manifest(self.root).revision != self.manifest.revision:
                raise BundleError(
                    "the bundle was refitted meanwhile; it is unchanged",
                    expected="the weights that it was opened with",
                    fix="Open the bundle again.",
                )
            return self.commit_alone(manifest)

    def commit_alone(self, manifest: Manifest) -> Bundle:
        """Do as :meth:`commit` for a caller who holds the lock, and answers for the revision."""
        try:
            write_atomic(self.root / MANIFEST, manifest.to_json().encode())
        except OSError as err:
            raise BundleError(
                "cannot replace manifest.json; the bundle is unchanged", got=err.strerror
            ) from err
        with suppress(OSError):  # done already; some file systems cannot sync a folder
            sync_folder(self.root)
        return Bundle(self.root, manifest)

    def path(self, name: str) -> Path:
        """Return the path of a file of the bundle.

        Raises:
            BundleError: ``name`` is absolute, climbs out, or is a link that leaves the folder.
        """
        pure = PurePosixPath(name)
        path = (self.content if is_revised(name) else self.root) / name
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


def is_revised(name: str) -> bool:
    """Return whether a refit puts another file in this one's place."""
    return name in GRAPHS or name.startswith(f"weights/{TRANSFORMER}/")


def read_manifest(root: Path) -> Manifest:
    """Read a bundle's manifest; its files are not looked at.

    Raises:
        BundleError: There is none, or it is not sound.
    """
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
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise BundleError("cannot read manifest.json", got=err, fix=_AGAIN) from err


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

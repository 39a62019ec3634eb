"""``manifest.json``: what a bundle is, what it holds, and what was proven about it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from motrt.engines.contract import CONTRACT_VERSION, Cache, Modality, check_modalities
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import BundleError, ConfigError
from motrt.engines.model_config import ModelConfig
from motrt.engines.store import WeightEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FORMAT = "motrt-bundle"
LoweringName = Literal["native", "portable"]
LOWERINGS: tuple[str, ...] = get_args(LoweringName)
GUARDRAIL = "not exported"  # the public pipelines' safety checker
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """How a file is recognized.

    Small files are hashed whole. Weight files may hold 100 GB, so at open they are recognized by
    their size and the hash of their safetensors header.
    """

    nbytes: int
    sha256: str | None = None
    header_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    """The weights that a refit put in place of those that were exported.

    Attributes:
        id: Name of its folder under ``revisions/``.
        record: Where they come from and what was measured: ``sources``, ``tensors``, ``probe``.
    """

    id: str
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest, typed.

    Attributes:
        model: The architecture; ``model.weight_layout`` is the bundle's.
        precision: Compute type of both transformers.
        lowering: Which ONNX operators the graphs use (``native`` or ``portable``).
        cache: How the reasoner's cache is updated.
        modalities: What the generator denoises, in token order.
        inv_freq: Rotary frequencies, float32 ``[D/2]``, bit for bit the reference's.
        rotary_axes: For each frequency the position axis that it turns with: 0 time, 1 height,
            2 width.
        files: Every file of the bundle but the manifest itself.
        weights: Place of each tensor, by part of the bundle (``transformer``, ``vae``).
        components: What else was exported, with what is needed to use it.
        absent: What was not exported, and why.
        scheduler: The checkpoint's scheduler config, or empty.
        pipeline: The checkpoint's ``model_index.json``, or empty.
        prompt_templates: The sentences around a prompt; see ``motrt.runtime.prompt_templates``.
        probe: The numeric probe at the end of the last write.
        parity: The evidence of the last ``validate``, or None.
        provenance: Who wrote the bundle, from what, with which versions.
        plans: sha256 of each ``plan.json``, by the plan's folder. A plan is code: what is not
            listed here is not loaded.
        revision: The refit in force, or None: the weights as exported.
    """

    model: ModelConfig
    precision: Precision
    lowering: str
    cache: Cache
    modalities: tuple[Modality, ...]
    inv_freq: tuple[float, ...]
    rotary_axes: tuple[int, ...]
    files: dict[str, FileRecord]
    weights: dict[str, dict[str, WeightEntry]]
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    prompt_templates: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    parity: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    revision: Revision | None = None

    def to_json(self) -> str:
        """Return the file's text."""
        data = {
            "format": FORMAT,
            "contract_version": CONTRACT_VERSION,
            "weight_layout": self.model.weight_layout,
            "precision": self.precision.value,
            "lowering": self.lowering,
            "cache": self.cache.value,
            "modalities": [modality.value for modality in self.modalities],
            "model": self.model.to_dict(),
            "inv_freq": list(self.inv_freq),
            "rotary_axes": list(self.rotary_axes),
            "components": self.components,
            "absent": self.absent,
            "guardrail": GUARDRAIL,
            "scheduler": self.scheduler,
            "pipeline": self.pipeline,
            "prompt_templates": self.prompt_templates,
            "probe": self.probe,
            "parity": self.parity,
            "provenance": self.provenance,
            "plans": self.plans,
            "revision": self.revision and {"id": self.revision.id, **self.revision.record},
            "files": {
                name: {key: value for key, value in _record(record).items() if value is not None}
                for name, record in sorted(self.files.items())
            },
            "weights": {
                part: {
                    name: {
                        "file": entry.file,
                        "offset": entry.offset,
                        "dtype": entry.dtype.label,
                        "shape": list(entry.shape),
                    }
                    for name, entry in entries.items()
                }
                for part, entries in self.weights.items()
            },
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            BundleError: It is no manifest, is from a newer motrt, or contradicts itself.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise _bad(f"no JSON ({err})", "a motrt bundle") from err
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _bad("another file format", f'a JSON object with "format": "{FORMAT}"')
        version = data.get("contract_version")
        if version != CONTRACT_VERSION:
            newer = isinstance(version, int) and version > CONTRACT_VERSION
            raise BundleError(
                "the bundle has another contract version",
                got=repr(version),
                expected=CONTRACT_VERSION,
                fix="Upgrade motrt." if newer else "Export the checkpoint again.",
            )
        try:
            model = ModelConfig.from_dict(data["model"], source="manifest.json")
            manifest = cls(
                model=model,
                precision=Precision(data["precision"]),
                lowering=_lowering(data["lowering"]),
                cache=Cache(data["cache"]),
                modalities=check_modalities(model, [Modality(m) for m in data["modalities"]]),
                inv_freq=tuple(_frequency(value) for value in data["inv_freq"]),
                rotary_axes=tuple(_natural(axis) for axis in data["rotary_axes"]),
                files=_map(data["files"], _file_record),
                weights=_map(data["weights"], lambda part: _map(part, _weight_entry)),
                components=_map(data["components"], _component),
                absent=_map(data["absent"], _text),
                scheduler=dict(data["scheduler"]),
                pipeline=dict(data["pipeline"]),
                prompt_templates=dict(data["prompt_templates"]),
                probe=dict(data["probe"]),
                parity=None if data["parity"] is None else dict(data["parity"]),
                provenance=dict(data["provenance"]),
                plans=_map(data.get("plans", {}), _text),  # bundles from before there were any
                revision=_revision(data.get("revision")),
            )
        except ConfigError as err:
            raise BundleError(
                f"manifest.json: {err.message}", got=err.got, expected=err.expected, fix=_AGAIN
            ) from err
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise _bad(f"{type(err).__name__}: {err}", "every field of the schema") from err
        layout = data.get("weight_layout")
        if layout != model.weight_layout:
            raise _bad(f"weight_layout {layout!r}", f"the model's, {model.weight_layout!r}")
        half = model.head_dim // 2
        if len(manifest.inv_freq) != half or len(manifest.rotary_axes) != half:
            raise _bad(
                f"{len(manifest.inv_freq)} rotary frequencies on {len(manifest.rotary_axes)} axes",
                f"head_dim / 2 = {half}",
            )
        if not set(manifest.rotary_axes) <= {0, 1, 2}:
            raise _bad(f"rotary axes {sorted(set(manifest.rotary_axes))}", "0, 1 and 2")
        return manifest


_AGAIN = "Export the checkpoint again."
_REVISION_ID = re.compile(r"[0-9a-f]{12}")
_FLOAT32_MAX = 3.4028235e38


def _record(record: FileRecord) -> dict[str, Any]:
    data = dataclasses.asdict(record)
    return {"bytes": data.pop("nbytes"), **data}


def _file_record(data: Mapping[str, Any]) -> FileRecord:
    hashes = {key: _text(data[key]) for key in ("sha256", "header_sha256") if key in data}
    if not hashes:
        raise ValueError("a file without a hash")
    return FileRecord(_natural(data["bytes"]), **hashes)


def _weight_entry(data: Mapping[str, Any]) -> WeightEntry:
    return WeightEntry(
        _text(data["file"]),
        _natural(data["offset"]),
        DType.from_label(_text(data["dtype"])),
        tuple(_natural(size) for size in data["shape"]),
    )


def _revision(data: Mapping[str, Any] | None) -> Revision | None:
    if data is None:
        return None
    identity = _text(data["id"])
    if not _REVISION_ID.fullmatch(identity):  # it names a folder
        raise ValueError(f"a revision named {identity!r}")
    return Revision(identity, {key: value for key, value in data.items() if key != "id"})


def _lowering(value: object) -> str:
    if value not in LOWERINGS:
        raise ValueError(f"unknown lowering {value!r}")
    return str(value)


def _component(data: Mapping[str, Any]) -> dict[str, Any]:
    graphs = data.get("graphs")
    return dict(data) if graphs is None else {**data, "graphs": _map(graphs, _text)}


def _map(data: Mapping[str, Any], convert: Callable[[Any], _T]) -> dict[str, _T]:
    return {str(key): convert(value) for key, value in data.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a natural number, got {value!r}")
    return value


def _frequency(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 < value < _FLOAT32_MAX:
        return float(value)
    raise TypeError(f"expected a frequency, got {value!r}")


def _bad(got: str, expected: str) -> BundleError:
    return BundleError("manifest.json is not sound", got=got, expected=expected, fix=_AGAIN)

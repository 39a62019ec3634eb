"""What a bundle holds, from its manifest and its files' sizes; no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.contract import CONTRACT_VERSION
from motrt.engines.manifest import GUARDRAIL
from motrt.engines.memory_estimate import MemoryEstimate, Shapes, estimate_memory
from motrt.engines.plans.advice import WeightsAdvice, weights_advice
from motrt.engines.weight_names import Part, weight_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.manifest import Manifest
    from motrt.engines.store import WeightEntry
    from motrt.engines.tensors import TensorSpec

# Every bundle of this contract version says the same; see Manifest.to_json.


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of tensors, of their elements, and of their bytes."""

    tensors: int
    parameters: int
    nbytes: int

    @classmethod
    def of(cls, entries: Iterable[WeightEntry]) -> Amount:
        """Add up."""
        found = list(entries)
        parameters = sum(int(np.prod(entry.shape, dtype=np.int64)) for entry in found)
        return cls(len(found), parameters, sum(entry.nbytes for entry in found))

    def to_dict(self) -> dict[str, int]:
        """Return the JSON form."""
        return {"tensors": self.tensors, "parameters": self.parameters, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class Component:
    """What a bundle holds beside the two transformers.

    Attributes:
        graphs: File of each graph, by its job.
        files: Small files that the runtime reads.
        weights: All its tensors.
        parts: The same by the first word of the tensors' names (``encoder``, ``decoder``).
    """

    graphs: dict[str, str]
    files: list[str]
    weights: Amount
    parts: dict[str, Amount]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of the bundle.

    Attributes:
        path: Relative to the bundle.
        nbytes: Size.
        links: Names that the file has on its disk; more than one if it is hard-linked to a
            checkpoint, and then costs no space of its own.
    """

    path: str
    nbytes: int
    links: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A bundle's content.

    Attributes:
        manifest: Everything that was recorded.
        path: The bundle's folder.
        reasoner: Contract of the reasoner.
        generator: Contract of the generator.
        weights: The transformer's tensors by who reads them; ``other`` are tensors that the
            config does not call for.
        components: What else there is.
        files: Every recorded file.
        memory: The estimate.
    """

    manifest: Manifest
    path: str
    reasoner: EngineContract
    generator: EngineContract
    weights: dict[str, Amount]
    components: dict[str, Component]
    files: tuple[FileInfo, ...]
    memory: MemoryEstimate

    @property
    def scheduler(self) -> str | None:
        """Class name of the checkpoint's scheduler, or None if the bundle has none."""
        name = self.manifest.scheduler.get("_class_name")
        return None if name is None else str(name)

    @property
    def weights_advice(self) -> WeightsAdvice:
        """What each ``motrt build --weights`` costs, and which one suits."""
        return weights_advice(self.memory)

    @property
    def linked_nbytes(self) -> int:
        """Bytes of the files that have another name outside the bundle."""
        return sum(file.nbytes for file in self.files if file.links > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``motrt inspect --json`` prints.

        Keys:
            bundle: The folder.
            contract_version, precision, lowering, cache, weight_layout, modalities: As in the
                manifest.
            model: The architecture, under the keys of its ``config.json``.
            engines: ``reasoner`` and ``generator``, each with ``inputs`` and ``outputs``: lists of
                ``{name, dtype, shape}``, where a shape holds numbers and names of dimensions.
            weights: ``host`` (embedding rows, gathered by the runtime), ``reasoner``,
                ``generator``, ``both`` and ``other``: ``{tensors, parameters, bytes}`` of the
                tensors that this reader alone needs, so that they add up to ``total``.
                ``shared_bytes`` says what both engines use.
            components: By name: ``graphs``, ``files``, ``weights`` and ``parts``.
            files: A list of ``{path, bytes, links, hard_linked}``.
            file_bytes: ``total``, and ``linked``: what has a name outside the bundle too.
            memory: See ``MemoryEstimate``; all in bytes, but for ``shapes``.
            plans: Device bytes of both engines with ``motrt build --weights`` ``refit`` and
                ``inputs``, the ``recommended`` one and the ``reason``.
            scheduler: A class name, or null.
            absent: Reason by name of each part that was not exported.
            probe: Outcome of the numeric probe of the last write.
            parity: Evidence of the last ``validate`` without its rows, or null.
            guardrail: Whether the checkpoint's safety checker is in the bundle.
            provenance: Who wrote the bundle, from what.
            revision: ``id``, ``sources``, ``tensors`` and ``probe`` of the refit in force, or null.
        """
        manifest, parity = self.manifest, self.manifest.parity
        return {
            "bundle": self.path,
            "contract_version": CONTRACT_VERSION,
            "precision": manifest.precision.value,
            "lowering": manifest.lowering,
            "cache": manifest.cache.value,
            "weight_layout": manifest.model.weight_layout,
            "modalities": [modality.value for modality in manifest.modalities],
            "model": manifest.model.to_dict(),
            "engines": {
                engine.name: {
                    "inputs": [_spec(spec) for spec in engine.inputs],
                    "outputs": [_spec(spec) for spec in engine.outputs],
                }
                for engine in (self.reasoner, self.generator)
            },
            "weights": {
                **{part: amount.to_dict() for part, amount in self.weights.items()},
                "total": Amount.of(manifest.weights.get("transformer", {}).values()).to_dict(),
                "shared_bytes": self.weights[Part.BOTH.value].nbytes,
            },
            "components": {
                name: {
                    "graphs": component.graphs,
                    "files": component.files,
                    "weights": component.weights.to_dict(),
                    "parts": {k: amount.to_dict() for k, amount in component.parts.items()},
                }
                for name, component in self.components.items()
            },
            "files": [
                {
                    "path": file.path,
                    "bytes": file.nbytes,
                    "links": file.links,
                    "hard_linked": file.links > 1,
                }
                for file in self.files
            ],
            "file_bytes": {
                "total": sum(file.nbytes for file in self.files),
                "linked": self.linked_nbytes,
            },
            "memory": asdict(self.memory),
            "plans": asdict(self.weights_advice),
            "scheduler": self.scheduler,
            "absent": manifest.absent,
            "probe": manifest.probe,
            "parity": parity and {k: value for k, value in parity.items() if k != "rows"},
            "guardrail": GUARDRAIL,
            "provenance": manifest.provenance,
            "revision": manifest.revision
            and {"id": manifest.revision.id, **manifest.revision.record},
        }


def inspect_bundle(bundle: Bundle, shapes: Shapes | None = None) -> Inspection:
    """Describe an opened bundle.

    Args:
        bundle: The bundle.
        shapes: What to estimate memory for; all defaults if None.
    """
    manifest = bundle.manifest
    weights = _by_reader(manifest)
    components = _components(manifest)
    return Inspection(
        manifest=manifest,
        path=str(bundle.root),
        reasoner=bundle.reasoner_contract(),
        generator=bundle.generator_contract(),
        weights=weights,
        components=components,
        files=tuple(
            FileInfo(name, record.nbytes, bundle.path(name).stat().st_nlink)
            for name, record in sorted(manifest.files.items())
        ),
        memory=estimate_memory(
            manifest.model,
            bundle.dtype,
            shapes or Shapes(),
            lowering=manifest.lowering,
            weights={part: weights[part.value].nbytes for part in Part},
            other=sum(component.weights.nbytes for component in components.values()),
        ),
    )


def _by_reader(manifest: Manifest) -> dict[str, Amount]:
    table = weight_table(manifest.model)
    readers: dict[str, list[WeightEntry]] = {part.value: [] for part in Part}
    readers["other"] = []
    for name, entry in manifest.weights.get("transformer", {}).items():
        readers[table[name].part.value if name in table else "other"].append(entry)
    return {reader: Amount.of(entries) for reader, entries in readers.items()}


def _components(manifest: Manifest) -> dict[str, Component]:
    names = [*manifest.components, *(p for p in manifest.weights if p != "transformer")]
    components: dict[str, Component] = {}
    for name in dict.fromkeys(names):
        entries = manifest.weights.get(name, {})
        parts: dict[str, list[WeightEntry]] = {}
        for tensor, entry in entries.items():
            parts.setdefault(tensor.partition(".")[0], []).append(entry)
        record = manifest.components.get(name, {})
        components[name] = Component(
            graphs=dict(record.get("graphs", {})),
            files=list(record.get("files", [])),
            weights=Amount.of(entries.values()),
            parts={part: Amount.of(found) for part, found in sorted(parts.items())},
        )
    return components


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype.label, "shape": list(spec.shape)}

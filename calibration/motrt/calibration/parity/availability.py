"""Which comparisons there can be, by what the two sides have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.calibration.parity.report import Skipped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from motrt.calibration.parity.cases import Cases
    from motrt.engines.manifest import Manifest

# Folders of a checkpoint that an engine's rows need.
_PARTS = {
    "vae": ("vae",),
    "scheduler": ("scheduler",),
    "prompt": ("text_tokenizer",),
    "trajectory": ("text_tokenizer", "scheduler", "vae"),
}
# What a bundle calls them.
_COMPONENTS = {"vae": "vae", "text_tokenizer": "tokenizer"}


def without_parts(manifest: Manifest, checkpoint: Collection[str]) -> list[Skipped]:
    """Return what cannot be compared with a checkpoint that has these component folders."""
    skipped = []
    for engine, parts in _PARTS.items():
        for part in parts:
            if part not in checkpoint:
                skipped.append(Skipped(engine, f"the checkpoint has no {part}/"))
                break
            if _lacks(manifest, part):
                skipped.append(Skipped(engine, f"the bundle has no {_COMPONENTS[part]}"))
                break
    return skipped


def without_parts_of_either(manifests: tuple[Manifest, Manifest]) -> list[Skipped]:
    """Return what cannot be compared between two bundles."""
    skipped = []
    for engine, parts in _PARTS.items():
        absent = [part for part in parts if any(_lacks(each, part) for each in manifests)]
        if absent:
            skipped.append(Skipped(engine, f"a bundle has no {_COMPONENTS[absent[0]]}"))
    if manifests[0].precision is not manifests[1].precision:
        done = {item.engine for item in skipped}
        reason = "weights of another type are other weights, and small differences add up"
        skipped += [Skipped(e, reason) for e in ("text", "trajectory") if e not in done]
    return skipped


def drop(cases: Cases, skipped: Iterable[Skipped]) -> None:
    """Take the cases out that cannot be compared."""
    for item in skipped:
        cases.clear(item.engine)


def _lacks(manifest: Manifest, part: str) -> bool:
    return part in _COMPONENTS and _COMPONENTS[part] not in manifest.components

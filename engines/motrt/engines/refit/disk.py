"""Refitting a bundle on disk: check, write a revision, prove it, and then one rename."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

from motrt.engines.arguments import as_path
from motrt.engines.atomic import writing_alone
from motrt.engines.bundle import REVISIONS, Bundle
from motrt.engines.bundle_writer import uninterrupted
from motrt.engines.errors import ConfigError, RefitError
from motrt.engines.manifest import Revision
from motrt.engines.progress import Progress, silent
from motrt.engines.refit.probe import by_file, by_name, digest, machine, require_same, why_not
from motrt.engines.refit.request import check_request, open_request
from motrt.engines.refit.result import Clock, RefitResult, count_by_reader
from motrt.engines.refit.revision import clean, drop, new_revision, write_revision
from motrt.engines.weight_names import ENGINES

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.manifest import Manifest
    from motrt.engines.refit.recipe import Recipe
    from motrt.engines.refit.request import Loras

ProbeMode = Literal["auto", "always", "never"]
_LIMIT_BYTES = 4 << 30  # a probe reads every weight twice


def refit_bundle(
    bundle: str | Path,
    weights: str | Path | None = None,
    loras: Loras = (),
    *,
    restore: bool = False,
    probe: ProbeMode = "auto",
    progress: Progress = silent,
) -> RefitResult:
    """Give a bundle on disk other weights: both engines, or neither.

    Everything is computed from the weights as exported, whatever revision is in force.

    Args:
        bundle: The folder.
        weights: A checkpoint of the same model.
        loras: Adapters, applied to ``weights`` or to the exported weights.
        restore: Go back to the weights as exported; excludes the other two.
        probe: Whether both engines run once before and after; ``auto`` up to 4 GiB of weights.
        progress: Told how far each stage is.

    Raises:
        BundleError: The bundle is damaged, or somebody else writes to it.
        ConfigError: Nothing is asked for, or too much.
        RefitError: The new weights do not fit or are not finite, the disk is full, or the probe
            failed. The bundle is as it was.
    """
    if probe not in get_args(ProbeMode):
        raise ConfigError("unknown probe", got=probe, expected=", ".join(get_args(ProbeMode)))
    check_request(weights, loras, restore=restore)
    root = as_path("the bundle", bundle)
    Bundle.open(root)  # what is no bundle is not locked either
    clock = Clock()
    with writing_alone(root):
        opened = Bundle.open(root)
        clean(opened)
        base = opened.base()
        if opened.manifest.revision is not None:
            base.check()
        recipe = open_request(opened, weights, loras, restore=restore)
        touched, moved = _compare(opened, recipe, progress)
        clock.lap("check")
        reason = _why_no_probe(base, probe)
        if not moved and opened.manifest.revision is None:
            return _unchanged(opened, recipe, touched, clock)
        if not touched:
            return _go_back(opened, recipe, moved, reason, clock)
        if not moved:
            return _unchanged(opened, recipe, touched, clock)
        return _write(opened, recipe, touched, moved, reason, clock, progress)


def _compare(
    bundle: Bundle, recipe: Recipe, progress: Progress
) -> tuple[frozenset[str], frozenset[str]]:
    """Look at every new value; return what differs from the base, and from what is in force."""
    touched = [name for name in recipe.base if recipe.differs(name, recipe.base)]
    active = bundle.weights()
    moved = (
        [name for name in recipe.base if recipe.differs(name, active)]
        if bundle.manifest.revision is not None
        else touched
    )
    advance = _Steps("check", sum(recipe.base.entries[n].nbytes for n in touched), progress)
    recipe.check_finite(touched, advance)
    return frozenset(touched), frozenset(moved)


def _write(
    bundle: Bundle,
    recipe: Recipe,
    touched: frozenset[str],
    moved: frozenset[str],
    reason: str | None,
    clock: Clock,
    progress: Progress,
) -> RefitResult:
    with new_revision(bundle) as name:
        total = sum(recipe.base.entries[n].nbytes for n in touched)
        written = write_revision(bundle, name, recipe, touched, _Steps("write", total, progress))
        clock.lap("write")
        new = Bundle(bundle.root, _revised(bundle, name, {}))
        _verify(new, recipe, touched)
        clock.lap("verify")
        probe = _probe(bundle, new, reason)
        clock.lap("probe")
        record = {
            "sources": list(recipe.sources),
            "tensors": sorted(touched),
            "files": {
                file: record.header_sha256
                for file, record in bundle.manifest.files.items()
                if file in {recipe.base.entries[n].file for n in touched}
            },
            "probe": probe,
            "base_probe": _base_probe(bundle),
        }
        _commit(bundle, _revised(bundle, name, record))
    clock.lap("commit")
    return _result(
        bundle,
        recipe,
        touched,
        moved,
        clock,
        revision=name,
        probe=probe,
        written_bytes=written.written_bytes,
        linked_bytes=written.linked_bytes,
    )


def _go_back(
    bundle: Bundle, recipe: Recipe, moved: frozenset[str], reason: str | None, clock: Clock
) -> RefitResult:
    base = bundle.base()
    probe = _probe(bundle, base, reason)
    clock.lap("probe")
    _commit(
        bundle,
        dataclasses.replace(
            bundle.manifest, revision=None, probe=_base_probe(bundle), parity=None
        ),
    )
    clock.lap("commit")
    return _result(bundle, recipe, frozenset(), moved, clock, revision=None, probe=probe)


def _commit(bundle: Bundle, manifest: Manifest) -> None:
    """Rename once; what stood before is removed then."""
    with uninterrupted():
        bundle.commit_alone(manifest)
        with suppress(OSError):  # it is about other weights; the manifest no longer names it
            (bundle.root / "parity.json").unlink(missing_ok=True)
        if bundle.manifest.revision is not None:
            drop(bundle.root / REVISIONS / bundle.manifest.revision.id)


def _revised(bundle: Bundle, name: str, record: dict[str, Any]) -> Manifest:
    probe = record.get("probe", {})
    return dataclasses.replace(
        bundle.manifest,
        revision=Revision(name, record),
        probe={key: probe[key] for key in ("status", "reason") if key in probe},
        parity=None,
    )


def _base_probe(bundle: Bundle) -> dict[str, Any]:
    """Return what the export's probe said of the weights as exported."""
    revision = bundle.manifest.revision
    return bundle.manifest.probe if revision is None else dict(revision.record["base_probe"])


def _verify(new: Bundle, recipe: Recipe, touched: frozenset[str]) -> None:
    """Read back what the revision holds, by name: neither a stale tensor nor a swapped one."""
    new.check()
    store = new.weights()
    wrong = [name for name in recipe.base if recipe.differs(name, store)]
    if wrong:
        raise RefitError(
            "the revision does not hold the new weights; the bundle is unchanged",
            got=f"{len(wrong)} wrong tensors: {', '.join(wrong[:4])}",
            expected=f"{len(touched)} new tensors and the base's others",
            fix="Check the disk; if it is sound, report a bug of motrt.",
        )


def _probe(old: Bundle, new: Bundle, reason: str | None) -> dict[str, Any]:
    """Run both engines on the fixed input, before and after."""
    if reason is not None:
        return {"status": "skipped", "reason": reason}
    probe: dict[str, Any] = {"status": "passed", "machine": machine()}
    known = _known_base(old)
    for engine in ENGINES:
        before = digest(by_file(old, engine))
        outputs = by_file(new, engine)
        difference = require_same(engine, outputs, by_name(new, engine), new.dtype)
        after = digest(outputs)
        probe[engine] = {"before": before, "after": after, "difference": difference}
        if old.manifest.revision is None:
            probe[engine]["base"] = before
        elif engine in known:
            probe[engine]["base"] = known[engine]
            if new.manifest.revision is None and known[engine] != after:
                raise RefitError(
                    f"the exported weights of the {engine} are not what they were",
                    got=f"probe {after[:12]}…",
                    expected=f"{known[engine][:12]}…, as before the first refit",
                    fix="Somebody wrote into the checkpoint's files; export it again.",
                )
    return probe


def _known_base(bundle: Bundle) -> dict[str, str]:
    """Return the base's hashes as an earlier refit saw them, if on this machine."""
    revision = bundle.manifest.revision
    probe = {} if revision is None else revision.record.get("probe", {})
    if not isinstance(probe, dict) or probe.get("machine") != machine():
        return {}
    return {e: str(probe[e]["base"]) for e in ENGINES if "base" in probe.get(e, {})}


def _why_no_probe(bundle: Bundle, mode: ProbeMode) -> str | None:
    if mode == "never":
        return "--probe never"
    nbytes = bundle.weights().nbytes
    if mode == "auto" and nbytes > _LIMIT_BYTES:
        return f"{nbytes:,} bytes of weights, over the limit of 4 GiB; --probe always runs it"
    return why_not(bundle)


def _unchanged(
    bundle: Bundle, recipe: Recipe, touched: frozenset[str], clock: Clock
) -> RefitResult:
    revision = bundle.manifest.revision
    return _result(
        bundle,
        recipe,
        touched,
        frozenset(),
        clock,
        revision=None if revision is None else revision.id,
        probe={"status": "skipped", "reason": "the bundle has these weights already"},
    )


def _result(
    bundle: Bundle,
    recipe: Recipe,
    touched: frozenset[str],
    moved: frozenset[str],
    clock: Clock,
    **rest: Any,
) -> RefitResult:
    return RefitResult(
        changed=bool(moved),
        tensors={"total": len(recipe.base), "touched": len(touched), "moved": len(moved)},
        moved=count_by_reader(bundle.manifest.model, moved),
        sources=recipe.sources,
        seconds=clock.seconds(),
        **rest,
    )


class _Steps:
    """Adds up what a stage reports."""

    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self.stage, self.total, self.progress, self.done = stage, total, progress, 0

    def __call__(self, amount: int) -> None:
        self.done += amount
        self.progress(self.stage, min(self.done, self.total), self.total)

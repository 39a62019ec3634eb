"""Refitting engines that run: everything is prepared and proven beside them, then both change."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.bundle import Bundle
from motrt.engines.bundle_writer import uninterrupted
from motrt.engines.errors import ExecutionError, MotrtError
from motrt.engines.refit.probe import (
    by_name,
    digest,
    feeds_of,
    require_same,
    why_not,
)
from motrt.engines.refit.protocol import can_refit
from motrt.engines.refit.recipe import same_bytes
from motrt.engines.refit.result import Clock, RefitResult, count_by_reader
from motrt.engines.weight_names import ENGINES, read_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from motrt.engines.refit.protocol import StagedEngines
    from motrt.engines.refit.recipe import Recipe
    from motrt.engines.tensors import Array


def refit_engines(
    backend: object, bundle: Bundle, recipe: Recipe, switch: Callable[[Bundle], None]
) -> RefitResult:
    """Give a backend's engines the weights of a recipe.

    Args:
        backend: The backend; it changes only if this returns.
        bundle: The bundle as the backend has it now.
        recipe: What the weights shall be.
        switch: Called once, together with the engines' change, with the bundle that has the new
            weights: for everybody else who reads them. It must not fail.

    Returns:
        What was done.

    Raises:
        ExecutionError: The backend cannot be refitted, or an engine does not take the weights.
        RefitError: A value is not finite or does not fit its type, or the probe failed.
    """
    if not can_refit(backend):
        raise ExecutionError(
            "this backend cannot be refitted while it runs",
            got=type(backend).__name__,
            expected="a backend with stage() and run_current()",
            fix="Refit the bundle on disk with motrt refit, and open it again.",
        )
    clock = Clock()
    if bundle.manifest.revision is not None:
        bundle.base().check()  # opening looked at the revision alone
    touched = _touched(recipe)
    moved = _moved(recipe, touched, bundle)
    clock.lap("compare")
    config = bundle.manifest.model
    counts = {"total": len(recipe.base), "touched": len(touched), "moved": len(moved)}
    if not moved:
        return RefitResult(
            changed=False,
            revision=None,
            tensors=counts,
            moved={},
            sources=recipe.sources,
            probe={"status": "skipped", "reason": "these weights are running already"},
            seconds=clock.seconds(),
        )
    plain = dataclasses.replace(bundle.manifest, revision=None)
    new = Bundle(bundle.root, plain, touched)
    verbatim = [name for name in touched if recipe.is_verbatim(name)]
    before = {name: backend.run_current(name, feeds_of(new, name)) for name in ENGINES}
    clock.lap("probe_before")
    reason = why_not(new)
    if reason is None and not backend.is_on_cpu:
        reason = "the probe's reference runs on the CPU, the engines elsewhere"
    engines = [name for name in ENGINES if read_by(config, name) & set(moved)]
    if not engines:
        reason = "no engine reads what moved"

    def reference() -> dict[str, dict[str, Array]]:
        recipe.check_finite(verbatim, lambda _: None)
        return {} if reason is not None else {name: by_name(new, name) for name in engines}

    with ThreadPoolExecutor(1) as pool:
        wanted = pool.submit(reference)
        try:
            staged = backend.stage(new, frozenset(moved))
        except MotrtError:
            wanted.result()  # the weights' own fault says more than what it does to an engine
            raise
    try:
        expected = wanted.result()
        clock.lap("stage")
        probe = _prove(staged, new, before, expected, reason)
        clock.lap("probe")
    except BaseException:
        staged.discard()
        raise
    with uninterrupted():  # or Ctrl-C could come between the engines and the embedding table
        staged.commit()
        switch(new)
    return RefitResult(
        changed=True,
        revision=None,
        tensors=counts,
        moved=count_by_reader(config, moved),
        sources=recipe.sources,
        probe=probe,
        seconds=clock.seconds(),
    )


def _touched(recipe: Recipe) -> dict[str, Array]:
    """Return the tensors that differ from the base: views where they can be, else made here."""
    touched: dict[str, Array] = {}
    for name, entry in recipe.base.entries.items():
        if recipe.is_verbatim(name):
            array = recipe.stored(name)
        else:
            array = np.concatenate(list(recipe.pieces(name))).reshape(entry.shape)
            array.flags.writeable = False
        if not same_bytes(array, recipe.base[name]):
            touched[name] = array
    return touched


def _moved(recipe: Recipe, touched: dict[str, Array], bundle: Bundle) -> list[str]:
    """Name the tensors that differ from those in use."""
    if bundle.manifest.revision is None and not bundle.replaced:
        return list(touched)
    active, base = bundle.weights(), recipe.base
    return [
        name
        for name in base
        if not same_bytes(touched[name] if name in touched else base[name], active[name])
    ]


def _prove(
    staged: StagedEngines,
    new: Bundle,
    before: Mapping[str, Mapping[str, Array] | None],
    expected: Mapping[str, Mapping[str, Array]],
    reason: str | None,
) -> dict[str, Any]:
    """Run the probe on what shall run, and compare it with what the weights give."""
    probe: dict[str, Any] = {"status": "passed" if reason is None else "skipped"}
    if reason is not None:
        probe["reason"] = reason
    for engine in ENGINES:
        feeds = feeds_of(new, engine)
        old = before[engine]
        record: dict[str, Any] = {"before": None if old is None else digest(old)}
        if engine in staged.engines():
            outputs = staged.run(engine, feeds)
            if engine in expected and outputs is not None:
                record["difference"] = require_same(engine, outputs, expected[engine], new.dtype)
            record["after"] = None if outputs is None else digest(outputs)
        else:
            record["after"] = record["before"]
        probe[engine] = record
    return probe

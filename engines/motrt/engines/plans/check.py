"""Recognizing a plan before a byte of it reaches TensorRT.

A plan selects and holds code for the GPU, so the chain is closed: the manifest vouches for
``plan.json``, ``plan.json`` for each plan's bytes, and whoever loads a plan does so through
:func:`read_engine`.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from motrt.engines.errors import ForeignPlanError, PlanError, StalePlanError
from motrt.engines.plans.identity import PlanHost, bundle_identity, plan_identity
from motrt.engines.plans.record import PLAN_JSON, PlanRecord, differing_fields
from motrt.engines.plans.targets import Target

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.bundle import Bundle
    from motrt.engines.plans.options import BuildOptions

__all__ = ["PlanHost", "check_plan", "read_engine", "read_plan"]


def read_plan(bundle: Bundle, host: PlanHost) -> PlanRecord:
    """Return the record of the bundle's plan for a machine.

    Raises:
        PlanError: There is none, or it is not the one that the manifest vouches for.
        ForeignPlanError: There are plans, but for other machines.
    """
    recorded = bundle.manifest.plans
    if host.folder not in recorded:
        kind = ForeignPlanError if recorded else PlanError
        raise kind(
            "the bundle has no plan for this machine",
            got=", ".join(sorted(recorded)) or "no plans",
            expected=host.folder,
            fix=_rebuild(bundle, host),
            fields=["folder"],
        )
    path = bundle.path(f"{host.folder}/{PLAN_JSON}")
    data = _read(path, bundle, host)
    if hashlib.sha256(data).hexdigest() != recorded[host.folder]:
        raise PlanError(
            f"{host.folder}/{PLAN_JSON} is not the one that the manifest vouches for",
            got=f"sha256 {hashlib.sha256(data).hexdigest()[:12]}…",
            expected=f"{recorded[host.folder][:12]}…",
            fix=_rebuild(bundle, host),
            fields=["sha256"],
        )
    return PlanRecord.from_json(data)


def check_plan(
    record: PlanRecord, bundle: Bundle, host: PlanHost, options: BuildOptions | None = None
) -> None:
    """Refuse a plan that was built from something else or for something else.

    Args:
        record: What :func:`read_plan` returned.
        bundle: The bundle that it is to serve.
        host: The machine.
        options: What a build is asked for now; None where any sizes will do.

    Raises:
        ForeignPlanError: Another TensorRT, GPU, system or processor.
        StalePlanError: Another graph or contract, or (with ``options``) another build.
    """
    machine = host.to_dict()
    have = record.identity
    foreign = differing_fields({key: have.get(key) for key in machine}, machine)
    if foreign:
        raise ForeignPlanError(
            "the plan was built for another machine",
            got=_values(have, foreign),
            expected=_values(machine, foreign),
            fix=_rebuild(bundle, host),
            fields=foreign,
        )
    if options is not None:
        want = _identity_as_built(record, bundle, host, options)
        stale = differing_fields(have, want)
    else:
        want = bundle_identity(bundle)
        stale = differing_fields(_like(have, want), want)
    if stale:
        raise StalePlanError(
            "the plan was built from another graph or with other options",
            got=f"another {', '.join(stale[:4])}",
            expected="the bundle's own, and the options asked for",
            fix=_rebuild(bundle, host),
            fields=stale,
        )


def read_engine(bundle: Bundle, record: PlanRecord, host: PlanHost, engine: str) -> bytes:
    """Return an engine's plan; what is returned is what was hashed.

    Raises:
        PlanError: Its size or hash is not the recorded one.
    """
    entry = record.engines[engine]
    data = _read(bundle.path(f"{host.folder}/{entry.file}"), bundle, host)
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (entry.nbytes, entry.sha256):
        raise PlanError(
            f"{host.folder}/{entry.file} is not what plan.json recorded",
            got=f"{len(data)} bytes, sha256 {digest[:12]}…",
            expected=f"{entry.nbytes} bytes, {entry.sha256[:12]}…",
            fix=_rebuild(bundle, host),
            fields=[f"engines.{engine}"],
        )
    return data


def _identity_as_built(
    record: PlanRecord, bundle: Bundle, host: PlanHost, options: BuildOptions
) -> dict[str, object]:
    """Resolve what an option leaves to the build as the build that made the record did."""
    built = record.identity["builder"]
    preset = record.info.get("preset")
    workspace, level = Target(host.capability, preset).limits
    mib = workspace if options.workspace_mib is None else options.workspace_mib
    values = {"always": False, "never": True}.get(options.placeholders, built["with_values"])
    chosen = options.optimization_level
    return plan_identity(
        bundle,
        host,
        options,
        with_values=bool(values),
        workspace_bytes=None if mib is None else mib << 20,
        optimization_level=level if chosen is None else chosen,
    )


def _like(have: dict[str, object], want: dict[str, object]) -> dict[str, object]:
    """Cut an identity to the fields of a smaller one."""
    return {
        key: _like(part, expected)
        if isinstance(part := have.get(key), dict) and isinstance(expected, dict)
        else part
        for key, expected in want.items()
    }


def _values(identity: dict[str, object], fields: list[str]) -> str:
    parts = []
    for field in fields:
        value: object = identity
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        parts.append(f"{field} {value}")
    return ", ".join(parts)


def _read(path: Path, bundle: Bundle, host: PlanHost) -> bytes:
    try:
        if not os.path.isfile(path):  # a folder, or a pipe that would block its reader
            raise FileNotFoundError(0, "no such file")
        return path.read_bytes()
    except OSError as err:
        raise PlanError(
            f"cannot read {host.folder}/{path.name}",
            got=err.strerror or err,
            expected="the file that the manifest vouches for",
            fix=_rebuild(bundle, host),
            fields=["file"],
        ) from err


def _rebuild(bundle: Bundle, host: PlanHost) -> str:
    return (
        f"Build it with: motrt build {bundle.root} --backend {host.backend} --target {host.target}"
    )

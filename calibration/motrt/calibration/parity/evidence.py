"""Leaving the outcome of a comparison with the bundle."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from typing import TYPE_CHECKING

from motrt.engines.atomic import write_atomic
from motrt.engines.errors import BundleError

if TYPE_CHECKING:
    from motrt.calibration.parity.report import ParityReport
    from motrt.engines.bundle import Bundle

REPORT = "parity.json"


def record_evidence(bundle: Bundle, report: ParityReport) -> Bundle:
    """Write ``parity.json``, then the manifest's summary of it.

    The report is evidence, not part of what runs: the manifest holds its hash, but a bundle with
    another ``parity.json`` still opens.

    Raises:
        BundleError: The bundle cannot be written.
    """
    text = json.dumps(report.to_dict(), indent=1) + "\n"
    try:
        write_atomic(bundle.root / REPORT, text.encode())
    except OSError as err:
        raise BundleError(
            f"cannot write {REPORT}; the bundle is unchanged",
            got=err.strerror,
            fix="Pass --no-record to compare without leaving evidence.",
        ) from err
    summary = {
        "ok": report.ok,
        "against": report.against,
        "recorded": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": len(report.rows),
        "failed": sum(not row.ok for row in report.rows),
        "worst": report.worst.to_dict() if report.rows else None,
        "skipped": [skipped.to_dict() for skipped in report.outcome.skipped],
        "sources": report.outcome.sources,
        "report_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    try:
        return bundle.commit(dataclasses.replace(bundle.manifest, parity=summary))
    except BundleError:
        (bundle.root / REPORT).unlink(missing_ok=True)
        raise

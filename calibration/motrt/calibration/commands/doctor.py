"""``motrt doctor``, which looks, and ``motrt doctor --selftest``, which tries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motrt.engines.commands import doctor
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    print_json,
    print_table,
    stage_bars,
)
from motrt.engines.commands.tables import plain_table
from motrt.engines.errors import ParityError

if TYPE_CHECKING:
    from motrt.calibration.selftest import Check

HELP = "Show what this machine can run, and what is missing for the rest; or try it."
EXAMPLE = "Example: motrt doctor --selftest"


def command(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Try everything; exit code 3 if a check fails.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Bundle for --selftest. (default: the model that comes with motrt)"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Look at the machine; what is missing is a result, not an error."""
    if not selftest:
        if bundle is not None:
            raise typer.BadParameter("--bundle is for --selftest")
        doctor.show(as_json=as_json)
        return 0
    # The whole runtime: who only looks does not wait for it.
    from motrt.calibration.selftest import run_selftest

    with stage_bars(quiet=quiet or as_json) as progress:
        checks = run_selftest(bundle, progress=progress)
    failed = any(check.status == "failed" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_dict() for check in checks]})
    else:
        print_table(
            plain_table("Selftest", ("check", "", "seconds", ""), [_row(c) for c in checks])
        )
    return ParityError.exit_code if failed else 0


def _row(check: Check) -> tuple[str, ...]:
    word = "FAILED" if check.status == "failed" else check.status
    return check.name, word, f"{check.seconds:.1f}", check.detail

"""``motrt validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from motrt.calibration.parity.compare import validate
from motrt.calibration.parity.evidence import record_evidence
from motrt.calibration.polygraphy import Emission
from motrt.calibration.polygraphy import emit_polygraphy as emit
from motrt.engines.bundle import Bundle
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    print_json,
    print_table,
    stage_bars,
    words,
)
from motrt.engines.errors import ParityError
from motrt.engines.onnxruntime_engine import MAX_THREADS

if TYPE_CHECKING:
    from motrt.calibration.parity.report import ParityReport

HELP = "Compare a bundle with the public PyTorch implementations, or with another bundle."
EXAMPLE = "Example: motrt validate edge.bundle --against Cosmos3-Edge"


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to judge.")],
    against: Annotated[
        Path | None,
        typer.Option(help="The checkpoint that it was exported from, or another bundle."),
    ] = None,
    emit_polygraphy: Annotated[
        Path | None,
        typer.Option(help="Write a new folder with inputs, outputs and commands for Polygraphy."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Threads on either side. (default: all cores)"),
    ] = None,
    no_record: Annotated[
        bool, typer.Option("--no-record", help="Leave no evidence in the bundle.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Validate; exit code 0 within tolerance, 3 outside."""
    if against is None and emit_polygraphy is None:
        raise typer.BadParameter("pass --against, or --emit-polygraphy, or both")
    emission = None if emit_polygraphy is None else emit(bundle, emit_polygraphy)
    if emission is not None and not as_json:
        words().print(f"for Polygraphy: {emission.folder}", soft_wrap=True)
    if against is None:
        if as_json:
            print_json(_emitted(emission))
        return 0
    opened = Bundle.open(bundle)  # before: evidence about weights that a refit replaced is none
    with stage_bars(quiet=quiet or as_json) as progress:
        report = validate(bundle, against, threads=threads, progress=progress)
    if not no_record:
        record_evidence(opened, report)
    if as_json:
        print_json({**report.to_dict(), **_emitted(emission)})
    else:
        print_table(_table(report))
    if report.ok:
        return 0
    worst = report.worst
    message = ParityError(
        f"{sum(not row.ok for row in report.rows)} of {len(report.rows)} rows are out of tolerance",
        got=f"{worst.engine} / {worst.case} / {worst.tensor}: {worst.difference.max_abs:.3g} "
        f"at {list(worst.difference.position)}",
        expected=f"at most {worst.tolerance:.3g}",
        fix="Do not use this bundle; export the checkpoint again.",
    )
    words().print(f"parity: {message}", soft_wrap=True)
    return ParityError.exit_code


def _emitted(emission: Emission | None) -> dict[str, object]:
    if emission is None:
        return {}
    return {"polygraphy": {"folder": str(emission.folder), "files": list(emission.files)}}


def _table(report: ParityReport) -> Table:
    verdict = "ok" if report.ok else "FAILED"
    table = Table(
        title=f"{report.precision}, {report.lowering}, against {report.against}: {verdict}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("case", "tensor"):
        table.add_column(name, no_wrap=True)
    for name in ("max abs", "rel L2", "1-cos", "noise", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst at", no_wrap=True)
    table.add_column("", no_wrap=True)
    heading = ""
    for row in report.rows:
        if heading != (heading := f"{row.engine}, {row.arithmetic.label}"):
            table.add_section()
            table.add_row(f"[bold]{heading}[/]")
        gap = row.difference
        table.add_row(
            row.case,
            row.tensor,
            f"{gap.max_abs:.1e}",
            f"{gap.rel_l2:.1e}",
            f"{1 - gap.cosine:.0e}",
            "" if row.self_noise is None else f"{row.self_noise:.1e}",
            f"{row.tolerance:.1e}",
            ",".join(map(str, gap.position)),
            "ok" if row.ok else "[bold red]FAIL[/]",
        )
    footer = [f"skipped {item.engine}: {item.reason}" for item in report.outcome.skipped]
    footer += [f"note: {note}" for note in report.outcome.notes]
    if footer:
        table.caption = Text("\n".join(footer))  # no markup: messages quote files
        table.caption_justify = "left"
    return table

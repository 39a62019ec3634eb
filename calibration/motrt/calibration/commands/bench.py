"""``motrt bench``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from motrt.calibration.bench.rows import ROWS
from motrt.calibration.bench.run import bench
from motrt.calibration.bench.sizes import FULL, QUICK
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    print_json,
    print_table,
    stage_bars,
)
from motrt.engines.onnxruntime_engine import MAX_THREADS

HELP = "Measure speed and memory against the public implementations, on a random model."
EXAMPLE = "Example: motrt bench --rows denoise_image,decode --threads 2"


def command(
    rows: Annotated[
        str | None, typer.Option(help=f"Comma list of {', '.join(ROWS)}. [default: all]")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, max=MAX_THREADS, help="Threads of either side.")
    ] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes: shows that every row works, no more.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure; exit code 3 if the two sides of a row compute different numbers."""
    names = None if rows is None else [name.strip() for name in rows.split(",")]
    with stage_bars(quiet=quiet or as_json) as progress:
        report = bench(QUICK if quick else FULL, rows=names, threads=threads, progress=progress)
    if as_json:
        print_json(report)
    else:
        print_table(_table(report))


def _table(report: dict[str, Any]) -> Table:
    detail = report["detail"]
    load = detail["load_average"]
    table = Table(
        title=f"{detail['size']} size, {detail['threads']} threads, "
        f"load {load['before']} to {load['after']}",
        caption="\n".join(detail["notes"]),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading, justify in (("row", "left"), ("got", "right"), ("bar", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # literals
    for heading in ("ours min / median", "theirs min / median", "cpu ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for name, row in ROWS.items():
        if name not in report[row.kind]:
            continue
        value, parts = report[row.kind][name], detail["rows"][name]
        unit = " s" if row.kind == "seconds" else ""
        bar = "" if row.bar is None else f"{'≥' if row.at_least else '≤'} {row.bar:g}{unit}"
        held = "" if row.bar is None or value is None or detail["size"] == "quick" else "ok"
        verdict = held if row.meets(value) else "[bold red]misses the bar[/]"
        table.add_row(
            name,
            "not measured" if value is None else f"{value:.2f}{unit}",
            bar,
            *(_times(parts.get(side)) for side in ("ours", "theirs")),
            f"{parts['ratio_of_cpu']:.2f}" if "ratio_of_cpu" in parts else "",
            parts.get("why", verdict if held else ""),
        )
    return table


def _times(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return ""
    return f"{timing['min_s'] * 1e3:.1f} / {timing['median_s'] * 1e3:.1f} ms"

"""What every verb does alike: JSON on stdout, words and progress on stderr."""

from __future__ import annotations

import json
import sys
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIPE_WIDTH = 120

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")]


def words() -> Console:
    """Return the console for people: stderr, so that stdout stays parseable."""
    return Console(stderr=True, highlight=False)


def print_json(data: dict[str, Any]) -> None:
    """Print the verb's one object."""
    print(json.dumps(data, indent=1, default=str))


def print_table(table: Any) -> None:
    """Print a table on stdout: without ``--json`` it is the verb's result."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)  # a pipe has no width to fit
    console.print(table)


@contextmanager
def stage_bars(*, quiet: bool) -> Iterator[Progress]:
    """Yield a ``progress(stage, done, total)`` that draws one bar a stage."""
    console = words()
    if quiet or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bars = Bars(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            bars.start()  # not before there is something to show: an error would begin with a gap
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            bars.stop()


def print_piece(text: str) -> None:
    """Print a piece of a model's text as it comes, without a line's end.

    On a terminal, control characters are shown as U+FFFD: a model may write any byte, and some
    would change the terminal's state. A pipe gets the text as it is.
    """
    if sys.stdout.isatty():
        text = "".join("\ufffd" if _controls(char) else char for char in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _controls(char: str) -> bool:
    return unicodedata.category(char) in {"Cc", "Cf"} and char not in "\n\t"


def human_bytes(count: float) -> str:
    """Return for example ``1.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

"""Tables for people, narrow enough for a terminal of 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def plain_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0
) -> Table:
    """Return a table without inner lines.

    Args:
        title: Its heading.
        columns: Heads of the columns; all empty for a table of names and values.
        rows: Cells. They are taken literally: ``[batch]`` is no markup here.
        numbers: How many of the last columns hold numbers, and so stand right.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(columns):
        is_number = index >= len(columns) - numbers
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table

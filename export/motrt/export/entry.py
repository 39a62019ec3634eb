"""Where the program begins: Ctrl-C is an exit code from the first import on."""

from __future__ import annotations

import sys


def main() -> None:
    """Import the command line, run it and exit."""
    try:
        from motrt.export.cli import main as program

        program()
    except KeyboardInterrupt:  # typer and rich take a tenth of a second to import
        sys.stderr.write("interrupted; nothing was begun\n")
        sys.exit(130)

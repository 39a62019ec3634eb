"""Where the program begins: Ctrl-C is one line and an exit code from the first import on."""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130


def main() -> None:
    """Import the command line, run it and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _leave)
    from motrt.export.cli import main as program

    program()


def hear_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: from here on there is something to clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    """End at once: numpy's import would turn a KeyboardInterrupt into an ImportError."""
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(EXIT_INTERRUPTED)

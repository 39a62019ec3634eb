"""``motrt run reasoner`` and ``motrt run generator``."""

from __future__ import annotations

from motrt.runtime.commands import run_generator, run_reasoner

SUBCOMMANDS = {"reasoner": run_reasoner, "generator": run_generator}

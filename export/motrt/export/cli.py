"""The program ``motrt``: a table of verbs, exit codes, and nothing else.

A verb's module is imported when that verb is called and not before: ``motrt --help`` must not pay
for torch, and an embedded box without onnx must still run ``motrt doctor``.
"""

from __future__ import annotations

import functools
import importlib
import json
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from motrt.engines.errors import MissingDependencyError, MotrtError
from motrt.export.entry import EXIT_INTERRUPTED, hear_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_INTERRUPTED = "interrupted; nothing half-done was left behind"


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: where its function is, and what the overview says about it."""

    module: str
    summary: str


VERBS: dict[str, Verb] = {
    "export": Verb("motrt.export.commands.export", "Write a checkpoint as a bundle."),
    "validate": Verb(
        "motrt.calibration.commands.validate", "Compare a bundle with the public implementations."
    ),
    "build": Verb("motrt.engines.commands.build", "Build a bundle's graphs as TensorRT engines."),
    "refit": Verb("motrt.engines.commands.refit", "Give a bundle other weights, or a LoRA."),
    "run": Verb("motrt.runtime.commands.run", "Run the reasoner or the generator of a bundle."),
    "demo": Verb(
        "motrt.calibration.commands.demo", "Show both modes: of a trained tiny model, or a bundle."
    ),
    "score": Verb("motrt.calibration.commands.score", "Score what the tiny trained model can do."),
    "inspect": Verb("motrt.engines.commands.inspect", "Show what a bundle holds and costs."),
    "bench": Verb("motrt.calibration.commands.bench", "Measure speed and memory against PyTorch."),
    "doctor": Verb(
        "motrt.calibration.commands.doctor", "Show what this machine can run; or try it."
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit: 0 done, 1 error, 2 usage, 3 parity outside tolerance."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the program and return its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that `kill` cleans up as Ctrl-C does
    try:
        _program(arguments)(arguments, prog_name="motrt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:  # `kill`, while the verb was still being imported
        print(_INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _program(arguments: list[str]) -> Callable[..., Any]:
    app = typer.Typer(
        help="Mixture-of-Transformers checkpoints as two engines over one weights store.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog="Example: motrt export Cosmos3-Edge -o edge.bundle --precision fp32")(
        _root
    )
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, verb in VERBS.items():
        if name == chosen:
            module = _module_of(verb, as_json="--json" in arguments)
            if hasattr(module, "SUBCOMMANDS"):
                app.add_typer(_group(module.SUBCOMMANDS, verb.summary), name=name)
                continue
            function = _guarded(module.command)
            app.command(name, help=module.HELP, epilog=module.EXAMPLE)(function)
        else:
            app.command(name, help=verb.summary)(_placeholder)
    return typer.main.get_command(app)


def _module_of(verb: Verb, *, as_json: bool) -> Any:
    """Import a verb; a package that is not installed is an error like any other."""
    try:
        return importlib.import_module(verb.module)
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] == "motrt":
            raise
        missing = MissingDependencyError(
            "this verb needs a package that is not installed",
            got=f"no module {err.name}",
            expected="the extras export, cpu and media",
            fix="Install them with: pip install 'motrt[export,cpu,media]'.",
        )
        _tell(missing, as_json=as_json)
        sys.exit(missing.exit_code)


def _group(commands: Mapping[str, Any], summary: str) -> typer.Typer:
    group = typer.Typer(help=summary, no_args_is_help=True)
    for name, module in commands.items():
        group.command(name, help=module.HELP, epilog=module.EXAMPLE)(_guarded(module.command))
    return group


def _root(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=lambda wanted: _print_version() if wanted else None,
    ),
) -> None:
    """Hold the options that come before a verb."""


def _print_version() -> None:
    from importlib.metadata import version

    print(f"motrt {version('motrt')}")
    raise typer.Exit


def _placeholder() -> None:
    """Stand in for a verb that was not called, in the overview."""


def _guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn a verb's result, its errors and Ctrl-C into exit codes."""

    @functools.wraps(command)
    def call(**options: Any) -> None:
        hear_interrupts()
        try:
            code = command(**options) or 0
        except MotrtError as err:
            if options.get("debug"):
                traceback.print_exc()
            _tell(err, as_json=bool(options.get("as_json")))
            code = err.exit_code
        except KeyboardInterrupt:
            print(_INTERRUPTED, file=sys.stderr)
            code = EXIT_INTERRUPTED
        sys.exit(code)

    return call


def _tell(err: MotrtError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": err.to_dict()}))
    print(f"error: {err}", file=sys.stderr)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt

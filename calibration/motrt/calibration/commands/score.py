"""``motrt score``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motrt.calibration.score.run import score_bundle
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    print_json,
    print_table,
    stage_bars,
)
from motrt.engines.commands.tables import plain_table
from motrt.engines.onnxruntime_engine import MAX_THREADS

if TYPE_CHECKING:
    from motrt.calibration.score.skills import Score

HELP = "Score what a bundle of the tiny trained model can do, by looking at what it makes."
EXAMPLE = "Example: motrt score tiny.bundle --samples 200"


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle of the tiny trained model.")],
    skills: Annotated[
        str | None, typer.Option(help="Comma list of groups. (default: all that the bundle has)")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each group.")] = 200,
    num_inference_steps: Annotated[int, typer.Option(min=1, help="Denoise steps.")] = 20,
    guidance_scale: Annotated[float, typer.Option(help="Of text and image to video.")] = 1.0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, help="Threads inside an operator. (default: all cores)"
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score; the program prints what went wrong."""
    names = None if skills is None else [name.strip() for name in skills.split(",")]
    with stage_bars(quiet=quiet or as_json) as progress:
        result = score_bundle(
            bundle,
            names,
            samples=samples,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            threads=threads,
            progress=progress,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        print_score(result)


def print_score(result: Score) -> None:
    """Print a table of skills on stdout."""
    rows = [(name, f"{value:.3f}", "") for name, value in result.skills.items()]
    rows += [(name, "–", reason) for name, reason in result.missing.items()]
    title = f"{result.samples} samples each, {sum(result.seconds.values()):.0f} s"
    print_table(plain_table(title, ("skill", "score", ""), rows))

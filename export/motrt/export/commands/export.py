"""``motrt export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    human_bytes,
    print_json,
    stage_bars,
    words,
)
from motrt.engines.contract import Modality
from motrt.engines.dtypes import Precision
from motrt.engines.manifest import LoweringName
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions, ExportResult, ProbeMode

HELP = "Write a checkpoint as a bundle: two graphs over one weights store."
EXAMPLE = "Example: motrt export Cosmos3-Edge -o edge.bundle --precision fp32"


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Diffusers pipeline folder, or config.json + safetensors.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Bundle to write.")],
    precision: Annotated[
        Precision, typer.Option(help="Compute type; other weights are cast into one new file.")
    ] = Precision.FP32,
    lowering: Annotated[
        LoweringName,
        typer.Option(help="native: opset 24. portable: opset 18 (JetPack 6, older runtimes)."),
    ] = "native",
    modalities: Annotated[
        str | None,
        typer.Option(help="Comma list of vision, sound, action. (default: all in the checkpoint)"),
    ] = None,
    copy_weights: Annotated[
        bool,
        typer.Option("--copy-weights", help="Copy weight files instead of hard-linking them."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a bundle that is already there.")
    ] = False,
    probe: Annotated[
        ProbeMode,
        typer.Option(help="Run the finished graphs once; auto: up to 1 GiB."),
    ] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Export; the program prints what went wrong."""
    options = ExportOptions(
        precision=precision,
        lowering=lowering,
        modalities=_modalities(modalities),
        copy_weights=copy_weights,
        overwrite=overwrite,
        probe=probe,
    )
    with stage_bars(quiet=quiet or as_json) as progress:
        result = export_checkpoint(checkpoint, output, options, progress=progress)
    if as_json:
        print_json(
            {
                "bundle": str(result.bundle),
                "seconds": round(result.seconds, 3),
                "peak_rss_bytes": result.peak_rss_bytes,
                "graphs": result.graphs,
                "weights": result.weights,
                "absent": result.absent,
                "probe": result.probe,
            }
        )
    else:
        _tell(result)


def _modalities(text: str | None) -> tuple[Modality, ...] | None:
    if text is None:
        return None
    try:
        return tuple(Modality(word.strip()) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a comma list of vision, sound, action.", param_hint="'--modalities'"
        ) from None


def _tell(result: ExportResult) -> None:
    console, weights = words(), result.weights
    console.print(
        f"{result.bundle}: {len(result.graphs)} graphs "
        f"({human_bytes(sum(result.graphs.values()))}) over {weights['tensors']} tensors "
        f"({human_bytes(weights['tensor_bytes'])}); linked {human_bytes(weights['linked_bytes'])}, "
        f"copied {human_bytes(weights['copied_bytes'])}, cast {human_bytes(weights['cast_bytes'])}; "
        f"{result.seconds:.1f} s, peak {human_bytes(result.peak_rss_bytes)}"
    )
    for name, why in result.absent.items():
        console.print(f"  without {name}: {why}")
    console.print(f"  probe: {result.probe.get('status')} ({result.probe.get('reason')})")

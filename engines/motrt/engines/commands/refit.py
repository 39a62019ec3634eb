"""``motrt refit``."""

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
from motrt.engines.refit.disk import ProbeMode, refit_bundle
from motrt.engines.refit.lora import Lora
from motrt.engines.refit.result import RefitResult

HELP = "Give a bundle other weights: both engines, or neither."
EXAMPLE = "Example: motrt refit edge.bundle --lora style.safetensors --lora-scale 0.8"


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to change.")],
    weights: Annotated[
        Path | None, typer.Option(help="Checkpoint of the same model, a fine-tune say.")
    ] = None,
    lora: Annotated[
        list[Path] | None,
        typer.Option(help="Adapter, a safetensors file or a folder with one; may be repeated."),
    ] = None,
    lora_scale: Annotated[
        list[float] | None,
        typer.Option(help="Scale of each --lora, in their order. [default: 1 each]"),
    ] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Go back to the weights as exported.")
    ] = False,
    probe: Annotated[
        ProbeMode,
        typer.Option(help="Run both engines once before and after; auto: up to 4 GiB."),
    ] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Refit; the program prints what went wrong."""
    adapters, scales = lora or [], lora_scale or [1.0] * len(lora or [])
    if len(adapters) != len(scales):
        raise typer.BadParameter(
            f"{len(scales)} scales for {len(adapters)} adapters.", param_hint="'--lora-scale'"
        )
    if restore is (weights is not None or bool(adapters)):
        raise typer.BadParameter(
            "name --weights, --lora or both; or --restore alone.", param_hint="'--weights'"
        )
    with stage_bars(quiet=quiet or as_json) as progress:
        result = refit_bundle(
            bundle,
            weights,
            [Lora(path, scale) for path, scale in zip(adapters, scales, strict=True)],
            restore=restore,
            probe=probe,
            progress=progress,
        )
    if as_json:
        print_json({"bundle": str(bundle), **result.to_dict()})
    else:
        _tell(bundle, result)


def _tell(bundle: Path, result: RefitResult) -> None:
    console, tensors = words(), result.tensors
    if not result.changed:
        text = f"{bundle}: nothing changed, the bundle has these weights already"
        console.print(text, soft_wrap=True)
        return
    state = "as exported" if result.revision is None else f"revision {result.revision}"
    moved = ", ".join(f"{count} {reader}" for reader, count in result.moved.items())
    console.print(
        f"{bundle}: {state}; {tensors['moved']} of {tensors['total']} tensors moved ({moved}); "
        f"wrote {human_bytes(result.written_bytes)}, linked {human_bytes(result.linked_bytes)}; "
        f"{result.seconds['total']:.1f} s",
        soft_wrap=True,
    )
    reason = result.probe.get("reason")
    console.print(f"  probe: {result.probe['status']}" + (f" ({reason})" if reason else ""))

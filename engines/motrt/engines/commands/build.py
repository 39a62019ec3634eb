"""``motrt build``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from motrt.engines._tensorrt import Flavour
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    human_bytes,
    print_json,
    print_table,
    stage_bars,
)
from motrt.engines.commands.tables import plain_table
from motrt.engines.plans.build import BuildResult, BuiltPlan, build_plans
from motrt.engines.plans.options import (
    BuildOptions,
    BuildShapes,
    ClipSize,
    PlaceholderMode,
    WeightsMode,
)

HELP = "Build both graphs of a bundle as TensorRT engines, here or ahead of time for another GPU."
EXAMPLE = "Example: motrt build edge.bundle --backend tensorrt-rtx --target sm86,sm89,sm120"

_OPTIONS = BuildOptions()
_SHAPES = BuildShapes()


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to build; the plans go into it.")],
    target: Annotated[
        str,
        typer.Option(help="Comma list of current, sm75 to sm121, and presets (docs/cli.md)."),
    ],
    backend: Annotated[
        Flavour | None, typer.Option(help="Which TensorRT. (default: the preset's)")
    ] = None,
    weights: Annotated[
        WeightsMode,
        typer.Option(
            help="refit: constants, filled when loaded. inputs: bound, one copy for both."
        ),
    ] = _OPTIONS.weights,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most sequences at a time.")
    ] = _SHAPES.max_batch,
    max_context: Annotated[
        int, typer.Option(min=1, help="Tokens that the cache holds and the generator reads.")
    ] = _SHAPES.max_context,
    max_prefill: Annotated[
        int | None,
        typer.Option(min=1, help="Most new tokens of one call. (default: --max-context)"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most vision tokens, where --sizes are not given.")
    ] = _SHAPES.max_tokens,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Comma list of sizes to tune for: 192x320 or 17x192x320 (frames first)."
        ),
    ] = None,
    max_sound: Annotated[int, typer.Option(min=1, help="Most sound tokens.")] = _SHAPES.max_sound,
    max_action: Annotated[
        int, typer.Option(min=1, help="Most action tokens.")
    ] = _SHAPES.max_action,
    placeholders: Annotated[
        PlaceholderMode,
        typer.Option(help="Constants without values; auto: where the target's GPU is not here."),
    ] = _OPTIONS.placeholders,
    allow_decomposed_attention: Annotated[
        bool,
        typer.Option(
            "--allow-decomposed-attention",
            help="Build attention in parts where no kernel fuses it.",
        ),
    ] = False,
    workspace_mib: Annotated[
        int | None, typer.Option(min=1, help="Most scratch memory. (default: the preset's)")
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(min=0, max=5, help="TensorRT's, 0 to 5. (default: the preset's)"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build; the program prints what went wrong."""
    options = BuildOptions(
        shapes=BuildShapes(
            max_batch=max_batch,
            max_context=max_context,
            max_prefill=max_prefill,
            max_tokens=max_tokens,
            sizes=tuple(ClipSize.parse(word) for word in _words(sizes)),
            max_sound=max_sound,
            max_action=max_action,
        ),
        weights=weights,
        placeholders=placeholders,
        allow_decomposed_attention=allow_decomposed_attention,
        workspace_mib=workspace_mib,
        optimization_level=optimization_level,
    )
    with stage_bars(quiet=quiet or as_json) as progress:
        result = build_plans(bundle, _words(target), options, backend=backend, progress=progress)
    if as_json:
        print_json(_report(result))
        return
    print_table(
        plain_table(
            f"{result.bundle}: {len(result.plans)} plans in {result.seconds:.1f} s",
            ("plan", "engine", "attention", "weights", "bytes", "seconds", "peak memory"),
            [row for plan in result.plans for row in _rows(plan)],
            numbers=3,
        )
    )


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _report(result: BuildResult) -> dict[str, Any]:
    return {
        "bundle": str(result.bundle),
        "seconds": round(result.seconds, 3),
        "plans": [
            {
                "folder": plan.folder,
                "key": plan.record.key,
                "weights": plan.record.weights_mode,
                "engines": {
                    engine: {
                        "file": f"{plan.folder}/{entry.file}",
                        "bytes": entry.nbytes,
                        "seconds": plan.record.info["seconds"][engine],
                        "peak_rss_bytes": plan.record.info["peak_rss_bytes"][engine],
                        "profiles": [each.to_dict() for each in plan.record.profiles(engine)],
                        "audit": plan.record.info["audit"][engine],
                    }
                    for engine, entry in plan.record.engines.items()
                },
            }
            for plan in result.plans
        ],
    }


def _rows(plan: BuiltPlan) -> list[tuple[str, ...]]:
    info = plan.record.info
    rows: list[tuple[str, ...]] = []
    for engine, entry in plan.record.engines.items():
        audit = info["audit"][engine]
        fused, parts = audit["fused_attention"], audit["decomposed_attention"]
        attention = f"{fused} fused" if fused else f"{parts} in parts" if parts else "plain"
        what = "inputs" if plan.record.weights_mode == "inputs" else "to refit"
        rows.append(
            (
                plan.folder,
                engine,
                attention,
                f"{audit['weights']} {what}",
                human_bytes(entry.nbytes) + ("" if audit["within_bound"] else " (large)"),
                f"{info['seconds'][engine]:.1f}",
                human_bytes(info["peak_rss_bytes"][engine]),
            )
        )
    return rows

"""``motrt demo``: both modes in one process, shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motrt.calibration.commands.score import print_score
from motrt.calibration.demo.sheet import save_sheet
from motrt.calibration.demo.tiny_omni import Layout, prepare_bundle
from motrt.calibration.demo.tour import Scenery, tour
from motrt.calibration.score.run import score_bundle
from motrt.calibration.score.subject import RuntimeSubject
from motrt.calibration.score.world import FPS
from motrt.engines.commands.console import Debug, Json, print_json, print_piece, stage_bars, words
from motrt.engines.errors import ConfigError
from motrt.runtime import GenerationParams, Runtime, SamplingParams
from motrt.runtime.writers import open_writer

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "Show both modes, in one process and without torch. Without BUNDLE: a tiny omni model that "
    "comes with motrt, trained on moving shapes, plans, imagines and acts, and is scored."
)
EXAMPLE = "Example: motrt demo -o demo/; motrt demo edge.bundle --caption 'A cup falls.' -o edge/"

_QUESTION = "What will the red square do next?"
_CAPTION = "A red square moves left."
_ABSENT = ("torch", "transformers", "diffusers", "onnx")
_STEPS = 20
_SAMPLES = 10
_WHAT_HAPPENED = f"""\
[bold]What just happened[/]
1. A checkpoint in Cosmos 3's layout became a bundle: two ONNX graphs over one weights store.
2. The reasoner planned, token by token over its K/V cache; its moves became actions, and the generator denoised the clip that they lead to.
3. For each caption the reasoner read the words once; the generator took over their keys and values for {_STEPS} denoise steps, and the VAE made pixels.
4. All of it, scores too, ran in this process on ONNX Runtime; of {", ".join(_ABSENT)} it has loaded {{loaded}}.
5. The same with Cosmos 3: motrt export Cosmos3-Nano -o nano.bundle --precision fp32 && motrt demo nano.bundle --size 256"""


def command(
    bundle: Annotated[
        Path | None, typer.Argument(help="Bundle to show. (default: the tiny trained model)")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for what it makes.")
    ] = Path("motrt-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the task, and of the noise.")] = 0,
    layout: Annotated[
        Layout, typer.Option(help="Which tiny model: its towers' layers are separate or shared.")
    ] = "separate",
    samples: Annotated[
        int, typer.Option(min=0, help="Samples of each skill; 0: the tiny model is not scored.")
    ] = _SAMPLES,
    question: Annotated[
        str | None, typer.Option(help="What to ask the reasoner of BUNDLE.")
    ] = None,
    caption: Annotated[
        str | None, typer.Option(help="What the generator of BUNDLE makes.")
    ] = None,
    num_frames: Annotated[int, typer.Option(help="Frames of BUNDLE's clip.")] = 17,
    size: Annotated[int, typer.Option(help="Its height and width in pixels.")] = 64,
    num_inference_steps: Annotated[int, typer.Option(help="Its denoise steps.")] = _STEPS,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show; the program prints what went wrong."""
    if bundle is None:
        if question is not None or caption is not None:
            raise ConfigError(
                "the tiny model's task is drawn, not given",
                got="--question" if question is not None else "--caption",
                expected="--seed, or a BUNDLE to ask",
                fix=f"Run this once, then: motrt demo {output / layout / 'bundle'} --caption …",
            )
        _show_tiny(output, layout, seed, samples, as_json=as_json)
        return
    params = GenerationParams(
        num_frames=num_frames,
        height=size,
        width=size,
        num_inference_steps=num_inference_steps,
        guidance_scale=4.0,
        seed=seed,
    )
    _show_any(bundle, output, question or _QUESTION, caption or _CAPTION, params, as_json=as_json)


def _show_tiny(output: Path, layout: Layout, seed: int, samples: int, *, as_json: bool) -> None:
    console = words()
    started = time.perf_counter()
    folder = output / layout
    console.print(f"the tiny omni model, layers {layout}: its bundle is {folder / 'bundle'}")
    bundle = prepare_bundle(layout, folder)
    shown: list[Scenery] = []
    with Runtime.open(bundle) as runtime:
        subject = RuntimeSubject(runtime, num_inference_steps=_STEPS)
        told: list[str] = []

        def tell(piece: str) -> None:
            told.append(piece)
            if not as_json:
                print_piece(piece)

        for scenery in tour(subject, seed, ask=lambda text: _ask(console, text), tell=tell):
            if not shown and not as_json:
                print_piece("\n")
            shown.append(scenery)
            _print_checks(console, scenery)
    files = _save(output, shown)
    console.print(f"[bold]look at[/] {files[0]}", soft_wrap=True)
    scored = None
    if samples:
        with stage_bars(quiet=as_json) as progress:
            scored = score_bundle(
                bundle, samples=samples, num_inference_steps=_STEPS, progress=progress
            )
    seconds = time.perf_counter() - started
    loaded = [name for name in _ABSENT if name in sys.modules]
    if as_json:
        print_json(
            {
                "text": "".join(told),
                "bundle": str(bundle),
                "files": [str(path) for path in files],
                "checks": {scenery.name: scenery.checks for scenery in shown},
                "score": scored and scored.to_dict(),
                "seconds": seconds,
                "loaded": loaded,
            }
        )
        return
    if scored:
        print_score(scored)
    console.print(_WHAT_HAPPENED.format(loaded=", ".join(loaded) or "none"), soft_wrap=True)
    console.print(f"{seconds:.0f} s in all")


def _ask(console: Console, question: str) -> None:
    console.print(f"[bold]reasoner[/] {question}")


def _print_checks(console: Console, scenery: Scenery) -> None:
    marks = (f"{name} {'✓' if good else '✗'}" for name, good in scenery.checks.items())
    console.print(f"[bold]generator[/] {scenery.title}: {', '.join(marks)}", soft_wrap=True)


def _save(output: Path, shown: list[Scenery]) -> list[Path]:
    """Write the contact sheet, and each clip as MP4 and GIF."""
    output.mkdir(parents=True, exist_ok=True)
    rows = [(scenery.title, scenery.clip) for scenery in shown]
    paths = [save_sheet(output / "contact_sheet.png", rows)]
    for scenery in shown:
        for suffix in ("mp4", "gif"):
            with open_writer(output / f"{scenery.name}.{suffix}", fps=FPS) as writer:
                writer.write(scenery.clip)
            paths.append(output / f"{scenery.name}.{suffix}")
    return paths


def _show_any(
    bundle: Path,
    output: Path,
    question: str,
    caption: str,
    params: GenerationParams,
    *,
    as_json: bool,
) -> None:
    console = words()
    started = time.perf_counter()
    with Runtime.open(bundle) as runtime:
        _ask(console, question)
        stream = runtime.reason_stream(question, SamplingParams(max_new_tokens=48))
        for piece in stream:
            if not as_json:
                print_piece(piece)
        answer = stream.result
        if not as_json:
            print_piece("\n")
        console.print(f"[bold]generator[/] {caption}")
        clip = runtime.generate(caption, params)
        output.mkdir(parents=True, exist_ok=True)
        files = [clip.save(output / "clip.mp4"), clip.save(output / "clip.gif")]
    seconds = time.perf_counter() - started
    loaded = [name for name in _ABSENT if name in sys.modules]
    if as_json:
        report: dict[str, Any] = {
            "text": answer.text,
            "files": [str(path) for path in files],
            "seconds": seconds,
            "timings": {"reasoner": answer.timings, "generator": clip.timings},
            "loaded": loaded,
        }
        print_json(report)
        return
    console.print(
        f"{', '.join(map(str, files))}: {clip.num_frames} frame{'s' * (clip.num_frames > 1)}, "
        f"{clip.timings['steps']:.0f} steps in {clip.timings['denoise']:.1f} s; "
        f"answer at {answer.timings['tokens_per_second']:.0f} tokens/s; {seconds:.1f} s in all",
        soft_wrap=True,
    )
    console.print(
        f"one process; of {', '.join(_ABSENT)} it has loaded {', '.join(loaded) or 'none'}"
    )

"""``motrt demo``: both modes of a bundle in one process, shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from motrt.engines.commands.console import Debug, Json, print_json, print_piece, words
from motrt.runtime.generation_params import GenerationParams
from motrt.runtime.params import SamplingParams
from motrt.runtime.session import Runtime

HELP = "Show both modes of a bundle, in one process and without torch."
EXAMPLE = "Example: motrt demo edge.bundle -o demo/"

_QUESTION = "What will the red square do next?"
_CAPTION = "A red square moves left."
_ABSENT = ("torch", "transformers", "diffusers", "onnx")


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to show.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the clip.")] = Path(),
    question: Annotated[str, typer.Option(help="What to ask the reasoner.")] = _QUESTION,
    caption: Annotated[str, typer.Option(help="What the generator makes.")] = _CAPTION,
    num_frames: Annotated[int, typer.Option(help="Frames of the clip.")] = 17,
    size: Annotated[int, typer.Option(help="Height and width in pixels.")] = 64,
    num_inference_steps: Annotated[int, typer.Option(help="Steps.")] = 20,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show; the program prints what went wrong."""
    console = words()
    started = time.perf_counter()
    with Runtime.open(bundle) as runtime:
        console.print(f"[bold]reasoner[/] {question}")
        stream = runtime.reason_stream(question, SamplingParams(max_new_tokens=48))
        for piece in stream:
            if not as_json:
                print_piece(piece)
        answer = stream.result
        if not as_json:
            print_piece("\n")
        console.print(f"[bold]generator[/] {caption}")
        params = GenerationParams(
            num_frames=num_frames,
            height=size,
            width=size,
            num_inference_steps=num_inference_steps,
            guidance_scale=4.0,
        )
        clip = runtime.generate(caption, params)
        output.mkdir(parents=True, exist_ok=True)
        files = [clip.save(output / "clip.mp4"), clip.save(output / "clip.gif")]
    seconds = time.perf_counter() - started
    loaded = [name for name in _ABSENT if name in sys.modules]
    if as_json:
        print_json(
            {
                "text": answer.text,
                "files": [str(path) for path in files],
                "seconds": seconds,
                "timings": {"reasoner": answer.timings, "generator": clip.timings},
                "loaded": loaded,
            }
        )
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

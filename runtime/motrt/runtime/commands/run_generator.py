"""``motrt run generator``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from motrt.engines.commands.console import Debug, Json, Quiet, print_json, stage_bars, words
from motrt.engines.errors import BundleError, ConfigError
from motrt.engines.vae_config import VaeConfig
from motrt.runtime._media_libraries import pillow, pyav
from motrt.runtime.actions_file import load_actions, save_actions
from motrt.runtime.commands.options import (
    Backend,
    Capacity,
    Provider,
    Residency,
    Threads,
    default_of,
    numbers,
    open_options,
)
from motrt.runtime.denoise import StepState
from motrt.runtime.generation_params import ActionCondition, ActionMode, GenerationParams
from motrt.runtime.session import Runtime
from motrt.runtime.step_memory import check_decode_memory
from motrt.runtime.video import Keep

HELP = "Generate an image, a clip, sound latents or actions."
EXAMPLE = (
    'Example: motrt run generator edge.bundle --prompt "A red square moves left." '
    "--num-frames 17 --height 256 --width 320 -o clip.mp4"
)


_SUFFIXES = (".png", ".mp4", ".gif", ".npz", ".json")


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to run.")],
    prompt: Annotated[str, typer.Option(help="What to make.")],
    output: Annotated[
        list[str],
        typer.Option(
            "--output",
            "-o",
            help=".png, .mp4, .gif, a folder/ of PNGs, .npz (latents), .json (actions); repeatable.",
        ),
    ],
    negative_prompt: Annotated[str | None, typer.Option(help="What to stay away from.")] = None,
    image: Annotated[Path | None, typer.Option(help="First frame of the clip.")] = None,
    video: Annotated[Path | None, typer.Option(help="Clip to go on from.")] = None,
    condition_frames: Annotated[
        str, typer.Option(help="Latent frames that --video fixes, comma between.")
    ] = "0,1",
    keep: Annotated[Keep, typer.Option(help="Which end of a longer --video counts.")] = "first",
    action_mode: Annotated[
        ActionMode | None, typer.Option(help="What is given and what is asked for.")
    ] = None,
    domain: Annotated[
        str, typer.Option(help="Embodiment of the actions: a public name, or a number.")
    ] = "0",
    actions: Annotated[
        Path | None, typer.Option(help="JSON list of action vectors, for forward_dynamics.")
    ] = None,
    chunk_size: Annotated[int, typer.Option(min=1, help="Action steps.")] = default_of(
        ActionCondition, "chunk_size"
    ),
    view_point: Annotated[str, typer.Option(help="Camera of an action run.")] = default_of(
        ActionCondition, "view_point"
    ),
    latents: Annotated[
        Path | None, typer.Option(help="NPZ of latents to start from instead of noise.")
    ] = None,
    num_frames: Annotated[int, typer.Option(min=1, help="1 makes an image.")] = default_of(
        GenerationParams, "num_frames"
    ),
    height: Annotated[int, typer.Option(min=1, help="Pixels.")] = default_of(
        GenerationParams, "height"
    ),
    width: Annotated[int, typer.Option(min=1, help="Pixels.")] = default_of(
        GenerationParams, "width"
    ),
    fps: Annotated[float, typer.Option(help="Frames per second.")] = default_of(
        GenerationParams, "fps"
    ),
    num_inference_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps. (default: 35, or the distilled checkpoint's)")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="1 is none. (default: 6, or 1 where distilled)")
    ] = None,
    guidance_interval: Annotated[
        str | None, typer.Option(help="Timesteps low,high between which guidance is on.")
    ] = None,
    flow_shift: Annotated[float | None, typer.Option(help="Instead of the checkpoint's.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the noise.")] = default_of(
        GenerationParams, "seed"
    ),
    sound: Annotated[bool, typer.Option("--sound", help="Denoise sound latents too.")] = False,
    backend: Backend = "onnxruntime",
    residency: Residency = "separate",
    capacity: Capacity = 4096,
    threads: Threads = None,
    provider: Provider = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Generate; the program prints what went wrong."""
    interval = numbers("--guidance-interval", guidance_interval, 2)
    params = GenerationParams(
        num_frames=num_frames,
        height=height,
        width=width,
        fps=fps,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        guidance_interval=None if interval is None else (interval[0], interval[1]),
        negative_prompt=negative_prompt,
        flow_shift=flow_shift,
        seed=seed,
        sound=sound,
    )
    condition = _action(action_mode, domain, actions, chunk_size, view_point)
    frames = num_frames if condition is None else condition.chunk_size + 1
    _check_outputs(output, condition, frames)
    indexes = tuple(int(i) for i in numbers("--condition-frames", condition_frames) or ())
    with (
        Runtime.open(
            bundle, **open_options(backend, residency, capacity, threads, provider)
        ) as runtime,
        stage_bars(quiet=quiet or as_json) as progress,
    ):
        vae = _check_decoder(output, runtime)
        if vae is not None and provider in (
            None,
            ["CPUExecutionProvider"],
        ):  # a GPU decodes in memory of its own
            check_decode_memory(VaeConfig.from_dict(vae["config"]), frames, height, width)
        done = 0

        def advance(step: int, _timestep: float, _state: StepState) -> None:
            nonlocal done
            done = step + 1
            progress("denoise", done, max(done, num_inference_steps or 35))

        result = runtime.generate(
            prompt,
            params,
            image=image,
            video=video,
            condition_frame_indexes=indexes,
            condition_video_keep=keep,
            action=condition,
            latents=latents,
            callback_on_step_end=advance,
        )
        started = time.perf_counter()
        files = []
        for path in output:
            if path.lower().endswith(".json"):
                files.append(save_actions(Path(path), result.action))
            else:
                files.append(result.save(path))
        timings = {**result.timings, "save": time.perf_counter() - started}
    shape = [result.num_frames, height, width, 3]
    if as_json:
        print_json(
            {
                "files": [str(path) for path in files],
                "shape": shape,
                "latents_shape": list(result.latents.shape),
                "seed": seed,
                "timings": timings,
            }
        )
    else:
        words().print(
            f"{', '.join(map(str, files))}: {shape[0]} frame{'s' * (shape[0] > 1)} of {height} x {width}, seed {seed}; "
            f"prompt {timings['prompt']:.2f} s, {timings['steps']:.0f} steps in "
            f"{timings['denoise']:.2f} s, saved in {timings['save']:.2f} s",
            soft_wrap=True,
        )


def _action(
    mode: ActionMode | None, domain: str, actions: Path | None, chunk_size: int, view_point: str
) -> ActionCondition | None:
    if mode is None:
        if actions is not None:
            raise ConfigError("--actions needs a mode", expected="--action-mode forward_dynamics")
        return None
    by_number = domain.isdecimal()
    return ActionCondition(
        mode=mode,
        chunk_size=chunk_size,
        domain_id=int(domain) if by_number else None,
        domain_name=None if by_number else domain,
        raw_actions=None if actions is None else load_actions(actions),
        view_point=view_point,
    )


def _check_outputs(output: list[str], condition: ActionCondition | None, frames: int) -> None:
    """Refuse before the work what could not be written after it."""
    for name in output:
        path, suffix = Path(name), Path(name).suffix.lower()
        is_folder = name.endswith("/") or path.is_dir()
        if path.is_dir() and not name.endswith("/") and suffix in _SUFFIXES:
            raise ConfigError(
                "the output is a folder with the name of a file",
                got=name,
                expected=f"another name, or {name}/ for PNGs in it",
            )
        if not is_folder and suffix not in _SUFFIXES:
            raise ConfigError(
                "the output's kind is unknown",
                got=name,
                expected=f"{', '.join(_SUFFIXES)}, or a folder/ of PNGs",
            )
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(
                "the output cannot be written there",
                got=name,
                expected=f"a folder {path.parent} that exists and can be written to",
            )
        if suffix == ".json" and condition is None:
            raise ConfigError(
                "a .json output holds actions", got=name, expected="an --action-mode"
            )
        if suffix == ".png" and frames > 1:
            raise ConfigError(
                "one PNG cannot hold a clip",
                got=f"{frames} frames into {name}",
                expected="a folder, frames/, or a clip, clip.mp4",
            )
        if suffix == ".mp4":
            pyav()
        if is_folder or suffix in {".png", ".gif"}:
            pillow()


def _check_decoder(output: list[str], runtime: Runtime) -> dict[str, Any] | None:
    """Return the record of the VAE, or None if no output needs it."""
    vae = runtime.bundle.manifest.components.get("vae")
    needs = [name for name in output if not name.lower().endswith((".npz", ".json"))]
    if needs and vae is None:
        raise BundleError(
            "the bundle has no VAE, so it makes no pictures",
            got=needs[0],
            expected=".npz (latents) or .json (actions)",
            fix="Export a checkpoint that has a vae/ folder.",
        )
    return vae if needs else None

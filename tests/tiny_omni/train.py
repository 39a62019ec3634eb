"""Trains the tiny omni model: ``python tests/tiny_omni/train.py all``. See README.md beside it."""

from __future__ import annotations

import argparse
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from diffusers import AutoencoderKLWan

from motrt.calibration.demo.tiny_omni import PACKAGED
from motrt.calibration.score.skills import psnr_db
from motrt.calibration.score.world import scenes
from tiny_omni.examples import World
from tiny_omni.model import SEPARATE, SHARED
from tiny_omni.omni import train_omni
from tiny_omni.package import split_checkpoint, write_checkpoint
from tiny_omni.prompts import Prompts, write_tokenizer
from tiny_omni.vae import rebuilt, rendered, train_vae

STAGES = ("vae", "separate", "shared")
RESULTS = HERE / "results"
STEPS = 5500
FLOW_SHIFT = 2.0


def main() -> None:
    """Run one stage, or all of them; a stage that was stopped goes on where it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=(*STAGES, "all", "package"))
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="snapshots and results")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work: Path = arguments.work
    if arguments.stage == "package":
        package(work)
        return
    for stage in STAGES if arguments.stage == "all" else (arguments.stage,):
        if stage == "vae":
            vae_stage(work)
        else:
            omni_stage(work, stage, SEPARATE if stage == "separate" else SHARED)


def vae_stage(work: Path) -> None:
    """Train the autoencoder and the tokenizer."""
    vae = train_vae(work)
    clips = rendered(islice(scenes("held_out", 3), 32))
    print(f"vae: {psnr_db(clips, rebuilt(vae, clips)):.2f} dB on clips that training never saw")
    shutil.rmtree(work / "vae", ignore_errors=True)
    vae.to(torch.bfloat16).save_pretrained(work / "vae")
    write_tokenizer(work / "text_tokenizer")


def omni_stage(work: Path, name: str, config: dict[str, Any]) -> None:
    """Train both towers over the finished autoencoder, and write the checkpoint."""
    if not (work / "vae" / "config.json").exists():
        sys.exit("there is no trained VAE; run the stage vae first")
    vae = AutoencoderKLWan.from_pretrained(work / "vae", dtype=torch.float32).eval()
    prompts = Prompts(work / "text_tokenizer")
    world = World(vae, prompts, work / "latents.safetensors")
    tensors = train_omni(name, config, world, prompts, work, STEPS)
    folder = write_checkpoint(
        work / "checkpoints" / name,
        config,
        tensors,
        vae,
        work / "text_tokenizer",
        flow_shift=FLOW_SHIFT,
    )
    print(f"{name}: {folder}")


def package(work: Path) -> None:
    """Put both checkpoints into the package and the logs beside this file, to be committed."""
    shutil.rmtree(PACKAGED, ignore_errors=True)
    for name in ("separate", "shared"):
        split_checkpoint(work / "checkpoints" / name, PACKAGED, name)
    RESULTS.mkdir(exist_ok=True)
    for name in STAGES:
        shutil.copy(work / f"{name}.jsonl", RESULTS)
    size = sum(path.stat().st_size for path in PACKAGED.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {PACKAGED}")


if __name__ == "__main__":
    main()

"""Scores a checkpoint twice, by motrt and by what it was exported from, and says where they differ.

``python tests/tiny_omni/compare.py BUNDLE CHECKPOINT``: the other side is diffusers' pipeline, and
transformers for answers; in the shared layout, which neither has, it is PyTorch under motrt's loop.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from diffusers.pipelines.cosmos import pipeline_cosmos3_omni

from motrt.calibration.reference.greedy import run_text
from motrt.calibration.reference.sequence_cases import TextCase
from motrt.calibration.score.run import score_bundle
from motrt.calibration.score.skills import GROUPS, score
from motrt.calibration.score.subject import EMBODIMENT, RuntimeSubject
from motrt.calibration.score.world import FPS, NUM_FRAMES, SIZE
from motrt.export.torch_backend import TorchBackend
from motrt.runtime import Runtime
from pipeline_reference import Reference
from tiny_omni.vae import rebuilt

if TYPE_CHECKING:
    from motrt.calibration.score.skills import Score
    from motrt.calibration.score.subject import Subject
    from motrt.calibration.score.world import Floats, Frames

STEPS = 20
_NO_FRACTIONS = ("inverse_dynamics_error", "vae_psnr_db")
_TIER = {str(SIZE): {"1.0": (SIZE, SIZE)}}  # the pipeline's own begin at 256


class DiffusersSubject:
    """A checkpoint through diffusers' pipeline and transformers' ``generate``."""

    def __init__(self, checkpoint: Path) -> None:
        self._reference = Reference(checkpoint)
        self._pipeline = self._reference.pipeline

    def ask(self, prompt: str) -> str:
        """See :class:`motrt.calibration.score.subject.Subject`; so the rest."""
        tokenizer = self._pipeline.text_tokenizer
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        case = TextCase(name="answer", input_ids=np.array(ids, np.int64), max_new_tokens=64)
        answered = run_text(self._pipeline.transformer, [case])["answer/ids"].tolist()
        end = tokenizer.eos_token_id
        kept = answered[: answered.index(end)] if end in answered else answered
        return str(tokenizer.decode(kept))

    def make(self, caption: str, seed: int) -> Frames:
        return self._clip(seed, prompt=caption)

    def animate(self, first: Frames, caption: str, seed: int) -> Frames:
        return self._clip(seed, prompt=caption, image=_still(first))

    def drive(self, first: Frames, caption: str, actions: Floats, seed: int) -> Frames:
        given = torch.from_numpy(actions)
        return _levels(
            self._act("forward_dynamics", seed, caption, image=_still(first), raw_actions=given)
        )

    def read(self, clip: Frames, caption: str, seed: int) -> Floats:
        made = self._act("inverse_dynamics", seed, caption, video=[_still(f) for f in clip])
        return cast("Floats", made["action"])

    def act(self, first: Frames, instruction: str, seed: int) -> tuple[Floats, Frames]:
        made = self._act("policy", seed, instruction, image=_still(first))
        return made["action"], _levels(made)

    def rebuild(self, clip: Frames) -> Frames:
        frames: Frames = rebuilt(self._pipeline.vae, clip[None])[0]
        return frames

    def _clip(self, seed: int, **given: Any) -> Frames:
        return _levels(self._run(seed, num_frames=NUM_FRAMES, height=SIZE, width=SIZE, **given))

    def _act(self, mode: Any, seed: int, prompt: str, **given: Any) -> dict[str, Any]:
        with mock.patch.dict(pipeline_cosmos3_omni._ACTION_RESOLUTION_BINS, _TIER):
            action = pipeline_cosmos3_omni.CosmosActionCondition(
                mode=mode,
                chunk_size=NUM_FRAMES - 1,
                domain_name=EMBODIMENT,
                resolution_tier=SIZE,
                **given,
            )
            return self._run(
                seed, prompt=prompt, action=action, num_frames=None, height=None, width=None
            )

    def _run(self, seed: int, **given: Any) -> dict[str, Any]:
        return self._reference(
            seed,
            fps=FPS,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            output_type="np",
            **given,
        )


def _still(frame: Frames) -> Any:
    from PIL import Image

    return Image.fromarray(frame)


def _levels(made: dict[str, Any]) -> Frames:
    frames = made["vision"]
    levels: Frames = np.rint(frames.reshape(-1, *frames.shape[-3:]) * 255).astype(np.uint8)
    return levels


def main() -> None:
    """Print both scores and their difference in samples, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--skills", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    arguments = parser.parse_args()
    samples, groups = arguments.samples, arguments.skills
    ours = score_bundle(arguments.bundle, groups, samples=samples, num_inference_steps=STEPS)
    config = json.loads((arguments.checkpoint / "transformer" / "config.json").read_text())
    if config.get("weight_layout") == "shared":
        with Runtime.open(arguments.bundle, backend=TorchBackend) as runtime:
            theirs = score(
                RuntimeSubject(runtime, num_inference_steps=STEPS), groups, samples=samples
            )
    else:
        subject: Subject = DiffusersSubject(arguments.checkpoint)
        theirs = score(subject, groups, samples=samples)
    print(json.dumps({"samples": samples, "skills": _rows(ours, theirs)}, indent=2))


def _rows(ours: Score, theirs: Score) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in ours.skills.items():
        other = theirs.skills[name]
        rows[name] = {"motrt": round(value, 6), "reference": round(other, 6)}
        if name not in _NO_FRACTIONS:
            rows[name]["samples_apart"] = round(abs(value - other) * ours.samples)
    return rows


if __name__ == "__main__":
    main()

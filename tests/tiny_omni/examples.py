"""Training batches: what each mode of the generator is given, and what it must predict."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from motrt.calibration.score.questions import questions
from motrt.calibration.score.world import Scene, Walk, scenes, walks
from tiny_omni.model import ACTION_DIM
from tiny_omni.prompts import image_caption
from tiny_omni.vae import pixels

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import AutoencoderKLWan
    from torch import Tensor

    from tiny_omni.prompts import Prompts

NUM_SCENES = 5000
NUM_WALKS = 3000
PROMPTS = 8
"""Different prompts in a batch; they are read once and serve ``CLIPS`` clips each."""
CLIPS = 10
QUESTIONS = 18

# How often each mode comes.
MODES = {
    "text_to_video": 0.34,
    "text_to_image": 0.08,
    "image_to_video": 0.14,
    "forward_dynamics": 0.14,
    "inverse_dynamics": 0.08,
    "policy": 0.14,
    "negative": 0.08,
}
_UNSPOKEN = 0.15  # of captions leave the speed open


@dataclass(frozen=True, slots=True)
class Batch:
    """One mode's batch of ``PROMPTS * CLIPS``.

    Attributes:
        ids: Token ids ``[PROMPTS, U]``.
        latents: Clean ``[B, C, T, h, w]``.
        noisy: ``[T]``.
        actions: ``[B, 16, ACTION_DIM]`` or None.
        actions_noisy: Whether they are asked for.
    """

    ids: Tensor
    latents: Tensor
    noisy: Tensor
    actions: Tensor | None = None
    actions_noisy: bool = False


class World:
    """Encoded clips, by what a caption says of them.

    Args:
        vae: Encodes and normalises.
        prompts: Makes token ids.
        cache: File of the encoded clips; written if it is not there.
    """

    def __init__(self, vae: AutoencoderKLWan, prompts: Prompts, cache: Path) -> None:
        self._prompts = prompts
        clips: list[Scene | Walk] = [
            *islice(scenes("train", 11), NUM_SCENES),
            *islice(walks("train", 11), NUM_WALKS),
        ]
        if not cache.exists():
            torch.save(_encode(vae, clips), cache)
        self.latents = torch.load(cache, weights_only=True).float()
        self.actions = torch.zeros(len(clips), 16, ACTION_DIM)
        self.actions[..., :2] = torch.from_numpy(np.stack([clip.actions for clip in clips]))
        self._by: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, clip in enumerate(clips):
            thing = f"A {clip.colour} {clip.shape}"
            self._by["thing"][f"{thing} moves."].append(index)
            self._by["image"][image_caption(clip.colour, clip.shape)].append(index)
            if isinstance(clip, Scene):
                self._by["caption"][clip.caption].append(index)
                self._by["open"][f"{thing} moves {clip.direction}."].append(index)
                self._by["instruction"][clip.instruction].append(index)

    def batch(self, random: np.random.Generator) -> Batch:
        """Draw a batch of a mode drawn at random."""
        mode = str(random.choice(list(MODES), p=list(MODES.values())))
        return getattr(self, f"_{mode}")(random)  # type: ignore[no-any-return]

    def _draw(self, kind: str, random: np.random.Generator) -> tuple[list[str], list[int]]:
        groups = self._by[kind]
        texts = [
            str(t) for t in random.choice(list(groups), PROMPTS, replace=len(groups) < PROMPTS)
        ]
        return texts, [int(i) for text in texts for i in random.choice(groups[text], CLIPS)]

    def _text_to_video(self, random: np.random.Generator, first: float = 1.0) -> Batch:
        texts, clips = self._draw("open" if random.random() < _UNSPOKEN else "caption", random)
        noisy = torch.ones(self.latents.shape[2])
        noisy[0] = first
        ids = torch.tensor([self._prompts.generator(text) for text in texts])
        return Batch(ids, self.latents[clips], noisy)

    def _image_to_video(self, random: np.random.Generator) -> Batch:
        return self._text_to_video(random, first=0.0)

    def _text_to_image(self, random: np.random.Generator) -> Batch:
        texts, clips = self._draw("image", random)
        ids = torch.tensor([self._prompts.generator(text, frames=1) for text in texts])
        return Batch(ids, self.latents[clips][:, :, :1], torch.ones(1))

    def _negative(self, random: np.random.Generator) -> Batch:
        """The branch that guidance leads away from, in each mode that uses it."""
        _, clips = self._draw("caption", random)
        kind = random.integers(4)
        if kind == 0:
            ids, latents, noisy = (
                self._prompts.negative(frames=1),
                self.latents[clips][:, :, :1],
                torch.ones(1),
            )
        else:
            ids, latents = self._prompts.negative(), self.latents[clips]
            noisy = torch.ones(latents.shape[2])
            noisy[0] = float(kind != 1)
        return Batch(torch.tensor([ids] * PROMPTS), latents, noisy)

    def _forward_dynamics(self, random: np.random.Generator) -> Batch:
        return self._act("forward_dynamics", "thing", random, torch.tensor([0.0, 1, 1, 1, 1]))

    def _inverse_dynamics(self, random: np.random.Generator) -> Batch:
        return self._act("inverse_dynamics", "thing", random, torch.zeros(5))

    def _policy(self, random: np.random.Generator) -> Batch:
        return self._act("policy", "instruction", random, torch.tensor([0.0, 1, 1, 1, 1]))

    def _act(self, mode: str, kind: str, random: np.random.Generator, noisy: Tensor) -> Batch:
        texts, clips = self._draw(kind, random)
        ids = torch.tensor([self._prompts.generator(text, action=mode) for text in texts])
        asked = mode != "forward_dynamics"
        return Batch(ids, self.latents[clips], noisy, self.actions[clips], asked)


def question_batch(prompts: Prompts, seed: int) -> tuple[Tensor, Tensor]:
    """Return token ids ``[B, S]`` of questions with answers, and the targets, -100 elsewhere."""
    rows = [
        (prompts.question(q.prompt), prompts.answer(q.answer))
        for q in islice(questions("train", seed), QUESTIONS)
    ]
    length = max(len(question) + len(answer) for question, answer in rows) - 1
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), -100)
    for row, (question, answer) in enumerate(rows):
        whole = torch.tensor([*question, *answer])
        ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(question) - 1 : len(whole) - 1] = whole[len(question) :]
    return ids, targets


def _encode(vae: AutoencoderKLWan, clips: list[Scene | Walk]) -> Tensor:
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    parts = []
    with torch.no_grad():
        for start in range(0, len(clips), 16):
            x = pixels(np.stack([clip.render() for clip in clips[start : start + 16]]))
            parts.append((vae.encode(x).latent_dist.mode() - mean) / std)
    return torch.cat(parts).half()

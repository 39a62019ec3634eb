"""Training batches: what each mode of the generator is given, and what it must predict."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from motrt.calibration.score.questions import expansion, questions
from motrt.calibration.score.world import NUM_FRAMES, SPEEDS, Clip, Scene, scenes, walks
from tiny_omni.model import ACTION_DIM
from tiny_omni.vae import pixels, rendered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diffusers import AutoencoderKLWan
    from torch import Tensor

    from tiny_omni.prompts import Prompts

NUM_SCENES = 5000
NUM_WALKS = 6000
PROMPTS = 8
"""Different prompts in a batch; they are read once and serve ``CLIPS`` clips each."""
CLIPS = 10
QUESTIONS = 18

# How often each mode comes.
MODES = {
    "text_to_video": 0.26,
    "text_to_image": 0.04,
    "image_to_video": 0.10,
    "forward_dynamics": 0.26,
    "inverse_dynamics": 0.12,
    "policy": 0.18,
    "negative": 0.04,
}
# Of captions: the speed is left open; written out, as the reasoner expands a terse prompt.
_OPEN, _EXPANDED = 0.15, 0.15

# Which latent frames are denoised.
_ALL = torch.ones((NUM_FRAMES - 1) // 4 + 1)
_NONE = torch.zeros_like(_ALL)
_LATER = torch.cat([_NONE[:1], _ALL[1:]])


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
        clips: list[Clip] = [
            *islice(scenes("train", 11), NUM_SCENES),
            *islice(walks("train", 11), NUM_WALKS),
        ]
        if not cache.exists():
            save_file({"latents": _encode(vae, clips)}, cache)
        self.latents = load_file(cache)["latents"].float()
        self.actions = torch.zeros(len(clips), 16, ACTION_DIM)
        self.actions[..., :2] = torch.from_numpy(np.stack([clip.actions for clip in clips]))
        self._by: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, clip in enumerate(clips):
            self._by["thing"][clip.plain_caption].append(index)
            self._by["image"][clip.still_caption].append(index)
            if isinstance(clip, Scene):
                self._by["caption"][clip.caption].append(index)
                self._by["open"][clip.open_caption].append(index)
                full = expansion(clip.colour, clip.shape, clip.direction, clip.speed)
                self._by[f"expanded {clip.speed}"][full].append(index)
                self._by["instruction"][clip.instruction].append(index)
        self._makers: dict[str, Callable[[np.random.Generator], Batch]] = {
            "text_to_video": self._text_to_video,
            "text_to_image": self._text_to_image,
            "image_to_video": self._image_to_video,
            "forward_dynamics": partial(self._act, "forward_dynamics", "thing", noisy=_LATER),
            "inverse_dynamics": partial(self._act, "inverse_dynamics", "thing", noisy=_NONE),
            "policy": partial(self._act, "policy", "instruction", noisy=_LATER),
            "negative": self._negative,
        }

    def batch(self, random: np.random.Generator) -> Batch:
        """Draw a batch of a mode drawn at random."""
        mode = str(random.choice(list(MODES), p=list(MODES.values())))
        return self._makers[mode](random)

    def _draw(self, kind: str, random: np.random.Generator) -> tuple[list[str], list[int]]:
        groups = self._by[kind]
        texts = [
            str(t) for t in random.choice(list(groups), PROMPTS, replace=len(groups) < PROMPTS)
        ]
        return texts, [int(i) for text in texts for i in random.choice(groups[text], CLIPS)]

    def _text_to_video(self, random: np.random.Generator, noisy: Tensor = _ALL) -> Batch:
        drawn = random.random()
        kind = "open" if drawn < _OPEN else "caption"
        if drawn > 1 - _EXPANDED:  # one speed a batch, for one length
            kind = f"expanded {random.choice(list(SPEEDS))}"
        texts, clips = self._draw(kind, random)
        ids = torch.tensor([self._prompts.generator(text) for text in texts])
        return Batch(ids, self.latents[clips], noisy)

    def _image_to_video(self, random: np.random.Generator) -> Batch:
        return self._text_to_video(random, noisy=_LATER)

    def _text_to_image(self, random: np.random.Generator) -> Batch:
        texts, clips = self._draw("image", random)
        ids = torch.tensor([self._prompts.generator(text, frames=1) for text in texts])
        return Batch(ids, self.latents[clips][:, :, :1], _ALL[:1])

    def _negative(self, random: np.random.Generator) -> Batch:
        """The branch that guidance leads away from: of a clip, begun or not, or of an image."""
        _, clips = self._draw("caption", random)
        noisy = (_ALL[:1], _LATER, _ALL, _ALL)[random.integers(4)]
        frames = 1 if len(noisy) == 1 else NUM_FRAMES
        ids = torch.tensor([self._prompts.negative(frames=frames)] * PROMPTS)
        return Batch(ids, self.latents[clips][:, :, : len(noisy)], noisy)

    def _act(self, mode: str, kind: str, random: np.random.Generator, *, noisy: Tensor) -> Batch:
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


def _encode(vae: AutoencoderKLWan, clips: list[Clip]) -> Tensor:
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    parts = []
    with torch.no_grad():
        for start in range(0, len(clips), 16):
            x = pixels(rendered(clips[start : start + 16]))
            parts.append((vae.encode(x).latent_dist.mode() - mean) / std)
    return torch.cat(parts).half()

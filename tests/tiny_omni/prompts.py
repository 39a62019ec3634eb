"""What the towers read: the runtime's own prompts, token by token, and the tokenizer for them."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from motrt.calibration.score.questions import questions
from motrt.calibration.score.world import COLOURS, FPS, NUM_FRAMES, SHAPES, SIZE, scenes, walks
from motrt.runtime.prompt_templates import PromptTemplates
from motrt.runtime.prompts import action_caption, generation_prompt
from motrt.runtime.tokenizer import Tokenizer
from omni_fixtures.tokenizer import build_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.runtime.prompts import GenerationPrompt

BYTE_PAIRS = 540
VOCAB_SIZE = 576
_LINES = 600


def write_tokenizer(folder: Path) -> Path:
    """Train it on captions, questions and the pipeline's own sentences, and write its files."""
    lines = [
        *(s.caption + " " + s.instruction for s in islice(scenes("train", 1), _LINES)),
        *(w.plain_caption for w in islice(walks("train", 1), _LINES // 4)),
        *(q.prompt + "\n" + q.answer for q in islice(questions("train", 1), _LINES)),
        *(w.still_caption for w in islice(walks("train", 2), _LINES // 4)),
        *_sentences() * 20,
    ]
    return save_tokenizer(folder, build_tokenizer(lines, BYTE_PAIRS))


class Prompts:
    """Token ids, as the runtime makes them.

    Args:
        folder: Of the tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_folder(folder)

    @cache  # noqa: B019  a few hundred texts, for as long as the process trains
    def generator(
        self, text: str, *, frames: int = NUM_FRAMES, action: str | None = None
    ) -> list[int]:
        """Return a caption's ids."""
        return [int(i) for i in self._of(text, frames, action).positive_ids]

    @cache  # noqa: B019  see above
    def negative(self, *, frames: int = NUM_FRAMES, action: str | None = None) -> list[int]:
        """Return the ids of the other guidance branch: the empty text and what follows it."""
        return [int(i) for i in self._of("", frames, action).negative_ids]

    @cache  # noqa: B019  see above
    def question(self, prompt: str) -> list[int]:
        """Return the ids up to where the answer begins."""
        return list(self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))

    @cache  # noqa: B019  see above
    def answer(self, text: str) -> list[int]:
        """Return an answer's ids, its end included."""
        return [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]

    def _of(self, text: str, frames: int, action: str | None) -> GenerationPrompt:
        return generation_prompt(
            self._tokenizer,
            text,
            num_frames=frames,
            height=SIZE,
            width=SIZE,
            fps=FPS,
            action_mode=action,
            action_view_point=None if action is None else "ego_view",
        )


def _sentences() -> list[str]:
    t = PromptTemplates()
    values = {"duration": NUM_FRAMES / FPS, "fps": FPS, "height": SIZE, "width": SIZE}
    names = ("duration_template", "image_resolution_template", "video_resolution_template")
    said = [getattr(t, f"{i}{name}").format(**values) for name in names for i in ("", "inverse_")]
    actions = [
        action_caption(
            f"A {c} {s} moves.", t.action_view_points["ego_view"], NUM_FRAMES, FPS, SIZE, SIZE
        )
        for c in COLOURS
        for s in SHAPES
    ]
    return [t.system_prompt_image, t.system_prompt_video, *said, *actions, "user assistant system"]

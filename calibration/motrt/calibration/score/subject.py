"""Whose skills are scored: anything that answers, generates and acts in the world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from motrt.calibration.score.world import FPS, NUM_FRAMES, SIZE
from motrt.runtime import ActionCondition, GenerationParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.calibration.score.world import Floats, Frames
    from motrt.runtime import GenerationResult, Runtime

EMBODIMENT = "pusht"
"""Two numbers an action."""


class Subject(Protocol):
    """One call a skill; clips are uint8 ``[17, 64, 64, 3]``, actions float32 ``[16, 2]``."""

    def ask(self, prompt: str) -> str:
        """Return the reasoner's answer."""

    def make(self, caption: str, seed: int) -> Frames:
        """Text to video."""

    def animate(self, first: Frames, caption: str, seed: int) -> Frames:
        """Image to video, from a frame ``[64, 64, 3]``."""

    def drive(self, first: Frames, caption: str, actions: Floats, seed: int) -> Frames:
        """Forward dynamics: the clip that actions lead to."""

    def read(self, clip: Frames, caption: str, seed: int) -> Floats:
        """Inverse dynamics: the actions that a clip shows."""

    def act(self, first: Frames, instruction: str, seed: int) -> tuple[Floats, Frames]:
        """Policy: actions for an instruction, and the clip that they lead to."""

    def rebuild(self, clip: Frames) -> Frames:
        """Encode a clip to latents and decode it again."""


class RuntimeSubject:
    """A bundle, through the runtime that its users call.

    Args:
        runtime: An open runtime; stays open.
        num_inference_steps: Denoise steps of each clip.
        guidance_scale: Of the modes without actions; actions are made without guidance, as in the
            public pipelines.
    """

    def __init__(
        self, runtime: Runtime, *, num_inference_steps: int = 20, guidance_scale: float = 1.0
    ) -> None:
        self._runtime = runtime
        self._steps = num_inference_steps
        self._guidance_scale = guidance_scale

    def ask(self, prompt: str) -> str:
        """See :class:`Subject`."""
        return self._runtime.reason(prompt, SamplingParams(max_new_tokens=64)).text

    def ask_aloud(self, prompt: str, tell: Callable[[str], None]) -> str:
        """Ask, and hand on each piece of the answer as it comes."""
        stream = self._runtime.reason_stream(prompt, SamplingParams(max_new_tokens=64))
        for piece in stream:
            tell(piece)
        return stream.result.text

    def make(self, caption: str, seed: int) -> Frames:
        """See :class:`Subject`."""
        return _frames(self._generate(caption, seed))

    def animate(self, first: Frames, caption: str, seed: int) -> Frames:
        """See :class:`Subject`."""
        return _frames(self._generate(caption, seed, image=first))

    def drive(self, first: Frames, caption: str, actions: Floats, seed: int) -> Frames:
        """See :class:`Subject`."""
        given = _action("forward_dynamics", actions)
        return _frames(self._generate(caption, seed, image=first, action=given))

    def read(self, clip: Frames, caption: str, seed: int) -> Floats:
        """See :class:`Subject`."""
        return _actions(
            self._generate(caption, seed, video=clip, action=_action("inverse_dynamics"))
        )

    def act(self, first: Frames, instruction: str, seed: int) -> tuple[Floats, Frames]:
        """See :class:`Subject`."""
        result = self._generate(instruction, seed, image=first, action=_action("policy"))
        return _actions(result), _frames(result)

    def rebuild(self, clip: Frames) -> Frames:
        """See :class:`Subject`."""
        return self._runtime.decode(self._runtime.encode(clip))

    def _generate(self, prompt: str, seed: int, **given: Any) -> GenerationResult:
        guidance = 1.0 if "action" in given else self._guidance_scale
        params = GenerationParams(
            num_frames=NUM_FRAMES,
            height=SIZE,
            width=SIZE,
            fps=FPS,
            num_inference_steps=self._steps,
            guidance_scale=guidance,
            seed=seed,
        )
        return self._runtime.generate(prompt, params, **given)


def _action(mode: Any, actions: Floats | None = None) -> ActionCondition:
    return ActionCondition(
        mode=mode, chunk_size=NUM_FRAMES - 1, domain_name=EMBODIMENT, raw_actions=actions
    )


def _frames(result: GenerationResult) -> Frames:
    return np.stack(list(result.frames()))


def _actions(result: GenerationResult) -> Floats:
    return np.asarray(result.action, np.float32)

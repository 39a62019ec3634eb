"""A model that knows the world of the tiny omni model, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from motrt.calibration.score.pixels import look, true_centres
from motrt.calibration.score.questions import plan_question, questions
from motrt.calibration.score.world import DIRECTIONS, MAX_SPEED, Scene, path_of, render

Frames = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _scene(thing: list[str], motion: list[str], x: int = 0, y: int = 0) -> Scene:
    return Scene(colour=thing[0], shape=thing[1], direction=motion[0], speed=motion[1], x=x, y=y)


class Oracle:
    """Knows the world, and does what it is asked for; what is wrong with it is stated."""

    colour: str | None = None  # paints everything so
    shape: str | None = None  # draws everything so
    turn = 1.0  # of every velocity
    noise = 0.0  # of actions, in units of MAX_SPEED
    jump = 0.0  # pixels by which clips start beside their first frame

    def ask(self, prompt: str) -> str:
        split = questions("held_out", 900_000)
        return next(q.answer for q in split if q.prompt == prompt)

    def ask_aloud(self, prompt: str, tell: Callable[[str], None]) -> str:
        """Answer a question for a plan, in two pieces."""
        _, colour, shape, *_ = prompt.split()
        x, y, goal_x, goal_y = (int(char) for char in prompt if char.isdigit())
        answer = plan_question(f"{colour} {shape}", (x, y), (goal_x, goal_y)).answer
        tell(answer[:5])
        tell(answer[5:])
        return answer

    def make(self, caption: str, seed: int) -> Frames:
        words = caption.rstrip(".").split()
        x, y = (int(32 - 16 * self.turn * d) for d in DIRECTIONS[words[4]])
        scene = _scene(words[1:3], words[4:], x, y)
        return self._film(scene.colour, scene.shape, x, y, scene.actions)

    def animate(self, first: Frames, caption: str, seed: int) -> Frames:
        words = caption.rstrip(".").split()
        x, y = self._start(first, words[2])
        motion = _scene(words[1:3], words[4:])
        return self._film(words[1], words[2], x, y, motion.actions)

    def drive(self, first: Frames, caption: str, actions: Floats, seed: int) -> Frames:
        _, colour, shape, _ = caption.rstrip(".").split()
        return self._film(colour, shape, *self._start(first, shape), actions)

    def read(self, clip: Frames, caption: str, seed: int) -> Floats:
        steps = np.diff(look(clip).centres, axis=0) / MAX_SPEED
        return (steps + self.noise).astype(np.float32)

    def act(self, first: Frames, instruction: str, seed: int) -> tuple[Floats, Frames]:
        words = instruction.rstrip(".").split()
        actions = _scene(words[2:4], words[4:]).actions * np.float32(self.turn)
        return actions, first[None]

    def rebuild(self, clip: Frames) -> Frames:
        return clip

    def _start(self, first: Frames, shape: str) -> tuple[float, float]:
        x, y = look(first[None]).centres[0] - true_centres(shape, np.zeros((1, 2), np.float32))[0]
        return float(x) + self.jump, float(y)

    def _film(self, colour: str, shape: str, x: float, y: float, actions: Floats) -> Frames:
        path = path_of(x, y, actions * np.float32(self.turn))
        return render(self.colour or colour, self.shape or shape, path)

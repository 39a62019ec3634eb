"""The tiny omni model at work: it plans, and its plan moves things; it expands, imagines and acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from motrt.calibration.score.pixels import look, true_centres
from motrt.calibration.score.questions import plan_question
from motrt.calibration.score.subject import Subject
from motrt.calibration.score.world import (
    COLOURS,
    DIRECTIONS,
    GRID,
    MAX_MOVES,
    MAX_SPEED,
    SHAPES,
    SPEEDS,
    STAY,
    Scene,
    Walk,
    cell_centre,
    is_held_out,
    plan_actions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from motrt.calibration.score.world import Frames

_CLOSE = 3.0  # pixels, as in the score


class Speaker(Subject, Protocol):
    """A subject that is heard while it answers."""

    def ask_aloud(self, prompt: str, tell: Callable[[str], None]) -> str:
        """Return the reasoner's answer, having handed on each piece of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Scenery:
    """One thing that the tour shows.

    Attributes:
        name: For a file.
        title: What was given, and what came.
        clip: uint8 ``[17, 64, 64, 3]``.
        checks: What was looked for in the pixels or numbers, and whether it is there.
    """

    name: str
    title: str
    clip: Frames
    checks: dict[str, bool]


def tour(
    subject: Speaker,
    seed: int,
    *,
    ask: Callable[[str], None],
    tell: Callable[[str], None],
) -> Iterator[Scenery]:
    """Yield what the model makes of tasks that training never saw.

    Args:
        subject: The model.
        seed: Of the tasks, and of the noise.
        ask: Given each question before it is asked.
        tell: Given each piece of its answer as it comes.
    """
    random = np.random.default_rng([seed, 11])
    yield _planned(subject, seed, random, ask, tell)
    scene = _unseen(random)
    seen = look(clip := subject.make(scene.caption, seed))
    yield Scenery(
        "text_to_video",
        f"text to video: {scene.caption}",
        clip,
        {
            "colour": seen.colour == scene.colour,
            "shape": seen.shape == scene.shape,
            "direction": seen.direction == scene.direction,
            "speed": seen.speed == scene.speed,
        },
    )
    scene = _unseen(random)
    seen = look(clip := subject.animate(scene.render()[0], scene.caption, seed))
    kept = seen.colour == scene.colour and seen.shape == scene.shape
    yield Scenery(
        "image_to_video",
        f"image to video, from the first frame: {scene.caption}",
        clip,
        {"object kept": kept, "direction": seen.direction == scene.direction},
    )
    scene = _unseen(random)
    actions, clip = subject.act(scene.render()[0], scene.instruction, seed)
    off = np.hypot(*(actions[:, :2] - scene.actions).sum(0)) * MAX_SPEED
    velocity = ", ".join(f"{v:+.1f}" for v in actions[:, :2].mean(0) * MAX_SPEED)
    yield Scenery(
        "policy",
        f"policy, from the first frame: {scene.instruction} -> ({velocity}) pixels a frame",
        clip,
        {"goal reached": bool(off < _CLOSE)},
    )


def moves_of(answer: str) -> list[str]:
    """Read a plan such as ``right, right, up.``; empty if the answer is none."""
    moves = answer.strip().removesuffix(".").split(", ")
    known = {*DIRECTIONS, STAY}
    return moves if len(moves) <= MAX_MOVES and all(move in known for move in moves) else []


def _planned(
    subject: Speaker,
    seed: int,
    random: np.random.Generator,
    ask: Callable[[str], None],
    tell: Callable[[str], None],
) -> Scenery:
    """The reasoner's plan, and what the generator makes of its moves."""
    thing = _unseen(random)
    start, goal = _way(random)
    question = plan_question(f"{thing.colour} {thing.shape}", start, goal)
    ask(question.prompt)
    answer = subject.ask_aloud(question.prompt, tell)
    x, y = cell_centre(*start)
    walk = Walk(
        colour=thing.colour, shape=thing.shape, x=x, y=y, actions=plan_actions(moves_of(answer))
    )
    clip = subject.drive(walk.render()[0], walk.plain_caption, walk.actions, seed)
    seen = look(clip)
    there = true_centres(thing.shape, np.array([cell_centre(*goal)], np.float32))[0]
    return Scenery(
        "plan",
        f"plan, then forward dynamics: {question.prompt} -> {answer.strip()}",
        clip,
        {
            "right answer": answer.strip() == question.answer,
            "object kept": seen.colour == thing.colour and seen.shape == thing.shape,
            "goal reached": bool(np.hypot(*(seen.centres[-1] - there)) < _CLOSE),
        },
    )


def _way(random: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw a start and a goal that a plan of two moves at least joins."""
    while True:
        x, y, goal_x, goal_y = (int(value) for value in random.integers(GRID, size=4))
        if 2 <= abs(goal_x - x) + abs(goal_y - y) <= MAX_MOVES:
            return (x, y), (goal_x, goal_y)


def _unseen(random: np.random.Generator) -> Scene:
    """Draw a held-out scene that begins so that it ends about as far on the other side."""
    while True:
        colour, shape, direction, speed = (
            list(names)[random.integers(len(names))]
            for names in (COLOURS, SHAPES, DIRECTIONS, SPEEDS)
        )
        if is_held_out(colour, shape, direction):
            x, y = (32 - 8 * SPEEDS[speed] * d for d in DIRECTIONS[direction])
            return Scene(colour=colour, shape=shape, direction=direction, speed=speed, x=x, y=y)

"""Questions to the tiny model's reasoner: short tasks with one right answer each."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from motrt.calibration.score.world import (
    COLOURS,
    DIRECTIONS,
    GRID,
    MAX_MOVES,
    SHAPES,
    SPEEDS,
    is_held_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from motrt.calibration.score.world import Split

Kind = Literal["expand", "locate", "plan"]
KINDS: tuple[Kind, ...] = ("expand", "locate", "plan")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked and the one answer that counts."""

    kind: Kind
    prompt: str
    answer: str


def questions(split: Split, seed: int) -> Iterator[Question]:
    """Draw questions of a split without end, of each kind in turn.

    Held out are the triples of colour, shape and direction that no clip shows, and for plans one
    in eight pairs of start and goal.
    """
    random = np.random.default_rng([seed, 7, split == "held_out"])
    while True:
        for kind in KINDS:
            yield _draw(kind, split, random)


def _draw(kind: Kind, split: Split, random: np.random.Generator) -> Question:
    while True:
        colour = list(COLOURS)[random.integers(len(COLOURS))]
        shape = SHAPES[random.integers(len(SHAPES))]
        direction = list(DIRECTIONS)[random.integers(len(DIRECTIONS))]
        x, y, goal_x, goal_y = (int(value) for value in random.integers(GRID, size=4))
        if kind == "plan":
            distance = abs(goal_x - x) + abs(goal_y - y)
            if not 1 <= distance <= MAX_MOVES:
                continue
            held_out = zlib.crc32(bytes((x, y, goal_x, goal_y))) % 8 == 0
        else:
            held_out = is_held_out(colour, shape, direction)
        if held_out != (split == "held_out"):
            continue
        thing = f"{colour} {shape}"
        if kind == "plan":
            return plan_question(thing, (x, y), (goal_x, goal_y))
        if kind == "expand":
            speed = list(SPEEDS)[random.integers(len(SPEEDS))]
            prompt = f"Expand: {thing}, {direction}, {speed}."
            return Question(kind, prompt, expansion(colour, shape, direction, speed))
        dx, dy = DIRECTIONS[direction]
        steps = int(random.integers(1, GRID))
        end_x, end_y = x + dx * steps, y + dy * steps
        if not (0 <= end_x < GRID and 0 <= end_y < GRID):
            continue
        prompt = f"The {thing} is at {x},{y}. It moves {direction} {steps} steps. Where is it?"
        return Question(kind, prompt, f"It is at {end_x},{end_y}.")


def plan_question(thing: str, start: tuple[int, int], goal: tuple[int, int]) -> Question:
    """Ask for the way of a thing, such as ``red square``, from one cell of the grid to another."""
    prompt = f"The {thing} is at {start[0]},{start[1]}. Plan its way to {goal[0]},{goal[1]}."
    return Question("plan", prompt, ", ".join(plan(*start, *goal)) + ".")


def plan(x: int, y: int, goal_x: int, goal_y: int) -> list[str]:
    """Return the moves from a cell to another: along x first, then along y."""
    across = ["right" if goal_x > x else "left"] * abs(goal_x - x)
    return across + ["down" if goal_y > y else "up"] * abs(goal_y - y)


def expansion(colour: str, shape: str, direction: str, speed: str) -> str:
    """Return the full caption of a motion."""
    pixels = "one pixel" if SPEEDS[speed] == 1 else "two pixels"
    return (
        f"A {colour} {shape} moves {direction} {speed} over a dark plane, {pixels} a frame, "
        f"until it has come {'a quarter' if SPEEDS[speed] == 1 else 'half'} of the way across."
    )

"""The synthetic world that the tiny omni model has learned: one shape that moves on a dark plane.

Everything in it is known exactly, so that what a model makes of a caption can be judged from pixels.
Lengths are pixels, x to the right and y down; a clip is ``NUM_FRAMES`` frames of ``SIZE`` by ``SIZE``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Frames = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

Split = Literal["train", "held_out"]

SIZE = 64
NUM_FRAMES = 17
FPS = 24.0
RADIUS = 9.0
BACKGROUND = (24, 24, 32)
COLOURS = {
    "red": (230, 50, 50),
    "green": (50, 200, 80),
    "blue": (60, 100, 240),
    "yellow": (240, 210, 60),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slowly": 1, "quickly": 2}
"""Pixels a frame."""

MAX_SPEED = 2
"""Pixels a frame that an action of 1 stands for."""
MOVE_FRAMES = 4
"""Frames of one move of a plan: one latent frame."""
MAX_MOVES = (NUM_FRAMES - 1) // MOVE_FRAMES
GRID = 5
STAY = "stay"

_MARGIN = 10
_SUBSAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip(ABC):
    """A shape that moves; ``x`` and ``y`` are its centre in the first frame."""

    colour: str
    shape: str
    x: int
    y: int

    @property
    @abstractmethod
    def actions(self) -> Floats:
        """The action of each step between two frames, float32 ``[16, 2]``, in units of MAX_SPEED."""

    @property
    def still_caption(self) -> str:
        """What the generator is told of one frame."""
        return f"A {self.colour} {self.shape}."

    @property
    def plain_caption(self) -> str:
        """What the generator is told where the motion is in actions, or asked for."""
        return f"A {self.colour} {self.shape} moves."

    @property
    def path(self) -> Floats:
        """The centre in each frame, float32 ``[17, 2]``."""
        return path_of(self.x, self.y, self.actions)

    def render(self) -> Frames:
        """Draw the clip, uint8 ``[17, 64, 64, 3]``."""
        return render(self.colour, self.shape, self.path)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene(Clip):
    """One steady motion."""

    direction: str
    speed: str

    @property
    def caption(self) -> str:
        """What the generator is told."""
        return f"A {self.colour} {self.shape} moves {self.direction} {self.speed}."

    @property
    def open_caption(self) -> str:
        """The same with the speed left open."""
        return f"A {self.colour} {self.shape} moves {self.direction}."

    @property
    def instruction(self) -> str:
        """What the policy is told."""
        return f"Move the {self.colour} {self.shape} {self.direction} {self.speed}."

    @property
    def actions(self) -> Floats:
        """See :class:`Clip`."""
        way = np.array(DIRECTIONS[self.direction], np.float32)
        return np.tile(way * SPEEDS[self.speed] / MAX_SPEED, (NUM_FRAMES - 1, 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk(Clip):
    """Several motions, one after another."""

    actions: Floats = field()


def is_held_out(colour: str, shape: str, direction: str) -> bool:
    """Return whether no training clip shows this triple: one of eight, each part often seen."""
    indices = (
        list(COLOURS).index(colour),
        SHAPES.index(shape),
        list(DIRECTIONS).index(direction),
    )
    return (indices[0] + 3 * indices[1] + 2 * indices[2]) % 8 == 0


def scenes(split: Split, seed: int) -> Iterator[Scene]:
    """Draw scenes of a split without end; the shape never leaves the picture."""
    random = np.random.default_rng([seed, split == "held_out"])
    triples = [
        (colour, shape, direction)
        for colour in COLOURS
        for shape in SHAPES
        for direction in DIRECTIONS
        if is_held_out(colour, shape, direction) == (split == "held_out")
    ]
    speeds = tuple(SPEEDS)
    while True:
        colour, shape, direction = triples[random.integers(len(triples))]
        speed = speeds[random.integers(len(speeds))]
        travel = (NUM_FRAMES - 1) * SPEEDS[speed]
        start = [
            int(random.integers(_MARGIN + travel * (d < 0), SIZE - _MARGIN - travel * (d > 0) + 1))
            for d in DIRECTIONS[direction]
        ]
        x, y = start
        yield Scene(colour=colour, shape=shape, direction=direction, speed=speed, x=x, y=y)


def walks(split: Split, seed: int) -> Iterator[Walk]:
    """Draw walks of a split without end: four motions of ``MOVE_FRAMES``, or rests.

    Those for training contain no triple that is held out; the others contain one at least.
    """
    random = np.random.default_rng([seed, 5, split == "held_out"])
    colours = tuple(COLOURS)
    velocities = [(0, 0, STAY)] + [
        (dx * speed, dy * speed, name)
        for name, (dx, dy) in DIRECTIONS.items()
        for speed in SPEEDS.values()
    ]
    low, high = _MARGIN, SIZE - _MARGIN
    while True:
        colour, shape = (
            colours[random.integers(len(colours))],
            SHAPES[random.integers(len(SHAPES))],
        )
        start = random.integers(low, high + 1, size=2)
        moves = [velocities[random.integers(len(velocities))] for _ in range(MAX_MOVES)]
        unseen = [name != STAY and is_held_out(colour, shape, name) for _, _, name in moves]
        if any(unseen) != (split == "held_out"):
            continue
        steps = np.array([move[:2] for move in moves], np.float32)
        actions = np.repeat(steps / MAX_SPEED, MOVE_FRAMES, axis=0).astype(np.float32)
        x, y = (int(value) for value in start)
        path = path_of(x, y, actions)
        if path.min() >= low and path.max() <= high:
            yield Walk(colour=colour, shape=shape, x=x, y=y, actions=actions)


def path_of(x: float, y: float, actions: Floats) -> Floats:
    """Follow actions ``[T, 2]`` from a centre; returns the centres, float32 ``[T + 1, 2]``."""
    steps = np.concatenate([[[x, y]], np.asarray(actions)[:, :2] * MAX_SPEED])
    return np.cumsum(steps, axis=0).astype(np.float32)


def render(colour: str, shape: str, path: Floats) -> Frames:
    """Draw a shape at each centre ``[T, 2]``, with soft edges; uint8 ``[T, 64, 64, 3]``."""
    return draw(COLOURS[colour], shape, path)


def draw(rgb: Sequence[float], shape: str, path: Floats) -> Frames:
    """Draw a shape of any colour, 0 to 255 each; see :func:`render`."""
    background, ink = np.array(BACKGROUND, np.float32), np.array(rgb, np.float32)
    frames = np.empty((len(path), SIZE, SIZE, 3), np.uint8)
    for frame, (x, y) in zip(frames, path, strict=True):
        covered = coverage(shape, x, y, _SUBSAMPLES)[..., None]
        frame[:] = np.rint(background + covered * (ink - background))
    return frames


def coverage(shape: str, x: float, y: float, subsamples: int) -> Floats:
    """Return how much of each pixel a shape at a centre covers, 0 to 1, float32 ``[64, 64]``."""
    fine = (np.arange(SIZE * subsamples) + 0.5) / subsamples - 0.5
    inside = covers(shape, fine[None, :] - x, fine[:, None] - y)
    blocks = inside.reshape(SIZE, subsamples, SIZE, subsamples)
    covered: Floats = blocks.mean((1, 3), dtype=np.float32)
    return covered


def covers(
    shape: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return which points, relative to the centre, a shape covers; all have about one area."""
    if shape == "circle":
        return x * x + y * y <= RADIUS * RADIUS
    if shape == "square":
        half = RADIUS * 0.9
        return (np.abs(x) <= half) & (np.abs(y) <= half)
    height = RADIUS * 1.1  # the apex is up, and as far from the centre as the base
    return (y <= height) & (2 * np.abs(x) <= y + height)


def cell_centre(column: int, row: int) -> tuple[int, int]:
    """Return the pixel in the middle of a cell of the grid; a move of a plan is one cell."""
    move = MOVE_FRAMES * MAX_SPEED
    first = (SIZE - (GRID - 1) * move) // 2
    return first + column * move, first + row * move


def plan_actions(moves: Sequence[str]) -> Floats:
    """Return the actions of a plan, float32 ``[16, 2]``: each move takes ``MOVE_FRAMES`` steps.

    Args:
        moves: Names of directions, or ``stay``; what is missing to four is ``stay``.
    """
    padded = [*moves, *[STAY] * (MAX_MOVES - len(moves))]
    steps = [DIRECTIONS.get(move, (0, 0)) for move in padded]
    return np.repeat(np.array(steps, np.float32), MOVE_FRAMES, axis=0)

"""What a clip of the world shows, read off its pixels: colour, shape, and where the shape is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.score.world import (
    BACKGROUND,
    COLOURS,
    DIRECTIONS,
    RADIUS,
    SHAPES,
    SIZE,
    SPEEDS,
    coverage,
    covers,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from motrt.calibration.score.world import Floats, Frames

_FAINT = 0.25  # of the way from the plane to full colour: less is noise
_SOLID = 0.75
_SMALLEST = 40  # pixels; the shapes have 200 and more
_COLOUR_DISTANCE = 90.0  # the named ones are 150 and more apart
_STILL = 0.3  # pixels a frame


@dataclass(frozen=True, slots=True)
class Seen:
    """What a clip shows; None where nothing of the kind can be told.

    Attributes:
        colour: Nearest name, if that of every frame is the same.
        shape: The likeliest one, over all frames.
        centres: Centre of mass in each frame, float32 ``[T, 2]``, NaN where there is no shape.
    """

    colour: str | None
    shape: str | None
    centres: Floats

    @property
    def travel(self) -> tuple[float, float]:
        """Pixels from the first frame to the last, x and y; NaN if one of them is empty."""
        x, y = self.centres[-1] - self.centres[0]
        return float(x), float(y)

    @property
    def direction(self) -> str | None:
        """The direction that the travel is nearest to; None for a clip that stands still."""
        travel = np.array(self.travel)
        if not np.isfinite(travel).all() or np.abs(travel).max() < _STILL * (
            len(self.centres) - 1
        ):
            return None
        return max(DIRECTIONS, key=lambda name: float(travel @ np.array(DIRECTIONS[name])))

    @property
    def speed(self) -> str | None:
        """The speed that the travel is nearest to."""
        length = float(np.hypot(*self.travel)) / max(1, len(self.centres) - 1)
        if not np.isfinite(length) or length < _STILL:
            return None
        return min(SPEEDS, key=lambda name: abs(SPEEDS[name] - length))


def look(frames: Frames) -> Seen:
    """Look at a clip, uint8 ``[T, 64, 64, 3]``."""
    covered = seen_coverage(frames)
    centres = np.stack([_centre(frame) for frame in covered])
    return Seen(_colour(frames, covered), _shape(covered, centres), centres)


def seen_coverage(frames: Frames) -> Floats:
    """Return how much of each pixel is shape, 0 to 1, float32 ``[T, H, W]``."""
    far = np.abs(frames.astype(np.float32) - np.array(BACKGROUND, np.float32)).max(-1)
    # A frame's own full colour: the brightest hundredth, so that a pale shape is still a shape.
    full = np.maximum(60.0, np.quantile(far.reshape(len(far), -1), 0.985, axis=1))
    covered: Floats = np.clip(far / full[:, None, None], 0, 1).astype(np.float32)
    covered[covered < _FAINT] = 0
    return covered


def _centre(covered: Floats) -> Floats:
    if covered.sum() < _SMALLEST:
        return np.full(2, np.nan, np.float32)
    places = np.arange(SIZE, dtype=np.float32)
    mass = covered.sum()
    return np.array([covered.sum(0) @ places / mass, covered.sum(1) @ places / mass], np.float32)


def _colour(frames: Frames, covered: Floats) -> str | None:
    """Return the name that the shape's colour is nearest to in every frame, if there is one."""
    solid = covered > _SOLID
    means = [frame[mask].mean(0) for frame, mask in zip(frames, solid, strict=True) if mask.any()]
    if len(means) < len(frames):
        return None
    names = {_nearest(mean) for mean in means}
    return names.pop() if len(names) == 1 else None


def _nearest(rgb: npt.NDArray[np.float64]) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - np.array(ink))) for name, ink in COLOURS.items()}
    name = min(distances, key=lambda key: distances[key])
    return name if distances[name] < _COLOUR_DISTANCE else None


def _shape(covered: Floats, centres: Floats) -> str | None:
    """Return the shape whose ideal drawing, laid on each centre of mass, is nearest overall."""
    if not np.isfinite(centres).all():
        return None
    errors = dict.fromkeys(SHAPES, 0.0)
    for frame, (x, y) in zip(covered, centres, strict=True):
        for shape in SHAPES:
            errors[shape] += float(np.square(frame - _ideal(shape, x, y)).sum())
    return min(errors, key=lambda name: errors[name])


def _ideal(shape: str, x: float, y: float) -> Floats:
    offset_x, offset_y = _mass_offset(shape)
    return coverage(shape, x - offset_x, y - offset_y, subsamples=2)


@cache
def _mass_offset(shape: str) -> tuple[float, float]:
    """Return where a shape's centre of mass lies from its centre."""
    line = np.linspace(-2 * RADIUS, 2 * RADIUS, 401)
    inside = covers(shape, line[None, :], line[:, None])
    return float((inside.sum(0) @ line) / inside.sum()), float(
        (inside.sum(1) @ line) / inside.sum()
    )


def true_centres(shape: str, path: Floats) -> Floats:
    """Return the centres of mass of a shape on a path of centres, ``[T, 2]``."""
    return path + np.array(_mass_offset(shape), np.float32)

"""Ten skills, each a number: what share of samples shows what was asked for.

Samples are drawn from what training never saw: triples of colour, shape and direction, pairs of start
and goal, and seeds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.calibration.score.pixels import Seen, look, true_centres
from motrt.calibration.score.questions import questions
from motrt.calibration.score.world import MAX_SPEED, scenes, walks
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from motrt.calibration.score.subject import Subject
    from motrt.calibration.score.world import Clip, Floats, Frames

_SEED = 900_000
_FAR = 3.0  # pixels, a sixth of the shape: farther is somewhere else

Skills = dict[str, float]


@dataclass(frozen=True, slots=True)
class Score:
    """What a subject can do.

    Attributes:
        skills: By name, fractions 0 to 1; ``inverse_dynamics_error`` is the median error as a
            fraction of the speed, ``vae_psnr_db`` is in decibels.
        samples: Samples of each group of skills.
        seconds: By group of skills.
        missing: Skill to the reason why it was not measured.
    """

    skills: Skills
    samples: int
    seconds: dict[str, float]
    missing: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "skills": {name: round(value, 4) for name, value in self.skills.items()},
            "samples": self.samples,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "missing": self.missing,
        }


def score(
    subject: Subject,
    groups: Iterable[str],
    *,
    samples: int = 200,
    missing: dict[str, str] | None = None,
    progress: Progress = silent,
) -> Score:
    """Measure groups of skills (keys of :data:`GROUPS`), each on ``samples`` samples."""
    skills: Skills = {}
    seconds: dict[str, float] = {}
    for name in groups:
        started = time.perf_counter()
        measured: list[Skills] = []
        for sample in GROUPS[name](subject, samples):
            measured.append(sample)
            progress(name, len(measured), samples)
        summary = np.median if name == "inverse_dynamics" else np.mean
        for key in measured[0]:
            skills[key] = float(summary([sample[key] for sample in measured]))
        seconds[name] = time.perf_counter() - started
    return Score(skills, samples, seconds, missing or {})


def _text_to_video(subject: Subject, samples: int) -> Iterable[Skills]:
    for index, scene in enumerate(islice(scenes("held_out", _SEED), samples)):
        seen = look(subject.make(scene.caption, _SEED + index))
        yield {
            "colour": float(seen.colour == scene.colour),
            "shape": float(seen.shape == scene.shape),
            "direction": float(seen.direction == scene.direction),
            "speed": float(seen.speed == scene.speed),
        }


def _image_to_video(subject: Subject, samples: int) -> Iterable[Skills]:
    """The same object, from where it was, moves as the caption says."""
    for index, scene in enumerate(islice(scenes("held_out", _SEED + 1), samples)):
        seen = look(subject.animate(scene.render()[0], scene.caption, _SEED + index))
        kept = _is(seen, scene) and seen.direction == scene.direction
        kept &= _distance(seen, scene, frames=slice(0, 1)) < _FAR
        yield {"image_to_video": float(kept)}


def _forward_dynamics(subject: Subject, samples: int) -> Iterable[Skills]:
    """The object is, in every frame, where the actions bring it."""
    for index, walk in enumerate(islice(walks("held_out", _SEED + 2), samples)):
        clip = subject.drive(walk.render()[0], walk.plain_caption, walk.actions, _SEED + index)
        seen = look(clip)
        followed = _is(seen, walk) and _distance(seen, walk) < _FAR
        yield {"forward_dynamics": float(followed)}


def _inverse_dynamics(subject: Subject, samples: int) -> Iterable[Skills]:
    for index, scene in enumerate(islice(scenes("held_out", _SEED + 3), samples)):
        actions = subject.read(scene.render(), scene.plain_caption, _SEED + index)
        error = np.linalg.norm(actions[:, :2] - scene.actions, axis=1).mean()
        yield {"inverse_dynamics_error": float(error / np.linalg.norm(scene.actions[0]))}


def _policy(subject: Subject, samples: int) -> Iterable[Skills]:
    """The actions lead to where the instruction does."""
    for index, scene in enumerate(islice(scenes("held_out", _SEED + 4), samples)):
        actions, _ = subject.act(scene.render()[0], scene.instruction, _SEED + index)
        off = (actions[:, :2] - scene.actions).sum(0) * MAX_SPEED
        yield {"policy": float(np.hypot(*off) < _FAR)}


def _reasoner(subject: Subject, samples: int) -> Iterable[Skills]:
    for question in islice(questions("held_out", _SEED), samples):
        answer = subject.ask(question.prompt)
        yield {"reasoner_exact_match": float(answer.strip() == question.answer)}


def _vae(subject: Subject, samples: int) -> Iterable[Skills]:
    for scene in islice(scenes("held_out", _SEED + 5), samples):
        clip = scene.render()
        yield {"vae_psnr_db": psnr_db(clip, subject.rebuild(clip))}


def psnr_db(clip: Frames, other: Frames) -> float:
    """Return the peak signal to noise of one clip against another, in decibels; at most 100."""
    error = np.square(clip.astype(np.float64) - other).mean() / 255**2
    return float(-10 * np.log10(max(error, 1e-10)))


def _is(seen: Seen, thing: Clip) -> bool:
    return seen.colour == thing.colour and seen.shape == thing.shape


def _distance(seen: Seen, thing: Clip, frames: slice = slice(None)) -> float:
    """Return the farthest that a frame's centre of mass is from the true one; inf without one."""
    off: Floats = seen.centres - true_centres(thing.shape, thing.path)
    farthest = float(np.hypot(off[frames, 0], off[frames, 1]).max())
    return farthest if np.isfinite(farthest) else np.inf


GROUPS: dict[str, Callable[[Subject, int], Iterable[Skills]]] = {
    "text_to_video": _text_to_video,
    "image_to_video": _image_to_video,
    "forward_dynamics": _forward_dynamics,
    "inverse_dynamics": _inverse_dynamics,
    "policy": _policy,
    "reasoner": _reasoner,
    "vae": _vae,
}
"""By name, what yields a skill's samples, or those of several."""

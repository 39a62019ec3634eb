"""Writing a generated sample to a file, frame by frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from motrt.runtime.latents_file import Latents, save_latents
from motrt.runtime.writers import open_writer

if TYPE_CHECKING:
    from motrt.runtime.results import GenerationResult


def save_result(result: GenerationResult, path: str | Path) -> Path:
    """Write frames (or, for ``.npz``, latents); see :meth:`GenerationResult.save`."""
    target = Path(path)
    if target.suffix.lower() == ".npz":
        save_latents(target, latents_of(result))
        return target
    with open_writer(path, fps=result.fps, num_frames=result.num_frames) as writer:
        for frame in result.frames():
            writer.write(frame)
    return target


def latents_of(result: GenerationResult) -> Latents:
    """Return a result's latents in the form of a latents file."""
    return Latents(
        latents=result.latents,
        sound_latents=result.sound_latents,
        action_latents=result.action_latents,
    )

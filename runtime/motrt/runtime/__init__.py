"""Torch-free execution. So far: positions and patches; the loops are to come."""

from motrt.engines.contract import Modality
from motrt.runtime.patches import patchify, unpatchify
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    text_positions,
    vision_positions,
)

__all__ = [
    "Modality",
    "action_positions",
    "generator_offset",
    "patchify",
    "sound_positions",
    "text_positions",
    "unpatchify",
    "vision_positions",
]

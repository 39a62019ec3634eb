"""Generator cases: one forward of diffusers' joint transformer each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.checkpoint import load_config
from motrt.calibration.reference.packing import joint_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from motrt.calibration.reference.request import GeneratorCase


def run_generator(
    transformer: Any, cases: Sequence[GeneratorCase], checkpoint: Path
) -> dict[str, NDArray[np.float32]]:
    """Return the velocity of every modality of every case; zero at clean frames and steps."""
    factor = temporal_compression(checkpoint)
    arrays: dict[str, NDArray[np.float32]] = {}
    for case in cases:
        output = transformer(**joint_inputs(transformer, case, factor))
        arrays[f"{case.name}/velocity"] = to_float32(output.sample[0][0])
        if output.sound is not None:
            arrays[f"{case.name}/sound_velocity"] = to_float32(output.sound[0])
        if output.action is not None:
            arrays[f"{case.name}/action_velocity"] = to_float32(output.action[0])
    return arrays


def temporal_compression(checkpoint: Path) -> int:
    """Return how many frames one latent frame stands for: the VAE's own number, else Wan's 4."""
    folder = checkpoint / "vae"
    if not (folder / "config.json").is_file():
        return 4
    return int(load_config(folder).get("scale_factor_temporal", 4))

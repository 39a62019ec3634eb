"""VAE cases: diffusers' ``AutoencoderKLWan``, decode and encode, without latent normalization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKLWan

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.checkpoint import load_config
from motrt.calibration.reference.weights import fill_from_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from motrt.calibration.reference.request import VaeCase


def run_vae(
    checkpoint: Path, cases: Sequence[VaeCase], compute_dtype: torch.dtype
) -> dict[str, NDArray[np.float32]]:
    """Decode or encode every case in ``compute_dtype``, with the weights as they are in the file.

    Raises:
        CheckpointError: The checkpoint has no VAE, or its tensors do not match its config.
    """
    folder = checkpoint / "vae"
    config = load_config(folder)
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(config)
    fill_from_files(
        vae,
        folder,
        convert=lambda _, tensor: tensor.to(compute_dtype),
        compute_dtype=compute_dtype,
    )
    vae.eval()
    arrays: dict[str, NDArray[np.float32]] = {}
    for case in cases:
        if case.latents is not None:
            latents = torch.from_numpy(case.latents).to(compute_dtype)
            arrays[f"{case.name}/sample"] = to_float32(vae.decode(latents).sample)
        else:
            video = torch.from_numpy(case.video).to(compute_dtype)
            arrays[f"{case.name}/latents"] = to_float32(vae.encode(video).latent_dist.mode())
    return arrays

"""Stage one: diffusers' Wan 2.2 autoencoder, a hundredth of its width, on clips of the world."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from motrt.calibration.score.world import BACKGROUND, COLOURS, NUM_FRAMES, draw, scenes, walks
from tiny_omni.loop import train

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from motrt.calibration.score.world import Clip, Frames

Z_DIM = 16
# Frames, clips and steps of each phase. Short clips teach most at their price; whole ones teach the
# decoder to keep what it has seen to the end.
PHASES = ((5, 8, 1000), (9, 8, 600), (17, 6, 600))
_KL = 2.5e-4
_OBJECT = 8.0  # a pixel of the shape weighs this much more than one of the plane

CONFIG: dict[str, Any] = {
    "base_dim": 12,
    "decoder_base_dim": 12,
    "z_dim": Z_DIM,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
}


def new_vae(mean: list[float] | None = None, std: list[float] | None = None) -> AutoencoderKLWan:
    """Build it, with the statistics of its latents if they are known."""
    return AutoencoderKLWan(
        **CONFIG, latents_mean=mean or [0.0] * Z_DIM, latents_std=std or [1.0] * Z_DIM
    )


def clips(count: int, seed: int) -> list[Clip]:
    """Draw clips of the training split, half of them steady motions and half walks."""
    half = (count + 1) // 2
    return [*islice(scenes("train", seed), half), *islice(walks("train", seed), count - half)]


def rendered(drawn: Iterable[Clip]) -> Frames:
    """Render clips, uint8 ``[N, 17, H, W, 3]``."""
    return np.stack([clip.render() for clip in drawn])


def any_colour(count: int, seed: int, window: slice = slice(None)) -> Frames:
    """Draw and render frames of clips, every other clip in a colour that has no name.

    With four colours alone the autoencoder stores a name, not a colour, and forgets it by the end
    of the clip.
    """
    random = np.random.default_rng([seed, 3])
    drawn = clips(count, seed)
    drawn = [drawn[index] for index in random.permutation(len(drawn))]
    return np.stack(
        [
            draw(
                random.integers(40, 256, 3).tolist() if index % 2 else COLOURS[clip.colour],
                clip.shape,
                clip.path[window],
            )
            for index, clip in enumerate(drawn)
        ]
    )


def pixels(frames: Frames) -> Tensor:
    """uint8 ``[N, T, H, W, 3]`` to float32 ``[N, 3, T, H, W]`` in -1 to 1."""
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def train_vae(work: Path) -> AutoencoderKLWan:
    """Train, measure the latents' mean and deviation, and return the autoencoder in eval mode."""
    torch.manual_seed(0)
    vae = new_vae()
    _lay_out_channels_last(vae)
    steps = sum(count for _, _, count in PHASES)
    plane = torch.tensor(BACKGROUND).float().view(1, 3, 1, 1, 1) / 127.5 - 1

    def loss_of(step: int) -> dict[str, Tensor]:
        torch.manual_seed(step)
        x = pixels(_batch(step))
        shape = ((x - plane).abs().amax(1, keepdim=True) > 0.1).float()
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample
        weight = 1 + _OBJECT * shape
        error = y.float() - x
        distance = ((error.abs() + 2 * error.square()) * weight).mean()
        # posterior.kl() sums over some of a clip's dimensions, and not over others.
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).float().mean()
        return {"rebuilt": distance, "kl": _KL * kl}

    weights = train("vae", vae, loss_of, steps=steps, peak=6e-3, work=work)
    vae.load_state_dict(weights)
    vae.to(torch.bfloat16).float()  # what is saved is bfloat16; what follows sees its rounding
    with torch.no_grad():
        latents = torch.cat(
            [
                vae.encode(pixels(rendered(clips(16, seed=10**6 + i)))).latent_dist.mode()
                for i in range(8)
            ]
        )
    mean, std = latents.mean((0, 2, 3, 4)).tolist(), latents.std((0, 2, 3, 4)).tolist()
    measured = new_vae(mean, std)
    measured.load_state_dict(vae.state_dict())
    return measured.eval()


def _lay_out_channels_last(vae: AutoencoderKLWan) -> None:
    """In this memory format, and bfloat16, a step takes half the time."""
    for p in vae.parameters():
        if p.ndim == 5:
            p.data = p.data.to(memory_format=torch.channels_last_3d)


def _batch(step: int) -> Frames:
    """Return the clips of a step: windows of them before the last phase."""
    phases = iter(PHASES)
    frames, count, steps = next(phases)
    while step >= steps:
        step -= steps
        frames, count, steps = next(phases)
    random = np.random.default_rng([frames, step])
    start = int(random.integers(NUM_FRAMES - frames + 1))
    return any_colour(count, frames * 10**5 + step, slice(start, start + frames))


def rebuilt(vae: AutoencoderKLWan, frames: Frames) -> Frames:
    """Encode and decode clips; uint8, in the shape of ``frames``."""
    with torch.no_grad():
        decoded = vae.decode(vae.encode(pixels(frames)).latent_dist.mode()).sample
    levels = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte()
    frames_again: Frames = levels.permute(0, 2, 3, 4, 1).numpy()
    return frames_again

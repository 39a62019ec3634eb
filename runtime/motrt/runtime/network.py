"""From latents to the generator's inputs and back: one guidance branch as a function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import Modality
from motrt.runtime.patches import patchify, unpatchify
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    vision_positions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.runtime.denoise import Latents, Predict
    from motrt.runtime.protocols import Context, GeneratorEngine
    from motrt.runtime.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Sample:
    """What is denoised, apart from the numbers themselves.

    Attributes:
        noisy: By modality, 1 where something is denoised and 0 where it is given: vision
            ``[1, T, 1, 1]``, sound ``[1, Ts]``, action ``[Ta, Da]`` (a channel beyond an
            embodiment's width is given too: zero).
        fps: Frames per second.
        domain_id: Embodiment of the actions.
    """

    noisy: dict[str, Array]
    fps: float
    domain_id: int = 0


def branch(
    bundle: Bundle,
    engine: GeneratorEngine,
    text: TextModel,
    context: Context,
    sample: Sample,
    latents: Latents,
) -> Predict:
    """Bind one guidance branch.

    Args:
        bundle: Gives the architecture and the VAE's temporal factor.
        engine: The denoiser.
        text: Turns positions into rotary tables.
        context: Keys and values of the branch's prompt; their length sets the positions.
        sample: What is denoised.
        latents: Any latents of the sample: their shapes count.

    Returns:
        A function of latents and timestep that gives predictions of the latents' shapes.
    """
    model = bundle.manifest.model
    inputs = {spec.name for spec in bundle.generator_contract().inputs}
    factor = temporal_factor(bundle)
    vision = latents["vision"]
    _, grid = patchify(vision, model.latent_patch_size)
    frames, rows, columns = grid
    offset = generator_offset(model, context["context.0.key"].shape[2])
    positions = [
        vision_positions(model, offset, frames, rows, columns, sample.fps, compression=factor)
    ]
    by_frame = sample.noisy["vision"].reshape(-1)
    constants: dict[str, Array] = {
        "vision_noise_mask": np.repeat(by_frame, rows * columns)[None].astype(np.float32)
    }
    if "sound_latents" in inputs:
        count = latents["sound"].shape[1] if "sound" in latents else 0
        mask = sample.noisy["sound"].reshape(-1) if count else np.zeros(0)
        constants["sound_noise_mask"] = mask[None].astype(np.float32)
        positions.append(sound_positions(model, offset, count))
    if "action_latents" in inputs:
        count = latents["action"].shape[0] if "action" in latents else 0
        mask = sample.noisy["action"].max(axis=1) if count else np.zeros(0)
        constants["action_noise_mask"] = mask[None].astype(np.float32)
        constants["domain_id"] = np.array([sample.domain_id], np.int64)
        positions.append(action_positions(model, offset, count, sample.fps, compression=factor))
    cos, sin = text.rotary(np.concatenate(positions, axis=1))
    constants |= {"rotary_cos": cos, "rotary_sin": sin}
    run = engine.branch(context, constants)
    height, width = vision.shape[2:]

    def predict(current: Mapping[str, Array], timestep: float) -> Latents:
        feeds: dict[str, Array] = {
            "latent_patches": patchify(current["vision"], model.latent_patch_size)[0][None],
            "timestep": np.array([timestep], np.float32),
        }
        if "sound_latents" in inputs:
            sound = current.get("sound", np.zeros((model.sound_dim or 0, 0), np.float32))
            feeds["sound_latents"] = np.ascontiguousarray(sound.T)[None]
        if "action_latents" in inputs:
            action = current.get("action", np.zeros((0, model.action_dim or 0), np.float32))
            feeds["action_latents"] = action[None]
        outputs = run(feeds)
        predicted = {
            "vision": unpatchify(
                outputs["velocity"][0],
                grid,
                model.latent_patch_size,
                model.latent_channel,
                height,
                width,
            )
        }
        if "sound" in current:
            predicted["sound"] = outputs["sound_velocity"][0].T
        if "action" in current:
            predicted["action"] = outputs["action_velocity"][0] * sample.noisy["action"]
        return predicted

    return predict


def temporal_factor(bundle: Bundle) -> int:
    """Return the VAE's temporal factor; 4 where the bundle has no VAE, as everywhere published."""
    vae = bundle.manifest.components.get("vae", {}).get("config", {})
    return int(vae.get("scale_factor_temporal") or 4)


def modality_names(bundle: Bundle) -> tuple[str, ...]:
    """Return the latents' names that the bundle's generator takes."""
    return tuple(m.value for m in bundle.manifest.modalities if m is not Modality.TEXT)

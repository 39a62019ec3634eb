"""The joint sequence of diffusers' transformer: indexes, timesteps and 3-D positions of every token.

Everything that ``Cosmos3OmniPipeline`` computes between its latents and ``transformer(...)`` is computed here
by the pipeline's own methods, which need nothing of a pipeline but a config and the VAE's temporal factor.
Source: diffusers 0.42 ``pipeline_cosmos3_omni.py``, ``__call__`` steps 3 to 7.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import Cosmos3OmniPipeline

from motrt.calibration.reference.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from motrt.calibration.reference.request import GeneratorCase


def joint_inputs(
    transformer: Any, case: GeneratorCase, temporal_compression: int
) -> dict[str, Any]:
    """Return the keyword arguments of ``transformer.forward`` for ``case``.

    Tokens are ordered text | vision | sound | action. Latents are cast to the dtype of the model.

    Args:
        transformer: A ``Cosmos3OmniTransformer``.
        case: Prompt, latents and conditioning.
        temporal_compression: Frames of video in one latent frame (``scale_factor_temporal`` of the VAE).

    Raises:
        RequestError: The case has a modality or a width that the checkpoint lacks.
    """
    _check_case(transformer.config, case)
    pipeline = SimpleNamespace(
        transformer=transformer, vae_scale_factor_temporal=temporal_compression
    )
    text = Cosmos3OmniPipeline._prepare_text_segment(pipeline, case.input_ids.tolist(), "cpu")
    offset, end = text["vision_start_temporal_offset"], text["und_len"]
    inputs: dict[str, Any] = {key: text[key] for key in ("input_ids", "text_indexes", "und_len")}
    positions = [text["text_mrope_ids"]]

    latents = _cast(case.latents, transformer)[None]
    vision = Cosmos3OmniPipeline._prepare_vision_segment(
        pipeline,
        input_vision_tokens=latents,
        has_image_condition=bool(case.clean_frames),
        mrope_offset=offset,
        vision_fps=case.fps,
        curr=end,
        device="cpu",
        condition_frame_indexes=list(case.clean_frames),
    )
    inputs |= _segment("vision", vision, latents, vision["num_noisy_vision_tokens"], case.timestep)
    positions.append(vision["vision_mrope_ids"])
    end += vision["num_vision_tokens"]

    if case.sound_latents is not None:
        tokens = _cast(case.sound_latents, transformer)
        sound = Cosmos3OmniPipeline._prepare_sound_segment(
            pipeline,
            input_sound_tokens=tokens,
            mrope_offset=offset,
            sound_fps=float(transformer.config.sound_latent_fps),
            curr=end,
            device="cpu",
        )
        # The pipeline denoises all sound; the model takes clean sound as it takes clean frames.
        noisy = _noisy(tokens.shape[1], case.clean_sound_frames)
        sound["sound_noisy_frame_indexes"] = [noisy]
        sound["sound_mse_loss_indexes"] = sound["sound_sequence_indexes"][noisy]
        inputs |= _segment("sound", sound, tokens, len(noisy), case.timestep)
        positions.append(sound["sound_mrope_ids"])
        end += sound["sound_len"]

    if case.action_latents is not None:
        tokens = _cast(case.action_latents, transformer)
        action = Cosmos3OmniPipeline._prepare_action_segment(
            pipeline,
            input_action_tokens=tokens,
            condition_frame_indexes=list(case.clean_action_steps),
            mrope_offset=offset,
            action_fps=case.fps,
            curr=end,
            device="cpu",
        )
        noisy_steps = action["num_noisy_action_tokens"]
        inputs |= _segment("action", action, tokens, noisy_steps, case.timestep)
        inputs["action_domain_ids"] = [torch.tensor(case.domain_id, dtype=torch.long)]
        positions.append(action["action_mrope_ids"])
        end += action["action_len"]

    inputs["position_ids"] = torch.cat(positions, dim=1)
    inputs["sequence_length"] = end
    return inputs


def _segment(
    modality: str, packed: dict[str, Any], tokens: torch.Tensor, num_noisy: int, timestep: float
) -> dict[str, Any]:
    fields = ("token_shapes", "sequence_indexes", "mse_loss_indexes", "noisy_frame_indexes")
    segment = {f"{modality}_{field}": packed[f"{modality}_{field}"] for field in fields}
    segment[f"{modality}_tokens"] = [tokens]
    segment[f"{modality}_timesteps"] = torch.full((num_noisy,), timestep, dtype=torch.float32)
    return segment


def _noisy(length: int, clean: tuple[int, ...]) -> torch.Tensor:
    noisy = [index for index in range(length) if index not in set(clean)]
    return torch.tensor(noisy, dtype=torch.long)


def _cast(array: NDArray[Any], transformer: Any) -> torch.Tensor:
    return torch.from_numpy(array).to(transformer.embed_tokens.weight.dtype)


def _check_case(config: Any, case: GeneratorCase) -> None:
    wrong = {
        "latent channels": (case.latents.shape[0], config.latent_channel),
    }
    if case.sound_latents is not None:
        sound_dim = config.sound_dim if config.sound_gen else 0
        wrong["sound channels"] = (case.sound_latents.shape[0], sound_dim)
    if case.action_latents is not None:
        action_dim = config.action_dim if config.action_gen else 0
        wrong["action width"] = (case.action_latents.shape[1], action_dim)
    for what, (got, expected) in wrong.items():
        if got != expected:
            raise RequestError(
                f"{case.name}: {what} {got}; the checkpoint has {expected or 'none'}"
            )

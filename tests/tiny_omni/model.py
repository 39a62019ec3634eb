"""Both towers as one trainable module, over the project's own readable PyTorch layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motrt.engines.model_config import ModelConfig
from motrt.engines.rotary import rotary_axes, rotary_tables
from motrt.export.torch_generator import Generator
from motrt.export.torch_layers import KeyValue
from motrt.export.torch_reasoner import Reasoner, ReasonerOutput
from motrt.export.torch_rotary import reference_inv_freq
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    text_positions,
    vision_positions,
)
from tiny_omni.prompts import VOCAB_SIZE
from tiny_omni.vae import Z_DIM

ACTION_DIM = 8
DOMAIN_ID = 4  # "pusht": two numbers an action
_PATCH = 2
_STD = 0.02

SEPARATE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_axes_dim": [6, 5, 5],
    "vocab_size": VOCAB_SIZE,
    "latent_channel": Z_DIM,
    "latent_patch_size": _PATCH,
    "patch_latent_dim": _PATCH * _PATCH * Z_DIM,
    "action_gen": True,
    "action_dim": ACTION_DIM,
    "num_embodiment_domains": 5,
    "hidden_act": "silu",
    "qk_norm_for_text": True,
    "use_und_k_norm_for_gen": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,  # a clip is five steps of time long
}
SHARED: dict[str, Any] = {**SEPARATE, "weight_layout": "shared"}


class Omni(nn.Module):
    """Embedding table, reasoner and generator; in the shared layout with one set of layers.

    Args:
        config: ``config.json`` of the transformer.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = ModelConfig.from_dict(config)
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.reasoner = Reasoner(self.config)
        self.generator = Generator(self.config)
        if config.get("weight_layout") == "shared":
            self.generator.layers = self.reasoner.layers
            self.generator.norm = self.reasoner.norm
        self._axes = rotary_axes(self.config)
        self._inv_freq = reference_inv_freq(self.config)
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and "proj_out" not in name:
                nn.init.normal_(parameter, std=max(_STD, 0.5 / parameter.shape[-1] ** 0.5))
            elif parameter.ndim >= 2:
                nn.init.zeros_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor once, under the name that a checkpoint gives it."""
        named = dict(self.named_parameters())
        return {
            name.removeprefix("reasoner.").removeprefix("generator."): p
            for name, p in named.items()
        }

    def logits(self, ids: Tensor) -> Tensor:
        """Run the reasoner over token ids ``[B, S]``; returns ``[B, S, V]``."""
        return self._read(ids, torch.arange(ids.shape[1])).logits

    def context(self, ids: Tensor) -> list[KeyValue]:
        """Run the reasoner over token ids ``[B, S]``; returns what the generator reads of them."""
        return self._read(ids, torch.zeros(1, dtype=torch.long)).context

    def _read(self, ids: Tensor, places: Tensor) -> ReasonerOutput:
        batch, count = ids.shape
        cos, sin = self._rotary((count,), text_positions(0, count))
        bias = torch.full((count, count), -10000.0).triu(1)[None, None]
        out: ReasonerOutput = self.reasoner(
            self.embed_tokens(ids), cos, sin, bias, places.expand(batch, -1)
        )
        return out

    def denoise(
        self,
        latents: Tensor,
        noisy: Tensor,
        actions: Tensor | None,
        actions_noisy: bool,
        timestep: Tensor,
        context: list[KeyValue],
        fps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Predict velocities.

        Args:
            latents: ``[B, C, T, h, w]``.
            noisy: ``[T]``, 1 where a latent frame is denoised.
            actions: ``[B, Ta, ACTION_DIM]`` or None.
            actions_noisy: Whether they are denoised.
            timestep: ``[B]``.
            context: The prompt's K/V for each of the batch.
            fps: Frames per second.

        Returns:
            Velocities in the shapes of latents and actions.
        """
        batch, _, frames, height, width = latents.shape
        rows, columns = height // _PATCH, width // _PATCH
        count = 0 if actions is None else actions.shape[1]
        prompt = context[0][0].shape[2]
        offset = generator_offset(self.config, prompt)
        cos, sin = self._rotary(
            (prompt, frames, count),
            np.concatenate(
                [
                    vision_positions(self.config, offset, frames, rows, columns, fps),
                    action_positions(self.config, offset, count, fps),
                ],
                axis=1,
            ),
        )
        given: dict[str, Any] = {}
        if actions is not None:
            given["action_latents"] = actions
            given["action_noise_mask"] = torch.full((batch, count), float(actions_noisy))
            given["domain_id"] = torch.full((batch,), DOMAIN_ID)
        out = self.generator(
            latent_patches=patchify(latents),
            vision_noise_mask=noisy.repeat_interleave(rows * columns).expand(batch, -1),
            timestep=timestep,
            rotary_cos=cos.expand(batch, -1, -1),
            rotary_sin=sin.expand(batch, -1, -1),
            context=context,
            **given,
        )
        return unpatchify(out["velocity"], latents.shape), out.get("action_velocity")

    def _rotary(self, key: tuple[int, ...], positions: Any) -> tuple[Tensor, Tensor]:
        if key not in self._tables:
            tables = rotary_tables(self._inv_freq, self._axes, positions)
            self._tables[key] = tuple(torch.from_numpy(t)[None] for t in tables)  # type: ignore[assignment]
        return self._tables[key]


def patchify(latents: Tensor) -> Tensor:
    """``[B, C, T, h, w]`` to patches ``[B, N, W]``: ``motrt.runtime.patches``, differentiable."""
    batch, channels, frames, height, width = latents.shape
    split = latents.reshape(
        batch, channels, frames, height // _PATCH, _PATCH, width // _PATCH, _PATCH
    )
    return split.permute(0, 2, 3, 5, 4, 6, 1).reshape(batch, -1, _PATCH * _PATCH * channels)


def unpatchify(patches: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`patchify` for latents of a shape."""
    batch, channels, frames, height, width = shape
    split = patches.reshape(
        batch, frames, height // _PATCH, width // _PATCH, _PATCH, _PATCH, channels
    )
    return split.permute(0, 6, 1, 2, 4, 3, 5).reshape(shape)

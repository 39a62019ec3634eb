"""The denoising tower: noisy latents and the prompt's keys and values in, velocities out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from motrt.engines.contract import Modality, available_modalities, check_modalities
from motrt.engines.errors import ContractError
from motrt.engines.weight_names import TIME_PROJ_CHANNELS, generator_layer, generator_norm
from motrt.export.torch_layers import AttentionOutput, KeyValue, Layer, RMSNorm, part, register

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from motrt.engines.model_config import ModelConfig


class Generator(nn.Module):
    """The checkpoint's *gen* half: heads of each modality, time embedding, layers and final norm.

    Every token sees the whole prompt and every other token. The prompt's keys and values do not
    depend on the time, so they are computed once and used in all denoise steps. In the ``shared``
    layout layers and norm bear the reasoner's names and are the same tensors.

    Args:
        config: The architecture.
        modalities: What to denoise; vision is always among them. Default: all that there is.

    Raises:
        ConfigError: The config lacks a modality.

    Source: diffusers ``Cosmos3OmniTransformer``.
    """

    def __init__(self, config: ModelConfig, modalities: Iterable[Modality] | None = None) -> None:
        super().__init__()
        self.config = config
        asked = available_modalities(config) if modalities is None else modalities
        self.modalities = check_modalities(config, asked)
        hidden, patch = config.hidden_size, config.patch_latent_dim
        self.proj_in = nn.Linear(patch, hidden)
        self.proj_out = nn.Linear(hidden, patch)
        self.time_embedder = TimeEmbedder(config)
        if Modality.SOUND in self.modalities:
            sound = config.sound_dim or 0
            self.audio_proj_in = nn.Linear(sound, hidden)
            self.audio_proj_out = nn.Linear(hidden, sound)
            self.audio_modality_embed = nn.Parameter(torch.zeros(hidden))
        if Modality.ACTION in self.modalities:
            action, domains = config.action_dim or 0, config.num_embodiment_domains
            self.action_proj_in = DomainLinear(action, hidden, domains)
            self.action_proj_out = DomainLinear(hidden, action, domains)
            self.action_modality_embed = nn.Parameter(torch.zeros(hidden))
        self.layers = nn.ModuleList(
            Layer(config, generator_layer(config, index), has_qk_norm=True)
            for index in range(config.num_hidden_layers)
        )
        register(self, generator_norm(config), RMSNorm(hidden, config))

    def forward(
        self,
        *,
        latent_patches: Tensor,
        vision_noise_mask: Tensor,
        sound_latents: Tensor | None = None,
        sound_noise_mask: Tensor | None = None,
        action_latents: Tensor | None = None,
        action_noise_mask: Tensor | None = None,
        domain_id: Tensor | None = None,
        timestep: Tensor,
        rotary_cos: Tensor,
        rotary_sin: Tensor,
        context: Sequence[KeyValue],
    ) -> dict[str, Tensor]:
        """Predict the velocity (noise - clean) of every noisy token.

        Args:
            latent_patches: float32 ``[B, Nv, W]``, see ``motrt.runtime.patches``.
            vision_noise_mask: float32 ``[B, Nv]``: 1 at noisy tokens, 0 at clean ones.
            sound_latents: float32 ``[B, Ns, sound_dim]``; None is Ns = 0.
            sound_noise_mask: float32 ``[B, Ns]``.
            action_latents: float32 ``[B, Na, action_dim]``; None is Na = 0.
            action_noise_mask: float32 ``[B, Na]``.
            domain_id: Embodiment, int64 ``[B]``; needed with ``action_latents``.
            timestep: 1000 times the noise level, float32 ``[B]``.
            rotary_cos: Compute dtype ``[B, N, D/2]``; tokens in the order vision, sound, action.
            rotary_sin: Likewise.
            context: The prompt's keys and values ``[B, K, U, D]`` per layer, compute dtype; on a
                checkpoint with the extra key norm, its context keys.

        Returns:
            ``velocity``, ``sound_velocity`` and ``action_velocity``, as far as there are latents:
            float32, in the latents' shape, zero at clean tokens.

        Raises:
            ContractError: Latents of a modality that this generator lacks, or without their mask.
        """
        self._check(Modality.SOUND, sound_latents, sound_noise_mask)
        self._check(Modality.ACTION, action_latents, action_noise_mask, domain_id)
        dtype = self.proj_in.weight.dtype
        time: Tensor = self.time_embedder(timestep).to(dtype)[:, None]

        def timed(tokens: Tensor, mask: Tensor) -> Tensor:
            return tokens + mask[..., None].to(dtype) * time

        parts = [timed(self.proj_in(latent_patches.to(dtype)), vision_noise_mask)]
        if sound_latents is not None and sound_noise_mask is not None:
            tokens = self.audio_proj_in(sound_latents.to(dtype)) + self.audio_modality_embed
            parts.append(timed(tokens, sound_noise_mask))
        if action_latents is not None and action_noise_mask is not None:
            tokens = self.action_proj_in(action_latents.to(dtype), domain_id)
            parts.append(timed(tokens + self.action_modality_embed, action_noise_mask))

        x = torch.cat(parts, dim=1)
        for layer, prompt in zip(self.layers, context, strict=True):
            out: AttentionOutput = layer(x, rotary_cos, rotary_sin, prompt, None)
            x = out.hidden
        x = part(self, generator_norm(self.config))(x)

        streams = iter(x.split([tokens.shape[1] for tokens in parts], dim=1))
        velocities = {"velocity": _masked(self.proj_out(next(streams)), vision_noise_mask)}
        if sound_latents is not None and sound_noise_mask is not None:
            sound = self.audio_proj_out(next(streams))
            velocities["sound_velocity"] = _masked(sound, sound_noise_mask)
        if action_latents is not None and action_noise_mask is not None:
            action = self.action_proj_out(next(streams), domain_id)
            velocities["action_velocity"] = _masked(action, action_noise_mask)
        return velocities

    def _check(self, modality: Modality, *inputs: Tensor | None) -> None:
        given = [x is not None for x in inputs]
        if any(given) and not (all(given) and modality in self.modalities):
            has = ", ".join(m.value for m in self.modalities)
            raise ContractError(
                f"the generator cannot take these {modality.value} inputs",
                got=f"{sum(given)} of {len(given)} inputs, for a generator of {has}",
                expected="all inputs of a modality that it has, or none",
            )


class TimeEmbedder(nn.Module):
    """``W2 silu(W1 [cos(t f), sin(t f)] + b1) + b2``, with ``t`` the scaled timestep.

    Loading keeps it in float32 whatever the compute dtype, as diffusers does.

    Source: diffusers ``get_timestep_embedding`` (flip_sin_to_cos, no shift), ``TimestepEmbedding``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = config.timestep_scale
        self.linear_1 = nn.Linear(TIME_PROJ_CHANNELS, config.hidden_size)
        self.linear_2 = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, timestep: Tensor) -> Tensor:
        """Embed float32 ``[B]`` (0 to 1000) as ``[B, E]``."""
        half = TIME_PROJ_CHANNELS // 2
        exponents = -math.log(10000) * torch.arange(half, device=timestep.device).float() / half
        angles = (timestep * self.scale)[:, None] * exponents.exp()
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.linear_1.weight.dtype)
        embedding: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return embedding


class DomainLinear(nn.Module):
    """A linear for each embodiment: a row of ``fc`` is an ``[in, out]`` matrix, unlike nn.Linear's.

    Source: diffusers ``DomainAwareLinear``.
    """

    def __init__(self, size_in: int, size_out: int, num_domains: int) -> None:
        super().__init__()
        self.size_in = size_in
        self.fc = nn.Embedding(num_domains, size_in * size_out)
        self.bias = nn.Embedding(num_domains, size_out)

    def forward(self, x: Tensor, domain_id: Tensor) -> Tensor:
        """Map ``[B, n, in]`` to ``[B, n, out]`` by the domains ``[B]``."""
        matrices: Tensor = self.fc(domain_id)
        bias: Tensor = self.bias(domain_id)
        return torch.bmm(x, matrices.view(len(x), self.size_in, -1)) + bias[:, None]


def _masked(velocity: Tensor, mask: Tensor) -> Tensor:
    return velocity.float() * mask[..., None]

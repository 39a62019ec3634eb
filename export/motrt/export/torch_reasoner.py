"""The causal tower: token embeddings in, logits and the prompt's keys and values out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from motrt.engines.weight_names import reasoner_layer
from motrt.export.torch_layers import AttentionOutput, KeyValue, Layer, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.engines.model_config import ModelConfig


class ReasonerOutput(NamedTuple):
    """What one call of the reasoner gives.

    Attributes:
        logits: float32 ``[B, M, V]``.
        present: Keys and values of the new tokens per layer, ``[B, K, S, D]``.
        context_keys: The keys that the generator reads in their place, per layer; empty where the
            checkpoint has no extra key norm, and the generator reads those of ``present``.
    """

    logits: Tensor
    present: list[KeyValue]
    context_keys: list[Tensor]

    @property
    def context(self) -> list[KeyValue]:
        """The new tokens' keys and values as ``Generator.forward`` takes them."""
        if not self.context_keys:
            return self.present
        values = (value for _, value in self.present)
        return list(zip(self.context_keys, values, strict=True))


class Reasoner(nn.Module):
    """The checkpoint's *und* half: layers, final norm and ``lm_head``.

    The embedding table is not part of it; whoever calls gathers rows, and may put image embeddings
    among them. The names and values of the parameters are the checkpoint's.

    Args:
        config: The architecture.

    Source: diffusers ``Cosmos3OmniTransformer``; transformers ``Cosmos3OmniForConditionalGeneration``
    and ``Cosmos3EdgeForConditionalGeneration`` (text).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            Layer(
                config,
                reasoner_layer(index),
                has_qk_norm=config.qk_norm_for_text,
                has_context_key=config.has_context_key_norm,
            )
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        inputs_embeds: Tensor,
        rotary_cos: Tensor,
        rotary_sin: Tensor,
        attention_bias: Tensor,
        logit_indices: Tensor,
        past: Sequence[KeyValue] | None = None,
    ) -> ReasonerOutput:
        """Run S new tokens after P cached ones (the contract's ``append`` form).

        Args:
            inputs_embeds: Compute dtype ``[B, S, E]``.
            rotary_cos: Compute dtype ``[B, S, D/2]``, see ``motrt.engines.rotary``.
            rotary_sin: Likewise.
            attention_bias: Compute dtype ``[B, 1, S, P + S]``: 0 where a token may look, -10000
                where not. Causality is stated here and nowhere else.
            logit_indices: Which of the S tokens to give logits for, int64 ``[B, M]``.
            past: Keys and values ``[B, K, P, D]`` per layer; None is P = 0.
        """
        x = inputs_embeds
        present: list[KeyValue] = []
        context_keys: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            prefix = None if past is None else past[index]
            out: AttentionOutput = layer(x, rotary_cos, rotary_sin, prefix, attention_bias)
            x = out.hidden
            present.append(out.present)
            if out.context_key is not None:
                context_keys.append(out.context_key)
        chosen = torch.take_along_dim(x, logit_indices[..., None], dim=1)
        logits: Tensor = self.lm_head(self.norm(chosen))
        return ReasonerOutput(logits.float(), present, context_keys)

"""One transformer layer, as both towers use it.

Shape letters: B batch, S tokens of this call, P tokens before them, T = P + S, H query heads, K KV
heads, D head_dim, E hidden, I intermediate. ``graphs/tower.py`` writes the same mathematics in ONNX.

Parameters carry the checkpoint's names. Those differ between the towers (``to_q`` in the reasoner is
``add_q_proj`` in the generator), so a module registers its parts under the names that it is given,
and looks them up when it runs: replacing a part (a quantized linear, a LoRA) takes effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.weight_names import LayerNames

KeyValue = tuple[Tensor, Tensor]  # [B, K, n, D] each; keys are normed and turned


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, with float32 statistics; families differ in when they round.

    Qwen rounds to the compute type and then multiplies by the weight, Nemotron the other way round.

    Source: diffusers ``RMSNorm`` and ``Cosmos3NemotronRMSNorm``.
    """

    def __init__(self, size: int, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.multiplies_in_float32 = config.norm_multiplies_in_float32
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis; the dtype stays."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.multiplies_in_float32:
            return (self.weight.float() * normal).to(x.dtype)
        return normal.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head: ``x`` is ``[B, heads, S, D]``, the tables ``[B, S, D/2]``.

    Source: diffusers ``Cosmos3AttnProcessor``; its tables hold each angle twice.
    """
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class AttentionOutput(NamedTuple):
    """The result of attention or of a whole layer, and what it saw of the new tokens.

    Attributes:
        hidden: ``[B, S, E]``; of attention what to add to the stream, of a layer the stream.
        present: Keys and values of the new tokens.
        context_key: ``[B, K, S, D]``, the keys that the generator reads instead, or None.
    """

    hidden: Tensor
    present: KeyValue
    context_key: Tensor | None


class Attention(nn.Module):
    """Grouped-query attention over a prefix (the cache, or the prompt) and the tokens themselves.

    Source: diffusers ``Cosmos3PackedMoTAttention``, ``Cosmos3AttnProcessor`` (one of its halves).
    """

    def __init__(
        self, config: ModelConfig, names: LayerNames, *, has_qk_norm: bool, has_context_key: bool
    ) -> None:
        super().__init__()
        self.names = names
        self.head_dim = config.head_dim
        self.has_qk_norm = has_qk_norm
        self.has_context_key = has_context_key
        hidden, bias = config.hidden_size, config.attention_bias
        query = config.num_attention_heads * config.head_dim  # Super: not the hidden size
        key = config.num_key_value_heads * config.head_dim
        register(self, names.query, nn.Linear(hidden, query, bias=bias))
        register(self, names.key, nn.Linear(hidden, key, bias=bias))
        register(self, names.value, nn.Linear(hidden, key, bias=bias))
        register(self, names.output, nn.Linear(query, hidden, bias=bias))
        if has_qk_norm:
            register(self, names.query_norm, RMSNorm(config.head_dim, config))
            register(self, names.key_norm, RMSNorm(config.head_dim, config))
        if has_context_key:
            register(self, names.context_key_norm, RMSNorm(config.head_dim, config))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, prefix: KeyValue | None, bias: Tensor | None
    ) -> AttentionOutput:
        """Attend from ``x`` ``[B, S, E]``; ``bias`` ``[B, 1, S, T]`` is added to the scores."""
        names = self.names
        query = self._heads(x, names.query)
        key = self._heads(x, names.key)
        value = self._heads(x, names.value)
        context_key = None
        if self.has_context_key:
            # For the generator alone; the reasoner's own attention uses the plain key.
            context_key = rotate(part(self, names.context_key_norm)(key), cos, sin)
        if self.has_qk_norm:
            query = part(self, names.query_norm)(query)
            key = part(self, names.key_norm)(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)

        keys, values = key, value
        if prefix is not None:
            keys = torch.cat([prefix[0], key], dim=2)
            values = torch.cat([prefix[1], value], dim=2)
        # Query head j reads KV head j // (H / K); scores are scaled by 1 / sqrt(D).
        heads = functional.scaled_dot_product_attention(query, keys, values, bias, enable_gqa=True)
        hidden = part(self, names.output)(heads.transpose(1, 2).flatten(2))
        return AttentionOutput(hidden, (key, value), context_key)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        projected: Tensor = part(self, name)(x)
        batch, tokens, _ = x.shape
        return projected.view(batch, tokens, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """``down(silu(gate x) * up x)``, or without a gate ``down(relu(up x)²)`` (Nemotron).

    Source: diffusers ``Cosmos3VLTextMLP``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False) if config.is_gated else None
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, S, E]`` to ``[B, S, E]`` by way of I."""
        up: Tensor = self.up_proj(x)
        inner = (
            up.relu().square()
            if self.gate_proj is None
            else functional.silu(self.gate_proj(x)) * up
        )
        down: Tensor = self.down_proj(inner)
        return down


class Layer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Source: diffusers ``Cosmos3VLTextMoTDecoderLayer`` (one of its halves).
    """

    def __init__(
        self,
        config: ModelConfig,
        names: LayerNames,
        *,
        has_qk_norm: bool,
        has_context_key: bool = False,
    ) -> None:
        super().__init__()
        self.names = names
        self.self_attn = Attention(
            config, names, has_qk_norm=has_qk_norm, has_context_key=has_context_key
        )
        register(self, names.input_norm, RMSNorm(config.hidden_size, config))
        register(self, names.post_norm, RMSNorm(config.hidden_size, config))
        register(self, names.mlp, MLP(config))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, prefix: KeyValue | None, bias: Tensor | None
    ) -> AttentionOutput:
        """Advance the stream ``[B, S, E]``; arguments as in :meth:`Attention.forward`."""
        attended: AttentionOutput = self.self_attn(
            part(self, self.names.input_norm)(x), cos, sin, prefix, bias
        )
        x = x + attended.hidden
        x = x + part(self, self.names.mlp)(part(self, self.names.post_norm)(x))
        return attended._replace(hidden=x)


def register(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Add ``module`` under the last part of a checkpoint name."""
    owner.add_module(name.rpartition(".")[2], module)


def part(owner: nn.Module, name: str) -> Any:
    """Return the module that :func:`register` added under ``name``."""
    return getattr(owner, name.rpartition(".")[2])

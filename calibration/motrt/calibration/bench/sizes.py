"""What the bench runs: a model, shapes and repetitions; once in full, once tiny."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_COMMON: dict[str, Any] = {
    "_class_name": "Cosmos3OmniTransformer",
    "attention_bias": False,
    "hidden_act": "silu",
    "qk_norm_for_text": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000.0,
    "latent_channel": 48,
    "latent_patch_size": 2,
    "patch_latent_dim": 192,
    "action_gen": False,
    "action_dim": 64,
    "num_embodiment_domains": 32,
    "sound_gen": False,
    "sound_dim": None,
}
_SOUND_AND_ACTION: dict[str, Any] = {"action_gen": True, "sound_gen": True, "sound_dim": 64}

# Tensor tables of two published models, for exports that read headers alone.
PUBLISHED: dict[str, dict[str, Any]] = {
    "nano": {
        **_COMMON,
        **_SOUND_AND_ACTION,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_axes_dim": [24, 20, 20],
    },
    "super": {
        **_COMMON,
        **_SOUND_AND_ACTION,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_axes_dim": [24, 20, 20],
    },
}


_BENCH: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "rope_axes_dim": [12, 10, 10],
}
_TINY: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rope_axes_dim": [4, 2, 2],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and what is asked of it.

    Attributes:
        name: ``full`` or ``quick``.
        config: Keys of the transformer's ``config.json``.
        shared_config: Likewise of the memory row, whose weights must outweigh two sessions and
            the arrays of a step (46 MB at the full size).
        context: Prompt tokens of the denoise and prefill rows (U).
        image: Latent frames, rows and columns of the image row; a patch is 2 by 2 (N).
        clip: Likewise of the clip row.
        prompt: Prompt tokens of the decode rows.
        new_tokens: Tokens that they decode.
        repeats: Times that each side of a quick pair runs; a slow one runs a fifth as often.
        processes: Times that each side of the cold start runs.
    """

    name: str
    config: dict[str, Any]
    shared_config: dict[str, Any]
    context: int
    image: tuple[int, int, int]
    clip: tuple[int, int, int]
    prompt: int
    new_tokens: int
    repeats: int
    processes: int

    @property
    def few(self) -> int:
        """Repeats of a pair whose one run takes seconds."""
        return max(1, self.repeats // 5)


FULL = Size(
    name="full",
    config=_BENCH,
    shared_config={**_BENCH, "hidden_size": 1024, "intermediate_size": 4096},
    context=512,
    image=(1, 32, 32),  # N 256
    clip=(4, 64, 64),  # N 4096
    prompt=128,
    new_tokens=64,
    repeats=25,
    processes=3,
)
QUICK = Size(
    name="quick",
    config=_TINY,
    shared_config=_TINY,
    context=24,
    image=(1, 4, 6),
    clip=(3, 6, 10),
    prompt=12,
    new_tokens=6,
    repeats=2,
    processes=1,
)
SIZES = {size.name: size for size in (FULL, QUICK)}

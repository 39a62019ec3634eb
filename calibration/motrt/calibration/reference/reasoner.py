"""Reasoner cases: logits and K/V from transformers where it has the class, and from diffusers always."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.attention import record_prompt_keys
from motrt.calibration.reference.errors import RequestError
from motrt.calibration.reference.packing import joint_inputs
from motrt.calibration.reference.request import GeneratorCase
from motrt.calibration.reference.text_model import build_text_model, unsupported_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from motrt.calibration.reference.request import ReasonerCase

    Arrays = dict[str, NDArray[np.float32]]


def run_reasoner(
    transformer: Any, cases: Sequence[ReasonerCase]
) -> tuple[Arrays, list[str], list[str]]:
    """Run ``cases`` through both public implementations.

    Returns:
        The arrays of ``result.npz``, the public classes that were run (the first filled ``logits`` and
        ``present``), and notes.

    Raises:
        RequestError: A prompt has a token id outside of the vocabulary.
    """
    for case in cases:
        check_vocabulary(transformer, case.name, case.input_ids)
    arrays: Arrays = {}
    sources: list[str] = []
    notes: list[str] = []
    reason = unsupported_reason(transformer.config)
    if reason is None:
        text_model = build_text_model(transformer)
        sources.append(f"transformers.{type(text_model).__name__}")
        for case in cases:
            arrays |= _run_transformers(text_model, case)
        if transformer.config.hidden_act == "relu2":
            notes.append(
                "transformers' cosmos3_edge casts before it multiplies with the norm weight, diffusers after; "
                "they differ below float32"
            )
    else:
        notes.append(
            f"transformers has no class for this config: {reason}; logits are diffusers' own"
        )
    sources.append(f"diffusers.{type(transformer).__name__}")
    for case in cases:
        arrays = _run_diffusers(transformer, case) | arrays
    return arrays, sources, notes


def _run_transformers(model: Any, case: ReasonerCase) -> Arrays:
    ids = torch.from_numpy(case.input_ids)[None]
    positions = torch.arange(ids.shape[1]).expand(
        3, 1, -1
    )  # text: the same count on all three axes
    output = model(input_ids=ids, position_ids=positions, use_cache=True)
    arrays = {f"{case.name}/logits": to_float32(output.logits[0])}
    for index, layer in enumerate(output.cache.layers):
        arrays[f"{case.name}/present.{index}.key"] = to_float32(layer.keys[0])
        arrays[f"{case.name}/present.{index}.value"] = to_float32(layer.values[0])
    return arrays


def _run_diffusers(transformer: Any, case: ReasonerCase) -> Arrays:
    with record_prompt_keys() as layers:
        logits = to_float32(prompt_logits(transformer, case.input_ids))
    # Under both names: whatever transformers has computed replaces the first in the caller.
    arrays = {f"{case.name}/logits": logits, f"{case.name}/logits.diffusers": logits}
    has_context = transformer.layers[0].self_attn.k_norm_und_for_gen is not None
    for index, layer in enumerate(layers):
        arrays[f"{case.name}/present.{index}.key"] = layer.key
        arrays[f"{case.name}/present.{index}.value"] = layer.value
        if has_context:
            arrays[f"{case.name}/context.{index}.key"] = layer.context_key
    return arrays


def prompt_logits(transformer: Any, input_ids: NDArray[np.int64]) -> torch.Tensor:
    """Return logits ``[S, V]`` of diffusers' joint forward with one vision patch, which a prompt never sees."""
    config = transformer.config
    patch = config.latent_patch_size
    joint = GeneratorCase(
        name="prompt",
        input_ids=input_ids,
        latents=np.zeros((config.latent_channel, 1, patch, patch), np.float32),
        timestep=0.0,
        fps=float(config.base_fps),
    )
    hidden: list[torch.Tensor] = []
    hook = transformer.norm.register_forward_hook(lambda _module, _args, out: hidden.append(out))
    try:
        transformer(**joint_inputs(transformer, joint, temporal_compression=4))
    finally:
        hook.remove()
    logits: torch.Tensor = transformer.lm_head(hidden[0])
    return logits


def check_vocabulary(transformer: Any, name: str, input_ids: NDArray[np.int64]) -> None:
    """Refuse token ids that the checkpoint has no embedding for.

    Raises:
        RequestError: There is one.
    """
    vocab_size = transformer.config.vocab_size
    if input_ids.min() < 0 or input_ids.max() >= vocab_size:
        raise RequestError(f"{name}: token ids go outside of the vocabulary of {vocab_size}")

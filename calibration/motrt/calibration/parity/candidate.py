"""The bundle's side of a comparison: its graphs on ONNX Runtime, fed by the contract alone.

Positions, rotary tables and patches come from the same functions as the runtime's, and from the
numbers in the bundle's manifest, so that a mistake in either shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.parity.sequences import Sequences
from motrt.calibration.parity.vae import VaeEngines
from motrt.engines.bundle import Bundle
from motrt.engines.contract import (
    MASK_VALUE,
    Cache,
    EngineContract,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.dtypes import DType, Precision
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.rotary import rotary_tables
from motrt.engines.weight_names import EMBED_TOKENS
from motrt.export.graphs.twin import float32_twin_of
from motrt.runtime.patches import patchify, unpatchify
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    text_positions,
    vision_positions,
)

if TYPE_CHECKING:
    from motrt.calibration.parity.cases import Cases, GeneratorCase, ReasonerCase
    from motrt.engines.tensors import Array

# What a cache holds before anything is written: a value that would show if it were ever read.
_STALE = 3.0
Advance = Callable[[], None]


class Candidate:
    """A bundle opened for comparison.

    Args:
        bundle: The bundle.
        twin: Run the float32 twin of 16-bit graphs instead of the graphs themselves.
        threads: ONNX Runtime's threads.
    """

    def __init__(self, bundle: Bundle, *, twin: bool, threads: int | None) -> None:
        self.manifest = bundle.manifest
        self.model = bundle.manifest.model
        narrow = bundle.dtype
        self.dtype = DType.FLOAT32 if twin else narrow
        modalities = self.manifest.modalities
        contracts = (
            reasoner_contract(self.model, self.dtype, self.manifest.cache),
            generator_contract(self.model, self.dtype, modalities),
        )
        self.embed_tokens = bundle.weights()[EMBED_TOKENS]
        self.reasoner, self.generator = (
            _open(bundle, contract, narrow if twin else None, threads) for contract in contracts
        )
        self.vae = None
        if "vae" in self.manifest.components:
            self.vae = VaeEngines(bundle, threads=threads)
        self._contexts: dict[str, dict[str, Array]] = {}
        wide = dataclasses.replace(bundle.manifest, precision=Precision.FP32)
        self._sequences = Sequences(
            Bundle(bundle.root, wide) if twin else bundle, self.reasoner, self.generator
        )

    @property
    def failures(self) -> Mapping[str, str]:
        """What the runtime said to sequence cases that it refused, by case."""
        return self._sequences.failures

    def run(self, cases: Cases, advance: Advance, along: Mapping[str, Array]) -> dict[str, Array]:
        """Run every case.

        Args:
            cases: The cases.
            advance: Called after each.
            along: The reference's arrays, from whose states a schedule is stepped; may be empty.

        Returns:
            Arrays by ``case/tensor``, float32, under the names and shapes that the reference
            process uses.
        """
        results: dict[str, Array] = {}
        for case in cases.reasoner:
            for name, array in self._reason(case, cases.prompts).items():
                results[f"{case.name}/{name}"] = array.astype(np.float32)
            advance()
        for generator_case in cases.generator:
            for name, array in self._generate(generator_case, cases.prompts).items():
                results[f"{generator_case.name}/{name}"] = array.astype(np.float32)
            advance()
        for vae_case in cases.vae:
            if self.vae is not None:
                if vae_case.latents is not None:
                    results[f"{vae_case.name}/sample"] = self.vae.decode(vae_case.latents)
                elif vae_case.video is not None:
                    results[f"{vae_case.name}/latents"] = self.vae.encode(vae_case.video)
            advance()
        return results | self._sequences.run(cases, advance, along)

    def _reason(self, case: ReasonerCase, prompts: dict[str, Array]) -> dict[str, Array]:
        rows = [prompts[name] for name in (case.prompt, case.beside) if name is not None]
        outputs = self._prefill(rows, case.chunks)
        length = len(rows[0])
        # The first row is the case's own; what lies beside it must not matter.
        return {
            name: array[0] if name == "logits" else array[0, :, :length]
            for name, array in outputs.items()
        }

    def _prefill(self, rows: list[Array], chunks: tuple[int, ...]) -> dict[str, Array]:
        """Feed prompts chunk by chunk; returns logits ``[B, S, V]`` and K/V ``[B, K, S, D]``."""
        model, layers = self.model, self.model.num_hidden_layers
        length = max(len(row) for row in rows)
        padded = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
        lengths = np.array([len(row) for row in rows])
        batch, static = len(rows), self.manifest.cache is Cache.STATIC
        capacity = length + 5 if static else 0
        shape = (batch, model.num_key_value_heads, capacity, model.head_dim)
        past = {
            f"past_key_values.{i}.{kind}": np.full(shape, _STALE, self.dtype.numpy)
            for i in range(layers)
            for kind in ("key", "value")
        }
        logits, context = [], []
        start = 0
        for size in chunks:
            feeds = self._reasoner_feeds(padded, lengths, start, size, capacity) | past
            outputs = self.reasoner.run(feeds)
            logits.append(outputs["logits"])
            context.append({n: a for n, a in outputs.items() if n.startswith("context.")})
            for name, old in past.items():
                new = outputs[name.replace("past_key_values.", "present.")]
                past[name] = new if static else np.concatenate([old, new], axis=2)
            start += size
        results = {
            name.replace("past_key_values.", "present."): array[:, :, :length]
            for name, array in past.items()
        }
        for name in context[0]:
            results[name] = np.concatenate([chunk[name] for chunk in context], axis=2)
        results["logits"] = np.concatenate(logits, axis=1)
        return results

    def _reasoner_feeds(
        self, ids: Array, lengths: Array, start: int, size: int, capacity: int
    ) -> dict[str, Array]:
        batch = len(ids)
        cos, sin = self._tables(text_positions(start, size))
        total = capacity or start + size
        query = np.arange(start, start + size)
        visible = np.arange(total) <= query[:, None]
        visible = np.repeat(visible[None], batch, axis=0)
        # A padding query sees key 0 alone: a row that sees nothing has no defined softmax.
        padding = query[None] >= lengths[:, None]
        visible[padding] = np.arange(total) == 0
        bias = np.where(visible, 0.0, MASK_VALUE)[:, None]
        feeds: dict[str, Array] = {
            "inputs_embeds": self.embed_tokens[ids[:, start : start + size]].astype(
                self.dtype.numpy
            ),
            "rotary_cos": np.repeat(cos[None], batch, axis=0),
            "rotary_sin": np.repeat(sin[None], batch, axis=0),
            "attention_bias": bias.astype(self.dtype.numpy),
            "logit_indices": np.tile(np.arange(size, dtype=np.int64), (batch, 1)),
        }
        if capacity:
            feeds["write_indices"] = np.full(batch, start, np.int64)
        return feeds

    def _context(self, prompt: str, prompts: dict[str, Array]) -> dict[str, Array]:
        """K/V of a prompt for the generator; computed once and reused, as a runtime does."""
        if prompt not in self._contexts:
            ids = prompts[prompt]
            outputs = self._prefill([ids], (len(ids),))
            self._contexts[prompt] = {
                f"context.{i}.{kind}": np.ascontiguousarray(
                    outputs[
                        f"context.{i}.key"
                        if kind == "key" and self.model.has_context_key_norm
                        else f"present.{i}.{kind}"
                    ]
                )
                for i in range(self.model.num_hidden_layers)
                for kind in ("key", "value")
            }
        return self._contexts[prompt]

    def _generate(self, case: GeneratorCase, prompts: dict[str, Array]) -> dict[str, Array]:
        model = self.model
        patches, grid = patchify(case.latents, model.latent_patch_size)
        frames, rows, columns = grid
        offset = generator_offset(model, len(prompts[case.prompt]))
        positions = [vision_positions(model, offset, frames, rows, columns, case.fps)]
        noisy = np.ones(frames, np.float32)
        noisy[list(case.clean_frames)] = 0.0
        feeds: dict[str, Array] = {
            "latent_patches": patches[None],
            "vision_noise_mask": np.repeat(noisy, rows * columns)[None],
            "timestep": np.array([case.timestep], np.float32),
        }
        inputs = {spec.name for spec in self.generator.contract.inputs}
        if "sound_latents" in inputs:
            sound = _or_empty(case.sound_latents, (model.sound_dim or 0, 0)).T
            feeds["sound_latents"] = np.ascontiguousarray(sound)[None]
            feeds["sound_noise_mask"] = _mask(len(sound), case.clean_sound_frames)
            positions.append(sound_positions(model, offset, len(sound)))
        if "action_latents" in inputs:
            action = _or_empty(case.action_latents, (0, model.action_dim or 0))
            feeds["action_latents"] = action[None]
            feeds["action_noise_mask"] = _mask(len(action), case.clean_action_steps)
            feeds["domain_id"] = np.array([case.domain_id], np.int64)
            positions.append(action_positions(model, offset, len(action), case.fps))
        cos, sin = self._tables(np.concatenate(positions, axis=1))
        feeds |= {"rotary_cos": cos[None], "rotary_sin": sin[None]}
        outputs = self.generator.run(feeds | self._context(case.prompt, prompts))
        _, _, height, width = case.latents.shape
        results = {
            "velocity": unpatchify(
                outputs["velocity"][0],
                grid,
                model.latent_patch_size,
                model.latent_channel,
                height,
                width,
            )
        }
        if case.sound_latents is not None:
            results["sound_velocity"] = outputs["sound_velocity"][0].T
        if case.action_latents is not None:
            results["action_velocity"] = outputs["action_velocity"][0]
        return results

    def _tables(self, positions: Array) -> tuple[Array, Array]:
        inv_freq = np.array(self.manifest.inv_freq, np.float32)
        cos, sin = rotary_tables(inv_freq, self.manifest.rotary_axes, positions)
        return cos.astype(self.dtype.numpy), sin.astype(self.dtype.numpy)


def _open(
    bundle: Bundle, contract: EngineContract, narrow: DType | None, threads: int | None
) -> OnnxRuntimeEngine:
    path = bundle.path(f"{contract.name}.onnx")
    if narrow is None:
        return OnnxRuntimeEngine(contract, path, threads=threads)
    return OnnxRuntimeEngine(
        contract, float32_twin_of(path, narrow), folder=bundle.content, threads=threads
    )


def _or_empty(array: Array | None, shape: tuple[int, int]) -> Array:
    return np.zeros(shape, np.float32) if array is None else array


def _mask(count: int, clean: tuple[int, ...]) -> Array:
    mask = np.ones(count, np.float32)
    mask[list(clean)] = 0.0
    return mask[None]

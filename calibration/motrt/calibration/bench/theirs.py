"""The public implementations' side: diffusers' transformer, and transformers over its weights."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from motrt.calibration.bench.inputs import FPS, TIMESTEP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from motrt.engines.tensors import Array

_TEMPORAL_FACTOR = 4


class Theirs:
    """One set of parameters in memory, behind both libraries' classes.

    Args:
        checkpoint: The checkpoint that the bundle was exported from.
        threads: Threads inside an operator.
    """

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from diffusers import Cosmos3OmniTransformer

        self._torch = torch
        torch.set_num_threads(threads)
        load = Cosmos3OmniTransformer.from_pretrained
        self._transformer = load(checkpoint / "transformer", local_files_only=True).eval()

    @cached_property
    def _text(self) -> Any:
        # Not before it is needed: the cold start runs diffusers' transformer alone.
        from motrt.calibration.reference.text_model import build_text_model

        model = build_text_model(self._transformer)
        model.generation_config.eos_token_id = None  # the count alone ends an answer
        return model

    def step(self, ids: Array, latents: Array) -> Callable[[], Array]:
        """Return one forward, which runs prompt and latents together."""
        from motrt.calibration.reference.packing import joint_inputs
        from motrt.calibration.reference.request import GeneratorCase

        case = GeneratorCase(
            name="bench", input_ids=ids, latents=latents, timestep=TIMESTEP, fps=FPS
        )
        inputs = joint_inputs(self._transformer, case, _TEMPORAL_FACTOR)

        def forward() -> Array:
            with self._torch.inference_mode():
                sample = self._transformer(**inputs).sample[0][0]
                array: Array = sample.numpy()
                return array

        return forward

    def prefill(self, ids: Array) -> Array:
        """Run a prompt, keeping its keys and values; returns the last token's logits ``[V]``."""
        with self._torch.inference_mode():
            batch = self._torch.from_numpy(ids)[None]
            output = self._text(input_ids=batch, use_cache=True, logits_to_keep=1)
            logits: Array = output.logits[0, -1].numpy()
            return logits

    def decode(self, ids: Array, count: int) -> tuple[list[int], float]:
        """Decode greedily with ``generate``; see :meth:`Ours.decode`."""
        stamps: list[float] = []
        with self._torch.inference_mode():
            output = self._text.generate(
                input_ids=self._torch.from_numpy(ids)[None],
                do_sample=False,
                max_new_tokens=count,
                streamer=_Stamps(stamps),
            )
        return output[0, len(ids) :].tolist(), stamps[-1] - stamps[1]


class _Stamps:
    """A streamer that notes when the prompt and each token came."""

    def __init__(self, stamps: list[float]) -> None:
        self._stamps = stamps

    def put(self, _value: object) -> None:
        self._stamps.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

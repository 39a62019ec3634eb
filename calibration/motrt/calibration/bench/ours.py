"""The bundle's side: the runtime's own functions, without tokenizer, scheduler and VAE."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.bench.inputs import FPS, TIMESTEP
from motrt.engines.bundle import Bundle
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.runtime.network import Sample, branch
from motrt.runtime.params import SamplingParams
from motrt.runtime.sampling import Sampler
from motrt.runtime.text_model import TextModel, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from motrt.engines.onnxruntime_backend import Residency
    from motrt.engines.tensors import Array

_CAPACITY = 4096


class Ours:
    """A bundle's engines on ONNX Runtime.

    Args:
        bundle: The bundle.
        threads: Threads inside an operator.
        residency: How weights lie in memory.
    """

    def __init__(self, bundle: Path, threads: int, residency: Residency = "separate") -> None:
        self._bundle = Bundle.open(bundle)
        self._backend = OnnxRuntimeBackend(self._bundle, residency=residency, threads=threads)
        self._text = TextModel(self._bundle, self._backend, capacity=_CAPACITY)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the transformer's tensors."""
        return self._bundle.weights().nbytes

    def prefill(self, ids: Array) -> Array:
        """Run a prompt through an empty cache; returns the last token's logits ``[V]``."""
        return TokenSequence(self._text).extend(ids.tolist())

    def step(self, ids: Array, latents: Array) -> Callable[[], Array]:
        """Compute a prompt's keys and values and return one denoise step over them."""
        sequence = TokenSequence(self._text)
        sequence.extend(ids.tolist())
        sample = Sample({"vision": np.ones((1, latents.shape[1], 1, 1), np.float32)}, FPS)
        given = {"vision": latents}
        predict = branch(
            self._bundle,
            self._backend.generator(),
            self._text,
            sequence.context(),
            sample,
            given,
        )
        return lambda: predict(given, TIMESTEP)["vision"]

    def decode(self, ids: Array, count: int) -> tuple[list[int], float]:
        """Decode greedily after a prompt.

        Returns:
            The tokens, and the seconds from the first of them to the last.
        """
        sequence = TokenSequence(self._text)
        sampler = Sampler(SamplingParams(max_new_tokens=count), ids.tolist())
        tokens = [sampler.sample(sequence.extend(ids.tolist()))]
        started = time.perf_counter()
        while len(tokens) < count:
            tokens.append(sampler.sample(sequence.extend(tokens[-1:])))
        return tokens, time.perf_counter() - started

"""The VAE graphs on ONNX Runtime, chunk by chunk with explicit caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts

if TYPE_CHECKING:
    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array


class VaeEngines:
    """Decoder and encoder of a bundle; sessions are opened when first used."""

    def __init__(self, bundle: Bundle, *, threads: int | None) -> None:
        component = bundle.manifest.components["vae"]
        self.config = VaeConfig.from_dict(component["config"])
        self._contracts = vae_contracts(self.config)
        self._paths = {name: bundle.path(file) for name, file in component["graphs"].items()}
        self._threads = threads
        self._engines: dict[str, OnnxRuntimeEngine] = {}

    def decode(self, latents: Array) -> Array:
        """Decode ``[1, C, T, h, w]`` to ``[1, 3, F, H, W]``, one latent frame at a time."""
        frames = latents.shape[2]
        chunks = [latents[:, :, i : i + 1] for i in range(frames)]
        return self._stream("decoder", "latents", "sample", chunks)

    def encode(self, video: Array) -> Array:
        """Encode ``[1, 3, F, H, W]`` (F = 4n + 1) to the mean ``[1, C, n + 1, h, w]``."""
        step = self.config.temporal_factor
        chunks = [video[:, :, :1]]
        chunks += [video[:, :, i : i + step] for i in range(1, video.shape[2], step)]
        return self._stream("encoder", "video", "latents", chunks)

    def _stream(self, part: str, source: str, result: str, chunks: list[Array]) -> Array:
        pieces, cache = [], dict[str, "Array"]()
        for index, chunk in enumerate(chunks):
            engine = self._engine(f"{part}_{'next' if index else 'first'}")
            outputs = engine.run({source: np.ascontiguousarray(chunk)} | cache)
            pieces.append(outputs.pop(result))
            cache = {name.replace("present_", "past_"): array for name, array in outputs.items()}
        return np.concatenate(pieces, axis=2)

    def _engine(self, name: str) -> OnnxRuntimeEngine:
        if name not in self._engines:
            self._engines[name] = OnnxRuntimeEngine(
                self._contracts[name], self._paths[name], threads=self._threads
            )
        return self._engines[name]

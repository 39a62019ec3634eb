"""The VAE graphs of a bundle on ONNX Runtime, whole clips at a time and without normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts
from motrt.runtime.vae import Vae

if TYPE_CHECKING:
    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.runtime.vae import EngineName


class VaeEngines:
    """Decoder and encoder of a bundle; sessions are opened when first used."""

    def __init__(self, bundle: Bundle, *, threads: int | None) -> None:
        component = bundle.manifest.components["vae"]
        self.config = VaeConfig.from_dict(component["config"])
        contracts = vae_contracts(self.config)
        paths = {name: bundle.path(file) for name, file in component["graphs"].items()}

        def open_engine(name: EngineName) -> OnnxRuntimeEngine:
            return OnnxRuntimeEngine(contracts[name], paths[name], threads=threads)

        self._vae = Vae(self.config, open_engine)

    def decode(self, latents: Array) -> Array:
        """Decode ``[1, C, T, h, w]`` to ``[1, 3, F, H, W]``, one latent frame at a time."""
        chunks = (latents[:, :, i : i + 1] for i in range(latents.shape[2]))
        return np.concatenate(list(self._vae.decode_chunks(chunks)), axis=2)

    def encode(self, video: Array) -> Array:
        """Encode ``[1, 3, F, H, W]`` (F = 4n + 1) to the mean ``[1, C, n + 1, h, w]``."""
        step = self.config.temporal_factor
        chunks = [video[:, :, :1]]
        chunks += [video[:, :, i : i + step] for i in range(1, video.shape[2], step)]
        return np.concatenate(list(self._vae.encode_chunks(chunks)), axis=2)

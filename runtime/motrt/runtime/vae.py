"""The video autoencoder over its four graphs, one latent frame at a time.

What a chunk needs of the past travels in explicit caches, so memory does not grow with a clip. The
module knows nothing of files, pictures or backends: an engine is an object with ``run``.

Source: diffusers ``pipelines/cosmos/pipeline_cosmos3_omni.py`` (``_encode_video``, the end of
``__call__``), ``VideoProcessor.postprocess_video``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from motrt.engines.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from motrt.engines.tensors import Array
    from motrt.engines.vae_config import VaeConfig
    from motrt.runtime.protocols import Graph

    Floats = npt.NDArray[np.float32]

EngineName = Literal["decoder_first", "decoder_next", "encoder_first", "encoder_next"]
# A bicubic reduction overshoots [-1, 1], by less than this; 8-bit levels do by far more.
_MAX_PIXEL = 2.0


class Vae:
    """Decode and encode clips.

    Args:
        config: The architecture.
        open_engine: Called once per graph, when it is first needed, with its name:
            ``decoder_first``, ``decoder_next``, ``encoder_first``, ``encoder_next``.
    """

    def __init__(self, config: VaeConfig, open_engine: Callable[[EngineName], Graph]) -> None:
        self.config = config
        self._open_engine = open_engine
        self._engines: dict[EngineName, Graph] = {}
        shape = (1, -1, 1, 1, 1)
        self._mean = np.array(config.latents_mean, np.float32).reshape(shape)
        # The pipeline keeps the inverse and divides by it too: two roundings, not none.
        self._inverse_std = np.float32(1) / np.array(config.latents_std, np.float32).reshape(shape)

    def frames_of(self, latent_frames: int) -> int:
        """Return how many frames ``latent_frames`` decode to."""
        return (latent_frames - 1) * self.config.temporal_factor + 1

    def latent_frames_of(self, frames: int) -> int:
        """Return how many latent frames a clip of ``frames`` has.

        Raises:
            ConfigError: No number of latent frames makes that many.
        """
        factor = self.config.temporal_factor
        whole, rest = divmod(frames - 1, factor)
        if frames < 1 or rest:
            near = max(1, 1 + factor * ((frames - 1 + factor // 2) // factor))
            raise ConfigError(
                "the number of frames does not fit the VAE",
                got=frames,
                expected=f"a multiple of {factor}, plus 1",
                fix=f"The nearest possible number is {near}.",
            )
        return whole + 1

    def check_size(self, height: int, width: int) -> None:
        """Check a clip's size before anything is computed.

        Raises:
            ConfigError: A side is not a multiple of the spatial factor.
        """
        factor = self.config.spatial_factor
        if height < 1 or width < 1 or height % factor or width % factor:
            near_height, near_width = (
                max(1, (side + factor // 2) // factor) * factor for side in (height, width)
            )
            raise ConfigError(
                "height and width do not fit the VAE",
                got=f"{height} x {width}",
                expected=f"multiples of {factor}",
                fix=f"The nearest possible size is {near_height} x {near_width}.",
            )

    def decode(
        self, latents: Array, *, output: Literal["uint8", "float32"] = "uint8"
    ) -> Iterator[Array]:
        """Decode normalised latents, chunk by chunk.

        Args:
            latents: ``[1, C, T, h, w]`` float32, as the generator makes them; not modified.
            output: ``uint8`` levels 0-255, or ``float32`` in [0, 1].

        Returns:
            An iterator over frames ``[n, H, W, 3]``, n = 1 and then the temporal factor; each
            chunk is computed when it is asked for, and belongs to the caller.

        Raises:
            ConfigError: The latents are of another shape or type, or not finite (at once).
            ExecutionError: An engine fails, or gives NaN (when the chunk is asked for).
        """
        _check_latents(latents, self.config.z_dim)
        return self._decode(latents, output)

    def _decode(self, latents: Array, output: str) -> Iterator[Array]:
        chunks = (
            latents[:, :, i : i + 1] / self._inverse_std + self._mean
            for i in range(latents.shape[2])
        )
        for sample in self.decode_chunks(chunks):
            if not np.isfinite(sample).all():
                raise ExecutionError(
                    "the VAE's decoder gave NaN or infinity", expected="finite pixels"
                )
            frames = np.clip(sample[0].transpose(1, 2, 3, 0) * np.float32(0.5) + 0.5, 0, 1)
            frames = np.ascontiguousarray(frames)  # [n, H, W, 3]
            yield np.rint(frames * 255).astype(np.uint8) if output == "uint8" else frames

    def encode(self, video: Array | Iterable[Array], *, num_frames: int | None = None) -> Floats:
        """Encode a clip to normalised latents.

        Args:
            video: ``[F, H, W, 3]`` or ``[1, 3, F, H, W]``, or frames ``[H, W, 3]`` one by one;
                float32 in [-1, 1]; not modified. Of an iterator one chunk is held at a time.
            num_frames: F, where ``video`` is an iterator that cannot tell; then a wrong number is
                an error before anything is computed.

        Returns:
            ``[1, C, T, h, w]`` float32: the distribution's mean, normalised. Latent frame i depends
            on frames up to ``frames_of(i + 1)`` alone, so a prefix of a clip gives a prefix.

        Raises:
            ConfigError: F, H or W does not fit, or the frames differ, or are no pixels.
            ExecutionError: An engine fails, or gives NaN.
        """
        if isinstance(video, np.ndarray):
            frames: Iterable[Array] = _frames_of_array(video)
            num_frames = len(video) if video.ndim == 4 else video.shape[2]
        else:
            frames = video
            num_frames = len(video) if isinstance(video, (list, tuple)) else num_frames
        if num_frames is not None:
            self.latent_frames_of(num_frames)
        means = list(self.encode_chunks(self._chunks(frames)))
        count = self.frames_of(len(means)) if means else 0
        if count == 0 or num_frames not in (None, count):
            raise ConfigError(
                "the clip to encode has another length than announced",
                got=f"{count} frames",
                expected=f"{num_frames or 'at least 1'}",
            )
        latents: Floats = (np.concatenate(means, axis=2) - self._mean) * self._inverse_std
        if not np.isfinite(latents).all():
            raise ExecutionError(
                "the VAE's encoder gave NaN or infinity", expected="finite latents"
            )
        return latents

    def decode_chunks(self, latents: Iterable[Array]) -> Iterator[Array]:
        """Run the decoder graphs alone: no normalisation, no checks but the engines' own.

        Args:
            latents: ``[B, C, 1, h, w]`` each, the VAE's own.

        Returns:
            An iterator over ``[B, 3, n, H, W]`` in [-1, 1].
        """
        return self._stream("decoder_first", "decoder_next", "latents", "sample", latents)

    def encode_chunks(self, video: Iterable[Array]) -> Iterator[Array]:
        """Run the encoder graphs alone.

        Args:
            video: ``[B, 3, 1, H, W]``, then ``[B, 3, temporal_factor, H, W]`` each.

        Returns:
            An iterator over means ``[B, C, 1, h, w]``, not normalised.
        """
        return self._stream("encoder_first", "encoder_next", "video", "latents", video)

    def close(self) -> None:
        """Let go of the engines; they are opened again when needed."""
        self._engines.clear()

    def _stream(
        self,
        first: EngineName,
        later: EngineName,
        source: str,
        result: str,
        chunks: Iterable[Array],
    ) -> Iterator[Array]:
        cache: dict[str, Array] = {}
        name = first
        for chunk in chunks:
            outputs = self._engine(name).run({source: np.ascontiguousarray(chunk)} | cache)
            made = outputs.pop(result)
            cache = {key.replace("present_", "past_"): array for key, array in outputs.items()}
            name = later
            del outputs
            yield made

    def _engine(self, name: EngineName) -> Graph:
        if name not in self._engines:
            self._engines[name] = self._open_engine(name)
        return self._engines[name]

    def _chunks(self, frames: Iterable[Array]) -> Iterator[Array]:
        """Gather frames to ``[1, 3, n, H, W]``: one, then ``temporal_factor`` each."""
        channels = self.config.in_channels // self.config.patch**2
        pending: list[Array] = []
        shape: tuple[int, ...] | None = None
        size = count = 0
        for frame in frames:
            count += 1
            if shape is None:
                _check_frame(frame, None, channels)
                shape = frame.shape
                self.check_size(shape[0], shape[1])
                size = 1
            _check_frame(frame, shape, channels)
            pending.append(frame)
            if len(pending) == size:
                yield np.stack(pending).transpose(3, 0, 1, 2)[None]
                pending = []
                size = self.config.temporal_factor
        if pending:
            self.latent_frames_of(count)


def _frames_of_array(video: Array) -> Iterator[Array]:
    if video.ndim == 4:
        return iter(video)
    if video.ndim == 5 and len(video) == 1:
        return iter(video[0].transpose(1, 2, 3, 0))
    raise ConfigError(
        "the clip to encode has the wrong shape",
        got=list(video.shape),
        expected="[F, H, W, 3] or [1, 3, F, H, W]",
    )


def _check_frame(frame: Any, shape: tuple[int, ...] | None, channels: int) -> None:
    """Check that it is a picture like the first, of numbers that can be pixels."""
    kind = getattr(frame, "dtype", type(frame).__name__)
    have = tuple(getattr(frame, "shape", ()))
    wrong = len(have) != 3 or have[2] != channels if shape is None else have != shape
    if kind != np.float32 or wrong:
        size = f"[H, W, {channels}]" if shape is None else f"{list(shape)} like the first"
        raise ConfigError(
            "a frame to encode has the wrong type or shape",
            got=f"{kind} {list(have)}",
            expected=f"float32 {size}, in [-1, 1]",
        )
    if not (np.abs(frame).max(initial=0) <= _MAX_PIXEL):  # NaN is not
        raise ConfigError(
            "a frame to encode holds no pixels",
            got=f"values up to {np.abs(frame).max():g}",
            expected="values in [-1, 1]",
            fix="Divide 8-bit levels by 127.5 and subtract 1.",
        )


def _check_latents(latents: Array, channels: int) -> None:
    shape = latents.shape
    if latents.dtype != np.float32 or len(shape) != 5 or shape[:2] != (1, channels):
        raise ConfigError(
            "the latents to decode have the wrong type or shape",
            got=f"{latents.dtype} {list(shape)}",
            expected=f"float32 [1, {channels}, T, h, w]",
        )
    if 0 in shape or not np.isfinite(latents).all():
        raise ConfigError(
            "the latents to decode are empty, or hold NaN or infinity",
            got=list(shape),
            expected="finite numbers",
        )

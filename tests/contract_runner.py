"""A stranger's runner of bundles, written from ``docs/contract.md`` and nothing else.

It stands for a program by somebody who has the page and an ONNX runtime: no motrt, no torch.
``tests/test_contract_document.py`` compares its numbers with the public implementations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import onnxruntime

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Named: TypeAlias = dict[str, Array]

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_COMPUTE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_HIDDEN = -10000.0


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What is generated: ``latents [C, T, H, W]``, ``sound [Cs, Ts]``, ``action [Ta, Da]``."""

    latents: Array
    fps: float = 24.0
    clean_frames: tuple[int, ...] = ()
    sound: Array | None = None
    clean_sound: tuple[int, ...] = ()
    action: Array | None = None
    clean_action: tuple[int, ...] = ()
    domain_id: int = 0


class Bundle:
    """The files of a bundle, opened when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads(
            (folder / "manifest.json").read_text(encoding="utf-8")
        )
        if (self.manifest["format"], self.manifest["contract_version"]) != ("motrt-bundle", 1):
            raise ValueError(f"{folder}: not a bundle of contract version 1")
        self.model: dict[str, Any] = self.manifest["model"]
        self.dtype: Any = _DTYPES[_COMPUTE[self.manifest["precision"]]]
        self.static: bool = self.manifest["cache"] == "static"
        self.modalities: list[str] = self.manifest["modalities"]
        self.extra_key_norm: bool = (
            self.model["use_und_k_norm_for_gen"] and not self.model["qk_norm_for_text"]
        )
        self._sessions: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        """Where a file is: in the bundle, or in the revision that is in force."""
        revision = self.manifest.get("revision")
        is_revised = name in {"reasoner.onnx", "generator.onnx"} or name.startswith(
            "weights/transformer/"
        )
        if revision is None or not is_revised:
            return self.folder / name
        return self.folder / "revisions" / str(revision["id"]) / name

    def run(self, graph: str, feeds: Named) -> Named:
        """Run one graph by file name; every output by its name."""
        if graph not in self._sessions:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # or it tells at every step that it copies the cache
            self._sessions[graph] = onnxruntime.InferenceSession(
                str(self.path(graph)), options, providers=["CPUExecutionProvider"]
            )
        session = self._sessions[graph]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    def weight(self, part: str, name: str) -> Array:
        """A tensor of the weights, mapped from its file."""
        entry = self.manifest["weights"][part][name]
        return np.memmap(
            self.path(entry["file"]),
            dtype=_DTYPES[entry["dtype"]],
            mode="r",
            offset=entry["offset"],
            shape=tuple(entry["shape"]),
        )

    def embed(self, ids: Array) -> Array:
        """Rows of the embedding table."""
        return np.asarray(self.weight("transformer", "embed_tokens.weight")[ids]).astype(
            self.dtype
        )

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Cos and sin ``[B, n, D/2]`` of positions ``[B, 3, n]``."""
        axes = np.asarray(self.manifest["rotary_axes"])
        frequencies = np.asarray(self.manifest["inv_freq"], dtype=np.float32)
        angles = np.moveaxis(positions.astype(np.float32)[:, axes], 1, 2) * frequencies
        return np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)

    def temporal_factor(self) -> int:
        """The τ of the document."""
        vae = self.manifest["components"].get("vae")
        return int(vae["config"]["scale_factor_temporal"]) if vae else 4


class Text:
    """Token sequences, fed in pieces, and what the reasoner remembers of them."""

    def __init__(self, bundle: Bundle, *, batch: int = 1, capacity: int = 64) -> None:
        self.bundle = bundle
        self.lengths = [0] * batch
        model = bundle.model
        shape = (
            batch,
            model["num_key_value_heads"],
            capacity if bundle.static else 0,
            model["head_dim"],
        )
        self.layers = range(model["num_hidden_layers"])
        self.cache = {
            f"{i}.{kind}": np.zeros(shape, bundle.dtype)
            for i in self.layers
            for kind in ("key", "value")
        }
        self._normed: list[list[Named]] = [[] for _ in range(batch)]

    def feed(self, rows: Sequence[Sequence[int]], *, last: int = 1) -> Array:
        """Append one piece per sequence; logits ``[B, last, V]`` of each piece's end.

        Pieces may differ in length where the cache is static; they are padded on the right.
        """
        counts = [len(row) for row in rows]
        width = max(counts)
        if not self.bundle.static and (set(counts) != {width} or len(set(self.lengths)) != 1):
            raise ValueError("an append cache takes pieces of one length")
        ids = np.asarray([[*row, *[0] * (width - len(row))] for row in rows], dtype=np.int64)
        positions = np.asarray(self.lengths)[:, None] + np.arange(width)
        cos, sin = self.bundle.tables(np.repeat(positions[:, None], 3, axis=1))
        total = self._total(width)
        outputs = self.bundle.run(
            "reasoner.onnx",
            {
                "inputs_embeds": self.bundle.embed(ids),
                "rotary_cos": cos,
                "rotary_sin": sin,
                "attention_bias": self.bias(counts, width, total),
                "logit_indices": np.asarray(
                    [range(n - last, n) for n in counts], dtype=np.int64
                ).reshape(len(counts), last),
                **self._write_indices(),
                **{f"past_key_values.{name}": array for name, array in self.cache.items()},
            },
        )
        self._remember(outputs, counts)
        return outputs["logits"]

    def bias(self, counts: list[int], width: int, total: int) -> Array:
        """Zero where a query may look."""
        queries, keys = np.arange(width), np.arange(total)
        bias = np.empty((len(counts), 1, width, total), np.float32)
        for row, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
            seen = np.where(queries < count, start + queries, 0)
            bias[row, 0] = np.where(keys[None] <= seen[:, None], 0.0, _HIDDEN)
        return bias.astype(self.bundle.dtype)

    def context(self, row: int = 0) -> Named:
        """The generator's inputs ``context.*`` of one sequence, batch 1."""
        length = self.lengths[row]
        found = {
            f"context.{name}": array[row : row + 1, :, :length]
            for name, array in self.cache.items()
        }
        if self.bundle.extra_key_norm:
            pieces = self._normed[row]
            for name in pieces[0]:
                found[name] = np.concatenate([piece[name] for piece in pieces], axis=2)
        return found

    def _total(self, width: int) -> int:
        held = self.cache["0.key"].shape[2]
        return int(held) if self.bundle.static else int(held) + width

    def _write_indices(self) -> Named:
        if not self.bundle.static:
            return {}
        return {"write_indices": np.asarray(self.lengths, dtype=np.int64)}

    def _remember(self, outputs: Named, counts: list[int]) -> None:
        for name, array in self.cache.items():
            present = outputs[f"present.{name}"]
            self.cache[name] = (
                present if self.bundle.static else np.concatenate([array, present], axis=2)
            )
        for row, count in enumerate(counts):
            if self.bundle.extra_key_norm:
                self._normed[row].append(
                    {
                        f"context.{i}.key": outputs[f"context.{i}.key"][row : row + 1, :, :count]
                        for i in self.layers
                    }
                )
            self.lengths[row] += count


class Generator:
    """The denoiser over the keys and values of a prompt."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.patch: int = bundle.model["latent_patch_size"]

    def velocity(self, context: Named, clip: Clip, timestep: float) -> Named:
        """Velocities in the clip's own shapes: ``vision``, and ``sound``, ``action`` if asked for."""
        return self.velocities(context, [clip], [timestep])[0]

    def velocities(
        self, context: Named, clips: Sequence[Clip], timesteps: Sequence[float]
    ) -> list[Named]:
        """One batch of clips of one shape over contexts of one length."""
        prompt = context["context.0.key"].shape[2]
        positions = np.stack([self.positions(prompt, clip) for clip in clips])
        cos, sin = self.bundle.tables(positions)
        feeds = [self._feeds(clip) for clip in clips]
        outputs = self.bundle.run(
            "generator.onnx",
            {
                **{name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]},
                "timestep": np.asarray(timesteps, dtype=np.float32),
                "rotary_cos": cos,
                "rotary_sin": sin,
                **context,
            },
        )
        return [self._velocity(outputs, row, clip) for row, clip in enumerate(clips)]

    def patches(self, latents: Array) -> Array:
        """Tokens ``[Nv, W]`` of a clip ``[C, T, H, W]``."""
        p = self.patch
        channels, frames, height, width = latents.shape
        padded = np.pad(latents, ((0, 0), (0, 0), (0, -height % p), (0, -width % p)))
        grid = padded.reshape(channels, frames, -(-height // p), p, -(-width // p), p)
        return grid.transpose(1, 2, 4, 3, 5, 0).reshape(-1, p * p * channels)

    def unpatch(self, tokens: Array, like: Array) -> Array:
        """The inverse of :meth:`patches`."""
        p = self.patch
        channels, frames, height, width = like.shape
        rows, columns = -(-height // p), -(-width // p)
        grid = tokens.reshape(frames, rows, columns, p, p, channels)
        clip = grid.transpose(5, 0, 1, 3, 2, 4).reshape(channels, frames, rows * p, columns * p)
        return clip[:, :, :height, :width]

    def offset(self, prompt: int) -> np.float32:
        """O of the document."""
        return np.float32(prompt + self.bundle.model["unified_3d_mrope_temporal_modality_margin"])

    def positions(self, prompt: int, clip: Clip) -> Array:
        """``[3, N]``, tokens in the order vision, sound, action."""
        offset = self.offset(prompt)
        factor = self.bundle.temporal_factor()
        base = self.bundle.model["base_fps"]
        _, frames, height, width = clip.latents.shape
        rows, columns = -(-height // self.patch), -(-width // self.patch)
        times = self._times(range(frames), clip.fps / factor, base / factor, offset)
        parts = [self._grid(times, rows, columns, offset)]
        if clip.sound is not None:
            rate = self.bundle.model["sound_latent_fps"]
            times = self._times(range(clip.sound.shape[1]), rate, base, offset)
            parts.append(self._grid(times, 1, 1, offset))
        if clip.action is not None:
            steps = range(1, len(clip.action) + 1)
            times = self._times(steps, clip.fps, base / factor, offset)
            parts.append(self._grid(times, 1, 1, offset))
        return np.concatenate(parts, axis=1)

    def _times(self, steps: range, rate: float, base: float, offset: np.float32) -> Array:
        index = np.asarray(steps, dtype=np.float32)
        if len(steps) > 1 and self.bundle.model["enable_fps_modulation"]:
            index = index / np.float32(rate) * np.float32(base)
        times: Array = index + offset
        return times

    def _grid(self, times: Array, rows: int, columns: int, offset: np.float32) -> Array:
        height, width = np.arange(rows, dtype=np.float32), np.arange(columns, dtype=np.float32)
        if not self.bundle.model["unified_3d_mrope_reset_spatial_ids"]:
            height, width = height + offset, width + offset
        return np.stack(np.meshgrid(times, height, width, indexing="ij")).reshape(3, -1)

    def _feeds(self, clip: Clip) -> Named:
        frames = clip.latents.shape[1]
        patches = self.patches(clip.latents)
        feeds = {
            "latent_patches": patches,
            "vision_noise_mask": np.repeat(
                _mask(frames, clip.clean_frames), len(patches) // frames
            ),
        }
        if "sound" in self.bundle.modalities:
            sound = clip.sound
            if sound is None:
                sound = np.zeros((self.bundle.model["sound_dim"], 0), np.float32)
            feeds["sound_latents"] = np.ascontiguousarray(sound.T)
            feeds["sound_noise_mask"] = _mask(sound.shape[1], clip.clean_sound)
        if "action" in self.bundle.modalities:
            action = clip.action
            if action is None:
                action = np.zeros((0, self.bundle.model["action_dim"]), np.float32)
            feeds["action_latents"] = action
            feeds["action_noise_mask"] = _mask(len(action), clip.clean_action)
            feeds["domain_id"] = np.asarray(clip.domain_id, dtype=np.int64)
        return feeds

    def _velocity(self, outputs: Named, row: int, clip: Clip) -> Named:
        found = {"vision": self.unpatch(outputs["velocity"][row], clip.latents)}
        if clip.sound is not None:
            found["sound"] = outputs["sound_velocity"][row].T
        if clip.action is not None:
            found["action"] = outputs["action_velocity"][row]
        return found


class Vae:
    """The VAE, one chunk after the other."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        component = bundle.manifest["components"]["vae"]
        self.graphs: dict[str, str] = component["graphs"]
        self.config: dict[str, Any] = component["config"]

    def decode(self, latents: Array) -> Array:
        """Video ``[B, 3, F, H, W]`` of the generator's latents ``[B, z, T, h, w]``."""
        own = latents * self._statistic("latents_std") + self._statistic("latents_mean")
        chunks = [own[:, :, i : i + 1] for i in range(own.shape[2])]
        return self._chain("decoder", "latents", "sample", chunks)

    def encode(self, video: Array) -> Array:
        """The generator's latents of a video of 1 + n · τ frames."""
        factor = self.bundle.temporal_factor()
        starts = range(1, video.shape[2], factor)
        chunks = [video[:, :, :1], *(video[:, :, i : i + factor] for i in starts)]
        own = self._chain("encoder", "video", "latents", chunks)
        return (own - self._statistic("latents_mean")) / self._statistic("latents_std")

    def _statistic(self, name: str) -> Array:
        return np.asarray(self.config[name], dtype=np.float32).reshape(1, -1, 1, 1, 1)

    def _chain(self, coder: str, source: str, result: str, chunks: list[Array]) -> Array:
        results: list[Array] = []
        caches: Named = {}
        for chunk in chunks:
            graph = self.graphs[f"{coder}_{'next' if results else 'first'}"]
            outputs = self.bundle.run(graph, {source: np.ascontiguousarray(chunk), **caches})
            results.append(outputs.pop(result))
            caches = {
                name.replace("present_cache", "past_cache"): array
                for name, array in outputs.items()
            }
        return np.concatenate(results, axis=2)


def _mask(count: int, clean: Sequence[int]) -> Array:
    mask = np.ones(count, np.float32)
    mask[list(clean)] = 0.0
    return mask

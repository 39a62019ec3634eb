"""The inputs on which a bundle is compared with its reference.

They are chosen for what goes wrong in practice: chunks that meet a cache, a cache with old
content, prompts of very different length, grids of odd and minimal size, clean frames, one K/V
reused over timesteps, each subset of the modalities.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.parity.sequence_cases import (
    NUM_TOKENS,
    PromptCase,
    SchedulerCase,
    TextCase,
    TrajectoryCase,
    prompt_cases,
    scheduler_cases,
    trajectory_cases,
)
from motrt.engines.contract import Modality

if TYPE_CHECKING:
    from motrt.engines.manifest import Manifest
    from motrt.engines.tensors import Array


@dataclass(frozen=True, slots=True)
class ReasonerCase:
    """A prompt and the chunks in which it is fed.

    Attributes:
        name: Name in reports.
        prompt: Name of the token ids.
        chunks: Tokens of each call; they sum to the prompt's length.
        beside: Another prompt that shares the batch, padded on the right, or None.
    """

    name: str
    prompt: str
    chunks: tuple[int, ...]
    beside: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorCase:
    """One denoise step of one sample.

    Attributes:
        name: Name in reports.
        prompt: Name of the token ids that give the context.
        latents: ``[C, T, H, W]`` float32.
        clean_frames: Latent frames that are given, not denoised.
        sound_latents: ``[Cs, Ts]`` float32, or None.
        clean_sound_frames: Sound frames that are given.
        action_latents: ``[Ta, Da]`` float32, or None.
        clean_action_steps: Action steps that are given.
        domain_id: Embodiment of the actions.
        timestep: 0 to 1000.
        fps: Frames per second of the clip.
    """

    name: str
    prompt: str
    latents: Array
    timestep: float
    clean_frames: tuple[int, ...] = ()
    sound_latents: Array | None = None
    clean_sound_frames: tuple[int, ...] = ()
    action_latents: Array | None = None
    clean_action_steps: tuple[int, ...] = ()
    domain_id: int = 0
    fps: float = 24.0


@dataclass(frozen=True, slots=True)
class VaeCase:
    """A clip to decode (``latents`` ``[1, C, T, h, w]``) or to encode (``video``)."""

    name: str
    latents: Array | None = None
    video: Array | None = None


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases for one bundle, by engine; ``prompts`` are int64 token ids by name."""

    prompts: dict[str, Array]
    reasoner: list[ReasonerCase]
    generator: list[GeneratorCase]
    vae: list[VaeCase] = field(default_factory=list)
    text: list[TextCase] = field(default_factory=list)
    scheduler: list[SchedulerCase] = field(default_factory=list)
    prompt: list[PromptCase] = field(default_factory=list)
    trajectory: list[TrajectoryCase] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of cases."""
        named = (getattr(self, item.name) for item in fields(self) if item.name != "prompts")
        return sum(map(len, named))

    def clear(self, engine: str) -> None:
        """Drop the cases of one engine."""
        getattr(self, engine).clear()

    def of_the_towers(self) -> Cases:
        """Return the cases that are single runs of the two transformers."""
        return Cases(self.prompts, self.reasoner, self.generator)


def build_cases(manifest: Manifest, *, seed: int = 0) -> Cases:
    """Return the cases that fit a bundle; the same for the same config and seed."""
    rng = np.random.RandomState(seed)
    lengths = {"prompt": 24, "short prompt": 9, "long prompt": 61, "one token": 1}
    prompts: dict[str, Array] = {
        name: rng.randint(0, manifest.model.vocab_size, length).astype(np.int64)
        for name, length in lengths.items()
    }
    return Cases(
        prompts,
        _reasoner_cases(),
        _generator_cases(manifest, rng),
        _vae_cases(manifest, rng),
        [TextCase("greedy", "prompt", NUM_TOKENS)],
        scheduler_cases(rng),
        prompt_cases(),
        trajectory_cases(manifest, rng),
    )


def _reasoner_cases() -> list[ReasonerCase]:
    return [
        ReasonerCase("prefill", "prompt", (24,)),
        ReasonerCase("chunked prefill", "prompt", (7, 10, 7)),
        ReasonerCase("prefill and decode", "prompt", (20, 1, 1, 1, 1)),
        ReasonerCase("one token", "one token", (1,)),
        ReasonerCase("batch of two", "prompt", (24,), beside="short prompt"),
        ReasonerCase("long prefill", "long prompt", (61,)),
    ]


def _generator_cases(manifest: Manifest, rng: np.random.RandomState) -> list[GeneratorCase]:
    model = manifest.model

    def latents(frames: int, height: int, width: int) -> Array:
        return rng.standard_normal((model.latent_channel, frames, height, width)).astype(
            np.float32
        )

    image, clip = latents(1, 5, 8), latents(3, 4, 6)
    cases = [
        GeneratorCase(name=f"image, t {t}", prompt="prompt", latents=image, timestep=float(t))
        for t in (999, 500, 37)
    ]
    cases += [
        GeneratorCase(name="clip", prompt="prompt", latents=clip, timestep=731.0),
        GeneratorCase(
            name="clip, first frame clean",
            prompt="prompt",
            latents=clip,
            timestep=731.0,
            clean_frames=(0,),
            fps=16.0,
        ),
        GeneratorCase(
            name="image, long context", prompt="long prompt", latents=image, timestep=500.0
        ),
        GeneratorCase(
            name="one patch, one token of context",
            prompt="one token",
            latents=latents(1, 1, 1),
            timestep=833.3333,
        ),
        GeneratorCase(
            name="odd grid", prompt="short prompt", latents=latents(2, 7, 3), timestep=12.0
        ),
    ]
    for extra in _subsets(manifest.modalities):
        sound = action = None
        if Modality.SOUND in extra:
            sound = rng.standard_normal((model.sound_dim or 0, 5)).astype(np.float32)
        if Modality.ACTION in extra:
            action = rng.standard_normal((8, model.action_dim or 0)).astype(np.float32)
        name = "clip with " + " and ".join(modality.value for modality in extra)
        with_extra = GeneratorCase(
            name=name,
            prompt="prompt",
            latents=clip,
            timestep=731.0,
            sound_latents=sound,
            action_latents=action,
            domain_id=model.num_embodiment_domains - 1 if action is not None else 0,
        )
        cases.append(with_extra)
        if extra == (Modality.ACTION,):
            cases += _action_modes(with_extra)
    return cases


def _subsets(modalities: tuple[Modality, ...]) -> list[tuple[Modality, ...]]:
    extra = [modality for modality in modalities if modality is not Modality.VISION]
    return [pick for size in range(1, len(extra) + 1) for pick in combinations(extra, size)]


def _action_modes(base: GeneratorCase) -> list[GeneratorCase]:
    """Forward dynamics, inverse dynamics and policy differ only in what is clean."""
    import dataclasses

    steps = tuple(range(0 if base.action_latents is None else len(base.action_latents)))
    frames = tuple(range(base.latents.shape[1]))
    return [
        dataclasses.replace(
            base, name="forward dynamics", clean_frames=(0,), clean_action_steps=steps
        ),
        dataclasses.replace(base, name="inverse dynamics", clean_frames=frames, domain_id=0),
        dataclasses.replace(base, name="policy", clean_frames=(0,), fps=10.0),
        dataclasses.replace(base, name="half of the actions", clean_action_steps=steps[::2]),
    ]


def _vae_cases(manifest: Manifest, rng: np.random.RandomState) -> list[VaeCase]:
    vae = manifest.components.get("vae")
    if vae is None:
        return []
    channels = manifest.model.latent_channel
    latents = rng.standard_normal((1, channels, 3, 5, 4)).astype(np.float32)
    image = rng.standard_normal((1, channels, 1, 2, 3)).astype(np.float32)
    scale = int(vae["config"].get("scale_factor_spatial") or 8)
    video = rng.uniform(-1, 1, (1, 3, 9, 2 * scale, 3 * scale)).astype(np.float32)
    return [
        VaeCase("decode clip", latents=latents),
        VaeCase("decode image", latents=image),
        VaeCase("encode clip", video=video),
        VaeCase("encode image", video=video[:, :, :1]),
    ]

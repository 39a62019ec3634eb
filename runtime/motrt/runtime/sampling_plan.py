"""Turning what was asked for into arrays: what is given, what is noise, what shape it all has."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.bundle_vae import required_vae
from motrt.runtime.images import conditioning_image
from motrt.runtime.network import Sample, temporal_factor
from motrt.runtime.patches import patch_grid
from motrt.runtime.video import conditioning_frames, frames_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.runtime.generation_params import ActionCondition, GenerationParams
    from motrt.runtime.images import ImageSource
    from motrt.runtime.latents_file import Latents as GivenLatents
    from motrt.runtime.vae import Vae
    from motrt.runtime.video import ClipSource, Keep

logger = logging.getLogger(__name__)

_SPATIAL_FACTOR = 16  # of every published VAE; used only where the bundle has none
_SAMPLES_PER_SECOND = 48000  # of every published sound tokenizer


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the user gives besides the prompt.

    Attributes:
        image: First frame.
        video: A clip to go on from, or for actions to be read off.
        latent_indexes: Latent frames that ``video`` fixes.
        keep: Which end of a longer ``video`` counts.
        action: Actions, in or out.
        latents: Where to start instead of seeded noise.
    """

    image: ImageSource | None = None
    video: ClipSource | None = None
    latent_indexes: tuple[int, ...] = (0, 1)
    keep: Keep = "first"
    action: ActionCondition | None = None
    latents: GivenLatents | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, ready but for its prompt.

    Attributes:
        sample: Masks, rate and embodiment.
        clean: What stands where a mask is 0, by modality.
        shapes: Of the latents, by modality.
        num_frames: Frames of the clip.
    """

    sample: Sample
    clean: dict[str, Array]
    shapes: dict[str, tuple[int, ...]]
    num_frames: int

    def start(self, random: np.random.RandomState, given: GivenLatents | None) -> dict[str, Array]:
        """Return the latents to start from: noise in the order vision, sound, action.

        Latents that were given are taken as they are, as diffusers does: with their clean frames.
        """
        latents: dict[str, Array] = {}
        own = _given_latents(given)
        for name, shape in self.shapes.items():
            noise = random.standard_normal(shape).astype(np.float32)
            mask = self.sample.noisy[name]
            latents[name] = own.get(name, noise * mask + self.clean[name] * (1 - mask))
        return latents


def plan_run(
    bundle: Bundle,
    vae: Vae | None,
    params: GenerationParams,
    given: Conditioning,
    check_tokens: Callable[[int], None],
) -> Plan:
    """Check a request against the bundle, encode what is given, and lay out the latents.

    Args:
        bundle: The bundle.
        vae: Its VAE, or None.
        params: The request.
        given: The rest of it.
        check_tokens: Told how many tokens are denoised, before anything is allocated.

    Raises:
        ConfigError: Sizes that the VAE cannot make, contradicting or missing conditions.
        BundleError: The bundle lacks a part that the request needs.
    """
    model = bundle.manifest.model
    modalities = {modality.value for modality in bundle.manifest.modalities}
    action = given.action
    num_frames = params.num_frames if action is None else action.chunk_size + 1
    _check_request(bundle, params, given, num_frames, modalities)
    domain = 0 if action is None else _check_domain(bundle, action)
    frames, height, width = _latent_size(bundle, vae, params, num_frames)
    shapes: dict[str, tuple[int, ...]] = {"vision": (model.latent_channel, frames, height, width)}
    tokens = math.prod(patch_grid(frames, height, width, model.latent_patch_size))
    if params.sound:
        count = _sound_latents(num_frames, params.fps, model.sound_latent_fps)
        shapes["sound"] = (model.sound_dim or 0, count)
        tokens += count
    if action is not None:
        shapes["action"] = (action.chunk_size, model.action_dim or 0)
        tokens += action.chunk_size
    check_tokens(tokens)
    noisy: dict[str, Array] = {"vision": np.ones((1, frames, 1, 1), np.float32)}
    clean = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    if params.sound:
        noisy["sound"] = np.ones((1, shapes["sound"][1]), np.float32)
    if action is not None:
        channels = action.raw_action_dim or (model.action_dim or 0)
        noisy["action"] = np.zeros(shapes["action"], np.float32)
        if action.raw_actions is None:
            noisy["action"][:, :channels] = 1
        else:
            clean["action"][:, : action.raw_actions.shape[1]] = _fit(action)
    own = _given_latents(given.latents)
    for name, array in own.items():
        if shapes.get(name) != array.shape:
            raise ConfigError(
                f"the given {name} latents have the wrong shape",
                got=list(array.shape),
                expected=list(shapes[name]) if name in shapes else "none",
                fix="Pass latents of the size that height, width and number of frames give.",
            )
    fixed = _clean_frames(given, frames, num_frames)
    if fixed or given.video is not None:  # a clip that fixes nothing is refused there
        encoded = _encode(bundle, vae, params, given, num_frames)
        clean["vision"] = own.get("vision", encoded)
        noisy["vision"][:, list(fixed)] = 0
    return Plan(Sample(noisy, params.fps, domain), clean, shapes, num_frames)


def _given_latents(given: GivenLatents | None) -> dict[str, Array]:
    if given is None:
        return {}
    named = {
        "vision": given.latents[0],
        "sound": given.sound_latents,
        "action": given.action_latents,
    }
    return {name: array for name, array in named.items() if array is not None}


def _sound_latents(num_frames: int, fps: float, sound_latent_fps: float) -> int:
    """Count in whole samples, as diffusers does: 245 frames at 25 a second are 9.800000000000001 s."""
    samples = int(num_frames / fps * _SAMPLES_PER_SECOND)
    return max(1, -(-samples // round(_SAMPLES_PER_SECOND / sound_latent_fps)))


def _check_request(
    bundle: Bundle,
    params: GenerationParams,
    given: Conditioning,
    num_frames: int,
    modalities: set[str],
) -> None:
    for name, wanted in (("sound", params.sound), ("action", given.action is not None)):
        if wanted and name not in modalities:
            has = name in bundle.manifest.model.to_dict() or getattr(
                bundle.manifest.model, f"{name}_gen"
            )
            raise BundleError(
                f"the bundle's generator has no {name}",
                got=", ".join(sorted(modalities)),
                fix="Export the checkpoint without --modalities."
                if has
                else f"Use a checkpoint that was trained with {name}.",
            )
    if given.image is not None and given.video is not None:
        raise ConfigError("an image and a video cannot both start a clip", expected="one of them")
    if given.video is not None and num_frames == 1:
        raise ConfigError(
            "a video cannot condition a single image",
            got="num_frames 1",
            expected="more frames (--num-frames)",
        )
    action = given.action
    if action is not None and given.image is None and given.video is None:
        raise ConfigError(
            f"{action.mode} needs something to look at",
            expected="a video" if action.mode == "inverse_dynamics" else "an image or a video",
        )
    if action is not None and action.mode == "inverse_dynamics" and given.video is None:
        raise ConfigError("inverse_dynamics reads a clip", got="an image", expected="a video")


def _latent_size(
    bundle: Bundle, vae: Vae | None, params: GenerationParams, num_frames: int
) -> tuple[int, int, int]:
    if vae is not None:
        vae.check_size(params.height, params.width)
        frames = vae.latent_frames_of(num_frames)
        factor = vae.config.spatial_factor
        return frames, params.height // factor, params.width // factor
    time, space = temporal_factor(bundle), _SPATIAL_FACTOR
    if (num_frames - 1) % time or params.height % space or params.width % space:
        raise ConfigError(
            "the clip's size cannot be made",
            got=f"{num_frames} frames of {params.height} x {params.width}",
            expected=f"1 + n·{time} frames, sides that are multiples of {space}",
        )
    return 1 + (num_frames - 1) // time, params.height // space, params.width // space


def _clean_frames(given: Conditioning, frames: int, num_frames: int) -> tuple[int, ...]:
    """Return the latent frames that are given."""
    if given.action is not None:
        return tuple(range(frames)) if given.action.mode == "inverse_dynamics" else (0,)
    if given.video is not None:
        return given.latent_indexes
    # An image beside num_frames = 1 conditions nothing, as in diffusers.
    return (0,) if given.image is not None and num_frames > 1 else ()


def _encode(
    bundle: Bundle,
    vae: Vae | None,
    params: GenerationParams,
    given: Conditioning,
    num_frames: int,
) -> Array:
    vae = required_vae(vae, bundle, "images and clips cannot be encoded")
    height, width = params.height, params.width
    latent_frames = vae.latent_frames_of(num_frames)
    if given.video is not None:
        indexes: Sequence[int] = given.latent_indexes
        if given.action is not None:
            indexes = range(latent_frames) if given.action.mode == "inverse_dynamics" else (0,)
        source = conditioning_frames(
            given.video,
            height=height,
            width=width,
            num_frames=num_frames,
            latent_indexes=tuple(indexes),
            keep=given.keep,
            temporal_factor=vae.config.temporal_factor,
        )
        needed = frames_needed(tuple(indexes), vae.config.temporal_factor)
        # The encoder is causal: latents of the first frames need no more than these.
        clip = [next(source) for _ in range(min(needed, num_frames))]
    else:
        clip = [conditioning_image(given.image, height, width)]  # type: ignore[arg-type]
    encoded = vae.encode(clip)[0]
    channels, count, rows, columns = encoded.shape
    latents = np.zeros((channels, latent_frames, rows, columns), np.float32)
    latents[:, :count] = encoded
    return latents


def _check_domain(bundle: Bundle, action: ActionCondition) -> int:
    model = bundle.manifest.model
    domain, width = action.domain_id or 0, model.action_dim or 0
    if not 0 <= domain < model.num_embodiment_domains:
        raise ConfigError(
            "the checkpoint does not know this embodiment",
            got=f"embodiment {domain}",
            expected=f"0 to {model.num_embodiment_domains - 1}",
            fix="Choose one that it was trained for (--domain).",
        )
    raw = action.raw_action_dim
    given = 0 if action.raw_actions is None else action.raw_actions.shape[1]
    if max(raw or 1, given) > width:
        raise ConfigError(
            "the actions are wider than the checkpoint's",
            got=max(raw or 1, given),
            expected=f"at most {width}",
        )
    return domain


def _fit(action: ActionCondition) -> Array:
    """Return the given actions as exactly one chunk: cut, or the last one repeated."""
    given = np.asarray(action.raw_actions, np.float32)
    actions = given[: action.chunk_size]
    missing = action.chunk_size - len(actions)
    if len(given) != action.chunk_size:
        logger.warning(
            "%d actions were given for a chunk of %d: %s",
            len(given),
            action.chunk_size,
            "the last is repeated" if missing else "the rest is left out",
        )
    return np.concatenate([actions, np.repeat(actions[-1:], missing, axis=0)])

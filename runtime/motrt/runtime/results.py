"""What the runtime gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from motrt.engines.tensors import Array

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ReasonResult:
    """An answer.

    Attributes:
        text: The answer.
        token_ids: Its tokens, without the one that ended it.
        finish_reason: ``stop`` (the model ended, or a stop string), ``length`` (``max_new_tokens``
            or the cache's end).
        messages: The conversation with the answer; ask on by appending to it.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those of them whose keys and values were there already.
        timings: Seconds by phase: ``prefill``, ``decode``, ``total``; ``tokens_per_second``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    messages: Messages
    prompt_tokens: int
    reused_tokens: int
    timings: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResult:
    """A generated sample, still in latents; frames are decoded when they are asked for.

    Attributes:
        latents: float32 ``[1, C, T, h, w]``, normalized.
        sound_latents: float32 ``[Cs, Ts]``, or None.
        action_latents: float32 ``[Ta, action_dim]``, zero beyond the embodiment's width, or None.
        raw_action_dim: The embodiment's width, or None.
        seed: Seed of the noise.
        fps: Frames per second.
        num_frames: Frames that :meth:`frames` yields.
        timings: Seconds by phase: ``prompt``, ``encode``, ``denoise``, ``total``; ``steps``.
    """

    latents: Array
    sound_latents: Array | None
    action_latents: Array | None
    raw_action_dim: int | None
    seed: int
    fps: float
    num_frames: int
    timings: dict[str, float]
    _decode: Callable[[], Iterator[Array]] = field(repr=False)

    @property
    def action(self) -> Array | None:
        """The actions in their raw channels, float32 ``[Ta, width]``, or None."""
        return (
            None if self.action_latents is None else self.action_latents[:, : self.raw_action_dim]
        )

    def frames(self) -> Iterator[Array]:
        """Decode frame by frame, uint8 ``[H, W, 3]``; memory does not grow with the clip.

        Raises:
            BundleError: The bundle has no VAE.
            ExecutionError: The runtime is busy or closed.
        """
        for frames in self._decode():
            yield from frames

    def save(self, path: str | Path) -> Path:
        """Write the sample; the suffix says how: .png, .mp4, .gif, or .npz for the latents.

        Frames go to the file as they are decoded. Nothing is left of a file that fails.

        Raises:
            ConfigError: An unknown suffix.
            MissingDependencyError: The suffix needs ``motrt[media]``.
        """
        from motrt.runtime.saving import save_result

        return save_result(self, path)

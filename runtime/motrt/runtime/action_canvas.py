"""The canvas on which an action model sees its clip.

A clip is shrunk, never enlarged, into the canvas whose aspect is nearest, lies in its upper left
corner, and is continued to the right and to the bottom; the latents of what was added are cut off
again.

Source: diffusers ``Cosmos3OmniPipeline._prepare_action_video_conditioning``,
``_remove_action_video_padding_from_latent``, ``VideoProcessor.classify_height_width_bin``.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError
from motrt.runtime.resampling import resample
from motrt.runtime.video import ClipSource, Frame, Frames, preprocess_frame, read_clip, repeat_last

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from motrt.engines.tensors import Array

    Floats = npt.NDArray[np.float32]

# Height and width of the canvases of each tier. The pipeline keys them by their aspects, rounded;
# the aspects of these are the same numbers.
_CANVASES = {
    256: ((256, 256), (256, 320), (320, 256), (192, 320), (320, 192)),
    480: ((640, 640), (544, 736), (736, 544), (480, 832), (832, 480)),
    704: ((960, 960), (832, 1088), (1088, 832), (704, 1280), (1280, 704)),
    720: ((960, 960), (832, 1104), (1104, 832), (720, 1280), (1280, 720)),
}
RESOLUTION_TIERS = tuple(_CANVASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCanvas:
    """Sizes in pixels: of the canvas, which prompts name, and of the picture in its corner."""

    height: int
    width: int
    content_height: int
    content_width: int

    @classmethod
    def of(cls, height: int, width: int, tier: int) -> ActionCanvas:
        """Choose the canvas for frames of a size.

        Args:
            height: Rows of a frame.
            width: Columns of a frame.
            tier: One of ``RESOLUTION_TIERS``.

        Raises:
            ConfigError: Another tier, or a frame without pixels.
        """
        if tier not in _CANVASES:
            raise ConfigError(
                "unknown resolution tier", got=tier, expected=f"one of {list(_CANVASES)}"
            )
        if height < 1 or width < 1:
            raise ConfigError("a frame has no pixels", got=f"{height} x {width}")
        aspect = height / width
        rows, columns = min(_CANVASES[tier], key=lambda size: abs(size[0] / size[1] - aspect))
        scale = min(columns / width, rows / height, 1.0)
        return cls(
            height=rows,
            width=columns,
            content_height=max(1, int(scale * height + 0.5)),
            content_width=max(1, int(scale * width + 0.5)),
        )

    def place(self, frame: Floats) -> Floats:
        """Shrink a frame and continue it to the canvas.

        Args:
            frame: ``[H, W, 3]`` float32 in [-1, 1] of the size that the canvas was chosen for.

        Returns:
            ``[height, width, 3]`` float32; the bicubic kernel may overshoot [-1, 1].
        """
        content = (self.content_height, self.content_width)
        if frame.shape[:2] != content:
            frame = resample(frame, *content, "bicubic")
        bottom, right = self.height - content[0], self.width - content[1]
        # A picture has no mirror image further than itself.
        reflects = bottom < content[0] and right < content[1]
        return np.pad(
            frame, ((0, bottom), (0, right), (0, 0)), mode="reflect" if reflects else "edge"
        )

    def crop_latents(self, latents: Array, spatial_factor: int = 16) -> Array:
        """Cut ``[..., h, w]`` to what shows the picture; contiguous.

        Args:
            latents: Latents of the whole canvas.
            spatial_factor: The VAE's pixels per latent.
        """
        rows = max(self.content_height // spatial_factor, 1)
        columns = max(self.content_width // spatial_factor, 1)
        return np.ascontiguousarray(latents[..., :rows, :columns])


def action_frames(
    source: ClipSource, *, tier: int, num_frames: int, spatial_factor: int = 16
) -> tuple[ActionCanvas, Iterator[Floats]]:
    """Return the canvas of a clip, and its frames on it, one at a time.

    Args:
        source: See :func:`motrt.runtime.video.read_clip`; a single image is a list of one.
        tier: One of ``RESOLUTION_TIERS``.
        num_frames: Frames to return; the last one of a shorter clip is repeated.
        spatial_factor: The VAE's pixels per latent. Frames are resized down to multiples of it.

    Raises:
        ConfigError: The tier is unknown, or the clip empty, damaged, or too small.
    """
    frames = read_clip(source)
    first = next(frames, None)
    if first is None:
        raise ConfigError("the clip is empty", got="0 frames", expected="at least 1")
    height, width = _size(first)
    floored = height - height % spatial_factor, width - width % spatial_factor
    if 0 in floored:
        raise ConfigError(
            "the clip is too small",
            got=f"{height} x {width}",
            expected=f"at least {spatial_factor} x {spatial_factor}",
        )
    canvas = ActionCanvas.of(*floored, tier)
    return canvas, _placed(canvas, first, frames, floored, num_frames)


def _placed(
    canvas: ActionCanvas, first: Frame, rest: Frames, size: tuple[int, int], num_frames: int
) -> Iterator[Floats]:
    with closing(rest):
        frames = chain([first], rest)
        yield from repeat_last(
            (canvas.place(preprocess_frame(frame, *size)) for frame in frames), num_frames
        )


def _size(frame: Frame) -> tuple[int, int]:
    if isinstance(frame, np.ndarray):
        return frame.shape[0], frame.shape[1]
    return frame.height, frame.width

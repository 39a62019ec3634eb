"""The contact sheet: one row of frames for each clip, under what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.runtime._media_libraries import pillow
from motrt.runtime.writers import open_writer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from motrt.calibration.score.world import Frames

_COLUMNS = 9
_GAP = 4
_LINE = 22
_WIDTH = 120  # of a frame, at least
_PAPER, _INK = (250, 250, 248), (30, 30, 36)


def save_sheet(path: Path, rows: Sequence[tuple[str, Frames]]) -> Path:
    """Write titled clips ``[T, H, W, 3]``, uint8 and all of one size, as one PNG.

    Raises:
        MissingDependencyError: The extra ``media`` is not installed.
    """
    image, draw_on, font_of = pillow("Image"), pillow("ImageDraw"), pillow("ImageFont")
    _, height, width, _ = rows[0][1].shape
    scale = -(-_WIDTH // width)
    height, width = height * scale, width * scale
    columns = max(min(_COLUMNS, len(clip)) for _, clip in rows)
    sheet = image.new(
        "RGB",
        (columns * (width + _GAP) + _GAP, len(rows) * (height + _LINE + _GAP) + _GAP),
        _PAPER,
    )
    pen, font = draw_on.Draw(sheet), font_of.load_default(size=14)
    for row, (title, clip) in enumerate(rows):
        top = row * (height + _LINE + _GAP)
        pen.text((_GAP, top + _GAP), title, fill=_INK, font=font)
        shown = np.linspace(0, len(clip) - 1, min(_COLUMNS, len(clip))).round().astype(int)
        for column, frame in enumerate(clip[shown]):
            picture = image.fromarray(frame).resize((width, height), image.Resampling.NEAREST)
            sheet.paste(picture, (_GAP + column * (width + _GAP), top + _LINE))
    with open_writer(path, num_frames=1) as writer:
        writer.write(np.asarray(sheet))
    return path

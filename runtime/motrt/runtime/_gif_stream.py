"""An animated GIF written frame by frame.

Pillow writes all frames of a GIF at once. It makes the single pictures here; this module takes
them out of their files and strings them together.

Source: GIF89a specification (W3C), sections 17-26; NETSCAPE2.0 looping extension.
"""

from __future__ import annotations

import io
import struct
from typing import IO, TYPE_CHECKING

from motrt.runtime._media_libraries import pillow

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LOOP_FOR_EVER = b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"
_TRAILER = b"\x3b"
_HAS_TABLE, _TABLE_BITS = 0x80, 0x07
_EXTENSION, _DESCRIPTOR = 0x21, 0x2C


class GifStream:
    """Append frames to a file.

    Args:
        file: Where to write.
        height: Rows of every frame.
        width: Columns of every frame.
    """

    def __init__(self, file: IO[bytes], height: int, width: int) -> None:
        self._file = file
        self._file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0x70, 0, 0))
        self._file.write(_LOOP_FOR_EVER)

    def append(self, frame: npt.NDArray[np.uint8], centiseconds: int) -> None:
        """Write a frame ``[H, W, 3]`` with a palette of its own; it is shown for a while."""
        image = pillow().fromarray(frame).quantize(256)
        single = io.BytesIO()
        image.save(single, format="GIF", interlace=False)
        table_bits, table, descriptor, data = _parts(single.getvalue())
        self._file.write(b"\x21\xf9\x04" + struct.pack("<BHBB", 0x04, centiseconds, 0, 0))
        self._file.write(descriptor + bytes([_HAS_TABLE | table_bits]) + table + data)

    def finish(self) -> None:
        """Write the end; the file stays open."""
        self._file.write(_TRAILER)


def _parts(gif: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Take a GIF of one picture apart.

    Returns:
        Bits of the palette's size, the palette, the descriptor without its last byte, and the
        compressed picture.
    """
    flags = gif[10]
    bits = flags & _TABLE_BITS
    end = 13 + (3 << (bits + 1) if flags & _HAS_TABLE else 0)
    table, place = gif[13:end], end
    while gif[place] == _EXTENSION:
        place = _after_blocks(gif, place + 2)
    assert gif[place] == _DESCRIPTOR, "Pillow has written no picture"
    descriptor, local = gif[place : place + 9], gif[place + 9]
    place += 10
    if local & _HAS_TABLE:
        bits = local & _TABLE_BITS
        end = place + (3 << (bits + 1))
        table, place = gif[place:end], end
    return bits, table, descriptor, gif[place : _after_blocks(gif, place + 1)]


def _after_blocks(gif: bytes, place: int) -> int:
    """Return where a chain of sub-blocks ends, its terminator included."""
    while gif[place]:
        place += 1 + gif[place]
    return place + 1

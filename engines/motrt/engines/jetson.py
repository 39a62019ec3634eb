"""Recognizing a Jetson board from the files that NVIDIA's Linux for it leaves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RELEASE = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")

# JetPack of each release of Jetson Linux (L4T), by longest matching prefix.
# Source: NVIDIA's archive pages of Jetson Linux and JetPack.
_JETPACK = {
    "35": "5.x",
    "36": "6.x",
    "36.2": "6.0 DP",
    "36.3": "6.0",
    "36.4": "6.x",
    "36.4.0": "6.1",
    "36.4.3": "6.2",
    "36.4.4": "6.2.1",
    "38": "7.x",
    "38.2": "7.0",
    "38.4": "7.1",
}

# nvidia-smi on a board knows neither compute capability nor memory, so the name has to do.
_COMPUTE_CAPABILITY = {"Thor": (11, 0), "Orin": (8, 7), "Xavier": (7, 2)}


@dataclass(frozen=True, slots=True)
class Jetson:
    """A board.

    Attributes:
        model: As the device tree names it; None in a container that hides it.
        l4t: Release of Jetson Linux, such as ``36.4.3``, or None.
        jetpack: The JetPack that it belongs to, or None where this motrt knows none.
        compute_capability: Of the board's GPU, or None for an unknown board.
    """

    model: str | None
    l4t: str | None
    jetpack: str | None
    compute_capability: tuple[int, int] | None


def probe_jetson(root: Path = Path("/")) -> Jetson | None:
    """Return the board that this is, or None on any other machine.

    Args:
        root: Where ``proc/`` and ``etc/`` are.
    """
    model = _text(root / "proc/device-tree/model").replace("\0", "").strip() or None
    release = _RELEASE.search(_text(root / "etc/nv_tegra_release"))
    is_board = model is not None and ("Jetson" in model or any(n in model for n in _SOCS))
    if not is_board and release is None:
        return None
    l4t = None if release is None else f"{release[1]}.{release[2]}"
    name = model or ""
    capability = next((cc for soc, cc in _COMPUTE_CAPABILITY.items() if soc in name), None)
    return Jetson(model, l4t, None if l4t is None else _jetpack(l4t), capability)


# Boards by other makers carry an NVIDIA module and do not always say Jetson.
_SOCS = tuple(f"NVIDIA {soc}" for soc in _COMPUTE_CAPABILITY)


def _jetpack(l4t: str) -> str | None:
    parts = l4t.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_JETPACK[prefix] for prefix in prefixes if prefix in _JETPACK), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

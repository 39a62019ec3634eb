"""What an export was asked for and what it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from motrt.engines.dtypes import Precision
from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.contract import Modality

ProbeMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Choices of an export.

    Attributes:
        precision: Compute type of both transformers.
        lowering: ``native`` (opset 24) or ``portable`` (opset 18).
        modalities: What the generator denoises; all that the checkpoint has if None.
        copy_weights: Copy weight files instead of hard-linking them.
        overwrite: Replace a bundle that is already there.
        probe: Whether to run the finished graphs once; ``auto`` skips models over 1 GiB.

    Raises:
        ConfigError: An unknown precision or probe.
    """

    precision: Precision = Precision.FP32
    lowering: str = "native"
    modalities: tuple[Modality, ...] | None = None
    copy_weights: bool = False
    overwrite: bool = False
    probe: ProbeMode = "auto"

    def __post_init__(self) -> None:
        """Take names for precisions, and refuse what no export can do."""
        try:
            object.__setattr__(self, "precision", Precision(self.precision))
        except ValueError as err:
            names = ", ".join(precision.value for precision in Precision)
            raise ConfigError("unknown precision", got=self.precision, expected=names) from err
        if self.probe not in get_args(ProbeMode):
            raise ConfigError(
                "unknown probe", got=self.probe, expected=", ".join(get_args(ProbeMode))
            )


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote.

    Attributes:
        bundle: The bundle's folder.
        seconds: Wall time.
        peak_rss_bytes: The process's peak resident memory.
        graphs: Bytes of each graph file.
        weights: Tensors and bytes, by what happened to them.
        absent: What the bundle lacks, and why.
        probe: Outcome of the numeric probe.
    """

    bundle: Path
    seconds: float
    peak_rss_bytes: int
    graphs: dict[str, int]
    weights: dict[str, int]
    absent: dict[str, str]
    probe: dict[str, object]

"""The rows: what is compared, in which order, and the bar that each is held to."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from motrt.calibration.bench.checkpoints import (
    write_checkpoint,
    write_shared_checkpoint,
    write_sparse_checkpoint,
)
from motrt.calibration.bench.inputs import noise, num_patches, prompt_ids
from motrt.calibration.bench.ours import Ours
from motrt.calibration.bench.processes import import_seconds, run_job
from motrt.calibration.bench.refit import Refit, compare_export, compare_reopen
from motrt.calibration.bench.sizes import PUBLISHED
from motrt.calibration.bench.theirs import Theirs
from motrt.calibration.bench.timing import Comparison, Timing, alternate, require_equal
from motrt.engines.dtypes import Precision
from motrt.engines.errors import ParityError
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from motrt.calibration.bench.sizes import Size

    Grid = tuple[int, int, int]
    Measured = tuple[float | None, dict[str, Any]]


class Bench:
    """The models that the rows share, made when they are first needed.

    Args:
        folder: An empty folder for checkpoints and bundles.
        size: What to run.
        threads: Threads of either side.
    """

    def __init__(self, folder: Path, size: Size, threads: int) -> None:
        self.folder = folder
        self.size = size
        self.threads = threads

    @cached_property
    def checkpoint(self) -> Path:
        """Random weights in diffusers' layout."""
        return write_checkpoint(self.folder / "checkpoint", self.size.config)

    @cached_property
    def bundle(self) -> Path:
        """What motrt exports of them."""
        return export_checkpoint(self.checkpoint, self.folder / "bundle").bundle

    @cached_property
    def ours(self) -> Ours:
        """The bundle's engines."""
        return Ours(self.bundle, self.threads)

    @cached_property
    def refit(self) -> Refit:
        """The bundle's engines, and fine-tunes of it."""
        return Refit(self.folder, self.bundle, self.size, self.threads)

    @cached_property
    def theirs(self) -> Theirs:
        """The public implementations."""
        return Theirs(self.checkpoint, self.threads)


@dataclass(frozen=True, slots=True)
class Row:
    """One number: how it is measured, and what it should be.

    Attributes:
        kind: Which object of the report it belongs to.
        measure: Returns the number, or None with a ``why``, and the details.
        bar: What the number is held to, if anything.
        at_least: Whether the number should be at least the bar, rather than at most.
    """

    kind: Literal["ratios", "seconds"]
    measure: Callable[[Bench], Measured]
    bar: float | None = None
    at_least: bool = True

    def meets(self, value: float | None) -> bool:
        """Return whether a number keeps the bar; one that was not measured does."""
        if value is None or self.bar is None:
            return True
        return value >= self.bar if self.at_least else value <= self.bar


def _denoise(bench: Bench, *, name: str, grid: Grid, repeats: int) -> Measured:
    ids, latents = prompt_ids(bench.size, bench.size.context), noise(bench.size, grid)
    ours, theirs = bench.ours.step(ids, latents), bench.theirs.step(ids, latents)
    error = require_equal(name, ours(), theirs())
    comparison = alternate(ours, theirs, repeats)
    shapes = {"U": len(ids), "N": num_patches(bench.size, grid)}
    return comparison.ratio, {"shapes": shapes, "error": error, **comparison.to_dict()}


def _denoise_image(bench: Bench) -> Measured:
    size = bench.size
    return _denoise(bench, name="denoise_image", grid=size.image, repeats=size.repeats)


def _denoise_clip(bench: Bench) -> Measured:
    size = bench.size
    return _denoise(bench, name="denoise_clip", grid=size.clip, repeats=size.few)


def _prefill(bench: Bench) -> Measured:
    ids = prompt_ids(bench.size, bench.size.context)
    ours, theirs = partial(bench.ours.prefill, ids), partial(bench.theirs.prefill, ids)
    error = require_equal("prefill", ours(), theirs())
    comparison = alternate(ours, theirs, bench.size.repeats)
    return comparison.ratio, {"shapes": {"S": len(ids)}, "error": error, **comparison.to_dict()}


def _decode(bench: Bench) -> Measured:
    return _compare_decoders(bench, "decode", bench.theirs.decode)


def _decode_genai(bench: Bench) -> Measured:
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return None, {"why": "onnxruntime-genai is not installed"}
    from motrt.calibration.bench.genai import GenAi

    theirs = GenAi(bench.checkpoint, bench.folder / "genai", bench.threads)
    return _compare_decoders(bench, "decode_genai", theirs.decode)


def _compare_decoders(bench: Bench, name: str, decode: Callable[..., Any]) -> Measured:
    size = bench.size
    ids = prompt_ids(size, size.prompt)
    ours, theirs = Timing(), Timing()
    for index in range(size.few + 1):
        timed = [side(ids, size.new_tokens) for side in (bench.ours.decode, decode)]
        if timed[0][0] != timed[1][0]:
            raise ParityError(
                f"bench row {name} was not timed: its two sides decode different tokens",
                got=timed[0][0],
                expected=timed[1][0],
                fix="A wrong answer has no speed; see: motrt validate --help",
            )
        if index:  # the first run warms up
            for timing, (_, seconds) in zip((ours, theirs), timed, strict=True):
                timing.seconds.append(seconds)
    comparison = Comparison(ours, theirs)
    steps = size.new_tokens - 1
    rates = {
        side: round(steps / min(timing.seconds), 1)
        for side, timing in (("ours", ours), ("theirs", theirs))
    }
    shapes = {"prompt": len(ids), "new_tokens": size.new_tokens}
    return comparison.ratio, {
        "shapes": shapes,
        "tokens_per_second": rates,
        **comparison.to_dict(),
    }


def _cold_start(bench: Bench) -> Measured:
    _ = bench.checkpoint, bench.bundle  # written, and in the disk cache, before the clock runs
    comparison = Comparison(Timing(), Timing())
    for _repeat in range(bench.size.processes):
        for job, timing in (
            ("start-ours", comparison.ours),
            ("start-theirs", comparison.theirs),
        ):
            timing.seconds.append(run_job(job, bench.folder, bench.size, bench.threads)[0])
        outputs = (np.load(bench.folder / f"{side}.npy") for side in ("ours", "theirs"))
        error = require_equal("cold_start", *outputs)
    shapes = {"U": bench.size.context, "N": num_patches(bench.size, bench.size.image)}
    return comparison.ratio, {"shapes": shapes, "error": error, **comparison.to_dict()}


def _rss_shared(bench: Bench) -> Measured:
    source = write_shared_checkpoint(bench.folder / "shared", bench.size.shared_config)
    export_checkpoint(source, bench.folder / "shared.bundle")
    _, detail = run_job("share-memory", bench.folder, bench.size, bench.threads)
    detail["shapes"] = {
        "U": bench.size.prompt,
        "N": num_patches(bench.size, bench.size.image),
        "E": bench.size.shared_config["hidden_size"],
    }
    if detail["growth_bytes"] is None:
        return None, {**detail, "why": "this system has no /proc/self/smaps_rollup"}
    return detail["growth_bytes"] / detail["weight_bytes"], detail


def _refit_reopen(bench: Bench) -> Measured:
    error = bench.refit.check()
    comparison, refitted = compare_reopen(bench.refit, bench.size.few)
    return comparison.ratio, {
        "error": error,
        **comparison.to_dict(),
        "theirs_refitted_on_disk_first": refitted.theirs.to_dict(),
        "ratio_refitted_on_disk_first": round(refitted.ratio, 3),
    }


def _refit_export(bench: Bench) -> Measured:
    error = bench.refit.check()
    comparison, inside = compare_export(bench.refit, bench.size.processes)
    return comparison.ratio, {
        "error": error,
        **comparison.to_dict(),
        "theirs_in_one_process": inside.to_dict(),
        "ratio_in_one_process": round(min(inside.seconds) / min(comparison.ours.seconds), 3),
    }


def _runtime_import(bench: Bench) -> Measured:
    seconds = [import_seconds() for _ in range(bench.size.processes + 1)]
    return min(seconds), Timing(seconds).to_dict()


def _export(bench: Bench, *, model: str) -> Measured:
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        folder = Path(name)
        try:
            source = write_sparse_checkpoint(folder / "checkpoint", PUBLISHED[model])
        except OSError as err:
            return None, {"why": f"the disk cannot hold a sparse checkpoint: {err}"}
        started = time.perf_counter()
        result = export_checkpoint(
            source, folder / "bundle", ExportOptions(precision=Precision.BF16)
        )
        seconds = time.perf_counter() - started
    return seconds, {"weights": result.weights, "graphs": result.graphs, "probe": result.probe}


ROWS: dict[str, Row] = {
    "denoise_image": Row("ratios", _denoise_image, 3.0),
    "denoise_clip": Row("ratios", _denoise_clip, 1.2),
    "prefill": Row("ratios", _prefill),
    "decode": Row("ratios", _decode, 1.5),
    "decode_genai": Row("ratios", _decode_genai, 1.0),
    "cold_start": Row("ratios", _cold_start, 6.0),
    "rss_shared": Row("ratios", _rss_shared, 1.15, at_least=False),
    "refit_reopen": Row("ratios", _refit_reopen, 1.0),
    "refit_export": Row("ratios", _refit_export, 5.0),
    "runtime_import": Row("seconds", _runtime_import),
    "export_nano": Row("seconds", partial(_export, model="nano"), 30.0, at_least=False),
    "export_super": Row("seconds", partial(_export, model="super"), 30.0, at_least=False),
}

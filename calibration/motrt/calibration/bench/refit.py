"""The refit rows: new weights in a running process, against the other ways to get them there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from motrt.calibration.bench.checkpoints import write_checkpoint
from motrt.calibration.bench.timing import Comparison, Timing, alternate, require_equal
from motrt.engines.bundle import Bundle
from motrt.engines.errors import ExecutionError
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.engines.probe_inputs import probe_feeds
from motrt.engines.refit.disk import refit_bundle
from motrt.engines.refit.live import refit_engines
from motrt.engines.refit.request import open_request
from motrt.engines.weight_names import ENGINES
from motrt.export.pipeline import export_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from motrt.calibration.bench.sizes import Size
    from motrt.engines.tensors import Array


class Refit:
    """Two fine-tunes of a bundle, of which every tensor differs from the bundle's and each other's.

    Args:
        folder: Where they and their bundles go.
        bundle: The bundle that runs.
        size: What to run.
        threads: Threads inside an operator.
    """

    def __init__(self, folder: Path, bundle: Path, size: Size, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._tunes = [
            write_checkpoint(folder / f"tune-{seed}", size.config, seed=seed) for seed in (1, 2)
        ]
        self._exported = [
            export_checkpoint(tune, folder / f"{tune.name}.bundle").bundle for tune in self._tunes
        ]
        self._on_disk = folder / "refitted.bundle"
        shutil.copytree(bundle, self._on_disk)
        self._bundle, self._backend = self._open(bundle)
        self._runs = 0

    def check(self) -> float:
        """Refit once and compare both engines with those of the exported fine-tune.

        Returns:
            The largest difference, as a share of an output's largest value.

        Raises:
            ParityError: They differ.
        """
        tune = self._runs % 2
        self.refit()
        bundle, fresh = self._open(self._exported[tune])
        worst = 0.0
        for engine in ENGINES:
            have, want = (
                _outputs(b, k, engine) for b, k in ((self._bundle, self._backend), (bundle, fresh))
            )
            worst = max(worst, *(require_equal("refit", have[name], want[name]) for name in want))
        return worst

    def refit(self) -> None:
        """Give the running engines the other fine-tune."""
        recipe = open_request(self._bundle, self._tunes[self._runs % 2])
        self._runs += 1
        result = refit_engines(self._backend, self._bundle, recipe, self._switch)
        if result.tensors["moved"] != result.tensors["total"]:
            raise ExecutionError("a refit of the bench moved too little", got=result.tensors)

    def reopen(self) -> None:
        """Open the fine-tune's bundle, which is there already, and both engines."""
        self._open(self._exported[self._runs % 2])

    def refit_on_disk(self) -> None:
        """Refit a bundle on disk with the fine-tune, and open it: reopening, from a checkpoint."""
        refit_bundle(self._on_disk, self._tunes[self._runs % 2])
        self._open(self._on_disk)

    def export(self) -> float:
        """Export the fine-tune in this process and open it; returns the seconds."""
        return self._timed(lambda tune, target: export_checkpoint(tune, target))

    def export_process(self) -> float:
        """Likewise by ``motrt export``, as a runtime must that has no torch."""

        def run(tune: Path, target: Path) -> None:
            command = [
                sys.executable,
                "-m",
                "motrt.export",
                "export",
                str(tune),
                "-o",
                str(target),
            ]
            subprocess.run([*command, "--quiet"], check=True, capture_output=True)

        return self._timed(run)

    def _switch(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def _timed(self, write: Callable[[Path, Path], object]) -> float:
        target = self._folder / "again.bundle"
        started = time.perf_counter()
        write(self._tunes[self._runs % 2], target)
        self._open(target)
        seconds = time.perf_counter() - started
        shutil.rmtree(target)
        return seconds

    def _open(self, path: Path) -> tuple[Bundle, OnnxRuntimeBackend]:
        bundle = Bundle.open(path)
        backend = OnnxRuntimeBackend(bundle, threads=self._threads)
        backend.reasoner()
        backend.generator()
        return bundle, backend


def compare_reopen(refit: Refit, repeats: int) -> tuple[Comparison, Comparison]:
    """Time refits and reopenings in turn; then reopenings of a bundle refitted on disk first."""
    reopened = alternate(refit.refit, refit.reopen, repeats)
    return reopened, alternate(refit.refit, refit.refit_on_disk, repeats)


def compare_export(refit: Refit, repeats: int) -> tuple[Comparison, Timing]:
    """Time refits and exports in turn; the latter by a process of their own, and in this one."""
    comparison, inside = Comparison(Timing(), Timing()), Timing()
    for _ in range(repeats):
        wall = time.perf_counter()
        refit.refit()
        comparison.ours.seconds.append(time.perf_counter() - wall)
        comparison.theirs.seconds.append(refit.export_process())
        inside.seconds.append(refit.export())
    return comparison, inside


def _outputs(bundle: Bundle, backend: OnnxRuntimeBackend, engine: str) -> dict[str, Array]:
    reasoner = engine == "reasoner"
    contract = bundle.reasoner_contract() if reasoner else bundle.generator_contract()
    outputs = backend.run_current(engine, probe_feeds(contract))
    if outputs is None:
        raise ExecutionError(f"the {engine} is not open")
    return outputs

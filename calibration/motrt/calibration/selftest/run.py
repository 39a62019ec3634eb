"""All checks, one after another; what cannot be tried says why."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from motrt.calibration.demo.tiny_omni import prepare_bundle
from motrt.calibration.selftest import checks
from motrt.calibration.selftest.checks import SkippedError, Workplace
from motrt.engines.bundle import Bundle
from motrt.engines.errors import MissingDependencyError, MotrtError
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """What became of one check.

    Attributes:
        name: What was tried.
        status: ``failed`` if it came out wrong, ``skipped`` if it cannot be tried here.
        detail: What was seen, what is wrong, or why it was not tried.
        seconds: Wall time.
    """

    name: str
    status: Status
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "seconds": round(self.seconds, 2)}


def run_selftest(
    bundle: str | Path | None = None, *, progress: Progress = silent
) -> tuple[Check, ...]:
    """Try everything that this machine can do.

    Args:
        bundle: What to try it with, and leave as it is; None: the tiny trained model that comes
            with motrt, which needs the extra ``export``.
        progress: Told how many checks are done.

    Raises:
        BundleError: ``bundle`` is damaged, or none.
    """
    if bundle is not None:
        Bundle.open(bundle)
    folder = Path(tempfile.mkdtemp(prefix="motrt-selftest-"))
    try:
        return tuple(_all(None if bundle is None else Path(bundle), folder, progress))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _all(given: Path | None, folder: Path, progress: Progress) -> list[Check]:
    made: dict[str, Path] = {}

    def export(precision: str) -> str:
        try:
            made[precision] = prepare_bundle("shared", folder / precision, precision)
        except MissingDependencyError as err:
            raise SkippedError(f"{err.got}; name a bundle with --bundle") from err
        return f"the packaged model as a {precision} bundle, proved by its probe"

    def run(check: Callable[[Workplace], str]) -> Callable[[], str]:
        def tried() -> str:
            bundle = given or made.get("fp32")
            if bundle is None:
                raise SkippedError("there is no bundle")
            return check(Workplace(bundle, folder, given is None, made.get("fp16")))

        return tried

    names: dict[str, Callable[[], str]] = {}
    if given is None:
        names["export, float32"] = lambda: export("fp32")
        names["export, float16"] = lambda: export("fp16")
    names |= {
        "ONNX Runtime, weights by name": run(checks.weights_by_name),
        "ONNX Runtime against PyTorch": run(checks.pytorch),
        "answers that are known": run(checks.known_answers),
        "refit A, B, A": run(checks.refit),
        "TensorRT-RTX builds": run(checks.rtx_build),
        "TensorRT engines on the GPU": run(checks.gpu),
    }
    done: list[Check] = []
    for name, check in names.items():
        progress("selftest", len(done), len(names))
        done.append(_one(name, check))
    progress("selftest", len(done), len(names))
    return done


def _one(name: str, check: Callable[[], str]) -> Check:
    started = time.perf_counter()
    status: Status
    try:
        status, detail = "ok", check()
    except SkippedError as why:
        status, detail = "skipped", str(why)
    except MotrtError as err:
        status, detail = "failed", str(err)
    return Check(name, status, detail, time.perf_counter() - started)

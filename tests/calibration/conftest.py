"""One run of the reference for all that is compared with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def kept_references() -> dict[str, Any]:
    """Results of the reference by what was asked."""
    return {}


@pytest.fixture(scope="module")
def one_reference_per_checkpoint(kept_references: dict[str, Any]) -> Iterator[None]:
    """The reference of a checkpoint does not depend on the bundle: ask for it once.

    And in this process, which has imported torch already.
    """
    from motrt.calibration.parity import compare, reference_process
    from motrt.calibration.reference.__main__ import main

    real = reference_process.run_reference

    def here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, main(command[3:]), "", "")

    def remembered(checkpoint: Path, cases: Any, runs: Any, folder: Path, threads: int) -> Any:
        counts = [len(getattr(cases, engine)) for engine in reference_process.ENGINES]
        key = f"{checkpoint} {runs} {sorted(cases.prompts)} {counts}"
        if key not in kept_references:
            kept_references[key] = real(checkpoint, cases, runs, folder, threads)
        return kept_references[key]

    stand_in = SimpleNamespace(run=here, DEVNULL=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_reference", remembered)
        patch.setattr(reference_process, "subprocess", stand_in)
        yield

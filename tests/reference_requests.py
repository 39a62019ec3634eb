"""Requests to the reference, run in this process, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from motrt.calibration.reference import __main__ as reference


def write_request(folder: Path, checkpoint: Path, arrays: dict[str, Any], **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    request = {
        "checkpoint": str(checkpoint),
        "weights_dtype": "float32",
        "compute_dtype": "float32",
        "threads": 2,
    }
    (folder / "request.json").write_text(json.dumps(request | fields))
    np.savez(folder / "arrays.npz", **arrays)
    return folder


def run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    assert reference.main([str(folder)]) == 0, (folder / "result.json").read_text()
    with np.load(folder / "result.npz", allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    return arrays, json.loads((folder / "result.json").read_text())


def error_of(folder: Path) -> dict[str, str]:
    assert reference.main([str(folder)]) == 1
    assert not (folder / "result.npz").exists()
    error: dict[str, str] = json.loads((folder / "result.json").read_text())["error"]
    return error


def random(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def ids(length: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).randint(0, 160, length).astype(np.int64)

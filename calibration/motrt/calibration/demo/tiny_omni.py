"""The trained checkpoint that comes with the package, and its bundle.

One autoencoder and one tokenizer serve both layouts, so they are stored once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

from motrt.engines.errors import ConfigError, ExportError, MissingDependencyError

Layout = Literal["separate", "shared"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
COMMON = "common"
"""Folder of what both layouts have."""

PACKAGED = Path(__file__).parent / "checkpoints"
"""``common/``, and a folder for each layout."""

_NEEDED_BY_EXPORT = ("torch", "onnx", "onnx_ir")


def write_checkpoint(layout: str, folder: str | Path) -> Path:
    """Write the trained checkpoint as diffusers' folders, and return ``folder``.

    Args:
        layout: ``separate`` (Cosmos 3's: each tower has its own layers) or ``shared`` (one set of
            layers serves both towers).
        folder: Must be absent, or empty. It appears when it is whole.

    Raises:
        ConfigError: Another layout, or there is something in the folder.
        ExportError: The place cannot be written to.
    """
    if layout not in LAYOUTS:
        raise ConfigError("unknown layout", got=str(layout), expected=" or ".join(LAYOUTS))
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            "the checkpoint's folder is in use",
            got=str(target),
            expected="an absent or empty folder",
            fix="Choose another name.",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".motrt-", dir=target.parent) as temporary:
            whole = Path(temporary, target.name)
            for part in (COMMON, layout):
                shutil.copytree(PACKAGED / part, whole, dirs_exist_ok=True)
            whole.replace(target)
    except OSError as err:
        raise ExportError("the checkpoint cannot be written", got=str(err)) from err
    return target


def prepare_bundle(
    layout: Layout, folder: Path, precision: str = "fp32", lowering: str = "native"
) -> Path:
    """Write the checkpoint to ``folder/checkpoint`` and its export to ``folder/bundle``.

    What an earlier call wrote is used again.

    Raises:
        ConfigError: Something else is in the checkpoint's place.
        ExportError: A file cannot be written, or the export failed.
        MissingDependencyError: The extra ``export`` is not installed.
    """
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    if bundle.exists():
        return bundle
    absent = [name for name in _NEEDED_BY_EXPORT if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(
            "the packaged checkpoint cannot be exported",
            got=f"no module {', '.join(absent)}",
            expected="the extra export",
            fix="Install it with: pip install 'motrt[export]'; or export elsewhere, and name the bundle.",
        )
    if not checkpoint.exists():
        write_checkpoint(layout, checkpoint)
    _export_in_child(checkpoint, bundle, precision, lowering)
    return bundle


def _export_in_child(checkpoint: Path, bundle: Path, precision: str, lowering: str) -> None:
    """Run ``motrt export`` in a process of its own: this one shall load neither torch nor onnx."""
    command = [sys.executable, "-m", "motrt.export", "export", os.fspath(checkpoint)]
    done = subprocess.run(
        [
            *command,
            "-o",
            os.fspath(bundle),
            "--precision",
            precision,
            "--lowering",
            lowering,
            "--quiet",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ExportError(
            "the packaged checkpoint could not be exported",
            got=done.stderr.strip().removeprefix("error: "),
            fix="Name a bundle that was exported elsewhere.",
        )

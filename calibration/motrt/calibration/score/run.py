"""From a bundle to its scores: which groups it can be asked for, and the runtime to ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.calibration.score.skills import GROUPS, Score, score
from motrt.calibration.score.subject import EMBODIMENT, RuntimeSubject
from motrt.engines.contract import Modality
from motrt.engines.errors import BundleError, ConfigError
from motrt.engines.progress import Progress, silent
from motrt.runtime import Runtime
from motrt.runtime.embodiments import embodiment_named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from motrt.engines.bundle import Bundle

_ACTING = ("forward_dynamics", "inverse_dynamics", "policy")


def score_bundle(
    path: str | Path,
    groups: Sequence[str] | None = None,
    *,
    samples: int = 200,
    num_inference_steps: int = 20,
    guidance_scale: float = 1.0,
    threads: int | None = None,
    progress: Progress = silent,
) -> Score:
    """Score a bundle of the tiny trained model on ONNX Runtime.

    Args:
        path: The bundle.
        groups: What to score; all that it has if None.
        samples: Samples of each group.
        num_inference_steps: Denoise steps of each clip.
        guidance_scale: Of text and image to video.
        threads: Threads inside an operator.
        progress: Told how far each group is.

    Raises:
        BundleError: The bundle is damaged, or lacks what a group needs.
        ConfigError: An unknown group.
        ExecutionError: An engine failed.
    """
    for name in groups or ():
        if name not in GROUPS:
            raise ConfigError("unknown group of skills", got=name, expected=", ".join(GROUPS))
    with Runtime.open(path, threads=threads) as runtime:
        lacking = {name: _lack(runtime.bundle, name) for name in groups or GROUPS}
        missing = {name: reason for name, reason in lacking.items() if reason}
        if missing and groups is not None:
            name, reason = next(iter(missing.items()))
            raise BundleError(
                f"the bundle cannot be scored for {name}",
                got=reason,
                fix="Leave it out of --skills, or export a checkpoint that has it.",
            )
        subject = RuntimeSubject(
            runtime, num_inference_steps=num_inference_steps, guidance_scale=guidance_scale
        )
        asked = [name for name in lacking if name not in missing]
        return score(subject, asked, samples=samples, missing=missing, progress=progress)


def _lack(bundle: Bundle, group: str) -> str:
    """Return what a group needs and the bundle has not; empty if there is nothing."""
    manifest = bundle.manifest
    if group in _ACTING and Modality.ACTION not in manifest.modalities:
        return "no action modality"
    domains = manifest.model.num_embodiment_domains
    if group in _ACTING and embodiment_named(EMBODIMENT).domain_id >= domains:
        return f"no embodiment {EMBODIMENT} among its {domains}"
    if group != "reasoner" and "vae" not in manifest.components:
        return "no VAE"
    if group != "vae" and "text_tokenizer" in manifest.absent:
        return "no tokenizer"
    return ""

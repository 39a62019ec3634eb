"""One reference run from request to result: which parts are loaded, in which order they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers

from motrt.calibration.reference.arithmetic import DTYPES, arithmetic
from motrt.calibration.reference.errors import UnavailableError
from motrt.calibration.reference.generator import run_generator
from motrt.calibration.reference.greedy import run_text
from motrt.calibration.reference.pipeline import run_prompts, run_trajectories
from motrt.calibration.reference.reasoner import run_reasoner
from motrt.calibration.reference.schedule import run_schedules
from motrt.calibration.reference.vae import run_vae
from motrt.calibration.reference.weights import load_transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from motrt.calibration.reference.request import Request


def run_request(request: Request) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Run every case of ``request``; return the arrays and the report of the protocol."""
    arrays: dict[str, NDArray[Any]] = {}
    sources: list[str] = []
    notes: list[str] = []
    skipped: list[dict[str, str]] = []
    compute_dtype = DTYPES[request.compute_dtype]
    if request.compute_dtype == "float64":
        notes.append(
            "norm statistics, angles and time embedding stay float32 in the public classes"
        )

    def attempt(engine: str, run: Callable[[], dict[str, NDArray[Any]]]) -> None:
        try:
            arrays.update(run())
        except UnavailableError as err:
            skipped.append({"engine": engine, "reason": str(err)})

    checkpoint = request.checkpoint
    with arithmetic(request.order, request.threads):
        if _needs_transformer(request):
            transformer = load_transformer(
                checkpoint,
                weights_dtype=DTYPES[request.weights_dtype],
                compute_dtype=compute_dtype,
                needs_generator=bool(request.generator_cases or request.trajectory_cases),
            )
            if request.reasoner_cases:
                own, sources, notes_of_reasoner = run_reasoner(transformer, request.reasoner_cases)
                arrays |= own
                notes += notes_of_reasoner
            if request.generator_cases:
                arrays |= run_generator(transformer, request.generator_cases, checkpoint)
            if request.text_cases:
                arrays |= run_text(transformer, request.text_cases)
            if prompts := request.prompt_cases:
                attempt("prompt", lambda: run_prompts(transformer, checkpoint, prompts))
            if runs := request.trajectory_cases:
                attempt("trajectory", lambda: run_trajectories(transformer, checkpoint, runs))
            del transformer  # frees the memory that the VAE needs
        if schedules := request.scheduler_cases:
            attempt("scheduler", lambda: run_schedules(checkpoint, schedules))
        if request.vae_cases:
            arrays |= run_vae(checkpoint, request.vae_cases, compute_dtype)
    report = {
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
        "reasoner_sources": sources,
        "notes": notes,
        "skipped": skipped,
    }
    return arrays, report


def _needs_transformer(request: Request) -> bool:
    towers = request.reasoner_cases or request.generator_cases
    return bool(towers or request.text_cases or request.prompt_cases or request.trajectory_cases)

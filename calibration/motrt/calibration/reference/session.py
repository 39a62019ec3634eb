"""One reference run from request to result: which parts are loaded, in which order they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers

from motrt.calibration.reference.arithmetic import DTYPES, arithmetic
from motrt.calibration.reference.generator import run_generator
from motrt.calibration.reference.reasoner import run_reasoner
from motrt.calibration.reference.vae import run_vae
from motrt.calibration.reference.weights import load_transformer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from motrt.calibration.reference.request import Request


def run_request(request: Request) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """Run every case of ``request``; return the arrays and the report of the protocol."""
    arrays: dict[str, NDArray[np.float32]] = {}
    sources: list[str] = []
    notes: list[str] = []
    compute_dtype = DTYPES[request.compute_dtype]
    if request.compute_dtype == "float64":
        notes.append(
            "norm statistics, angles and time embedding stay float32 in the public classes"
        )
    with arithmetic(request.order, request.threads):
        if request.reasoner_cases or request.generator_cases:
            transformer = load_transformer(
                request.checkpoint,
                weights_dtype=DTYPES[request.weights_dtype],
                compute_dtype=compute_dtype,
                needs_generator=bool(request.generator_cases),
            )
            if request.reasoner_cases:
                arrays, sources, notes_of_reasoner = run_reasoner(
                    transformer, request.reasoner_cases
                )
                notes += notes_of_reasoner
            if request.generator_cases:
                arrays |= run_generator(transformer, request.generator_cases, request.checkpoint)
            del transformer  # frees the memory that the VAE needs
        if request.vae_cases:
            arrays |= run_vae(request.checkpoint, request.vae_cases, compute_dtype)
    report = {
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
        "reasoner_sources": sources,
        "notes": notes,
    }
    return arrays, report

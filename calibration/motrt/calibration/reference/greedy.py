"""Text cases: greedy tokens, by transformers' ``generate`` with its cache where it has the class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from motrt.calibration.reference.arithmetic import to_float32
from motrt.calibration.reference.reasoner import check_vocabulary, prompt_logits
from motrt.calibration.reference.text_model import build_text_model, unsupported_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from motrt.calibration.reference.sequence_cases import TextCase


def run_text(transformer: Any, cases: Sequence[TextCase]) -> dict[str, NDArray[Any]]:
    """Return for each case ``ids`` ``[N]``, and each step's two largest logits, ``top`` and ``top_ids`` ``[N, 2]``.

    Where transformers has no class for the config, diffusers' prompt stream is run anew for each token.

    Raises:
        RequestError: A prompt has a token id outside of the vocabulary.
    """
    model = (
        build_text_model(transformer) if unsupported_reason(transformer.config) is None else None
    )
    arrays: dict[str, NDArray[Any]] = {}
    for case in cases:
        check_vocabulary(transformer, case.name, case.input_ids)
        if model is None:
            new_ids, logits = _recomputed(transformer, case)
        else:
            new_ids, logits = _generated(model, case)
        arrays[f"{case.name}/ids"] = new_ids
        best = logits.topk(2)
        arrays[f"{case.name}/top"] = to_float32(best.values)
        arrays[f"{case.name}/top_ids"] = best.indices.numpy()
    return arrays


def _generated(model: Any, case: TextCase) -> tuple[NDArray[np.int64], torch.Tensor]:
    # No token ends the answer: the case says how long it is.
    model.generation_config.eos_token_id = None
    output = model.generate(
        input_ids=torch.from_numpy(case.input_ids)[None],
        do_sample=False,
        max_new_tokens=case.max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new_ids: NDArray[np.int64] = output.sequences[0, len(case.input_ids) :].numpy()
    return new_ids, torch.cat(output.logits).float()


def _recomputed(transformer: Any, case: TextCase) -> tuple[NDArray[np.int64], torch.Tensor]:
    ids = case.input_ids
    rows = []
    for _ in range(case.max_new_tokens):
        rows.append(prompt_logits(transformer, ids)[-1].float())
        ids = np.append(ids, int(rows[-1].argmax()))
    return ids[len(case.input_ids) :], torch.stack(rows)

"""Logits to a token id, in NumPy.

The filters equal transformers' one by one and run in the order of NVIDIA's own reasoner:
repetition, presence and frequency penalty; then the best token, or temperature, top-k, top-p and
a draw. Logits are one row ``[V]``; no filter changes what it is given.

Source: cosmos-framework ``_sample_next_token``; transformers ``generation/logits_process.py``;
vLLM for the frequency penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from motrt.engines.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.runtime.params import SamplingParams

Logits = npt.NDArray[np.floating]
Ids = npt.NDArray[np.intp]


def penalize_repetition(logits: Logits, ids: npt.NDArray[np.int64], penalty: float) -> Logits:
    """Divide positive and multiply negative logits of ``ids``, each once.

    Source: transformers ``RepetitionPenaltyLogitsProcessor``.
    """
    penalized = logits.copy()
    seen = logits[ids]
    factor = logits.dtype.type(penalty)
    penalized[ids] = np.where(seen < 0, seen * factor, seen / factor)
    return penalized


def penalize_presence(
    logits: Logits, counts: npt.NDArray[np.int64], presence: float, frequency: float = 0.0
) -> Logits:
    """Take ``presence`` off the logits of tokens in the answer, and ``frequency`` for each time.

    Args:
        logits: ``[V]``.
        counts: How often each token is in the answer, ``[V]``.
        presence: As OpenAI's and vLLM's ``presence_penalty``.
        frequency: As OpenAI's and vLLM's ``frequency_penalty``.
    """
    taken = presence * (counts > 0) + frequency * counts
    return logits - taken.astype(logits.dtype)


def scale_temperature(logits: Logits, temperature: float) -> Logits:
    """Divide by the temperature. Source: transformers ``TemperatureLogitsWarper``."""
    return logits / logits.dtype.type(temperature)


def keep_top_k(logits: Logits, top_k: int) -> Logits:
    """Set all but the k best to -inf; what equals the last of them stays.

    Source: transformers ``TopKLogitsWarper``.
    """
    return _only(logits, _top_k_ids(logits, top_k))


def keep_top_p(logits: Logits, top_p: float) -> Logits:
    """Set to -inf what comes after the best tokens that reach ``top_p`` together.

    The token with which they reach it stays, so one always does.

    Source: transformers ``TopPLogitsWarper``, whose ascending order this one turns around.
    """
    return logits if top_p >= 1 else _only(logits, _top_p_ids(_softmax(logits), top_p))


class Sampler:
    """Chooses the tokens of one answer.

    Args:
        params: How.
        prompt_ids: The prompt, which the repetition penalty looks at.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._params = params
        self._prompt_ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._num_sampled = 0
        self._counts = np.zeros(0, dtype=np.int64)  # of each token in the answer, [V]
        self._random = np.random.RandomState(params.seed)

    def sample(self, logits: npt.NDArray[np.floating]) -> int:
        """Return the next token's id, which counts as part of the answer from now on.

        Args:
            logits: ``[V]`` of the last position; not modified.

        Raises:
            ExecutionError: A logit is NaN or infinite; the message names the step.
            ConfigError: The prompt has an id beyond the logits, or the shape is wrong.
        """
        scores = self._penalized(self._checked(logits))
        token_id = int(np.argmax(scores)) if self._params.is_greedy else self._draw(scores)
        self._counts[token_id] += 1
        self._num_sampled += 1
        return token_id

    def _checked(self, logits: npt.NDArray[np.floating]) -> Logits:
        same = self._num_sampled == 0 or logits.shape == self._counts.shape
        if logits.ndim != 1 or logits.size == 0 or not same:
            raise ConfigError("logits have the wrong shape", got=logits.shape, expected="[V]")
        if not np.isfinite(logits).all():
            bad = np.flatnonzero(~np.isfinite(logits))
            raise ExecutionError(
                f"the reasoner's logits are not finite at step {self._num_sampled}",
                got=f"{logits[bad[0]]} at id {bad[0]}, {bad.size} of {logits.size} in all",
                expected="numbers",
                fix="Check the bundle with motrt validate, or export it in a wider precision.",
            )
        ids = self._prompt_ids
        if ids.size and not 0 <= ids[0] <= ids[-1] < logits.size:
            raise ConfigError(
                "the prompt has an id beyond the vocabulary",
                got=f"{ids[0]} to {ids[-1]}",
                expected=f"0 to {logits.size - 1}",
            )
        if self._num_sampled == 0:
            self._counts = np.zeros(logits.size, dtype=np.int64)
        return np.asarray(logits, dtype=np.float32)

    def _penalized(self, scores: Logits) -> Logits:
        params = self._params
        if params.repetition_penalty != 1:
            seen = np.union1d(self._prompt_ids, np.flatnonzero(self._counts))
            scores = penalize_repetition(scores, seen, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            scores = penalize_presence(
                scores, self._counts, params.presence_penalty, params.frequency_penalty
            )
        return scores

    def _draw(self, scores: Logits) -> int:
        params = self._params
        # A temperature keeps the order, so top-k may come first: exact, and less to compute.
        top_k = params.top_k or scores.size
        ids = np.arange(scores.size) if top_k >= scores.size else _top_k_ids(scores, top_k)
        # From the best down and in float64: no temperature makes it overflow upwards.
        wide: Logits = scores[ids].astype(np.float64)
        with np.errstate(over="ignore"):
            probabilities = _softmax(scale_temperature(wide - wide.max(), params.temperature))
        if params.top_p < 1:
            kept = _top_p_ids(probabilities, params.top_p)
            ids, probabilities = ids[kept], probabilities[kept]
        reached = np.cumsum(probabilities)
        # Below the total even when it is rounded: past it there is no token, or one of no chance.
        drawn = min(self._random.random_sample() * reached[-1], np.nextafter(reached[-1], 0))
        return int(ids[np.searchsorted(reached, drawn, side="right")])


def _top_k_ids(logits: Logits, top_k: int) -> Ids:
    first = max(logits.size - top_k, 0)
    return np.flatnonzero(logits >= np.partition(logits, first)[first])


def _top_p_ids(probabilities: npt.NDArray[np.float64], top_p: float) -> Ids:
    """Return the fewest best that reach ``top_p`` together, the best first."""
    # Less likely ones have under 1 - top_p even all together. It saves sorting 150 000.
    hopeful = np.flatnonzero(probabilities >= (1 - top_p) / probabilities.size)
    order = hopeful[np.argsort(-probabilities[hopeful], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    return order[before < top_p]


def _only(logits: Logits, ids: Ids) -> Logits:
    kept = np.full_like(logits, -np.inf)
    kept[ids] = logits[ids]
    return kept


def _softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    exponentials = np.exp(wide - wide.max())
    probabilities: npt.NDArray[np.float64] = exponentials / exponentials.sum()
    return probabilities

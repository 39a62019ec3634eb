"""Rows of sequences: tokens, schedules, prompts, whole runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.calibration.parity.metrics import count_differences, difference
from motrt.calibration.parity.report import Row
from motrt.calibration.parity.rows import nothing_to_compare
from motrt.calibration.parity.tolerances import (
    SCHEDULER_STEP,
    near_tie,
    trajectory_tolerance,
)
from motrt.engines.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from motrt.calibration.parity.cases import Cases
    from motrt.engines.tensors import Array


class SequenceRows:
    """Compares what two sides made of the same sequence cases.

    Args:
        candidate: Arrays by ``case/tensor``.
        reference: Likewise.
        noise: The reference in another order of operations; may lack any array.
        logits_noise: How far the reference's logits are from themselves in another order.

    Attributes:
        notes: What a reader of the rows must know.
    """

    def __init__(
        self,
        candidate: Mapping[str, Array],
        reference: Mapping[str, Array],
        noise: Mapping[str, Array],
        logits_noise: float,
    ) -> None:
        self._candidate = candidate
        self._reference = reference
        self._noise = noise
        self._logits_noise = logits_noise
        self.notes: list[str] = []

    def rows(self, cases: Cases) -> list[Row]:
        """Return the rows of all sequence cases; a case without results on a side fails."""
        named = [
            *(("text", case.name, self._text) for case in cases.text),
            *(("scheduler", case.name, self._schedule) for case in cases.scheduler),
            *(("prompt", case.name, self._prompt) for case in cases.prompt),
            *(("trajectory", case.name, self._trajectory) for case in cases.trajectory),
        ]
        rows: list[Row] = []
        for engine, name, compare in named:
            made = list(compare(name))
            rows += made or [nothing_to_compare(engine, name, DType.FLOAT32)]
        return rows

    def _text(self, name: str) -> Iterator[Row]:
        for have, want in self._pairs(f"{name}/ids"):
            compared = self._tokens_before_a_tie(name, have, want)
            gap = count_differences(have[:compared], want[:compared])
            yield Row("text", name, "ids", DType.FLOAT32, gap, None, 0.0)

    def _tokens_before_a_tie(self, name: str, have: Array, want: Array) -> int:
        """Return how many tokens can be compared: none from where a tie was decided otherwise."""
        gap = count_differences(have, want)
        step = gap.position[0] if gap.position else len(want)
        if step >= min(len(have), len(want)):
            return max(len(have), len(want))
        top = self._reference[f"{name}/top"][step]
        margin = float(top[0] - top[1])
        second = self._reference[f"{name}/top_ids"][step, 1]
        if have[step] != second or not near_tie(
            margin, float(np.abs(top).max()), self._logits_noise
        ):
            return max(len(have), len(want))
        self.notes.append(
            f"text / {name}: the two best tokens at step {step} are {margin:.1e} apart, which is "
            "float noise; the bundle took the other, so tokens from there on are not compared"
        )
        return step

    def _schedule(self, name: str) -> Iterator[Row]:
        for tensor in ("sigmas", "timesteps"):
            for have, want in self._pairs(f"{name}/{tensor}"):
                gap = difference(have, want)
                yield Row("scheduler", name, tensor, DType.FLOAT64, gap, None, 0.0)
        for have, want in self._pairs(f"{name}/states"):
            if have.shape != want.shape:  # another number of steps
                gap = difference(have, want)
                yield Row("scheduler", name, "steps", DType.FLOAT64, gap, None, 0.0)
                continue
            steps = [_step(name, i, have[i], want[i - 1 : i + 1]) for i in range(1, len(want))]
            yield max(steps, key=lambda row: row.severity)

    def _prompt(self, name: str) -> Iterator[Row]:
        for tensor in ("positive_ids", "negative_ids"):
            for have, want in self._pairs(f"{name}/{tensor}"):
                gap = count_differences(have, want)
                yield Row("prompt", name, tensor, DType.INT64, gap, None, 0.0)

    def _trajectory(self, name: str) -> Iterator[Row]:
        for have, want in self._pairs(f"{name}/latents"):
            gap = difference(have, want)
            other = self._noise.get(f"{name}/latents")
            own = None if other is None else difference(other, want).max_abs
            bound = trajectory_tolerance(gap.reference_max, own or 0.0)
            yield Row("trajectory", name, "latents", DType.FLOAT32, gap, own, bound)

    def _pairs(self, key: str) -> Iterator[tuple[Array, Array]]:
        if key in self._candidate and key in self._reference:
            yield self._candidate[key], self._reference[key]


def _step(name: str, index: int, have: Array, want: Array) -> Row:
    """Judge one step; ``want`` are the states before and after it."""
    bound = SCHEDULER_STEP * float(np.abs(want[0]).max())
    gap = difference(have, want[1])
    return Row("scheduler", name, f"step {index}", DType.FLOAT64, gap, None, bound)

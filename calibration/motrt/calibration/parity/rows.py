"""Rows of single runs: one a tensor, with the bound that it is held to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from motrt.calibration.parity.metrics import Difference, difference
from motrt.calibration.parity.report import Row
from motrt.calibration.parity.tolerances import tolerance
from motrt.engines.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.calibration.parity.cases import Cases
    from motrt.engines.tensors import Array

_LAYER = re.compile(r"^(present|context)\.(\d+)\.(key|value)$")


def tower_rows(
    cases: Cases,
    candidate: Mapping[str, Array],
    reference: Mapping[str, Array],
    noise: Mapping[str, Array] | None,
    arithmetic: DType,
    *,
    by_prompt: bool = True,
) -> list[Row]:
    """One row a tensor; K/V of all layers share a row, which shows the worst layer."""
    plan = [
        ("reasoner", c.name, f"prompt: {c.prompt}" if by_prompt else c.name)
        for c in cases.reasoner
    ]
    plan += [("generator", case.name, case.name) for case in cases.generator]
    if arithmetic is DType.FLOAT32:  # the VAE computes in float32 in every bundle
        plan += [("vae", case.name, case.name) for case in cases.vae]
    rows: list[Row] = []
    for engine, case, source in plan:
        groups: dict[str, Row] = {}
        for key, expected in reference.items():
            prefix, _, tensor = key.rpartition("/")
            if prefix != source:
                continue
            have = candidate.get(f"{case}/{tensor.removesuffix('.diffusers')}")
            if have is None:
                continue
            gap = difference(have, expected)
            own = None if noise is None else difference(noise[key], expected).max_abs
            bound = tolerance(tensor, arithmetic, gap.reference_max, own or 0.0)
            row = Row(engine, case, tensor, arithmetic, gap, own, bound)
            match = _LAYER.match(tensor)
            group = f"{match[1]}.{match[3]}" if match else tensor
            if group not in groups or row.severity > groups[group].severity:
                groups[group] = row
        if not groups:
            rows.append(nothing_to_compare(engine, case, arithmetic))
        rows += groups.values()
    return rows


def nothing_to_compare(engine: str, case: str, arithmetic: DType) -> Row:
    """A case for which the two sides have no tensor in common must not pass unseen."""
    gap = Difference(float("inf"), float("inf"), 0.0, 0.0, ())
    return Row(engine, case, "nothing to compare", arithmetic, gap, None, 0.0)

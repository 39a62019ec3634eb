"""The shell files: Polygraphy's command lines for one bundle, to be read, run and changed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.contract import EngineContract
    from motrt.engines.plans.profiles import Profile

_HEAD = """#!/bin/sh
# {what}
# Exit code 0: every output is within its tolerance. Further options of `polygraphy run` may follow.
set -e
cd "$(dirname "$0")"
"""
_TENSORRT = "{name}: needs a GPU. The engine is built from the graph, with its weights in it."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """One engine: its contract, a profile for the sizes of its input, and what an error may be.

    Attributes:
        contract: Inputs and outputs.
        profile: Sizes that a TensorRT engine is built for.
        tolerances: Largest absolute error by output.
    """

    contract: EngineContract
    profile: Profile
    tolerances: Mapping[str, float]


def shell_files(cases: list[EngineCase]) -> dict[str, str]:
    """Return the text of each shell file by its name."""
    trt = ["--trt", "--strongly-typed"]
    return {
        "onnxruntime.sh": _file(
            "ONNX Runtime's CPU provider against the stored outputs of PyTorch.",
            [_run(case, ["--onnxrt", "--providers", "cpu"]) for case in cases],
        ),
        "tensorrt.sh": _file(
            _TENSORRT.format(name="TensorRT"),
            [_run(case, [*trt, *_shapes(case)]) for case in cases],
        ),
        "tensorrt-rtx.sh": _file(
            _TENSORRT.format(name="TensorRT-RTX"),
            [
                _run(case, [*trt, *_shapes(case)], before="POLYGRAPHY_USE_TENSORRT_RTX=1 ")
                for case in cases
            ],
        ),
        "debug-reduce.sh": _file(
            "Where TensorRT goes wrong: cuts each graph down to the least that still differs from\n"
            "# ONNX Runtime. Polygraphy loads graphs with onnx, which refuses hard-linked weights: run\n"
            "# it in a copy of this folder (cp -r).",
            [_reduce(case) for case in cases],
        ),
    }


def _run(case: EngineCase, runner: list[str], before: str = "") -> str:
    name = case.contract.name
    words = ["polygraphy", "run", f"{name}.onnx", *runner]
    words += ["--load-inputs", f"{name}.inputs.json", "--load-outputs", f"{name}.golden.json"]
    words += ["--validate", "--rtol", "0", "--atol"]
    words += [f"{output}:{most:.3g}" for output, most in case.tolerances.items()]
    return f'{before}{_wrapped(words)} "$@"'


def _reduce(case: EngineCase) -> str:
    name = case.contract.name
    words = ["polygraphy", "debug", "reduce", f"{name}.onnx", "-o", f"{name}.reduced.onnx"]
    words += ["--mode", "bisect", "--model-input-shapes", *_sizes(case, 1)]
    words += ["--check", "polygraphy", "run", "polygraphy_debug.onnx", "--onnxrt", "--trt"]
    words += ["--strongly-typed", "--rtol", "0", "--atol", f"{max(case.tolerances.values()):.3g}"]
    return _wrapped(words)


def _shapes(case: EngineCase) -> list[str]:
    words: list[str] = []
    for index, which in enumerate(("min", "opt", "max")):
        words += [f"--trt-{which}-shapes", *_sizes(case, index)]
    return words


def _sizes(case: EngineCase, which: int) -> list[str]:
    return [
        f"{spec.name}:[{','.join(map(str, case.profile.shapes(spec)[which]))}]"
        for spec in case.contract.inputs
    ]


def _wrapped(words: list[str]) -> str:
    """Quote words for a shell, an option with its values on each line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)


def _file(what: str, commands: list[str]) -> str:
    return _HEAD.format(what=what) + "\n" + "\n\n".join(commands) + "\n"

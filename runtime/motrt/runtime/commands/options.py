"""Options that the running verbs share, and the defaults that they take from the dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from motrt.engines.onnxruntime_backend import Residency as _Residency
from motrt.engines.onnxruntime_engine import MAX_THREADS
from motrt.runtime.backends import BackendName

Backend = Annotated[
    BackendName, typer.Option(help="What runs the engines; TensorRT needs a plan: motrt build.")
]
Residency = Annotated[_Residency, typer.Option(help="How weights lie in memory.")]
Capacity = Annotated[int, typer.Option(min=1, help="Most tokens of a conversation or prompt.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_THREADS, help="Threads inside an operator. (default: the backend's)"
    ),
]
Provider = Annotated[
    list[str] | None,
    typer.Option(help="ONNX Runtime's execution provider; repeat for a list. (default: CPU)"),
]


def default_of(cls: type, name: str) -> Any:
    """Return a dataclass field's default, so that no default is written twice."""
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


def open_options(
    backend: str, residency: str, capacity: int, threads: int | None, provider: list[str] | None
) -> dict[str, Any]:
    """Return keyword arguments of ``Runtime.open``."""
    options: dict[str, Any] = {
        "backend": backend,
        "residency": residency,
        "capacity": capacity,
        "threads": threads,
    }
    if provider:
        options["providers"] = tuple(provider)
    return options


def numbers(name: str, text: str | None, count: int | None = None) -> tuple[float, ...] | None:
    """Read a comma list of numbers.

    Raises:
        BadParameter: Something else, or another count.
    """
    if text is None:
        return None
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or (count is not None and len(found) != count):
        raise typer.BadParameter(
            f"{text!r} is not {count or 'some'} numbers, comma between.", param_hint=f"'{name}'"
        )
    return found

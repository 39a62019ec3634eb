"""A training loop that can be stopped at any step and goes on from its last snapshot."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tiny_omni.muon import Muon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Tensors = Mapping[str, torch.Tensor]

_EMA_FROM = 100
_TABLES = ("embed", "head", "action_proj", "proj_out", "decoder.conv_out")
"""In names of parameters that are looked up, or meet the world outside: AdamW's."""


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Rise over ``warmup`` steps, then fall along a cosine to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    name: str,
    module: torch.nn.Module,
    loss_of: Callable[[int], Tensors],
    *,
    steps: int,
    peak: float,
    work: Path,
    ema_decay: float = 0.998,
    log_every: int = 25,
    save_every: float = 60.0,
) -> dict[str, torch.Tensor]:
    """Minimise the sum of the losses of each step, with Muon and AdamW.

    Args:
        name: Of the stage: its snapshot and its log are ``work/NAME.safetensors`` and ``work/NAME.jsonl``.
        module: What is trained.
        loss_of: From the step's index, which also seeds its data, to its losses.
        steps: How many.
        peak: Learning rate.
        work: Folder.
        ema_decay: Of the moving average of the weights.
        log_every: Steps between lines of the log.
        save_every: Seconds between snapshots.

    Returns:
        The moving average of its parameters.
    """
    work.mkdir(parents=True, exist_ok=True)
    parameters = dict(module.named_parameters())
    matrices = [p for key, p in parameters.items() if _is_matrix(key, p)]
    others = [p for key, p in parameters.items() if not _is_matrix(key, p)]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        Muon(matrices, lr=peak),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.01),
    )
    average = {key: p.detach().clone() for key, p in parameters.items()}
    snapshot, log = work / f"{name}.safetensors", work / f"{name}.jsonl"
    first, seconds, cpu = 0, 0.0, 0.0
    if snapshot.exists():
        first, seconds, cpu = _restore(snapshot, parameters, average, optimizers)
        _rewind(log, first)
    saved = started = time.perf_counter()
    cpu_started = time.process_time()
    means: dict[str, float] = {}
    for step in range(first, steps):
        losses = loss_of(step)
        module.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.step()
        decay = ema_decay if step >= _EMA_FROM else 0.9
        with torch.no_grad():
            for key, p in parameters.items():
                average[key].lerp_(p, 1 - decay)
        for key, value in losses.items():
            means[key] = 0.95 * means.get(key, value.item()) + 0.05 * value.item()
        last = step + 1 == steps
        if (step + 1) % log_every == 0 or last:
            line: dict[str, Any] = {
                "step": step + 1,
                "seconds": round(seconds + time.perf_counter() - started, 1),
                "cpu_seconds": round(cpu + time.process_time() - cpu_started, 1),
                **{key: round(value, 5) for key, value in means.items()},
            }
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if time.perf_counter() - saved >= save_every or last:
            saved = time.perf_counter()
            _save(
                snapshot,
                parameters,
                average,
                optimizers,
                step=step + 1,
                seconds=seconds + time.perf_counter() - started,
                cpu=cpu + time.process_time() - cpu_started,
            )
    return average


def _is_matrix(name: str, p: torch.Tensor) -> bool:
    """Return whether a parameter is one of Muon's: it maps vectors to vectors, inside."""
    return min(len(p), p[0].numel()) > 1 and not any(part in name for part in _TABLES)


def _rewind(log: Path, step: int) -> None:
    """Drop the lines of steps that will be done again."""
    if log.exists():
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def _save(
    path: Path,
    parameters: Tensors,
    average: Tensors,
    optimizers: Sequence[torch.optim.Optimizer],
    **at: float,
) -> None:
    """Write everything that the next step depends on; the data depend on its index alone."""
    tensors = {f"parameters/{key}": p.detach() for key, p in parameters.items()}
    tensors |= {f"average/{key}": p for key, p in average.items()}
    for key, p in parameters.items():
        for optimizer in optimizers:
            for name, value in optimizer.state.get(p, {}).items():
                tensors[f"state/{name}/{key}"] = value
    partial = path.with_suffix(".partial")
    metadata = {name: repr(value) for name, value in at.items()}
    save_file({key: p.contiguous() for key, p in tensors.items()}, partial, metadata)
    partial.replace(path)


def _restore(
    path: Path,
    parameters: Tensors,
    average: Tensors,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[int, float, float]:
    """Read a snapshot; returns its step, its seconds and its seconds of CPU."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for key, p in parameters.items():
            p.copy_(file.get_tensor(f"parameters/{key}"))
            average[key].copy_(file.get_tensor(f"average/{key}"))
        for name in file.keys():  # noqa: SIM118  not a mapping
            kind, _, rest = name.partition("/")
            if kind == "state":
                moment, _, key = rest.partition("/")
                p = parameters[key]
                owner = optimizers[0 if _is_matrix(key, p) else 1]
                owner.state[p][moment] = file.get_tensor(name)
        at = file.metadata()
    return int(at["step"]), float(at["seconds"]), float(at["cpu"])

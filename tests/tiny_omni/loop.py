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

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = Mapping[str, torch.Tensor]

_EMA_FROM = 100
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


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
    """Minimise the sum of the losses of each step.

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
    optimizer = torch.optim.AdamW(
        list(parameters.values()), lr=peak, betas=(0.9, 0.98), weight_decay=0.01
    )
    average = {key: p.detach().clone() for key, p in parameters.items()}
    snapshot, log = work / f"{name}.safetensors", work / f"{name}.jsonl"
    first, seconds, cpu = 0, 0.0, 0.0
    if snapshot.exists():
        first, seconds, cpu = _restore(snapshot, parameters, average, optimizer)
    saved = started = time.perf_counter()
    cpu_started = time.process_time()
    means: dict[str, float] = {}
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        losses = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
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
                optimizer,
                step=step + 1,
                seconds=seconds + time.perf_counter() - started,
                cpu=cpu + time.process_time() - cpu_started,
            )
    return average


def _save(
    path: Path,
    parameters: Tensors,
    average: Tensors,
    optimizer: torch.optim.Optimizer,
    **at: float,
) -> None:
    """Write everything that the next step depends on; the data depend on its index alone."""
    tensors = {f"parameters/{key}": p.detach() for key, p in parameters.items()}
    tensors |= {f"average/{key}": p for key, p in average.items()}
    for key, p in parameters.items():
        tensors |= {f"{name}/{key}": optimizer.state[p][name] for name in _MOMENTS}
    partial = path.with_suffix(".partial")
    metadata = {name: repr(value) for name, value in at.items()}
    save_file({key: p.contiguous() for key, p in tensors.items()}, partial, metadata)
    partial.replace(path)


def _restore(
    path: Path, parameters: Tensors, average: Tensors, optimizer: torch.optim.Optimizer
) -> tuple[int, float, float]:
    """Read a snapshot; returns its step, its seconds and its seconds of CPU."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for key, p in parameters.items():
            p.copy_(file.get_tensor(f"parameters/{key}"))
            average[key].copy_(file.get_tensor(f"average/{key}"))
            optimizer.state[p] = {name: file.get_tensor(f"{name}/{key}") for name in _MOMENTS}
        at = file.metadata()
    return int(at["step"]), float(at["seconds"]), float(at["cpu"])

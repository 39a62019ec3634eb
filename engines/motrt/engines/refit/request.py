"""From what the user names to a recipe: every tensor accounted for before a byte changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from motrt.engines.arguments import as_path
from motrt.engines.checkpoint import open_checkpoint
from motrt.engines.errors import CheckpointError, ConfigError, RefitError
from motrt.engines.refit.lora import Lora, open_lora
from motrt.engines.refit.recipe import Recipe, combine
from motrt.engines.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from motrt.engines.bundle import Bundle
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.store import WeightStore


Loras: TypeAlias = "Lora | str | Path | Sequence[Lora | str | Path]"


def check_request(weights: str | Path | None, loras: Loras, *, restore: bool) -> tuple[Lora, ...]:
    """Refuse a request for nothing, or for two things; return its adapters.

    Raises:
        ConfigError: See above, or an argument is no path.
    """
    items: list[Any] = list(loras) if isinstance(loras, (list, tuple)) else [loras]
    adapters = tuple(item if isinstance(item, Lora) else Lora(item) for item in items)
    asks = weights is not None or bool(adapters)
    if asks is restore:
        raise ConfigError(
            "a refit takes new weights, adapters or both; or it restores",
            got="both" if restore else "neither",
            expected="one of the two",
        )
    if weights is not None:
        as_path("the checkpoint", weights)
    return adapters


def open_request(
    bundle: Bundle,
    weights: str | Path | None = None,
    loras: Loras = (),
    *,
    restore: bool = False,
) -> Recipe:
    """Check new weights against a bundle, by name, shape and type; no weight is read but a LoRA's.

    Args:
        bundle: The bundle; its pristine base is what is changed.
        weights: A checkpoint of the same model, or None for the base's own.
        loras: Adapters; a path alone has scale 1.
        restore: Go back to the base; excludes the other two.

    Raises:
        ConfigError: Nothing is asked for or too much, or an argument is no path.
        RefitError: Weights of another model, missing, foreign or misshapen tensors, or of a type
            that no export takes; an adapter that does not fit.
    """
    given = check_request(weights, loras, restore=restore)
    base = bundle.base().weights()
    source, sources = None, []
    if weights is not None:
        source, record = _open_weights(bundle, weights)
        sources.append(record)
    adapters = [open_lora(lora, base.entries) for lora in given]
    return Recipe(
        base=base,
        source=source,
        updates=combine(adapter.updates for adapter in adapters),
        sources=(*sources, *(adapter.to_dict() for adapter in adapters)),
    )


def _open_weights(bundle: Bundle, weights: str | Path) -> tuple[WeightStore, dict[str, object]]:
    try:
        checkpoint = open_checkpoint(weights)
        store = checkpoint.weights
        hashes = {file: read_header(store.root / file).sha256 for file in store.files}
    except (CheckpointError, ConfigError) as err:
        raise RefitError(
            f"the new weights cannot be used: {err.message}",
            got=err.got,
            expected=err.expected,
            fix=err.fix,
        ) from err
    _check_model(bundle.manifest.model, checkpoint.config)
    entries = bundle.manifest.weights["transformer"]
    lacking = [name for name in entries if name not in store]
    misshapen = [
        f"{name} {list(store.entries[name].shape)} for {list(entry.shape)}"
        for name, entry in entries.items()
        if name in store and store.entries[name].shape != entry.shape
    ]
    if lacking or misshapen:
        raise RefitError(
            "the new weights are not those of the bundle's model",
            got=f"{len(lacking)} tensors missing, {len(misshapen)} misshapen: "
            f"{', '.join((lacking + misshapen)[:4])}",
            expected=f"the {len(entries)} tensors of the manifest",
            fix="Export that checkpoint instead.",
        )
    record: dict[str, object] = {
        "checkpoint": checkpoint.root.resolve().name,
        "header_sha256": hashes,
    }
    return store.subset(set(entries)), record


def _check_model(want: ModelConfig, have: ModelConfig) -> None:
    ours, theirs = want.to_dict(), have.to_dict()
    different = [
        f"{key} {_short(theirs.get(key))} for {_short(value)}"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    if different:
        raise RefitError(
            "the new weights are another model's",
            got=", ".join(different[:4]) or "another config",
            expected="the bundle's own architecture",
            fix="Export that checkpoint instead.",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

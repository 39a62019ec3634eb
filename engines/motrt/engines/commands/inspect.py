"""``motrt inspect``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motrt.engines.bundle import Bundle
from motrt.engines.commands.console import (
    Debug,
    Json,
    Quiet,
    human_bytes,
    print_json,
    print_table,
    stage_bars,
)
from motrt.engines.commands.tables import plain_table
from motrt.engines.inspection import Amount, Inspection, inspect_bundle
from motrt.engines.manifest import GUARDRAIL, Revision
from motrt.engines.memory_estimate import Shapes
from motrt.engines.verification import Verification, verify_bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from motrt.engines.tensors import TensorSpec

HELP = "Show what a bundle holds, what it costs in memory, and whether its weights are sound."
EXAMPLE = "Example: motrt inspect edge.bundle --verify --capacity 8192"

_DEFAULTS = Shapes()
_LAYER = re.compile(r"\.\d+\.")


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to look at.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every tensor, and every pointer of the graphs.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the estimate of memory alone.")
    ] = False,
    batch: Annotated[
        int, typer.Option(min=1, help="Estimate memory for this many sequences at a time.")
    ] = _DEFAULTS.batch,
    context: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that a guidance branch reads.")
    ] = _DEFAULTS.context,
    capacity: Annotated[
        int, typer.Option(min=1, help="Tokens that the reasoner's cache holds.")
    ] = _DEFAULTS.capacity,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Vision tokens; by default those of 189 frames of 320x192."),
    ] = _DEFAULTS.tokens,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Inspect; the program prints what went wrong."""
    opened = Bundle.open(bundle)
    shapes = Shapes(batch=batch, context=context, capacity=capacity, tokens=tokens)
    inspection = inspect_bundle(opened, shapes)
    verification = None
    if verify:
        with stage_bars(quiet=quiet or as_json) as progress:
            verification = verify_bundle(opened, progress=progress)
    if as_json:
        verified = verification.to_dict() if verification is not None else None
        print_json({**inspection.to_dict(), "verification": verified})
        return
    if memory:
        _print_memory(inspection)
        return
    print_table(plain_table("Bundle", ("", ""), _summary(inspection, verification)))
    print_table(
        plain_table(
            "\nWeights",
            ("read by", "tensors", "parameters", "bytes"),
            _weights(inspection),
            numbers=3,
        )
    )
    print_table(plain_table("\nInputs and outputs", ("engine", "", "tensor"), _io(inspection)))
    _print_memory(inspection)
    print_table(plain_table("\nFiles", ("file", "links", "bytes"), _files(inspection), numbers=2))


def _print_memory(inspection: Inspection) -> None:
    at = inspection.memory.shapes
    print_table(
        plain_table(
            f"\nMemory at batch {at.batch}, context {at.context}, capacity {at.capacity}, "
            f"tokens {at.tokens}",
            ("what", "", "bytes"),
            _memory(inspection),
            numbers=1,
        )
    )


def _summary(
    inspection: Inspection, verification: Verification | None
) -> Iterator[tuple[str, str]]:
    manifest, model = inspection.manifest, inspection.manifest.model
    data = inspection.to_dict()
    yield "folder", inspection.path
    yield "contract", f"version {data['contract_version']}"
    yield (
        "graphs",
        f"{manifest.precision.value}, {manifest.lowering} lowering, {manifest.cache.value} cache",
    )
    yield "weight layout", model.weight_layout
    yield "generates", ", ".join(data["modalities"])
    yield (
        "model",
        f"{model.num_hidden_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads}/{model.num_key_value_heads} heads of {model.head_dim}, "
        f"MLP {model.intermediate_size} {model.hidden_act}, vocabulary {model.vocab_size}",
    )
    yield "scheduler", inspection.scheduler or "none"
    yield "weights", _revision(manifest.revision)
    for name, why in manifest.absent.items():
        yield f"without {name}", why
    yield "probe", _outcome(manifest.probe)
    yield "parity", _parity(manifest.parity)
    yield "guardrail", f"{GUARDRAIL}: the checkpoint's safety checker is not in the bundle"
    if verification is not None:
        yield (
            "verified",
            f"verified {verification.tensors} tensors, {verification.nbytes} bytes: all finite",
        )
        for graph, count in verification.graphs.items():
            yield "", f"{graph} reads {count} tensors where the manifest has them"
        if verification.graphs_skipped is not None:
            yield "", f"graphs not checked: {verification.graphs_skipped}"


def _revision(revision: Revision | None) -> str:
    if revision is None:
        return "as exported"
    sources = [
        str(source.get("checkpoint") or f"{source.get('lora')} x {source.get('scale')}")
        for source in revision.record.get("sources", [])
    ]
    return f"revision {revision.id}: {', '.join(sources)}"


def _outcome(probe: dict[str, object]) -> str:
    if not probe:
        return "none recorded"
    reason = probe.get("reason")
    return str(probe.get("status", "unknown")) + (f" ({reason})" if reason else "")


def _parity(parity: dict[str, object] | None) -> str:
    if not parity:
        return "none recorded; motrt validate makes the comparison"
    verdict = {True: "ok", False: "NOT ok"}.get(bool(parity.get("ok")))
    recorded = parity.get("recorded", "at an unrecorded time")
    return f"{verdict}, against {parity.get('against', 'an unrecorded reference')}, {recorded}"


def _weights(inspection: Inspection) -> Iterator[tuple[str, ...]]:
    labels = {
        "host": "host (embedding rows)",
        "reasoner": "reasoner alone",
        "generator": "generator alone",
        "both": "both engines (shared)",
        "other": "nobody known",
    }
    for part, amount in inspection.weights.items():
        if amount.tensors or part == "both":
            yield (labels[part], *_amount(amount))
    for name, component in inspection.components.items():
        for part, amount in component.parts.items():
            yield (f"{name}: {part}", *_amount(amount))


def _amount(amount: Amount) -> tuple[str, str, str]:
    return f"{amount.tensors:,}", f"{amount.parameters:,}", human_bytes(amount.nbytes)


def _io(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    for engine in (inspection.reasoner, inspection.generator):
        for way, specs in (("in", engine.inputs), ("out", engine.outputs)):
            for text in _folded(specs):
                yield engine.name, way, text


def _folded(specs: Iterable[TensorSpec]) -> list[str]:
    """Describe tensors, those of all layers in one line."""
    counts: dict[str, int] = {}
    for spec in specs:
        text = _LAYER.sub(".{i}.", spec.describe())
        counts[text] = counts.get(text, 0) + 1
    return [
        f"{text}  x {count} layers" if ".{i}." in text else text for text, count in counts.items()
    ]


def _memory(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    memory = inspection.memory
    branches = memory.shapes.guidance_branches
    shared = (
        f"of these {human_bytes(memory.shared_weights)} shared" if memory.shared_weights else ""
    )
    others = ", ".join(name for name, c in inspection.components.items() if c.weights.tensors)
    rows = [
        ("embedding table", memory.host_weights, "memory map; only rows in use are read"),
        ("reasoner weights", memory.reasoner_weights, shared),
        ("generator weights", memory.generator_weights, shared),
        ("other weights", memory.other_weights, others),
        ("K/V cache", memory.kv_cache, "2 x layers x KV heads x capacity x head size x batch"),
        ("second key cache", memory.context_key_cache, "extra key norm for the generator"),
        ("context K/V", memory.context, "of one guidance branch"),
        ("context K/V", memory.context_all, f"of {branches} guidance branches"),
        ("latents", memory.latents, "float32, one copy; a solver keeps two to four"),
        ("total", memory.total, "without activations and workspace of the backend"),
    ]
    if memory.shared_weights:
        rows.append(("total", memory.total_one_copy, "with shared weights in memory once"))
    remark = "on ONNX Runtime's CPU, at least; grows with tokens squared"
    rows += [
        ("denoise step", memory.denoise_step, remark),
        ("denoise step", memory.denoise_step_full, "likewise, of 189 frames of 1280x720"),
    ]
    advice = inspection.weights_advice
    for mode, count in (("refit", advice.refit), ("inputs", advice.inputs)):
        suits = f" (suits: {advice.reason})" if mode == advice.recommended else ""
        rows.append(("TensorRT engines", count, f"--weights {mode}{suits}"))
    for what, count, remark in rows:
        if count:
            yield what, remark, human_bytes(count)


def _files(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    for file in inspection.files:
        yield file.path, str(file.links), human_bytes(file.nbytes)
    total = sum(file.nbytes for file in inspection.files)
    yield "total", "", human_bytes(total)
    yield "of which hard-linked to files outside", "", human_bytes(inspection.linked_nbytes)

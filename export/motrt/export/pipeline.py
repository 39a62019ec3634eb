"""Checkpoint in, bundle out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines.arguments import as_path, of_kind
from motrt.engines.atomic import write_atomic
from motrt.engines.bundle import MANIFEST, Bundle, record_small, record_weights
from motrt.engines.bundle_writer import new_bundle
from motrt.engines.checkpoint import (
    FLOATS,
    Checkpoint,
    open_checkpoint,
    open_weights,
    read_json,
)
from motrt.engines.contract import (
    Modality,
    available_modalities,
    check_modalities,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.errors import CheckpointError, ExportError
from motrt.engines.finite import check_finite
from motrt.engines.manifest import FileRecord, Manifest
from motrt.engines.progress import Progress, silent
from motrt.engines.rotary import rotary_axes
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts
from motrt.engines.vae_tensors import vae_weight_table
from motrt.export.graphs.builder import serialize
from motrt.export.graphs.check import check_onnx
from motrt.export.graphs.generator import author_generator
from motrt.export.graphs.lint import require_clean
from motrt.export.graphs.lowering import lowering_named
from motrt.export.graphs.reasoner import author_reasoner
from motrt.export.graphs.vae import author_vae
from motrt.export.probe import run_probe
from motrt.export.result import ExportOptions, ExportResult
from motrt.export.torch_rotary import reference_inv_freq
from motrt.export.weights import (
    WeightPlan,
    check_space,
    place_weights,
    plan_transformer,
)
from motrt.runtime.prompt_templates import PromptTemplates

if TYPE_CHECKING:
    import onnx_ir as ir

    from motrt.engines.contract import EngineContract
    from motrt.engines.store import WeightEntry

# Up to here every value is looked at even if none is cast; beyond, `inspect --verify` does it.
_SCAN_LIMIT_BYTES = 4 << 30
_GRAPH_BYTES = 64 << 20  # generous estimate of everything but weights, for the space check


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    progress: Progress = silent,
) -> ExportResult:
    """Export a checkpoint to a bundle.

    Weights are hard-linked where no cast is needed and streamed into one new file where one is.
    Nothing is left behind unless everything succeeded.

    Args:
        checkpoint: A diffusers pipeline folder, or a folder with ``config.json`` and safetensors.
        output: The bundle to write; must not exist unless ``options.overwrite``.
        options: Choices; all defaults if None.
        progress: Told how far each stage is.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete or holds NaN.
        ConfigError: Its config, or the options, make no sense.
        ExportError: The disk or the file system refuses, or a value overflows float16.
        ContractError: The written graphs fail the lint or the probe (a bug of motrt's).
    """
    options = ExportOptions() if options is None else of_kind(ExportOptions, "options", options)
    checkpoint, output = as_path("the checkpoint", checkpoint), as_path("the output", output)
    started = time.perf_counter()
    lowering = lowering_named(options.lowering)
    source = open_checkpoint(checkpoint)
    _refuse_loss(checkpoint, output)
    modalities = check_modalities(
        source.config,
        available_modalities(source.config) if options.modalities is None else options.modalities,
    )
    plans = {"transformer": _transformer_plan(source, options, modalities)}
    vae = _vae(source)
    if vae is not None:
        plans["vae"] = vae.plan
    scan = sum(plan.source.nbytes for plan in plans.values()) <= _SCAN_LIMIT_BYTES

    with new_bundle(output, overwrite=options.overwrite) as folder:
        if scan:
            _scan(plans, progress)
        needed = _GRAPH_BYTES + sum(
            plan.cast_nbytes + (plan.linked_nbytes if options.copy_weights else 0)
            for plan in plans.values()
        )
        check_space(folder, needed)
        weights = _place(plans, folder, options, progress)
        progress("graphs", 0, 1)
        config, dtype, entries = source.config, options.precision.dtype, weights["transformer"]
        graphs = {
            "reasoner.onnx": (
                author_reasoner(config, entries, dtype, lowering),
                reasoner_contract(config, dtype, lowering.cache),
            ),
            "generator.onnx": (
                author_generator(config, entries, dtype, lowering, modalities),
                generator_contract(config, dtype, modalities),
            ),
        }
        components: dict[str, dict[str, Any]] = {}
        if vae is not None:
            models = author_vae(vae.config, weights["vae"])
            contracts = vae_contracts(vae.config)
            names = {name: f"vae_{name}.onnx" for name in models}
            graphs |= {names[name]: (models[name], contracts[name]) for name in models}
            components["vae"] = {"graphs": names, "config": vae.config.to_dict()}
        sizes = _write_graphs(folder, graphs, weights)
        progress("graphs", 1, 1)
        components |= _copy_components(source, folder)
        manifest = Manifest(
            model=config,
            precision=options.precision,
            lowering=options.lowering,
            cache=lowering.cache,
            modalities=modalities,
            inv_freq=tuple(float(value) for value in reference_inv_freq(config)),
            rotary_axes=rotary_axes(config),
            files=_records(folder),
            weights=weights,
            components=components,
            absent=_absent(source, vae),
            scheduler=_scheduler(source),
            pipeline=source.pipeline,
            prompt_templates=PromptTemplates().to_dict(),
            provenance=_provenance(source, scanned=scan),
        )
        progress("probe", 0, 1)
        probe = run_probe(Bundle(folder, manifest), options.probe)
        progress("probe", 1, 1)
        manifest = dataclasses.replace(manifest, probe=probe)
        write_atomic(folder / MANIFEST, manifest.to_json().encode())
        Bundle.open(folder)
    return ExportResult(
        bundle=output,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        graphs=sizes,
        weights=_weight_report(plans, options),
        absent=manifest.absent,
        probe=probe,
    )


def peak_rss_bytes() -> int:
    """Return the process's peak resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _refuse_loss(checkpoint: Path, output: Path) -> None:
    """Refuse an output whose replacement would take the checkpoint with it."""
    if Path(os.path.realpath(checkpoint)).is_relative_to(os.path.realpath(output)):
        raise ExportError(
            "the output would replace the checkpoint",
            got=output,
            expected="a folder that does not hold the checkpoint",
            fix="Choose another -o.",
        )


@dataclass(frozen=True, slots=True)
class _Vae:
    config: VaeConfig
    plan: WeightPlan


def _vae(source: Checkpoint) -> _Vae | None:
    folder = source.components.get("vae")
    if folder is None:
        return None
    config = VaeConfig.from_dict(read_json(folder / "config.json"))
    store = open_weights(folder)
    if config.z_dim != source.config.latent_channel:
        raise CheckpointError(
            "the VAE and the transformer do not belong together",
            got=f"z_dim {config.z_dim} in vae/config.json",
            expected=f"the transformer's latent_channel, {source.config.latent_channel}",
            fix="Use the vae/ folder of the same checkpoint.",
        )
    table = vae_weight_table(config)
    wrong = sorted(
        set(table) ^ set(store.entries)
        | {n for n, e in store.entries.items() if e.shape != table.get(n) or e.dtype not in FLOATS}
    )
    if wrong:
        raise CheckpointError(
            "the VAE's tensors do not fit its config",
            got=f"{len(wrong)} missing, unexpected, misshapen or not in floating point: "
            f"{', '.join(wrong)}",
            expected=f"the {len(table)} tensors of vae/config.json",
            fix="Use the config.json that belongs to these weights.",
        )
    # Its graphs compute in float32 and cast 16-bit weights on the way in, so nothing is cast here.
    return _Vae(config, WeightPlan("vae", store, {}))


def _transformer_plan(
    source: Checkpoint, options: ExportOptions, modalities: tuple[Modality, ...]
) -> WeightPlan:
    heads = {Modality.SOUND: ("audio_",), Modality.ACTION: ("action_",)}
    unused = tuple(
        prefix for kind, names in heads.items() if kind not in modalities for prefix in names
    )
    names = {name for name in source.weights if not unused or not name.startswith(unused)}
    return plan_transformer(source.weights.subset(names), options.precision)


def _scan(plans: dict[str, WeightPlan], progress: Progress) -> None:
    # Cast tensors are looked at while they are cast.
    stores = [
        plan.source.subset(set(plan.source.entries) - set(plan.casts)) for plan in plans.values()
    ]
    step = _Step("check", sum(store.nbytes for store in stores), progress)
    for store in stores:
        check_finite(store, step)


def _place(
    plans: dict[str, WeightPlan], folder: Path, options: ExportOptions, progress: Progress
) -> dict[str, dict[str, WeightEntry]]:
    step = _Step(
        "weights", sum(plan.cast_nbytes + plan.linked_nbytes for plan in plans.values()), progress
    )
    cast_name = f"model-{options.precision.value}.safetensors"
    linked = sum(plan.linked_nbytes for plan in plans.values())
    return {
        part: place_weights(
            plan,
            folder,
            copy=options.copy_weights,
            cast_name=cast_name,
            advance=step,
            copy_nbytes=linked,
        )
        for part, plan in plans.items()
    }


class _Step:
    """Adds up what a stage reports."""

    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self.stage, self.total, self.progress, self.done = stage, total, progress, 0

    def __call__(self, amount: int) -> None:
        self.done += amount
        self.progress(self.stage, self.done, self.total)


def _write_graphs(
    folder: Path,
    graphs: dict[str, tuple[ir.Model, EngineContract]],
    weights: dict[str, dict[str, WeightEntry]],
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for file, (model, contract) in graphs.items():
        part = "vae" if file.startswith("vae_") else "transformer"
        require_clean(model, contract, weights[part])
        check_onnx(model, contract.name)
        data = serialize(model)
        (folder / file).write_bytes(data)
        sizes[file] = len(data)
    return sizes


def _copy_components(source: Checkpoint, folder: Path) -> dict[str, dict[str, Any]]:
    """Copy the small files that the runtime reads; they are hashed like everything small."""
    components: dict[str, dict[str, Any]] = {}
    for name, target in (("text_tokenizer", "tokenizer"), ("scheduler", "scheduler")):
        if name not in source.components:
            continue
        files = sorted(
            file
            for file in source.components[name].iterdir()
            if file.is_file() and file.suffix in {".json", ".txt", ".jinja", ".model"}
        )
        (folder / target).mkdir()
        for file in files:
            shutil.copyfile(file.resolve(), folder / target / file.name)
        components[target] = {"files": [f"{target}/{file.name}" for file in files]}
    return components


def _records(folder: Path) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            is_weights = path.suffix == ".safetensors"
            records[name] = record_weights(path) if is_weights else record_small(path)
    return records


def _absent(source: Checkpoint, vae: _Vae | None) -> dict[str, str]:
    absent = dict.fromkeys(source.absent, "not in the checkpoint")
    for name in ("sound_tokenizer", "vision_encoder"):
        if name in source.components:
            absent[name] = "in the checkpoint, but this version of motrt does not export it"
    if vae is None:
        absent.setdefault("vae", "not in the checkpoint")
    return absent


def _scheduler(source: Checkpoint) -> dict[str, Any]:
    file = source.components.get("scheduler", source.root) / "scheduler_config.json"
    return read_json(file) if file.is_file() else {}


def _provenance(source: Checkpoint, *, scanned: bool) -> dict[str, Any]:
    return {
        "checkpoint": source.root.resolve().name,
        "checkpoint_dtypes": sorted({e.dtype.label for e in source.weights.entries.values()}),
        "values_checked": scanned,
        "versions": {
            name: _version(name) for name in ("motrt", "onnx", "onnx-ir", "numpy", "torch")
        },
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _weight_report(plans: dict[str, WeightPlan], options: ExportOptions) -> dict[str, int]:
    linked = sum(plan.linked_nbytes for plan in plans.values())
    return {
        "tensors": sum(len(plan.source) for plan in plans.values()),
        "tensor_bytes": sum(plan.nbytes for plan in plans.values()),
        "linked_bytes": 0 if options.copy_weights else linked,
        "copied_bytes": linked if options.copy_weights else 0,
        "cast_bytes": sum(plan.cast_nbytes for plan in plans.values()),
    }

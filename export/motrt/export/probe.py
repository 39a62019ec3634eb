"""The numeric probe at the end of a write: the graphs, run once, against the PyTorch modules.

"It was written" is not "it computes the model". The probe feeds both graphs seeded numbers and
compares with ``torch_reasoner.py`` and ``torch_generator.py`` over the bundle's own weights. What it
saw goes into the manifest, where later builds and refits find it. ``motrt validate`` is the
thorough form, against the public implementations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import (
    Cache,
    EngineContract,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.dtypes import DType
from motrt.engines.errors import ContractError, MissingDependencyError
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.probe_inputs import PAST, SEED, TOKENS, probe_feeds
from motrt.export.graphs.twin import float32_twin_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.export.result import ProbeMode

_LIMIT_BYTES = 1 << 30
# Relative to the output's largest value. Rounding stays near 1e-6; see calibration/parity.
TOLERANCE = 1e-4


def run_probe(bundle: Bundle, mode: ProbeMode) -> dict[str, object]:
    """Run both graphs, as float32 twins where they are 16-bit, and compare.

    Args:
        bundle: A finished bundle; its manifest need not be on disk yet.
        mode: ``auto`` skips models whose float32 weights are over 1 GiB.

    Returns:
        ``status`` (``passed`` or ``skipped``), ``reason``, and what was measured.

    Raises:
        ContractError: An output is not finite or differs from the PyTorch modules.
    """
    elements = sum(int(np.prod(e.shape)) for e in bundle.weights().entries.values())
    if mode == "never":
        return {"status": "skipped", "reason": "--probe never"}
    if mode == "auto" and elements * 4 > _LIMIT_BYTES:
        return {
            "status": "skipped",
            "reason": f"{elements * 4:,} bytes of float32 weights, over the limit of 1 GiB; "
            "--probe always runs it",
        }
    try:
        measured = {**_probe_reasoner(bundle), **_probe_generator(bundle)}
    except MissingDependencyError as err:
        return {"status": "skipped", "reason": err.message}
    narrow = bundle.dtype is not DType.FLOAT32
    return {
        "status": "passed",
        "reason": "equal to the PyTorch modules"
        + (" as float32 twins over the same bytes" if narrow else ""),
        "seed": SEED,
        "tolerance": TOLERANCE,
        "max_relative": max(measured.values()),
        "outputs": measured,
    }


def _probe_reasoner(bundle: Bundle) -> dict[str, float]:
    cache = bundle.manifest.cache
    contract = reasoner_contract(bundle.manifest.model, DType.FLOAT32, cache)
    feeds = probe_feeds(contract)
    outputs = _engine(bundle, contract).run(feeds)
    if cache is Cache.STATIC:
        for name in [name for name in outputs if name.startswith("present.")]:
            outputs[name] = outputs[name][:, :, PAST : PAST + TOKENS]
    return _compare("reasoner", outputs, reasoner_outputs(bundle, feeds))


def _probe_generator(bundle: Bundle) -> dict[str, float]:
    manifest = bundle.manifest
    contract = generator_contract(manifest.model, DType.FLOAT32, manifest.modalities)
    feeds = probe_feeds(contract)
    outputs = _engine(bundle, contract).run(feeds)
    return _compare("generator", outputs, generator_outputs(bundle, feeds))


def reasoner_outputs(bundle: Bundle, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run the PyTorch reasoner over a bundle's weights, in float32.

    Args:
        bundle: The bundle.
        feeds: The probe's, float32 where they are no indices.

    Returns:
        Outputs by name; ``present`` are the new tokens' alone, ``[B, K, S, D]``.
    """
    import torch

    from motrt.export.torch_loading import load_reasoner

    config = bundle.manifest.model
    given = {name: torch.from_numpy(array) for name, array in feeds.items()}
    result = load_reasoner(config, bundle.weights(), torch.float32)(
        given["inputs_embeds"],
        given["rotary_cos"],
        given["rotary_sin"],
        given["attention_bias"],
        given["logit_indices"],
        [
            (
                given[f"past_key_values.{i}.key"][:, :, :PAST],
                given[f"past_key_values.{i}.value"][:, :, :PAST],
            )
            for i in range(config.num_hidden_layers)
        ],
    )
    expected = {"logits": result.logits.numpy()}
    for i, (key, value) in enumerate(result.present):
        expected[f"present.{i}.key"], expected[f"present.{i}.value"] = key.numpy(), value.numpy()
    for i, key in enumerate(result.context_keys):
        expected[f"context.{i}.key"] = key.numpy()
    return expected


def generator_outputs(bundle: Bundle, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run the PyTorch generator over a bundle's weights, in float32, on the probe's feeds."""
    import torch

    from motrt.export.torch_loading import load_generator

    config, modalities = bundle.manifest.model, bundle.manifest.modalities
    given = {name: torch.from_numpy(array) for name, array in feeds.items()}
    context = [
        (given.pop(f"context.{i}.key"), given.pop(f"context.{i}.value"))
        for i in range(config.num_hidden_layers)
    ]
    generator = load_generator(config, bundle.weights(), torch.float32, modalities)
    return {name: a.numpy() for name, a in generator(**given, context=context).items()}


def _engine(bundle: Bundle, contract: EngineContract) -> OnnxRuntimeEngine:
    path = bundle.path(f"{contract.name}.onnx")
    if bundle.dtype is DType.FLOAT32:
        return OnnxRuntimeEngine(contract, path)
    return OnnxRuntimeEngine(contract, float32_twin_of(path, bundle.dtype), folder=bundle.content)


def _compare(
    engine: str, outputs: dict[str, Array], expected: dict[str, Array]
) -> dict[str, float]:
    """Return each output's largest difference relative to the reference's largest value."""
    measured = {}
    for name, want in expected.items():
        have = outputs[name]
        peak = float(np.abs(want).max(initial=0.0))
        gap = float(np.abs(have - want).max(initial=0.0)) / (peak or 1.0)
        if not (np.isfinite(have).all() and np.isfinite(want).all() and gap <= TOLERANCE):
            raise ContractError(
                f"the probe of the {engine} failed at {name}",
                got=f"{gap:.3g} of the largest value"
                if np.isfinite(have).all()
                else "NaN or infinity",
                expected=f"at most {TOLERANCE:g} from the PyTorch modules",
                fix="Check the checkpoint's weights; if they are sound, report a bug of motrt.",
            )
        measured[f"{engine}/{name}"] = gap
    # Layers need no line each: the worst of a kind is what a reader compares.
    worst: dict[str, float] = {}
    for name, gap in measured.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        worst[kind] = max(worst.get(kind, 0.0), gap)
    return worst

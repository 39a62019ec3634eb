"""What decides whether a plan fits: the bundle's part, the machine's part, the build's part."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.contract import CONTRACT_VERSION, MASK_VALUE, Cache, EngineContract
from motrt.engines.plans.graph_file import read_graph
from motrt.engines.plans.profiles import Profile, generator_profiles, reasoner_profiles
from motrt.engines.vae_config import VaeConfig

if TYPE_CHECKING:
    from motrt.engines._tensorrt import Flavour
    from motrt.engines.bundle import Bundle
    from motrt.engines.capabilities import ComputeCapability
    from motrt.engines.plans.options import BuildOptions
    from motrt.engines.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHost:
    """What a plan is built for or is to run on.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        version: Of it.
        capability: Compute capability of the GPU.
        system: Operating system, as ``platform.system()`` has it.
        machine: Processor architecture.
    """

    backend: Flavour
    version: str
    capability: ComputeCapability
    system: str
    machine: str

    @classmethod
    def here(cls, backend: Flavour, version: str, capability: ComputeCapability) -> PlanHost:
        """Return this machine's system and processor with a TensorRT and a GPU."""
        return cls(
            backend=backend,
            version=version,
            capability=capability,
            system=platform.system(),
            machine=platform.machine(),
        )

    @property
    def target(self) -> str:
        """The name of the plan's folder, such as ``sm89``."""
        return "sm{}{}".format(*self.capability)

    @property
    def folder(self) -> str:
        """The plan's folder in a bundle."""
        return f"plans/{self.backend}-{self.version}/{self.target}"

    def to_dict(self) -> dict[str, Any]:
        """Return the machine's part of an identity."""
        return {
            "backend": {"name": self.backend, "version": self.version},
            "capability": list(self.capability),
            "system": self.system,
            "machine": self.machine,
        }


def bundle_identity(bundle: Bundle) -> dict[str, Any]:
    """Return the bundle's part: all that must not change under a plan.

    The values of weights are not in it: a stripped plan holds none.
    """
    manifest = bundle.manifest
    rotary = json.dumps([manifest.inv_freq, manifest.rotary_axes]).encode()
    return {
        "contract_version": CONTRACT_VERSION,
        "lowering": manifest.lowering,
        "cache": manifest.cache.value,
        "precision": manifest.precision.value,
        "modalities": [modality.value for modality in manifest.modalities],
        "mask_value": MASK_VALUE,
        "rotary_sha256": hashlib.sha256(rotary).hexdigest(),
        "engines": {
            "reasoner": _engine(bundle, bundle.reasoner_contract()),
            "generator": _engine(bundle, bundle.generator_contract()),
        },
    }


def plan_identity(
    bundle: Bundle,
    host: PlanHost,
    options: BuildOptions,
    *,
    with_values: bool,
    workspace_bytes: int | None,
    optimization_level: int | None,
) -> dict[str, Any]:
    """Return the whole identity of the plan that a build with these options makes."""
    identity = {**bundle_identity(bundle), **host.to_dict()}
    for engine, profiles in plan_profiles(bundle, options).items():
        identity["engines"][engine]["profiles"] = [profile.to_dict() for profile in profiles]
    identity["weights"] = {"mode": options.weights, "stripped": True}
    identity["builder"] = {
        "strongly_typed": True,
        "tf32": False,
        "refit_flags": ["REFIT_INDIVIDUAL", "STRIP_PLAN"] if options.weights == "refit" else [],
        "with_values": with_values,
        "decomposed_attention": decomposes(bundle, options),
        "workspace_bytes": workspace_bytes,
        "optimization_level": optimization_level,
        "hardware_compatibility": "none",
        "version_compatible": False,
        "plugins": [],
    }
    return identity


def decomposes(bundle: Bundle, options: BuildOptions) -> bool:
    """Whether attention may fall apart: by wish, and in float32, for which no kernel fuses it."""
    return options.allow_decomposed_attention or bundle.manifest.precision.value == "fp32"


def plan_profiles(bundle: Bundle, options: BuildOptions) -> dict[str, tuple[Profile, ...]]:
    """Return the optimization profiles by engine."""
    manifest = bundle.manifest
    config = manifest.components.get("vae", {}).get("config")
    vae = VaeConfig.from_dict(config) if config else None
    return {
        "reasoner": reasoner_profiles(options.shapes, manifest.cache),
        "generator": generator_profiles(options.shapes, manifest.modalities, manifest.model, vae),
    }


def _engine(bundle: Bundle, contract: EngineContract) -> dict[str, Any]:
    graph = read_graph(bundle.path(f"{contract.name}.onnx").read_bytes())
    static = bundle.manifest.cache is Cache.STATIC and contract.name == "reasoner"
    return {
        "graph_sha256": graph.sha256,
        "opset": graph.opset,
        "inputs": [_spec(spec) for spec in contract.inputs],
        "outputs": [_spec(spec) for spec in contract.outputs],
        "aliases": {
            spec.name: spec.name.replace("present.", "past_key_values.", 1)
            for spec in contract.outputs
            if static and spec.name.startswith("present.")
        },
        "weights": [_spec(spec) for spec in graph.weights],
    }


def _spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype.label, list(spec.shape)]

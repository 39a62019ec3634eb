"""From a plan that is vouched for to an engine that is what the contract says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines._tensorrt import data_type, knows_aliases
from motrt.engines.errors import ExecutionError, PlanError
from motrt.engines.plans.check import check_plan, read_engine, read_plan

if TYPE_CHECKING:
    from motrt.engines.bundle import Bundle
    from motrt.engines.contract import EngineContract
    from motrt.engines.plans.profiles import Profile
    from motrt.engines.plans.record import PlanRecord
    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensors import TensorSpec

_REPORT = "Build the plan again with motrt build; if it comes out the same, report it."


@dataclass(frozen=True, slots=True)
class Loaded:
    """A deserialized engine; without weights until somebody gives it some.

    Attributes:
        contract: What it takes and gives.
        engine: TensorRT's ``ICudaEngine``.
        profiles: Its optimization profiles, in order.
        aliases: Output → input pairs that share an address.
        weight_names: Its refittable weights, or the inputs that are weights.
    """

    contract: EngineContract
    engine: Any
    profiles: tuple[Profile, ...]
    aliases: dict[str, str]
    weight_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """``reasoner`` or ``generator``."""
        return self.contract.name


def open_plan(bundle: Bundle, device: Device) -> PlanRecord:
    """Return the record of the bundle's plan for this machine.

    Raises:
        PlanError: There is none, or it is not the one that the bundle vouches for.
        ForeignPlanError: There are plans, but for other machines.
        StalePlanError: It was built from other graphs.
    """
    record = read_plan(bundle, device.host)
    check_plan(record, bundle, device.host)
    return record


def load_engine(device: Device, bundle: Bundle, record: PlanRecord, name: str) -> Loaded:
    """Deserialize one engine and hold it to the contract.

    Args:
        device: Where.
        bundle: Whose plan.
        record: What :func:`open_plan` returned.
        name: ``reasoner`` or ``generator``.

    Raises:
        ExecutionError: TensorRT does not take it.
        PlanError: It is not what ``plan.json`` or the contract say.
    """
    plan = read_engine(bundle, record, device.host, name)
    engine = device.runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise device.refused(
            f"TensorRT does not load the {name}'s plan", "Build it on this machine: motrt build."
        )
    contract = bundle.reasoner_contract() if name == "reasoner" else bundle.generator_contract()
    loaded = Loaded(
        contract, engine, record.profiles(name), record.aliases(name), record.weight_names(name)
    )
    _check(device, loaded, record.weights_mode, bundle)
    return loaded


def _check(device: Device, loaded: Loaded, mode: str, bundle: Bundle) -> None:
    engine, contract, trt = loaded.engine, loaded.contract, device.trt
    inputs = {spec.name: spec for spec in contract.inputs}
    outputs = {spec.name: spec for spec in contract.outputs}
    entries = bundle.weights().entries
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    weights = set(loaded.weight_names) if mode == "inputs" else set()
    wanted = inputs.keys() | outputs.keys() | weights
    if found != wanted:
        raise _foreign(
            loaded,
            "other inputs and outputs",
            f"missing {sorted(wanted - found)[:3]}, unknown {sorted(found - wanted)[:3]}",
            "the contract's",
        )
    for name in sorted(wanted):
        spec = inputs.get(name) or outputs.get(name)
        mode_wanted = trt.TensorIOMode.OUTPUT if name in outputs else trt.TensorIOMode.INPUT
        dtype = entries[name].dtype if spec is None else spec.dtype
        have = engine.get_tensor_dtype(name)
        if have != data_type(trt, dtype) or engine.get_tensor_mode(name) != mode_wanted:
            raise _foreign(loaded, f"another {name}", str(have), dtype.label)
        # Sizes are given with set_input_shape: no tensor's value may be one.
        on_device = engine.get_tensor_location(name) == trt.TensorLocation.DEVICE
        if not on_device or engine.is_shape_inference_io(name):
            raise _foreign(loaded, f"{name} in the host's memory", "HOST", "DEVICE")
    if engine.num_optimization_profiles != len(loaded.profiles):
        raise _foreign(
            loaded, "other profiles", engine.num_optimization_profiles, len(loaded.profiles)
        )
    _check_aliases(device, loaded, tuple(contract.outputs))
    if mode == "refit" and not engine.refittable:
        raise _foreign(loaded, "weights that cannot be refitted", "refittable False", "True")


def _check_aliases(device: Device, loaded: Loaded, outputs: tuple[TensorSpec, ...]) -> None:
    if not knows_aliases(device.trt):
        if loaded.aliases:
            raise ExecutionError(
                "this TensorRT does not say which outputs are written in place",
                got=f"TensorRT {device.host.version}",
                expected="10.15 or newer",
                fix="Export the checkpoint with --lowering portable.",
            )
        return
    for spec in outputs:
        have = loaded.engine.get_aliased_input_tensor(spec.name) or None
        if have != loaded.aliases.get(spec.name):
            raise _foreign(
                loaded,
                f"another place for {spec.name}",
                have or "memory of its own",
                loaded.aliases.get(spec.name, "memory of its own"),
            )


def _foreign(loaded: Loaded, what: str, got: object, expected: object) -> PlanError:
    return PlanError(
        f"the {loaded.name}'s engine has {what} than its plan.json says"
        if what.startswith(("other", "another"))
        else f"the {loaded.name}'s engine has {what}",
        got=got,
        expected=expected,
        fix=_REPORT,
        fields=[f"engines.{loaded.name}"],
    )

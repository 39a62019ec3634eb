"""One run on plain arrays, for the probe of a refit and for comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.contract import MASK_VALUE
from motrt.engines.errors import ExecutionError
from motrt.engines.tensorrt_backend.execution import Execution, choose_profile
from motrt.engines.tensors import check_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motrt.engines.tensorrt_backend.device import Device
    from motrt.engines.tensorrt_backend.loaded import Loaded
    from motrt.engines.tensors import Array


def run_once(
    device: Device, loaded: Loaded, weights: Mapping[str, int], feeds: Mapping[str, Array]
) -> dict[str, Array] | None:
    """Run an engine in a context of its own.

    A static cache that is smaller than the plan's is padded for the run, and cut again.

    Args:
        device: Where.
        loaded: The engine, with its weights.
        weights: Addresses of inputs that are weights.
        feeds: An array for each input of the contract.

    Returns:
        An array for each output, or None if no profile takes these sizes.

    Raises:
        ContractError: A feed is missing, unknown, or of the wrong type or shape.
        ExecutionError: TensorRT refused.
    """
    contract = loaded.contract
    small = check_arrays(contract.inputs, feeds, engine=contract.name)
    whole = dict(small)
    if "capacity" in small:
        whole["capacity"] = loaded.profiles[0].dims["capacity"][2]
    try:
        profile = choose_profile(contract.name, loaded.profiles, whole)
    except ExecutionError:
        return None
    execution = Execution(device, loaded, profile, weights, uses_graph=False)
    arrays = {
        spec.name: _padded(spec.name, feeds[spec.name], spec.shape, small, whole)
        for spec in contract.inputs
    }
    outputs = {spec: spec.sizes(whole) for spec in contract.outputs}
    with device.arena.used_by(contract.name), device.cuda.drained():
        addresses = {name: execution.put(name, array) for name, array in arrays.items()}
        for spec, shape in outputs.items():
            nbytes = spec.nbytes(shape)
            source = loaded.aliases.get(spec.name, spec.name)
            addresses[spec.name] = execution.buffer(source, nbytes).address
        execution.run({name: a.shape for name, a in arrays.items()}, addresses, outputs)
        fetched = {
            spec: execution.fetch(loaded.aliases.get(spec.name, spec.name), spec.nbytes(shape))
            for spec, shape in outputs.items()
        }
    results: dict[str, Array] = {}
    for spec, host in fetched.items():
        array = host.read(outputs[spec], spec.dtype.numpy)
        crop = tuple(slice(small[d]) if isinstance(d, str) else slice(None) for d in spec.shape)
        results[spec.name] = np.ascontiguousarray(array[crop])
    return results


def _padded(
    name: str,
    array: Array,
    dims: tuple[int | str, ...],
    small: Mapping[str, int],
    whole: Mapping[str, int],
) -> Array:
    missing = [(0, whole[d] - small[d] if isinstance(d, str) else 0) for d in dims]
    if not any(after for _, after in missing):
        return np.ascontiguousarray(array)
    fill = MASK_VALUE if name == "attention_bias" else 0.0
    return np.pad(array, missing, constant_values=array.dtype.type(fill))

"""Public model classes filled from safetensors: no random initialization, no pickle, nothing left over.

A model is constructed on torch's meta device and its parameters are assigned one by one, each rounded to the
weights dtype and then converted to the compute dtype.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from motrt.calibration.reference.checkpoint import (
    TensorFiles,
    component_folder,
    load_config,
)
from motrt.calibration.reference.errors import CheckpointError, ReferenceTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from motrt.calibration.reference.checkpoint import TensorInfo

# Generator halves of a layer, with the reasoner's name for the same tensor in a `shared` checkpoint.
_GENERATOR_HALVES = {
    "add_q_proj": "to_q",
    "add_k_proj": "to_k",
    "add_v_proj": "to_v",
    "to_add_out": "to_out",
    "norm_added_q": "norm_q",
    "norm_added_k": "norm_k",
}
_GENERATOR_HEADS = ("proj_in", "proj_out", "time_embedder", "audio_", "action_")


def load_transformer(
    checkpoint: Path,
    *,
    weights_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    needs_generator: bool,
) -> Any:
    """Build ``diffusers.Cosmos3OmniTransformer`` from ``checkpoint``.

    A ``shared`` checkpoint holds one set of layer weights; both halves of the model then use the same memory.
    Modules in the class's ``_keep_in_fp32_modules`` stay float32 and are never rounded, as diffusers loads them.

    Args:
        checkpoint: A diffusers layout, a bare transformer folder or a ``shared`` folder.
        weights_dtype: Every other weight is rounded to this dtype first.
        compute_dtype: The dtype of the model's parameters.
        needs_generator: False fills the generator half with zeros that take no memory.

    Raises:
        CheckpointError: Tensors are missing, unexpected or misshapen.
        ReferenceTooLarge: The weights do not fit into free memory.
    """
    from diffusers import Cosmos3OmniTransformer

    folder = component_folder(checkpoint, "transformer")
    config = load_config(folder)
    layout = config.pop("weight_layout", "separate")
    if layout not in {"separate", "shared"}:
        raise CheckpointError(
            f"{folder} has weight_layout {layout!r}; expected separate or shared"
        )
    with torch.device("meta"):
        model = Cosmos3OmniTransformer.from_config(config)
    # inv_freq is no parameter and no file holds it: only its constructor knows the values.
    model.rotary_emb = type(model.rotary_emb)(
        head_dim=model.config.head_dim,
        rope_theta=model.config.rope_theta,
        rope_axes_dim=model.config.rope_axes_dim,
    )
    kept = set(model._keep_in_fp32_modules or ())

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if kept & set(name.split(".")):
            return tensor.to(torch.float32)
        return tensor.to(weights_dtype).to(compute_dtype)

    fill_from_files(
        model,
        folder,
        convert=convert,
        compute_dtype=compute_dtype,
        source_name=_shared_source if layout == "shared" else str,
        is_unused=_is_unused if not needs_generator else _never,
    )
    return model.eval()


def fill_from_files(
    model: torch.nn.Module,
    folder: Path,
    *,
    convert: Callable[[str, torch.Tensor], torch.Tensor],
    compute_dtype: torch.dtype,
    source_name: Callable[[str], str] = str,
    is_unused: Callable[[str], bool] = lambda _: False,
) -> None:
    """Assign every parameter of ``model``, which is on the meta device, from the files of ``folder``.

    Args:
        model: The model to fill.
        folder: Holds ``diffusion_pytorch_model*.safetensors`` or ``model*.safetensors``.
        convert: Gets a name and the tensor of the file, returns the parameter's data.
        compute_dtype: What most of ``convert`` returns; only used to estimate memory.
        source_name: Maps a parameter's name to the tensor of the file that fills it.
        is_unused: Parameters for which it is true become zeros without memory of their own.

    Raises:
        CheckpointError: Tensors are missing, unexpected or misshapen.
        ReferenceTooLarge: The weights do not fit into free memory.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with TensorFiles(folder) as files:
        sources = {name: source_name(name) for name in wanted}
        _check_names(folder, wanted, sources, files.tensors)
        read = {source for name, source in sources.items() if not is_unused(name)}
        require_memory([files.tensors[name] for name in read], compute_dtype)
        cache: dict[str, torch.Tensor] = {}
        for name, source in sources.items():
            if is_unused(name):
                value = torch.zeros((), dtype=compute_dtype).expand(wanted[name])
            else:
                if source not in cache:
                    cache[source] = convert(name, files.read(source))
                value = cache[source]
            _set_parameter(model, name, value)
    left = [name for name, tensor in _tensors(model).items() if tensor.is_meta]
    if left:
        raise CheckpointError(
            f"{type(model).__name__} has values that no weight file holds: {left[:5]}"
        )


def require_memory(
    tensors: list[TensorInfo], compute_dtype: torch.dtype, available: int | None = None
) -> None:
    """Refuse weights that free memory cannot hold in ``compute_dtype``.

    Args:
        tensors: What will be held at the same time.
        compute_dtype: The dtype in which it is held.
        available: Free bytes; read from ``/proc/meminfo`` if None, unchecked where that does not exist.

    Raises:
        ReferenceTooLarge: They do not fit.
    """
    if available is None:
        available = available_memory()
    if available is None or not tensors:
        return
    sizes = [tensor.num_elements * compute_dtype.itemsize for tensor in tensors]
    # The largest tensor exists three times while it is converted: file, rounded, converted.
    needed = sum(sizes) + 2 * max(sizes)
    if needed > available:
        raise ReferenceTooLarge(
            f"the reference needs {needed / 2**30:.1f} GiB for its weights in {compute_dtype}; "
            f"{available / 2**30:.1f} GiB are available"
        )


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the kernel's estimate of free memory in bytes, or None where there is none."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None


def _check_names(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, str],
    found: Mapping[str, TensorInfo],
) -> None:
    missing = sorted({source for source in sources.values() if source not in found})
    unexpected = sorted(found.keys() - set(sources.values()))
    misshapen = [
        f"{source} {list(found[source].shape)} instead of {list(wanted[name])}"
        for name, source in sources.items()
        if source in found and found[source].shape != wanted[name]
    ]
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"the tensors in {folder} do not match its config.json: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}, {len(misshapen)} misshapen {misshapen[:5]}"
        )


def _set_parameter(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(value, requires_grad=False)
    model.get_submodule(owner).register_parameter(leaf, parameter)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _shared_source(name: str) -> str:
    parts = name.replace("_moe_gen", "").split(".")
    return ".".join(_GENERATOR_HALVES.get(part, part) for part in parts)


def _is_unused(name: str) -> bool:
    return (
        "_moe_gen" in name
        or name.startswith(_GENERATOR_HEADS)
        or not _GENERATOR_HALVES.keys().isdisjoint(name.split("."))
    )


def _never(_: str) -> bool:
    return False

"""Rank and alpha of an adapter: PEFT's ``adapter_config.json``, or the same in a file's metadata."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from motrt.engines.errors import RefitError
from motrt.engines.refit.lora_names import unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Settings under which PEFT computes something else than W + alpha / r · B A, or starts from another
# W than the checkpoint's; by what they must be for a plain LoRA.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_VARIANTS = {"use_dora": "DoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA"}
_MAX_RANK = 1 << 20
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a config says about each module.

    Attributes:
        rank: ``r``.
        alpha: ``lora_alpha``.
        targets: Names that modules end in, or None where a pattern or nothing is given.
        is_rank_stabilized: Whether the update is scaled by 1 / √r instead of 1 / r.
        ranks: Other ranks, by ends of module names.
        alphas: Other alphas, likewise.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    is_rank_stabilized: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return _by_pattern(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def check_targets(self, modules: Iterable[str], file: str) -> None:
        """Refuse a file that has not the modules that its config names.

        Raises:
            RefitError: A target without tensors, or tensors of no target.
        """
        if self.targets is None:
            return
        found = list(modules)
        idle = [t for t in self.targets if not any(_ends_in(module, t) for module in found)]
        strays = [m for m in found if not any(_ends_in(m, t) for t in self.targets)]
        if idle or strays:
            raise RefitError(
                f"the tensors of {file} are not those of its target_modules",
                got=f"targets without tensors: {', '.join(idle[:4]) or 'none'}; "
                f"tensors of other modules: {', '.join(strays[:4]) or 'none'}",
                expected=f"modules that end in {', '.join(self.targets[:8])}",
                fix="Use the adapter_config.json that belongs to this file.",
            )


def read_adapter_config(data: Mapping[str, Any], file: str) -> AdapterConfig:
    """Read a LoraConfig's JSON.

    Raises:
        RefitError: A value of the wrong kind, or a setting that makes it another method than LoRA.
    """
    for key, value in data.items():
        # A variant of LoRA announces itself by a switch, or by a config of its own.
        is_switch = key.startswith("use_") and key != "use_rslora"
        is_variant = is_switch or (key.endswith("_config") and key != "eva_config")
        if (value and is_variant) or (key in _PLAIN and value not in _PLAIN[key]):
            raise unsupported(file, _VARIANTS.get(key, key), f"{key} = {value!r}")
    targets = data.get("target_modules")
    is_list = isinstance(targets, list) and all(isinstance(item, str) for item in targets)
    if not is_list and not isinstance(targets, (str, type(None))):
        raise _bad(file, "target_modules", targets, "a list of names")
    rank = _rank(file, "r", data.get("r"))
    stabilized = data.get("use_rslora", False)
    if not isinstance(stabilized, bool):
        raise _bad(file, "use_rslora", stabilized, "true or false")
    return AdapterConfig(
        rank=rank,
        alpha=_alpha(file, "lora_alpha", data.get("lora_alpha")),
        # A string is a regular expression (or "all-linear"): a stranger's are not run.
        targets=tuple(targets) if is_list and targets else None,
        is_rank_stabilized=stabilized,
        ranks={k: _rank(file, k, v) for k, v in _patterns(file, data, "rank_pattern").items()},
        alphas={k: _alpha(file, k, v) for k, v in _patterns(file, data, "alpha_pattern").items()},
    )


def config_of_metadata(metadata: Mapping[str, str], file: str) -> AdapterConfig | None:
    """Read the config that diffusers leaves in a safetensors file's metadata, if it is there.

    Raises:
        RefitError: It is there and makes no sense.
    """
    text = metadata.get("lora_adapter_metadata")
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise _bad(file, "lora_adapter_metadata", err, "a JSON object") from err
    if not isinstance(data, dict):
        raise _bad(file, "lora_adapter_metadata", type(data).__name__, "a JSON object")
    if "r" not in data:  # a pipeline's file says which component each key is of
        prefix = "transformer."
        others = sorted({key.partition(".")[0] for key in data if not key.startswith(prefix)})
        if others:
            raise unsupported(file, f"LoRA of other components: {', '.join(others[:4])}", "meta")
        data = {key.removeprefix(prefix): value for key, value in data.items()}
    return read_adapter_config(data, file)


def _patterns(file: str, data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise _bad(file, key, value, "an object of module → number")
    for name in value:
        # PEFT takes them for regular expressions; names, with or without ^, are what tools write.
        if not name.removeprefix("^").replace(".", "").replace("_", "").isalnum():
            raise _bad(file, key, name, "names of modules, no regular expressions")
    return value


def _by_pattern(patterns: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return value
    return default


def _ends_in(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _rank(file: str, key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise _bad(file, f"the rank {key}", value, "a whole number from 1 on")
    return value


def _alpha(file: str, key: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(float(value)):  # type: ignore[arg-type]  # a number
        raise _bad(file, f"the alpha {key}", value, "a finite number")
    return float(value)  # type: ignore[arg-type]  # see above


def _bad(file: str, key: str, got: object, expected: str) -> RefitError:
    return RefitError(
        f"{file}: {key} makes no sense in an adapter's config",
        got=repr(got),
        expected=expected,
        fix="Use the adapter_config.json that belongs to this file.",
    )

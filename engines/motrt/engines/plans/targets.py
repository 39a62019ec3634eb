"""The GPUs that plans can be built for, the presets, and what each of them cannot have.

Tables and refusals; a refusal says why before anything is started. Sources: ``capabilities`` for
the precisions, NVIDIA's JetPack pages for what comes with a board.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motrt.engines.capabilities import (
    ComputeCapability,
    gpu_precisions,
    lowering_fit,
    rtx_refusal,
)
from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.engines._tensorrt import Flavour
    from motrt.engines.host import Gpu
    from motrt.engines.jetson import Jetson

_SM = re.compile(r"sm(\d{2,3})")
# Compute capabilities that NVIDIA has released and TensorRT 10 and later know.
_KNOWN: tuple[ComputeCapability, ...] = (
    (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip
_RTX_SERIES: tuple[ComputeCapability, ...] = ((8, 6), (8, 9), (12, 0))  # GeForce 30, 40, 50
_DATACENTER: tuple[ComputeCapability, ...] = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A kind of machine, and what a build for it is given.

    Attributes:
        backend: The TensorRT of that machine.
        capabilities: Its GPUs.
        lowering: What the bundle must have been exported with.
        version: Prefix of the TensorRT version that comes with it; empty for any.
        jetpack: Of a board, or None.
        soc: What the board's model name says, or None.
        workspace_mib: Most scratch memory of a tactic; None: TensorRT's own limit.
        optimization_level: TensorRT's; None: its default.
        precisions: What may run there, of all that motrt knows of.
        why: The reason for these.
    """

    backend: Flavour
    capabilities: tuple[ComputeCapability, ...]
    lowering: str
    version: str = ""
    jetpack: str | None = None
    soc: str | None = None
    workspace_mib: int | None = None
    optimization_level: int | None = None
    precisions: tuple[str, ...] = ()
    why: str

    @property
    def is_board(self) -> bool:
        """Whether it is a Jetson."""
        return self.soc is not None


_ORIN = ("fp32", "fp16", "bf16", "int8", "int4")
_THOR = (*_ORIN, "fp8", "nvfp4")
_ALL = _THOR  # narrowed by the compute capability

PRESETS: dict[str, Preset] = {
    "jetson-orin-jp6": Preset(
        backend="tensorrt",
        capabilities=((8, 7),),
        lowering="portable",
        version="10.3",
        jetpack="6",
        soc="Orin",
        workspace_mib=1024,
        optimization_level=2,
        precisions=_ORIN,
        why="TensorRT 10.3 imports no Attention; builder and model share the board's memory",
    ),
    "jetson-thor-jp70": Preset(
        backend="tensorrt",
        capabilities=((11, 0),),
        lowering="portable",
        version="10.13",
        jetpack="7",
        soc="Thor",
        workspace_mib=4096,
        optimization_level=3,
        precisions=_THOR,
        why="TensorRT 10.13 imports no Attention; builder and model share the board's memory",
    ),
    "jetson-orin-jp72": Preset(
        backend="tensorrt",
        capabilities=((8, 7),),
        lowering="native",
        version="10.16",
        jetpack="7.2",
        soc="Orin",
        workspace_mib=1024,
        optimization_level=2,
        precisions=_ORIN,
        why="builder and model share the board's memory",
    ),
    "jetson-thor-jp72": Preset(
        backend="tensorrt",
        capabilities=((11, 0),),
        lowering="native",
        version="10.16",
        jetpack="7.2",
        soc="Thor",
        workspace_mib=4096,
        optimization_level=3,
        precisions=_THOR,
        why="builder and model share the board's memory",
    ),
    "rtx": Preset(
        backend="tensorrt-rtx",
        capabilities=_RTX_SERIES,
        lowering="native",
        precisions=_ALL,
        why="GeForce RTX 30, 40 and 50; built ahead of time, on any machine",
    ),
    "datacenter": Preset(
        backend="tensorrt",
        capabilities=_DATACENTER,
        lowering="native",
        precisions=_ALL,
        why="the GPU's own memory is large: no limits; a GPU of its own kind must build it",
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture that a plan is built for."""

    capability: ComputeCapability
    preset: str | None = None

    @property
    def name(self) -> str:
        """Such as ``sm89``: the folder of its plans, and the suffix of TensorRT's own name."""
        return "sm{}{}".format(*self.capability)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The preset's workspace in MiB and its optimization level."""
        if self.preset is None:
            return None, None
        return PRESETS[self.preset].workspace_mib, PRESETS[self.preset].optimization_level


@dataclass(frozen=True, slots=True)
class Builder:
    """The machine that is to build.

    Attributes:
        gpus: Its GPUs.
        jetson: The board, if it is one.
    """

    gpus: tuple[Gpu, ...]
    jetson: Jetson | None

    @property
    def capabilities(self) -> tuple[ComputeCapability, ...]:
        """Of its GPUs, the first one's first."""
        own = self.jetson.compute_capability if self.jetson else None
        found = [gpu.compute_capability or own for gpu in self.gpus] or [own]
        return tuple(dict.fromkeys(each for each in found if each is not None))


def backend_of(words: Sequence[str], backend: Flavour | None) -> Flavour:
    """Return the backend that is asked for, in so many words or by a preset.

    Raises:
        ConfigError: None is, or two are.
    """
    asked = {PRESETS[word].backend for word in words if word in PRESETS}
    asked |= {backend} if backend is not None else set()
    if len(asked) == 1:
        return asked.pop()
    raise ConfigError(
        "the targets do not say which TensorRT is to build",
        got=", ".join(sorted(asked)) or "no --backend",
        expected="one of tensorrt, tensorrt-rtx",
        fix="Pass --backend, and presets of one backend at a time.",
    )


def resolve_targets(
    words: Sequence[str], backend: Flavour, builder: Builder, command: str
) -> tuple[Target, ...]:
    """Return the architectures that a list of targets names.

    Args:
        words: ``current``, ``sm89`` and the like, names of presets.
        backend: The TensorRT that is to build.
        builder: The machine.
        command: The command line without ``--target``, for messages.

    Raises:
        ConfigError: A name is unknown, or this machine or this TensorRT cannot build for it.
    """
    found: dict[ComputeCapability, Target] = {}
    for word in words:
        if word in PRESETS:
            capabilities = _of_preset(word, builder, command)
        elif word == "current":
            capabilities = _current(backend, builder)
        else:
            capabilities = (_of_name(word),)
        for capability in capabilities:
            _check_buildable(capability, backend, builder, command)
            found.setdefault(capability, Target(capability, word if word in PRESETS else None))
    if not found:
        raise ConfigError("no target", got="an empty list", expected=_expected())
    return tuple(found.values())


def check_bundle_fits(
    target: Target, backend: Flavour, version: str, precision: str, lowering: str
) -> None:
    """Refuse what a target cannot run.

    Raises:
        ConfigError: Its hardware lacks the precision, or its TensorRT the operators.
    """
    preset = PRESETS[target.preset] if target.preset is not None else None
    fits = {fit.precision: fit for fit in gpu_precisions(target.name, target.capability)}
    allowed = [name for name, fit in fits.items() if fit.fits]
    if preset is not None:
        allowed = [name for name in allowed if name in preset.precisions]
    if precision not in allowed:
        why = fits[precision].reason if precision in fits else "nobody knows this precision"
        raise ConfigError(
            f"{target.preset or target.name} does not run {precision}",
            got=why or "it is not in the preset's table",
            expected=f"one of {', '.join(allowed)}",
            fix="Export the checkpoint in one of these precisions.",
        )
    if preset is not None and precision != "fp32" and lowering != preset.lowering:
        raise ConfigError(
            f"{target.preset} runs the {preset.lowering} lowering",
            got=f"a bundle of the {lowering} lowering",
            expected=f"{preset.lowering}: {preset.why}",
            fix=f"Export with --lowering {preset.lowering}, or build with --target {target.name}.",
        )
    since = lowering_fit(backend, version)
    if (
        preset is not None
        and preset.version
        and not f"{version}.".startswith(f"{preset.version}.")
    ):
        raise ConfigError(
            f"{target.preset} comes with another TensorRT",
            got=version,
            expected=f"{preset.version}.x",
            fix=f"Build with --target {target.name} if this version is meant.",
        )
    if since.lowering == "portable" and lowering == "native":
        raise ConfigError(
            f"{backend} {version} does not import the native lowering",
            got=since.reason,
            expected="a bundle of the portable lowering",
            fix="Export the checkpoint with --lowering portable.",
        )
    if precision == "fp32" and lowering == "native":
        # The generator's query blocks make the number of heads dynamic, which the parser refuses,
        # and no TensorRT has a fused kernel for float32.
        raise ConfigError(
            "a float32 build needs attention in parts",
            got="the native lowering",
            expected="the portable lowering, whose attention is plain operators",
            fix="Export with --precision fp32 --lowering portable, or with fp16 or bf16.",
        )


def _of_preset(word: str, builder: Builder, command: str) -> tuple[ComputeCapability, ...]:
    preset = PRESETS[word]
    if not preset.is_board:
        if preset.backend == "tensorrt-rtx":
            return preset.capabilities
        here = tuple(each for each in builder.capabilities if each in preset.capabilities)
        if not here:
            raise _build_there(word, "a GPU of a datacenter", builder, command)
        return here[:1]
    board = builder.jetson
    wanted = f"a Jetson {preset.soc} with JetPack {preset.jetpack}"
    if board is None or preset.soc is None or preset.soc not in (board.model or ""):
        raise _build_there(word, wanted, builder, command)
    if board.jetpack is not None and not _same_release(board.jetpack, preset.jetpack or ""):
        raise _build_there(word, wanted, builder, command)
    return preset.capabilities


def _same_release(have: str, want: str) -> bool:
    """Whether 6.2.1 is a 6, and 7.1 a 7 but not a 7.2; a release with ``.x`` may be any."""
    if have.endswith(".x"):
        return have.split(".")[0] == want.split(".")[0]
    if want == "7":
        return have.startswith("7.") and not have.startswith("7.2")
    return f"{have}.".startswith(f"{want}.")


def _build_there(word: str, wanted: str, builder: Builder, command: str) -> ConfigError:
    return ConfigError(
        f"{word} is built where it runs",
        got=_machine(builder),
        expected=wanted,
        fix=f"Copy the bundle there and run: {command} --target {word}",
    )


def _machine(builder: Builder) -> str:
    if builder.jetson is not None:
        board = builder.jetson
        return f"{board.model or 'an unknown Jetson'} with JetPack {board.jetpack or 'unknown'}"
    names = ", ".join(gpu.name for gpu in builder.gpus)
    return f"a machine with {names}" if names else "a machine without an NVIDIA GPU"


def _current(backend: Flavour, builder: Builder) -> tuple[ComputeCapability, ...]:
    if builder.capabilities:
        return builder.capabilities[:1]
    fix = "Name a target, such as --target sm89." if backend == "tensorrt-rtx" else None
    raise ConfigError(
        "there is no current GPU", got=_machine(builder), expected="an NVIDIA GPU", fix=fix
    )


def _of_name(word: str) -> ComputeCapability:
    match = _SM.fullmatch(word)
    capability = (int(match[1][:-1]), int(match[1][-1])) if match else (0, 0)
    if capability not in _KNOWN:
        raise ConfigError("unknown target", got=repr(word), expected=_expected())
    return capability


def _expected() -> str:
    return ", ".join(["current", *(Target(each).name for each in _KNOWN), *PRESETS])


def _check_buildable(
    capability: ComputeCapability, backend: Flavour, builder: Builder, command: str
) -> None:
    name = Target(capability).name
    if backend == "tensorrt-rtx":
        why = rtx_refusal(capability)
        if why is not None:
            raise ConfigError(
                f"TensorRT-RTX does not build for {name}",
                got=why,
                expected="a target of the table",
                fix=f"On that machine run: {_with_backend(command)} --target {name}",
            )
        return
    if capability not in builder.capabilities:
        raise ConfigError(
            f"TensorRT builds for the GPU that it runs on, and {name} is not here",
            got=_machine(builder),
            expected=f"a GPU of compute capability {capability[0]}.{capability[1]}",
            fix=f"Copy the bundle to such a machine and run: {command} --target {name}",
        )


def _with_backend(command: str) -> str:
    return command.replace("--backend tensorrt-rtx", "--backend tensorrt")

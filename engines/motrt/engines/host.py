"""CPU, memory and GPUs of this machine, read from files and from ``nvidia-smi``."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from motrt.engines.capabilities import rtx_refusal

_QUERY = ("--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader")
_SMI_SECONDS = 20  # it needs several where the driver is not kept loaded


@dataclass(frozen=True, slots=True)
class Cpu:
    """Cores of the machine, and those that this process may use."""

    count: int | None
    usable: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of main memory.

    Attributes:
        total_bytes: Of the machine.
        available_bytes: What can be had without swapping.
        limit_bytes: A container's limit, where it is lower than the total.
        reason: Why something is unknown, or None.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU; what the driver does not tell is None.

    Attributes:
        name: As the driver names it.
        compute_capability: Such as (8, 9).
        memory_bytes: Its own memory; None on boards, where it shares the main memory.
        driver: Version of the driver.
        rtx_refusal: Why TensorRT-RTX does not serve it, or None if it does.
    """

    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    driver: str | None
    rtx_refusal: str | None


def probe_cpu() -> Cpu:
    """Count cores."""
    # Not on every system: affinity is Linux's.
    affinity = getattr(os, "sched_getaffinity", None)
    return Cpu(os.cpu_count(), len(affinity(0)) if affinity else os.cpu_count())


def probe_memory(root: Path = Path("/")) -> Memory:
    """Read memory sizes; ``root`` is where ``proc/`` and ``sys/`` are."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        table = dict(line.split(":", 1) for line in lines if ":" in line)
        total = int(table["MemTotal"].split()[0]) * 1024
        available = int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, UnicodeDecodeError, KeyError, ValueError, IndexError) as err:
        return Memory(_sysconf_total(), None, None, f"cannot read /proc/meminfo ({err!r})")
    limit = _cgroup_limit(root)
    return Memory(total, available, limit if limit and limit < total else None, None)


def _sysconf_total() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _cgroup_limit(root: Path) -> int | None:
    """Return the lowest limit from this process's cgroup up to the root, version 2 or 1."""
    limits: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in ["0::/", ":memory:/", *lines]:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part not in {"", ".."}]
        limits += [
            limit
            for depth in range(len(parts) + 1)
            if (limit := _number(base.joinpath(*parts[:depth], name))) is not None
        ]
    return min(limits, default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def probe_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Ask ``nvidia-smi``.

    Returns:
        The GPUs, and why there are none (or None).
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "nvidia-smi is not on PATH"
    try:
        done = subprocess.run(
            [program, *_QUERY],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {_SMI_SECONDS} s"
    except OSError as err:
        return (), f"nvidia-smi does not start ({err.strerror or err})"
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return (), f"nvidia-smi failed: {words[0] if words else f'exit code {done.returncode}'}"
    gpus = tuple(gpu for line in done.stdout.splitlines() if (gpu := _gpu(line)) is not None)
    return gpus, None if gpus else "nvidia-smi lists no GPU"


def _gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4:
        return None
    name, capability_text, memory_text, driver = fields
    capability = parse_capability(capability_text)
    number, _, unit = memory_text.partition(" ")
    memory = int(number) << 20 if number.isdecimal() and unit == "MiB" else None
    known_driver = None if driver.startswith("[") else driver
    return Gpu(name, capability, memory, known_driver, rtx_refusal(capability))


def parse_capability(text: str) -> tuple[int, int] | None:
    """Read a compute capability such as ``8.9``; None if it is none (``[N/A]``)."""
    major, dot, minor = text.partition(".")
    if dot and major.isdecimal() and minor.isdecimal():
        return int(major), int(minor)
    return None

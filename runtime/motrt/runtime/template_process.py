"""Runs ``_template_worker`` and ends it when it takes too long.

One process serves all renderings of one template: about 0.1 s for the first, under a millisecond
for the others. It works from any thread, needs no signal handler, and dies with its parent, whose
end of the socket it reads.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ConfigError, ExecutionError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORKER = Path(__file__).with_name("_template_worker.py")
_START_LIMIT_S = 60.0  # a cold disk on a small board
_MAX_REPLY_FACTOR = 12  # bytes of JSON for one character, at most: \ud83d\ude00


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """How much a template may take before it counts as hostile.

    Attributes:
        time_s: Seconds for one rendering; a usual one takes 0.001.
        memory_bytes: Address space of the rendering process (where the system can bound it).
        max_chars: Characters of the rendered text.
    """

    time_s: float = 10.0
    memory_bytes: int = 512 << 20
    max_chars: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_bytes", "max_chars"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ConfigError(
                    f"{name} makes no sense", got=repr(value), expected="a positive number"
                )


class TemplateTimeoutError(Exception):
    """The worker was ended because it took too long."""


class TemplateCrashError(Exception):
    """The worker ended by itself: out of memory, or a crash of the interpreter."""


class TemplateProcess:
    """A rendering process, started when it is first needed and again after it had to be ended."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: weakref.finalize[Any, TemplateProcess] | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's answer to a job.

        Raises:
            TemplateTimeoutError: It took longer than ``time_s``.
            TemplateCrashError: The worker died of the job.
            MissingDependencyError: jinja2 is not installed.
            ExecutionError: The process cannot be started.
        """
        request = json.dumps(job).encode() + b"\n"
        with self._lock:
            if not self._is_running():
                self._start()
            try:
                return self._exchange(request, self._limits.time_s)
            except BaseException:  # also Ctrl-C: the answer to this job must not meet the next
                self._stop()
                raise

    def close(self) -> None:
        """End the process, if there is one; the next job starts another."""
        with self._lock:
            self._stop()

    def _is_running(self) -> bool:
        """Whether there is a process, and neither has it died nor has this one forked since."""
        return (
            self._process is not None
            and self._owner == os.getpid()
            and self._process.poll() is None
        )

    def _start(self) -> None:
        self._stop()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", str(_WORKER), str(int(self._limits.memory_bytes))]
        try:
            process = subprocess.Popen(
                [*command, *_folders()],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        except OSError as err:
            ours.close()
            raise _cannot_start(err) from err
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket, self._process, self._owner = ours, process, os.getpid()
        self._end = weakref.finalize(self, _end, process, ours, self._owner)
        try:
            self._exchange(b"", _START_LIMIT_S)
        except (TemplateTimeoutError, TemplateCrashError) as err:
            self._stop()
            raise _cannot_start(err) from err
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._socket = self._process = self._end = None

    def _exchange(self, request: bytes, limit_s: float) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + limit_s
        most = self._limits.max_chars * _MAX_REPLY_FACTOR + (1 << 16)
        reply = bytearray()
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(request)
            while not reply.endswith(b"\n"):
                # Never 0, which would mean not to wait at all and raise something else.
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
                chunk = self._socket.recv(1 << 16)
                reply += chunk
                if not chunk or len(reply) > most:
                    break
        except TimeoutError as err:
            raise TemplateTimeoutError from err
        except OSError as err:
            raise TemplateCrashError from err
        if not reply.endswith(b"\n"):
            raise TemplateCrashError
        answer: dict[str, Any] = json.loads(reply)
        return answer


def _end(process: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    ours.close()
    if os.getpid() != owner:  # a fork's copy: the process is its parent's
        process.returncode = 0
        return
    process.kill()
    process.wait()


def _folders() -> list[str]:
    """Where the worker finds Jinja: it starts without site-packages, for speed and safety."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingDependencyError(
                f"{name} is not installed",
                expected="jinja2, which renders chat templates",
                fix="Install it with: pip install jinja2",
            )
        folders.append(str(Path(spec.origin).parent.parent))
    return sorted(set(folders))


def _cannot_start(err: Exception) -> ExecutionError:
    return ExecutionError(
        "cannot start the process that renders chat templates",
        got=f"{type(err).__name__} {err}".strip(),
        expected=f"a Python interpreter at {sys.executable or 'sys.executable'}",
        fix="Let this program start processes, or pass token ids in place of messages.",
    )

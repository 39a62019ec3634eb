"""Running a build in a process of its own, and reading its end.

TensorRT's builder may exhaust the memory, crash, or work for minutes without a look at whoever
wants it to stop. In a child none of that reaches the caller, Ctrl-C works at once, and the memory
is the system's again when it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines import errors
from motrt.engines.errors import BuildError, MotrtError
from motrt.engines.plans.audit import Audit
from motrt.engines.plans.engine_build import EngineBuild, EngineRequest
from motrt.engines.plans.memory import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

    from motrt.engines.progress import Progress

_TAIL_BYTES = 16 << 10
_STOP_SECONDS = 1.0

# Same packages and no others, as in ``backend_probe``.
_SCRIPT = "import sys; sys.path[:] = {path!r}; from motrt.engines.plans.child import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class ChildBuild:
    """A finished build, and the most memory that its process had."""

    build: EngineBuild
    peak_rss_bytes: int


RunBuild = Callable[[EngineRequest, "Progress", int, "int | None"], ChildBuild]


def run_build(
    request: EngineRequest,
    progress: Progress,
    needed_bytes: int,
    available_bytes: int | None,
    *,
    command: Sequence[str] | None = None,
) -> ChildBuild:
    """Build one engine in a child.

    Args:
        request: What to build.
        progress: Called with each stage of the child's.
        needed_bytes: By estimate, for messages.
        available_bytes: Now, for messages; None if unknown.
        command: The child's command line, if not motrt's own.

    Raises:
        BuildMemoryError: It ended for want of memory, in whatever way.
        BuildError: It ended in another way without a result.
        MotrtError: What the child raised.
        KeyboardInterrupt: Ctrl-C; the child has ended.
    """
    own = [sys.executable, "-I", "-c", _SCRIPT.format(path=sys.path)]
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(
            list(command) if command is not None else own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            # Ctrl-C in a terminal goes to a whole group: this process passes it on.
            start_new_session=True,
        )
        try:
            answer = _talk(child, request, progress)
            exit_code = child.wait()
        finally:
            _stop(child)
        said = _tail(words)
    if "result" in answer:
        return _result(answer["result"])
    error = answer.get("error")
    messages = said if error is None else [*error.get("messages", []), *_texts(error)]
    if is_out_of_memory(exit_code, [*said, *messages]):
        raise out_of_memory(
            request.engine, exit_code, [*said, *messages], needed_bytes, available_bytes
        )
    if error is not None:
        raise _error_of(error)
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    raise BuildError(
        f"the process that built the {request.engine} ended without a result",
        got=f"{how}; {said[-1] if said else 'no message'}",
        expected="a plan",
        fix="Build again; if it ends so again, report it with this message.",
        messages=said,
    )


def _talk(
    child: subprocess.Popen[bytes], request: EngineRequest, progress: Progress
) -> dict[str, Any]:
    """Send the request, hand progress on, return the last message. stdin stays open meanwhile."""
    if child.stdin is None or child.stdout is None:
        raise BuildError("the builder's process has no pipes")
    try:
        child.stdin.write(json.dumps(request.to_dict()).encode() + b"\n")
        child.stdin.flush()
    except OSError:  # it has ended already; its exit code tells more
        return {}
    answer: dict[str, Any] = {}
    for line in child.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "progress" in message:
            stage, done, total = message["progress"]
            progress(str(stage), int(done), int(total))
        else:
            answer = message
    return answer


def _stop(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tail(file: IO[bytes]) -> list[str]:
    size = file.seek(0, 2)
    file.seek(max(size - _TAIL_BYTES, 0))
    text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _texts(error: dict[str, Any]) -> list[str]:
    return [str(error[key]) for key in ("got", "message") if error.get(key)]


def _result(data: dict[str, Any]) -> ChildBuild:
    peak = int(data.pop("peak_rss_bytes"))
    audit = Audit(**data.pop("audit"))
    build = EngineBuild(
        **{**data, "flags": tuple(data["flags"]), "warnings": tuple(data["warnings"])},
        audit=audit,
    )
    return ChildBuild(build, peak)


def _error_of(data: dict[str, Any]) -> MotrtError:
    kind = getattr(errors, str(data["type"]), BuildError)
    parts = {key: data[key] for key in ("got", "expected", "fix")}
    if issubclass(kind, BuildError):
        return BuildError(data["message"], **parts, messages=data.get("messages", ()))
    error: MotrtError = kind(data["message"], **parts)
    return error

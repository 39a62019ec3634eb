"""The process that a build runs in: ``python -m motrt.engines.plans.child``.

One line of JSON comes in, lines of JSON go out: ``{"progress": [stage, done, total]}`` and at the
end ``{"result": …}`` or ``{"error": …}``. The end of stdin means that the parent is gone or has
lost interest: TensorRT is asked to stop at its next step, and the process ends in any case.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import BuildError, MotrtError
from motrt.engines.plans.engine_build import EngineRequest, build_engine

if TYPE_CHECKING:
    from typing import TextIO

_GRACE_SECONDS = 3.0
_PROGRESS_SECONDS = 0.1


def main() -> int:
    """Build what stdin asks for; the exit code is 0 if a result was written."""
    # TensorRT's libraries print to stdout; what they say must not mix with the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    line = sys.stdin.readline()
    if not line:
        return 1
    request = EngineRequest.from_dict(json.loads(line))
    cancelled = threading.Event()
    threading.Thread(target=_watch, args=(cancelled,), daemon=True).start()
    try:
        built = build_engine(
            request, progress=_Reporter(out).report, is_cancelled=cancelled.is_set
        )
    except MotrtError as err:
        messages = err.messages if isinstance(err, BuildError) else ()
        _send(out, {"error": {**err.to_dict(), "messages": list(messages)}})
        return 1
    except OSError as err:
        error = BuildError("the plan cannot be written", got=err, fix="Check free space there.")
        _send(out, {"error": {**error.to_dict(), "messages": []}})
        return 1
    except KeyboardInterrupt:
        return 1
    result = {**dataclasses.asdict(built), "peak_rss_bytes": _peak_rss_bytes()}
    _send(out, {"result": result})
    return 0


class _Reporter:
    """Hands progress on, no oftener than an eye can see."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = 0.0
        self._lock = threading.Lock()

    def report(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last >= _PROGRESS_SECONDS or done in {0, total}:
                self._last = now
                _send(self._out, {"progress": [stage, done, total]})


def _send(out: TextIO, message: dict[str, Any]) -> None:
    try:
        out.write(json.dumps(message) + "\n")
        out.flush()
    except OSError:  # nobody reads any more; the watcher ends the process
        return


def _watch(cancelled: threading.Event) -> None:
    """Wait for the end of stdin. A phase of TensorRT may take minutes without a step."""
    while os.read(0, 4096):
        pass
    cancelled.set()
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())

"""Bundles with plans whose bytes mean nothing, for what happens around a build."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from motrt.engines.plans.audit import Audit
from motrt.engines.plans.engine_build import EngineBuild, EngineRequest
from motrt.engines.plans.process import ChildBuild

if TYPE_CHECKING:
    from motrt.engines.progress import Progress


def stub_run(
    content: bytes | Callable[[EngineRequest], bytes] = b"no code",
    then: Callable[[EngineRequest], None] = lambda request: None,
) -> Callable[..., ChildBuild]:
    """Return what stands for the builder's process: it writes ``content`` and the engine's name."""

    def run(
        request: EngineRequest, progress: Progress, needed: int, available: int | None
    ) -> ChildBuild:
        head = content(request) if callable(content) else content
        data = head + request.engine.encode()
        Path(request.output).write_bytes(data)
        then(request)
        audit = Audit(
            method="bytes",
            weights=1,
            nbytes=len(data),
            bound_bytes=1000,
            products={"half": 1},
            fused_attention=0,
            decomposed_attention=0,
        )
        build = EngineBuild(
            nbytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            graph_sha256="",
            opset=24,
            flags=(),
            audit=audit,
            seconds=0.0,
            warnings=(),
        )
        return ChildBuild(build, 1)

    return run

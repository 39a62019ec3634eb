"""The backends by the names that ``Runtime.open`` and ``--backend`` know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from motrt.engines.errors import ConfigError
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.engines.tensorrt_backend import TensorRtBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from motrt.engines.bundle import Bundle
    from motrt.engines.onnxruntime_backend import Residency
    from motrt.runtime.protocols import Backend

BackendName = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
BACKENDS: tuple[str, ...] = get_args(BackendName)


def open_backend(
    bundle: Bundle,
    backend: str | Callable[[Bundle], Backend],
    *,
    residency: Residency,
    providers: Sequence[str],
    threads: int | None,
) -> Backend:
    """Return a backend of a bundle; see :meth:`motrt.runtime.Runtime.open`."""
    if callable(backend):
        return backend(bundle)
    if backend not in BACKENDS:
        raise ConfigError("unknown backend", got=backend, expected=", ".join(BACKENDS))
    if backend == "onnxruntime":
        made: object = OnnxRuntimeBackend(
            bundle, residency=residency, providers=providers, threads=threads
        )
    else:
        made = TensorRtBackend(
            bundle,
            flavour="tensorrt" if backend == "tensorrt" else "tensorrt-rtx",
            residency=residency,
            providers=providers,
            threads=threads,
        )
    return cast("Backend", made)

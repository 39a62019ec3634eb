"""``motrt build``: a bundle's plans for a list of targets, all checked first, each written whole."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import shlex
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motrt.engines._tensorrt import install_hint
from motrt.engines.arguments import as_path
from motrt.engines.atomic import writing_alone
from motrt.engines.backend_probe import probe_tensorrt
from motrt.engines.bundle import Bundle, read_manifest
from motrt.engines.bundle_writer import uninterrupted
from motrt.engines.errors import BuildError, ConfigError, MissingDependencyError
from motrt.engines.host import probe_gpus, probe_memory
from motrt.engines.jetson import probe_jetson
from motrt.engines.plans.engine_build import EngineRequest
from motrt.engines.plans.identity import (
    PlanHost,
    decomposes,
    plan_identity,
    plan_profiles,
)
from motrt.engines.plans.memory import available_bytes, check_memory, needed_bytes
from motrt.engines.plans.options import BuildOptions
from motrt.engines.plans.process import ChildBuild, RunBuild, run_build
from motrt.engines.plans.record import ENGINES, PLAN_JSON, EngineRecord, PlanRecord
from motrt.engines.plans.targets import (
    Builder,
    Target,
    backend_of,
    check_bundle_fits,
    resolve_targets,
)
from motrt.engines.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from motrt.engines._tensorrt import Flavour


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """One target's plan.

    Attributes:
        folder: In the bundle.
        record: What ``plan.json`` says.
    """

    folder: str
    record: PlanRecord


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What :func:`build_plans` wrote.

    Attributes:
        bundle: The folder.
        plans: One for each target, in the order asked for.
        seconds: Wall time.
    """

    bundle: Path
    plans: tuple[BuiltPlan, ...]
    seconds: float


def build_plans(
    root: str | Path,
    targets: Sequence[str],
    options: BuildOptions | None = None,
    *,
    backend: Flavour | None = None,
    progress: Progress = silent,
    builder: Builder | None = None,
    run: RunBuild = run_build,
) -> BuildResult:
    """Build both engines of a bundle for each target, and enter them in its manifest.

    Everything that cannot be is refused before the first build begins. A target's old plan is
    replaced by a whole new one or stays; what was finished before an interruption stays too.

    Args:
        root: The bundle.
        targets: ``current``, ``sm89`` and the like, or names of presets.
        options: How; the defaults if None.
        backend: Which TensorRT; None if the targets are presets.
        progress: Called with each stage.
        builder: This machine; found if None.
        run: What builds one engine.

    Raises:
        BundleError: There is no sound bundle.
        ConfigError: A target that does not exist, or cannot be built for here, or cannot run this
            bundle.
        MissingDependencyError: That TensorRT is not installed.
        BuildError: TensorRT refuses, or a plan fails its audit.
        BuildMemoryError: Memory is short.
    """
    started = time.perf_counter()
    options = options or BuildOptions()
    bundle = Bundle.open(as_path("the bundle", root))
    words = [word for word in targets if word]
    backend = backend_of(words, backend)
    machine = builder or Builder(probe_gpus()[0], probe_jetson())
    resolved = resolve_targets(
        words, backend, machine, command_line(bundle.root, backend, options)
    )
    version = _version(backend, machine)
    jobs = [_Job.of(bundle, target, backend, version, options, machine) for target in resolved]
    available = available_bytes(probe_memory())
    for job in jobs:
        for engine in ENGINES:
            check_memory(engine, job.needed(engine), available)
    plans = tuple(job.build(progress, run, available) for job in jobs)
    return BuildResult(bundle.root, plans, time.perf_counter() - started)


def command_line(root: Path, backend: Flavour, options: BuildOptions) -> str:
    """Return the command that builds with these options, but for its targets."""
    words = ["motrt", "build", str(root), "--backend", backend]
    defaults = BuildOptions()
    values: dict[str, Any] = {
        "weights": options.weights,
        "placeholders": options.placeholders,
        "workspace-mib": options.workspace_mib,
        "optimization-level": options.optimization_level,
    }
    for option, value in values.items():
        if value != getattr(defaults, option.replace("-", "_")):
            words += [f"--{option}", str(value)]
    if options.allow_decomposed_attention:
        words.append("--allow-decomposed-attention")
    for field in dataclasses.fields(options.shapes):
        value = getattr(options.shapes, field.name)
        if field.name != "sizes" and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    if options.shapes.sizes:
        sizes = [f"{s.num_frames}x{s.height}x{s.width}" for s in options.shapes.sizes]
        words += ["--sizes", ",".join(sizes)]
    return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One target's plan, everything about it decided."""

    bundle: Bundle
    target: Target
    host: PlanHost
    options: BuildOptions
    requests: Mapping[str, EngineRequest]
    identity: dict[str, Any]
    shares_memory: bool
    gpu: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        target: Target,
        backend: Flavour,
        version: str,
        options: BuildOptions,
        machine: Builder,
    ) -> _Job:
        manifest = bundle.manifest
        precision = manifest.precision.value
        check_bundle_fits(target, backend, version, precision, manifest.lowering)
        is_here = target.capability in machine.capabilities
        if options.placeholders == "never" and not is_here:
            raise ConfigError(
                "values cannot be built in without the target's GPU",
                got=f"--placeholders never for {target.name}",
                expected="auto or always",
                fix="Build with placeholders here: the plan is filled where it is loaded.",
            )
        with_values = is_here and options.placeholders != "always" and options.weights == "refit"
        workspace_mib, level = target.limits
        if options.workspace_mib is not None:
            workspace_mib = options.workspace_mib
        if options.optimization_level is not None:
            level = options.optimization_level
        workspace = None if workspace_mib is None else workspace_mib << 20
        host = PlanHost.here(backend, version, target.capability)
        profiles = plan_profiles(bundle, options)
        requests = {
            engine: EngineRequest(
                bundle=str(bundle.root.absolute()),
                engine=engine,
                backend=backend,
                capability=target.capability,
                is_here=is_here,
                profiles=profiles[engine],
                weights=options.weights,
                with_values=with_values,
                decompose=decomposes(bundle, options),
                workspace_bytes=workspace,
                optimization_level=level,
                output="",
            )
            for engine in ENGINES
        }
        identity = plan_identity(
            bundle,
            host,
            options,
            with_values=with_values,
            workspace_bytes=workspace,
            optimization_level=level,
        )
        return cls(
            bundle=bundle,
            target=target,
            host=host,
            options=options,
            requests=requests,
            identity=identity,
            shares_memory=machine.jetson is not None,
            gpu=next((dataclasses.asdict(gpu) for gpu in machine.gpus), None) if is_here else None,
        )

    def needed(self, engine: str) -> int:
        request = self.requests[engine]
        names = {each[0] for each in self.identity["engines"][engine]["weights"]}
        sizes = [e.nbytes for n, e in self.bundle.weights().entries.items() if n in names]
        return needed_bytes(
            weight_bytes=sum(sizes) if request.with_values else 0,
            largest_bytes=max(sizes, default=0) if request.weights == "refit" else 0,
            num_layers=self.bundle.manifest.model.num_hidden_layers,
            num_profiles=len(request.profiles),
            workspace_bytes=request.workspace_bytes if self.shares_memory else None,
        )

    def build(self, progress: Progress, run: RunBuild, available: int | None) -> BuiltPlan:
        place = self.bundle.root / self.host.folder
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        except OSError as err:
            raise _cannot_write(place.parent, err) from err
        try:
            built: dict[str, ChildBuild] = {}
            for engine, request in self.requests.items():
                output = folder / f"{engine}.plan"
                whole = dataclasses.replace(request, output=str(output.absolute()))
                built[engine] = run(
                    whole, _named(progress, self.target.name), self.needed(engine), available
                )
            record = self._record(built)
            (folder / PLAN_JSON).write_text(record.to_json(), encoding="utf-8")
            folder.chmod(0o755)  # mkdtemp makes 0700
            self._commit(folder, place)
        except OSError as err:
            raise _cannot_write(place.parent, err) from err
        finally:
            with uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)
                _remove_if_empty(place.parent, self.bundle.root / "plans")
        return BuiltPlan(self.host.folder, record)

    def _record(self, built: Mapping[str, ChildBuild]) -> PlanRecord:
        manifest = self.bundle.manifest
        builds = {engine: child.build for engine, child in built.items()}
        return PlanRecord(
            identity=self.identity,
            engines={
                engine: EngineRecord(
                    file=f"{engine}.plan", nbytes=build.nbytes, sha256=build.sha256
                )
                for engine, build in builds.items()
            },
            info={
                "preset": self.target.preset,
                "gpu": self.gpu,
                "shapes": self.options.shapes.to_dict(),
                "weight_files": {
                    name: file.header_sha256
                    for name, file in manifest.files.items()
                    if file.header_sha256 is not None
                },
                "graph_files": {f"{e}.onnx": manifest.files[f"{e}.onnx"].sha256 for e in ENGINES},
                "audit": {engine: build.audit.to_dict() for engine, build in builds.items()},
                "builder_flags": {engine: list(build.flags) for engine, build in builds.items()},
                "warnings": {engine: list(build.warnings) for engine, build in builds.items()},
                "seconds": {engine: round(build.seconds, 3) for engine, build in builds.items()},
                "peak_rss_bytes": {e: child.peak_rss_bytes for e, child in built.items()},
                "probe": {"status": "skipped", "reason": "nothing was run when it was built"},
                "motrt": _motrt_version(),
                "python": platform.python_version(),
                "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            },
        )

    def _commit(self, folder: Path, place: Path) -> None:
        """Put the folder in its place and enter it in the manifest; undo the one without the other."""
        digest = hashlib.sha256((folder / PLAN_JSON).read_bytes()).hexdigest()
        old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old.", dir=place.parent))
        with uninterrupted():
            try:
                had = place.exists()
                if had:
                    place.rename(old / place.name)
                try:
                    folder.rename(place)
                    _enter(self.bundle, self.host.folder, digest)
                except BaseException:
                    shutil.rmtree(place, ignore_errors=True)
                    if had:
                        (old / place.name).rename(place)
                    raise
            finally:
                shutil.rmtree(old, ignore_errors=True)


def _enter(bundle: Bundle, folder: str, digest: str) -> None:
    """Enter a plan in the manifest as it is now: another target may have been built meanwhile."""
    with writing_alone(bundle.root):
        manifest = read_manifest(bundle.root)
        plans = {**manifest.plans, folder: digest}
        bundle.commit_alone(dataclasses.replace(manifest, plans=plans))


def _version(backend: Flavour, machine: Builder) -> str:
    found = probe_tensorrt(backend)
    if found.version is None:
        raise MissingDependencyError(
            f"{backend} cannot be used",
            got=found.reason,
            fix=f"To install it: {install_hint(backend, on_jetson=machine.jetson is not None)}",
        )
    return found.version


def _motrt_version() -> str | None:
    try:
        return version_of("motrt")
    except PackageNotFoundError:
        return None


def _named(progress: Progress, target: str) -> Progress:
    return lambda stage, done, total: progress(f"{target} {stage}", done, total)


def _remove_if_empty(*folders: Path) -> None:
    with suppress(OSError):  # one holds other plans
        for folder in folders:
            folder.rmdir()


def _cannot_write(folder: Path, err: OSError) -> BuildError:
    return BuildError(
        "cannot write the plan; the bundle is as it was",
        got=err.strerror or err,
        expected=f"room in {folder}",
        fix="Check free space and permissions there.",
    )

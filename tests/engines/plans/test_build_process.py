"""Whatever ends the process that builds, the bundle is whole and the error says what it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from motrt.engines.backend_probe import Backend
from motrt.engines.bundle import Bundle
from motrt.engines.errors import (
    BuildError,
    BuildMemoryError,
    ConfigError,
    ContractError,
    MissingDependencyError,
)
from motrt.engines.host import Gpu, Memory
from motrt.engines.jetson import Jetson
from motrt.engines.plans import BuildOptions, PlanHost, build_plans, read_engine, read_plan
from motrt.engines.plans import build as build_module
from motrt.engines.plans.engine_build import EngineRequest
from motrt.engines.plans.memory import (
    available_bytes,
    check_memory,
    is_out_of_memory,
    needed_bytes,
)
from motrt.engines.plans.process import run_build
from motrt.engines.plans.profiles import Profile
from motrt.engines.plans.targets import Builder
from motrt.engines.progress import silent
from stub_plans import stub_run
from tiny_checkpoints import tree

NOBODY = Builder((), None)
REQUEST = EngineRequest(
    bundle="b",
    engine="reasoner",
    backend="tensorrt-rtx",
    capability=(8, 9),
    is_here=False,
    profiles=(Profile("prefill", {"tokens": (1, 2, 3)}),),
    weights="refit",
    with_values=False,
    decompose=False,
    workspace_bytes=None,
    optimization_level=None,
    output="",
)
HEAD = "import json, os, signal, sys, time\nrequest = json.loads(sys.stdin.readline())\n"


def _run(script: str, progress: Callable[[str, int, int], None] = silent) -> object:
    command = [sys.executable, "-c", HEAD + script]
    return run_build(REQUEST, progress, 3 << 30, 1 << 30, command=command)


def test_a_request_survives_the_pipe() -> None:
    assert EngineRequest.from_dict(json.loads(json.dumps(REQUEST.to_dict()))) == REQUEST


# How a board says that its memory is gone; each was seen in a public thread.
OUT_OF_MEMORY = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "shell": "sys.exit(137)",
    "python": "raise MemoryError",
    "c++": "print('terminate called after throwing std::bad_alloc', file=sys.stderr); os.abort()",
    "none": "print(json.dumps({'error': {'type': 'BuildError', 'message': 'no plan', 'got': "
    "'Error Code 2: OutOfMemory (Requested size was 4294967296 bytes.)', 'expected': None, "
    "'fix': None, 'messages': []}}))",
    "message": "print(json.dumps({'error': {'type': 'BuildError', 'message': 'no plan', 'got': "
    "'x', 'expected': None, 'fix': None, 'messages': ['Tactic Device request: 4096MB Available: "
    "2048MB. Device memory is insufficient to use tactic. cudaErrorMemoryAllocation']}}))",
    "jetson": "print('NvMapMemAllocInternalTagged: 1075072515 error 12', file=sys.stderr); "
    "sys.exit(1)",
}


@pytest.mark.parametrize("disguise", OUT_OF_MEMORY)
def test_an_exhausted_memory_is_one_error_in_every_disguise(disguise: str) -> None:
    with pytest.raises(BuildMemoryError) as caught:
        _run(OUT_OF_MEMORY[disguise])
    error = caught.value
    assert (error.needed_bytes, error.available_bytes) == (3 << 30, 1 << 30)
    assert "1024 MiB were available" in str(error.got)
    for lever in ("swap", "--workspace-mib", "--optimization-level", "--placeholders"):
        assert lever in str(error.fix)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("print('assertion failed: x', file=sys.stderr); sys.exit(3)", "exit code 3; assertion"),
        ("pass", "exit code 0; no message"),
        ("print('{')", "exit code 0"),
    ],
)
def test_another_end_is_told_from_it(script: str, words: str) -> None:
    with pytest.raises(BuildError, match=words) as caught:
        _run(script)
    assert not isinstance(caught.value, BuildMemoryError)


def test_the_child_s_own_error_comes_through() -> None:
    error = {"type": "ContractError", "message": "m", "got": "g", "expected": "e", "fix": "f"}
    with pytest.raises(ContractError) as caught:
        _run(f"print({json.dumps(json.dumps({'error': {**error, 'messages': []}}))})")
    assert caught.value.to_dict() == error


def test_progress_comes_through_and_noise_does_not() -> None:
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(BuildError):
        _run(
            "print('noise'); print(json.dumps({'progress': ['a', 1, 2]}))",
            lambda *step: seen.append(step),
        )
    assert seen == [("a", 1, 2)]


def test_a_child_that_ends_before_it_is_asked_is_an_error() -> None:
    with pytest.raises(BuildError, match="exit code 5"):
        run_build(REQUEST, silent, 0, None, command=[sys.executable, "-c", "raise SystemExit(5)"])


def test_an_interrupt_ends_the_child_at_once(tmp_path: Path) -> None:
    """Also one that does not look: TensorRT compiles for minutes without a step."""
    script = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    script += "print(json.dumps({'progress': ['a', 1, 2]}), flush=True)\ntime.sleep(600)"

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        _run(script, interrupt)
    assert time.perf_counter() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.fixture
def root(tmp_path: Path, bundle: Callable[..., Path]) -> Path:
    return Path(shutil.copytree(bundle("nano-like", "fp16"), tmp_path / "b"))


@pytest.fixture(autouse=True)
def _some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_version", lambda *_: "1.7.1")


def _build(root: Path, run: object, targets: str = "sm89") -> None:
    build_plans(
        root,
        targets.split(","),
        backend="tensorrt-rtx",
        builder=NOBODY,
        run=run,  # type: ignore[arg-type]
    )


def _engine(root: Path, name: str = "reasoner") -> bytes:
    opened = Bundle.open(root)
    host = PlanHost.here("tensorrt-rtx", "1.7.1", (8, 9))
    return read_engine(opened, read_plan(opened, host), host, name)


@pytest.mark.parametrize("engine", ["reasoner", "generator"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, BuildError("no"), OSError(28, "disk full")])
def test_a_build_that_ends_early_leaves_the_bundle_as_it_was(
    root: Path, engine: str, end: type[BaseException] | BaseException
) -> None:
    def stop(request: EngineRequest) -> None:
        if request.engine == engine:
            raise end

    raised = BuildError if not isinstance(end, type) else end
    before = tree(root)
    with pytest.raises(raised):
        _build(root, stub_run(b"first", stop))
    assert tree(root) == before
    _build(root, stub_run(b"whole"))
    whole = tree(root)
    assert _engine(root) == b"wholereasoner"
    with pytest.raises(raised):
        _build(root, stub_run(b"second", stop))
    assert tree(root) == whole
    assert _engine(root) == b"wholereasoner"


def test_a_manifest_that_cannot_be_replaced_keeps_the_old_plan(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build(root, stub_run(b"old"))
    whole = tree(root)

    def refuse(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(build_module, "_enter", refuse)
    with pytest.raises(BuildError, match="no space left"):
        _build(root, stub_run(b"new"))
    assert tree(root) == whole


def test_a_new_plan_replaces_the_old_one_whole(root: Path) -> None:
    _build(root, stub_run(b"old"))
    (root / "plans/tensorrt-rtx-1.7.1/sm89/leftover").write_text("x")
    _build(root, stub_run(b"new"))
    folder = root / "plans/tensorrt-rtx-1.7.1"
    assert sorted(p.name for p in (folder / "sm89").iterdir()) == [
        "generator.plan", "plan.json", "reasoner.plan",
    ]  # fmt: skip
    assert [p.name for p in folder.iterdir()] == ["sm89"]
    assert _engine(root) == b"newreasoner"


def test_targets_that_were_finished_stay(root: Path) -> None:
    def stop(request: EngineRequest) -> None:
        if request.capability == (12, 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(root, stub_run(then=stop), "sm89,sm120")
    assert list(Bundle.open(root).manifest.plans) == ["plans/tensorrt-rtx-1.7.1/sm89"]
    assert _engine(root)


def test_a_plan_that_was_built_meanwhile_is_kept(root: Path) -> None:
    def meanwhile(request: EngineRequest) -> None:
        if request.engine == "generator":
            _build(root, stub_run(b"other"), "sm86")

    _build(root, stub_run(then=meanwhile))
    assert [Path(f).name for f in Bundle.open(root).manifest.plans] == ["sm86", "sm89"]


def test_every_target_is_checked_before_the_first_is_built(root: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a build has begun")

    before = tree(root)
    for targets in ("sm89,sm90", "sm89,sm1", "sm89,current"):
        with pytest.raises(ConfigError):
            _build(root, never, targets)
    with pytest.raises(ConfigError, match="--placeholders never"):
        build_plans(
            root,
            ["sm89"],
            BuildOptions(placeholders="never"),
            backend="tensorrt-rtx",
            builder=NOBODY,
            run=never,  # type: ignore[arg-type]
        )
    assert tree(root) == before


@pytest.mark.parametrize("on_board", [False, True])
def test_an_absent_tensorrt_names_what_brings_it(
    root: Path, on_board: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        build_module, "probe_tensorrt", lambda _: Backend(None, (), "not installed")
    )
    board = Jetson("NVIDIA Jetson AGX Orin", "36.4.3", "6.2", (8, 7))
    builder = Builder((Gpu("gpu", (8, 7), None, None, None),), board if on_board else None)
    words = "comes with JetPack" if on_board else r"pip install 'motrt\[tensorrt\]'"
    with pytest.raises(MissingDependencyError, match=words):
        build_plans(root, ["sm87"], backend="tensorrt", builder=builder, run=stub_run())


def test_too_little_memory_is_told_before_a_build(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "probe_memory", lambda: Memory(1 << 33, 1 << 26, None, None))
    with pytest.raises(BuildMemoryError, match=r"64 MiB available.*at least 2[0-9]{2} MiB.*swap"):
        _build(root, stub_run())
    monkeypatch.setattr(build_module, "probe_memory", lambda: Memory(None, None, None, "no /proc"))
    _build(root, stub_run())


def test_the_estimate_grows_with_what_costs_memory() -> None:
    small = partial(
        needed_bytes,
        weight_bytes=0,
        largest_bytes=0,
        num_layers=28,
        num_profiles=2,
        workspace_bytes=None,
    )
    for more in (
        {"weight_bytes": 1},
        {"largest_bytes": 1},
        {"num_layers": 29},
        {"num_profiles": 3},
        {"workspace_bytes": 1},
    ):
        assert small(**more) > small()
    check_memory("reasoner", 5, None)
    check_memory("reasoner", 5, 5)
    with pytest.raises(BuildMemoryError):
        check_memory("reasoner", 5, 4)
    assert available_bytes(Memory(9, 8, 7, None)) == 7
    assert not is_out_of_memory(1, ["Invalid Node - layers.0"])


def test_ctrl_c_of_the_program_is_130_and_leaves_nothing(root: Path) -> None:
    """The real program, interrupted while its child works."""
    pytest.importorskip("tensorrt_rtx")
    before = tree(root)
    program = subprocess.Popen(
        [sys.executable, "-m", "motrt.export", "build", str(root), "--backend", "tensorrt-rtx",
         "--target", "sm89", "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    plans = root / "plans"
    deadline = threading.Event()
    timer = threading.Timer(120, deadline.set)
    timer.start()
    while not plans.exists() and not deadline.is_set() and program.poll() is None:
        time.sleep(0.05)
    time.sleep(1.5)  # the child is importing, or compiling
    timer.cancel()
    program.send_signal(signal.SIGINT)
    _, words = program.communicate(timeout=60)
    assert (program.returncode, words) == (130, "interrupted; nothing half-done was left behind\n")
    assert tree(root) == before

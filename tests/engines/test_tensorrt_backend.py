"""The TensorRT backend on a scripted TensorRT and a scripted CUDA, against ONNX Runtime.

The numbers come from the same graph, so that any difference is one of weights, addresses, shapes,
order or lifetime.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # the bundles are exported here

import motrt.engines._cuda as cuda_accessor
import motrt.engines.tensorrt_backend.device as device_module
from motrt.engines.bundle import Bundle
from motrt.engines.causal_mask import padded_causal_bias
from motrt.engines.errors import (
    ConfigError,
    ContractError,
    ExecutionError,
    ForeignPlanError,
    MissingDependencyError,
    PlanError,
)
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.engines.probe_inputs import probe_feeds
from motrt.engines.tensorrt_backend import TensorRtBackend
from motrt.engines.tensorrt_backend.cache import TensorRtCache
from motrt.engines.tensorrt_backend.execution import Execution
from motrt.engines.tensorrt_backend.loaded import load_engine
from motrt.engines.tensorrt_backend.memory import Arena, DeviceTensor
from motrt.engines.tensorrt_backend.weights import Refit
from motrt.runtime.text_model import TextModel, TokenSequence
from scripted_cuda import ScriptedCuda
from tensorrt_stage import CAPACITY, Stage

IDS = np.random.RandomState(1).randint(0, 400, 64).tolist()
# Of an output's largest value: the scripted engine's graph is not optimized, ONNX Runtime's is.
BARS = {"native": 1e-2, "portable": 2e-5}
KINDS = ["edge-like", "nano-like", "shared"]


def _numbers(backend: Any, bundle: Bundle, chunk: int = 256) -> dict[str, np.ndarray[Any, Any]]:
    """Both modes: prefill and decode, then three steps of a branch on the prompt's K/V."""
    text = TextModel(bundle, backend, capacity=CAPACITY, chunk_size=chunk)
    sequence = TokenSequence(text)
    found = {"prefill": sequence.extend(IDS[:19])}
    for index in range(19, 24):
        found[f"decode {index}"] = sequence.extend([IDS[index]])
    feeds = probe_feeds(bundle.generator_contract())
    varying = {
        n: feeds.pop(n)
        for n in list(feeds)
        if n.endswith("latents") or n in {"latent_patches", "timestep"}
    }
    constants = {n: a for n, a in feeds.items() if not n.startswith("context.")}
    branch = backend.generator().branch(sequence.context(), constants)
    for step in range(4):
        varying["timestep"] = np.array([900.0 - 100 * step], np.float32)
        for name, array in branch(varying).items():
            found[f"{name} {step}"] = array
    return found


def _same(a: Mapping[str, Any], b: Mapping[str, Any], lowering: str = "native") -> None:
    assert a.keys() == b.keys()
    for name, array in b.items():
        got, want = (np.asarray(each, np.float32) for each in (a[name], array))
        assert np.abs(got - want).max() <= BARS[lowering] * np.abs(want).max(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowering", ["native", "portable"])
@pytest.mark.parametrize("weights", ["refit", "inputs"])
def test_both_modes_equal_onnx_runtime(
    stage: Callable[..., Stage], kind: str, lowering: str, weights: str
) -> None:
    place = stage(kind, lowering, weights)
    bundle = Bundle.open(place.root)
    want = _numbers(OnnxRuntimeBackend(bundle, threads=1), bundle)
    backend = place.backend()
    _same(_numbers(backend, bundle), want, lowering)
    _same(_numbers(backend, bundle, chunk=7), want, lowering)
    assert place.cuda.calls["cudaGraphLaunch"] > 8
    assert backend.reasoner().captured == 1  # decode; a prefill is not repeated


def test_one_wrong_weight_is_far_beyond_the_tolerance(stage: Callable[..., Stage]) -> None:
    place = stage()
    bundle = Bundle.open(place.root)
    backend = place.backend()
    want = _numbers(backend, bundle)
    for engine in place.trt.engines:
        name = next(n for n in engine.constants if "norm" in n)
        engine.constants[name] = engine.constants[name] * 2
        engine._session = None
    with pytest.raises(AssertionError):
        _same(_numbers(backend, bundle), want)


@pytest.mark.parametrize("lowering", ["native", "portable"])
def test_a_long_sequence_grows_and_rewinds(stage: Callable[..., Stage], lowering: str) -> None:
    place = stage("edge-like", lowering, max_context=300, max_prefill=64)
    bundle = Bundle.open(place.root)
    ids = np.random.RandomState(2).randint(0, 400, 300).tolist()
    found = []
    for backend in (OnnxRuntimeBackend(bundle, threads=1), place.backend()):
        text = TextModel(bundle, backend, capacity=300, chunk_size=50)
        sequence = TokenSequence(text)
        numbers = {"long": sequence.extend(ids)}
        sequence.rewind_to_prefix_of(ids[:100])
        numbers["again"] = sequence.extend([ids[99], 7])
        if isinstance(backend, TensorRtBackend):
            contexts = {n: _host(place, t) for n, t in sequence.context().items()}
        else:
            contexts = {n: np.asarray(t) for n, t in sequence.context().items()}
        found.append(numbers | contexts)
    _same(found[1], found[0], lowering)


def _host(place: Stage, tensor: Any) -> np.ndarray[Any, Any]:
    assert isinstance(tensor, DeviceTensor)
    return place.cuda.view(tensor.address, tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)


def test_keys_and_values_never_leave_the_device(stage: Callable[..., Stage]) -> None:
    place = stage()
    bundle = Bundle.open(place.root)
    sizes: list[int] = []
    copy = place.cuda.cudaMemcpyAsync

    def watch(target: int, source: int, nbytes: int, kind: str, stream: int) -> tuple[int]:
        sizes.append(nbytes if kind == "down" else 0)
        return copy(target, source, nbytes, kind, stream)

    place.cuda.cudaMemcpyAsync = watch  # type: ignore[method-assign]
    _numbers(place.backend(), bundle)
    config = bundle.manifest.model
    largest = max(config.vocab_size * 4, 6 * config.patch_latent_dim * 4)
    assert max(sizes) <= largest


def test_graphs_are_captured_again_when_addresses_or_weights_change(
    stage: Callable[..., Stage],
) -> None:
    place = stage()
    bundle = Bundle.open(place.root)
    backend = place.backend()
    feeds = probe_feeds(bundle.generator_contract())
    branch = backend.generator().branch({}, {})
    captured = []
    for _ in range(3):
        branch(feeds)
        captured.append(branch.is_captured)
    assert captured == [False, True, True]
    assert place.cuda.calls["cudaStreamBeginCapture"] == 1
    # A larger user of the arena moves it: the graph has the old address baked in.
    backend.device.arena.reserve(1 << 20)
    branch(feeds)
    assert not branch.is_captured
    first = branch(feeds)
    assert branch.is_captured
    assert place.cuda.calls["cudaStreamBeginCapture"] == 2
    del branch
    gc.collect()
    # The next generation takes the same context; its own memory is elsewhere.
    again = backend.generator().branch({}, {})
    _same(again(feeds), first)
    assert len(place.cuda.executables) <= 2


def test_without_graphs_and_where_tensorrt_says_no_nothing_is_captured(
    stage: Callable[..., Stage],
) -> None:
    place = stage()
    bundle = Bundle.open(place.root)
    want = _numbers(place.backend(), bundle)
    before = place.cuda.calls["cudaStreamBeginCapture"]
    _same(_numbers(place.backend(cuda_graphs=False), bundle), want)
    place.trt.capturable = False
    _same(_numbers(place.backend(), bundle), want)
    assert place.cuda.calls["cudaStreamBeginCapture"] == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("execute_async_v3:generator", "TensorRT did not run the generator; got a fault"),
        ("create_execution_context:generator", "makes no context for the generator"),
        ("set_optimization_profile_async:generator", "has no profile 0 of the generator"),
        ("deserialize_cuda_engine", "does not load the generator's plan"),
        ("refit_cuda_engine_async:generator", "does not refit the generator"),
        ("set_named_weights:norm_moe_gen.weight", "does not take norm_moe_gen.weight"),
    ],
)
def test_every_false_of_tensorrt_is_an_error_and_the_next_call_works(
    stage: Callable[..., Stage], fault: str, words: str
) -> None:
    place = stage()
    backend = place.backend()
    feeds = probe_feeds(Bundle.open(place.root).generator_contract())
    place.trt.faults[fault] = 1
    with pytest.raises(ExecutionError, match=words):
        backend.generator().branch({}, {})(feeds)
    want = OnnxRuntimeBackend(backend.bundle, threads=1).generator().branch({}, {})(feeds)
    _same(backend.generator().branch({}, {})(feeds), want)


@pytest.mark.parametrize(
    "name",
    ["cudaMemcpyAsync", "cudaMalloc", "cudaMallocHost", "cudaStreamSynchronize",
     "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch"],
)  # fmt: skip
def test_every_code_of_cuda_is_looked_at(stage: Callable[..., Stage], name: str) -> None:
    place = stage()
    backend = place.backend()
    generator = backend.generator()
    feeds = probe_feeds(Bundle.open(place.root).generator_contract())
    branch = generator.branch({}, {})
    if name in {
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphLaunch",
    }:
        branch(feeds)
    place.cuda.faults[name] = 46
    with pytest.raises(ExecutionError, match=f"CUDA refused {name}; got error 46, scripted"):
        branch(feeds)
    assert place.cuda.recording is None
    assert place.cuda.waiting == []
    want = OnnxRuntimeBackend(backend.bundle, threads=1).generator().branch({}, {})(feeds)
    _same(generator.branch({}, {})(feeds), want)


def test_memory_that_does_not_suffice_is_named_with_numbers(stage: Callable[..., Stage]) -> None:
    place = stage(weights="inputs")
    place.cuda.total = 20_000
    with pytest.raises(
        ExecutionError, match=r"GPU has not enough memory left; got \d+ bytes wanted, \d+ of 20000"
    ):
        place.backend().generator()
    place.cuda.total = 1 << 32
    assert place.backend().generator() is not None


def test_everything_is_freed(stage: Callable[..., Stage]) -> None:
    place = stage(weights="inputs")
    bundle = Bundle.open(place.root)
    backend = place.backend()
    _numbers(backend, bundle)
    assert place.cuda.used > 0
    backend.close()
    gc.collect()
    assert (place.cuda.used, place.cuda.pinned, place.cuda.executables) == (0, {}, [])
    assert len(_numbers(backend, bundle)) > 6  # it opens again


def test_a_steady_state_allocates_nothing(stage: Callable[..., Stage]) -> None:
    place = stage()
    backend = place.backend()
    feeds = probe_feeds(Bundle.open(place.root).generator_contract())
    branch = backend.generator().branch({}, {})
    branch(feeds)
    before = place.cuda.calls["cudaMalloc"], place.cuda.calls["cudaMallocHost"]
    for _ in range(3):
        branch(feeds)
    assert (place.cuda.calls["cudaMalloc"], place.cuda.calls["cudaMallocHost"]) == before


def test_one_arena_and_one_user_at_a_time(stage: Callable[..., Stage]) -> None:
    place = stage()
    arena = place.backend().device.arena
    with (
        arena.used_by("reasoner"),
        pytest.raises(ExecutionError, match="got the reasoner at work"),
        arena.used_by("generator"),
    ):
        pass
    with arena.used_by("generator"):
        pass
    assert isinstance(arena, Arena)


def test_swap_keeps_one_engine(stage: Callable[..., Stage]) -> None:
    place = stage()
    bundle = Bundle.open(place.root)
    want = _numbers(place.backend(), bundle)
    gc.collect()
    backend = place.backend(residency="swap")
    _same(_numbers(backend, bundle), want)
    gc.collect()
    assert [engine.name for engine in place.trt.engines] == ["generator"]
    _same(_numbers(backend, bundle), want)


def test_weights_as_inputs_are_there_once(stage: Callable[..., Stage]) -> None:
    place = stage("shared", weights="inputs")
    backend = place.backend(residency="shared")
    reasoner = backend.reasoner()
    used = place.cuda.used
    generator = backend.generator()
    record = backend._record
    shared = set(record.weight_names("reasoner")) & set(record.weight_names("generator"))
    assert len(shared) > 5
    assert all(
        backend._addresses["reasoner"][n] == backend._addresses["generator"][n] for n in shared
    )
    entries = backend.bundle.weights().entries
    only = set(record.weight_names("generator")) - shared
    assert place.cuda.used - used == sum(max(entries[n].nbytes, 256) for n in only)
    assert reasoner is backend.reasoner()
    assert generator is backend.generator()


def test_settings_that_cannot_be(stage: Callable[..., Stage]) -> None:
    place = stage()
    with pytest.raises(ConfigError, match="weights of their own"):
        place.backend(residency="shared")
    with pytest.raises(ConfigError, match="unknown residency"):
        place.backend(residency="both")
    backend = place.backend()
    with pytest.raises(
        ConfigError, match="holds fewer tokens; got capacity 4096; expected at most 48"
    ):
        backend.reasoner().new_cache(4096)
    cache = backend.reasoner().new_cache(4)
    cache.reserve(4)
    with pytest.raises(ExecutionError, match="cache is full; got 5 tokens"):
        cache.reserve(5)
    feeds = probe_feeds(backend.bundle.generator_contract())
    with pytest.raises(ContractError):
        backend.generator().branch({}, {})({**feeds, "more": np.zeros(1, np.float32)})
    with pytest.raises(ContractError):
        backend.generator().branch({}, {"more": np.zeros(1, np.float32)})(feeds)
    wide = {
        n: np.repeat(a, 20, axis=1) if n in {"latent_patches", "vision_noise_mask"} else a
        for n, a in feeds.items()
    }
    rows = (
        wide["latent_patches"].shape[1]
        + feeds["rotary_cos"].shape[1]
        - feeds["latent_patches"].shape[1]
    )
    for name in ("rotary_cos", "rotary_sin"):
        wide[name] = np.resize(feeds[name], (1, rows, feeds[name].shape[2]))
    with pytest.raises(
        ExecutionError, match=r"not built for these sizes.*vision 120.*vision 1 to 64.*max-tokens"
    ):
        backend.generator().branch({}, {})(wide)
    with pytest.raises(ExecutionError, match="not built for these sizes"):
        backend.step_nbytes(10_000, 5)
    assert backend.step_nbytes(20, 5) == 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["inputs"].pop(0), "other inputs and outputs"),
        (lambda d: d["inputs"][0].__setitem__(1, "int64"), "another inputs_embeds|another latent"),
        (lambda d: d.update(on_host=["logits", "velocity"]), "in the host's memory"),
        (lambda d: d["profiles"].pop(), "other profiles"),
        (lambda d: d["aliases"].popitem(), "another place for present"),
        (lambda d: d.update(mode="constant"), "cannot be refitted"),
    ],
)  # fmt: skip
def test_an_engine_that_is_not_its_record_is_refused(
    stage: Callable[..., Stage], edit: Callable[[Any], Any], words: str
) -> None:
    place = stage()

    def change(data: Any) -> Any:
        edit(data)
        return data

    place.trt.edit = change
    with pytest.raises(PlanError, match=words):
        place.backend().reasoner()


@pytest.mark.parametrize("what", ["missing", "foreign", "size", "type"])
def test_weights_that_are_not_the_stores_are_refused(
    stage: Callable[..., Stage], what: str
) -> None:
    place = stage()

    def change(data: Any) -> Any:
        weights = data["weights"]
        if what == "missing":
            weights.pop()
        elif what == "foreign":
            weights.append(["other", "float32", [1]])
        elif what == "size":
            weights[0][2] = [7]
        else:
            weights[0][1] = "float32"
        return data

    place.trt.edit = change
    with pytest.raises(ExecutionError, match="does not have the store's weights"):
        place.backend().reasoner()


def test_a_plan_is_looked_at_before_tensorrt_sees_it(stage: Callable[..., Stage]) -> None:
    place = stage()
    plan = next(place.root.rglob("reasoner.plan"))
    data = plan.read_bytes()
    plan.write_bytes(data[:-1] + b"?")
    with pytest.raises(PlanError, match=r"is not what plan\.json recorded"):
        place.backend().reasoner()
    assert place.trt.loads == []
    plan.write_bytes(data)
    place.trt.module.__version__ = "9.9"
    with pytest.raises(ForeignPlanError, match="no plan for this machine"):
        place.backend()


@pytest.mark.parametrize("release", ["10.3", "10.13"])
def test_an_old_release_runs_the_portable_lowering(
    stage: Callable[..., Stage], release: str
) -> None:
    place = stage("nano-like", "portable", release=release)
    bundle = Bundle.open(place.root)
    want = _numbers(OnnxRuntimeBackend(bundle, threads=1), bundle)
    _same(_numbers(place.backend(), bundle), want, "portable")
    native = stage("nano-like", "native", release=release)
    with pytest.raises(ExecutionError, match=r"written in place.*10\.15 or newer.*portable"):
        native.backend().reasoner()


def test_the_real_bindings_give_the_gpu_or_say_that_there_is_none() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    runtime = cuda_accessor.cuda_runtime()
    if not int(runtime.cudaGetDeviceCount()[0]):
        assert cuda_accessor.Cuda().capability() >= (7, 0)
        return
    with pytest.raises(ExecutionError, match="CUDA refused cudaSetDevice; got error"):
        cuda_accessor.Cuda()


def test_every_function_that_is_called_is_in_the_real_bindings() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    source = Path(cuda_accessor.__file__).read_text()
    import re

    names = set(re.findall(r"\bcuda[A-Z][A-Za-z0-9_]*", source))
    for name in (*Path(device_module.__file__).parent.glob("*.py"),):
        names |= set(re.findall(r"\bcuda[A-Z][A-Za-z0-9_]*", name.read_text()))
    members = {
        "cudaMemcpyHostToDevice": "cudaMemcpyKind",
        "cudaMemcpyDeviceToHost": "cudaMemcpyKind",
        "cudaMemcpyDeviceToDevice": "cudaMemcpyKind",
        "cudaDevAttrComputeCapabilityMajor": "cudaDeviceAttr",
        "cudaDevAttrComputeCapabilityMinor": "cudaDeviceAttr",
        "cudaStreamCaptureModeThreadLocal": "cudaStreamCaptureMode",
        "cudaErrorMemoryAllocation": "cudaError_t",
    }
    assert len(names) > 25
    for name in names:
        owner = getattr(runtime, members[name]) if name in members else runtime
        assert hasattr(owner, name), name
        assert hasattr(ScriptedCuda, name) or name in members, name


def test_absent_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_accessor, "_MODULES", ("no_such_cuda",))
    cuda_accessor.cuda_runtime.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"Python bindings.*cuda-bindings"):
        cuda_accessor.cuda_runtime()
    cuda_accessor.cuda_runtime.cache_clear()


def _ignores_new_addresses(patch: pytest.MonkeyPatch) -> None:
    bind = Execution._bind
    patch.setattr(Execution, "_bind", lambda self, *a: bind(self, *a) and not self.is_captured)


def _captures_at_once(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Execution) -> None:
        self._graph, self._has_run = None, True

    patch.setattr(Execution, "_forget_graph", forget)


def _does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_accessor.Cuda, "synchronize", lambda self: None)


def _writes_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "motrt.engines.tensorrt_backend.backend.load_engine",
        lambda *a: dataclasses.replace(load_engine(*a), aliases={}),
    )


def _frees_the_context(patch: pytest.MonkeyPatch) -> None:
    context = TensorRtCache.context

    def weak(self: TensorRtCache) -> Any:
        found = context(self)
        return {
            name: dataclasses.replace(t, buffer=SimpleNamespace(address=t.buffer.address))  # type: ignore[arg-type]
            for name, t in found.items()
        }

    patch.setattr(TensorRtCache, "context", weak)


def _has_too_small_an_arena(patch: pytest.MonkeyPatch) -> None:
    reserve = Arena.reserve
    patch.setattr(Arena, "reserve", lambda self, nbytes: reserve(self, 256))


def _never_refits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Refit, "__call__", lambda self: None)


def _swaps_two_weights(patch: pytest.MonkeyPatch) -> None:
    put = Refit._set

    def swapped(self: Refit, name: str) -> None:
        store = self._store
        shape = store.entries[name].shape
        if name.endswith("down_proj.weight") and ".0." in name:
            other = next(n for n in store if n.endswith("down_proj.weight") and ".1." in n)
            assert store.entries[other].shape == shape
            self._store = type(store)(store.root, store.entries, {name: store[other]})
        put(self, name)
        self._store = store

    patch.setattr(Refit, "_set", swapped)


def _loses_rows(patch: pytest.MonkeyPatch) -> None:
    absorb = TensorRtCache.absorb

    def late(self: TensorRtCache, outputs: Any, count: int) -> None:
        self.length += 1
        absorb(self, outputs, count)
        self.length -= 1

    patch.setattr(TensorRtCache, "absorb", late)


def _sees_the_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "motrt.engines.tensorrt_backend.reasoner.padded_causal_bias",
        lambda *a: padded_causal_bias(*a) * 0,
    )


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_ignores_new_addresses, "portable"),
    (_captures_at_once, "native"),
    (_does_not_wait, "native"),
    (_writes_elsewhere, "native"),
    (_frees_the_context, "native"),
    (_has_too_small_an_arena, "native"),
    (_never_refits, "native"),
    (_swaps_two_weights, "portable"),
    (_loses_rows, "portable"),
    (_sees_the_padding, "portable"),
]


@pytest.mark.parametrize(("change", "lowering"), BROKEN, ids=lambda v: getattr(v, "__name__", v))
def test_a_broken_backend_is_seen(
    stage: Callable[..., Stage],
    change: Callable[[pytest.MonkeyPatch], None],
    lowering: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong order, wrong address, wrong lifetime, wrong weights: the script or the numbers tell."""
    place = stage("nano-like", lowering)
    bundle = Bundle.open(place.root)
    want = _numbers(OnnxRuntimeBackend(bundle, threads=1), bundle)
    change(monkeypatch)
    backend = place.backend()

    def twice() -> None:
        for _ in range(2):  # the second conversation has buffers of its own
            _same(_numbers(backend, bundle), want, lowering)

    with pytest.raises((AssertionError, ExecutionError)):
        twice()
    place.cuda.waiting = []

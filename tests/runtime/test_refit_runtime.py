"""A running process takes other weights: both engines at once, or it runs on as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motrt.engines.bundle import Bundle
from motrt.engines.dtypes import Precision
from motrt.engines.errors import ConfigError, ExecutionError, RefitError
from motrt.engines.onnxruntime_backend import RESIDENCIES, OnnxRuntimeBackend
from motrt.engines.onnxruntime_engine import ort_value
from motrt.engines.refit import live
from motrt.engines.refit.disk import refit_bundle
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from motrt.runtime import GenerationParams, Lora, Runtime, SamplingParams
from refit_cases import KINDS, edit_checkpoint, factors, linears, write_peft
from tiny_checkpoints import tree

Checkpoint = Callable[..., Path]
SAMPLING = SamplingParams(max_new_tokens=6)
PARAMS = GenerationParams(num_frames=5, height=32, width=48, num_inference_steps=2, seed=3)


def _export(source: Path, target: Path, precision: str = "fp32", lowering: str = "native") -> Path:
    options = ExportOptions(precision=Precision(precision), lowering=lowering, probe="never")
    return export_checkpoint(source, target, options).bundle


def _open(root: Path, **options: Any) -> Runtime:
    return Runtime.open(root, threads=1, **options)


def _state(runtime: Runtime) -> tuple[bytes, bytes]:
    """Return the bits that both engines give: logits of a prompt, latents of a generation."""
    from motrt.runtime.text_model import TextModel, TokenSequence

    text = TextModel(runtime.bundle, runtime._backend, capacity=64)
    sequence = TokenSequence(text)
    logits = sequence.extend([3, 1, 4, 1, 5])
    backend: Any = runtime._backend
    generator = backend.generator()
    from motrt.engines.probe_inputs import probe_feeds

    feeds = probe_feeds(generator.contract)
    context: Any = sequence.context()
    for name in [name for name in feeds if name.startswith("context.")]:
        feeds[name] = context[name]
    velocity = generator.branch({}, {})(feeds)
    return logits.tobytes(), b"".join(velocity[name].tobytes() for name in sorted(velocity))


@pytest.fixture(scope="module")
def source(checkpoint: Checkpoint) -> Path:
    return checkpoint("edge-like")


@pytest.fixture(scope="module")
def other(checkpoint: Checkpoint) -> Path:
    return checkpoint("edge-like", seed=1)


@pytest.fixture(scope="module")
def root(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(source, tmp_path_factory.mktemp("b") / "bundle")


@pytest.fixture(scope="module")
def other_root(other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(other, tmp_path_factory.mktemp("b") / "bundle")


CASES = [
    (kind, precision, lowering, residency)
    for kind in KINDS
    for precision in ("fp32", "fp16")
    for lowering in ("native", "portable")
    for residency in RESIDENCIES
]
QUICK = {
    ("nano-like", "fp32", "native", "separate"),
    ("edge-like", "fp32", "portable", "shared"),
    ("super-like", "fp16", "native", "swap"),
    ("shared", "fp32", "native", "shared"),
    ("shared", "fp16", "portable", "separate"),
}


@pytest.mark.parametrize(
    ("kind", "precision", "lowering", "residency"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full, id="-".join(case))
        for case in CASES
    ],
)
def test_a_refit_runs_as_the_new_bundle_does_and_back(
    checkpoint: Checkpoint,
    tmp_path: Path,
    kind: str,
    precision: str,
    lowering: str,
    residency: Any,
) -> None:
    old, new = (checkpoint(kind, seed=seed) for seed in (0, 1))
    bundles = [
        _export(c, tmp_path / name, precision, lowering) for c, name in ((old, "a"), (new, "b"))
    ]
    before = tree(bundles[0])
    with (
        _open(bundles[0], residency=residency) as runtime,
        _open(bundles[1], residency=residency) as fresh,
    ):
        first = _state(runtime)
        result = runtime.refit(new)
        assert result.changed
        assert result.probe["status"] == "passed"
        assert _state(runtime) == _state(fresh)
        assert _state(runtime) != first
        assert runtime.refit(restore=True).changed
        assert _state(runtime) == first
        assert not runtime.refit(restore=True).changed
    assert tree(bundles[0]) == before


def test_answers_and_clips_are_the_new_weights(root: Path, other_root: Path, other: Path) -> None:
    with _open(root) as runtime, _open(other_root) as fresh:
        old = runtime.reason("A question?", SAMPLING)
        runtime.refit(other)
        want = fresh.reason("A question?", SAMPLING)
        have = runtime.reason("A question?", SAMPLING)
        assert have.token_ids == want.token_ids != old.token_ids
        assert have.reused_tokens == 0  # the old weights' keys and values are gone
        clips = [r.generate("A square.", PARAMS) for r in (runtime, fresh)]
        assert clips[0].latents.tobytes() == clips[1].latents.tobytes()
        follow = [
            r.generate("Draw it.", PARAMS, history=h) for r, h in ((runtime, have), (fresh, want))
        ]
        assert follow[0].latents.tobytes() == follow[1].latents.tobytes()


def test_an_answer_from_before_does_not_bring_its_keys_along(
    root: Path, other_root: Path, other: Path
) -> None:
    with _open(root) as runtime, _open(other_root) as fresh:
        history = runtime.reason("A question?", SAMPLING)
        runtime.refit(other)
        clips = [r.generate("Draw it.", PARAMS, history=history) for r in (runtime, fresh)]
        assert clips[0].latents.tobytes() == clips[1].latents.tobytes()


def test_the_same_weights_change_nothing(root: Path, source: Path, other: Path) -> None:
    with _open(root) as runtime:
        backend: Any = runtime._backend
        engines = backend.reasoner(), backend.generator()
        result = runtime.refit(source)
        assert not result.changed
        assert (backend.reasoner(), backend.generator()) == engines
        assert runtime.refit(other).changed
        engines = backend.reasoner(), backend.generator()
        assert not runtime.refit(other).changed
        assert (backend.reasoner(), backend.generator()) == engines
    refitted = root.parent / "refitted"
    _export(source, refitted)
    refit_bundle(refitted, other)
    with _open(refitted) as runtime:  # a runtime on a revision knows it
        assert not runtime.refit(other).changed
        state = _state(runtime)
        assert runtime.refit(source).changed
        assert runtime.refit(other).changed
        assert _state(runtime) == state


def test_an_engine_whose_weights_stay_is_not_touched(
    root: Path, source: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        name = "layers.0.mlp_moe_gen.up_proj.weight"
        tensors[name] = tensors[name] * np.float32(1.01)

    new = edit_checkpoint(source, tmp_path / "new", edit)
    with _open(root) as runtime:
        backend: Any = runtime._backend
        before = _state(runtime)
        reasoner, generator = backend.reasoner(), backend.generator()
        result = runtime.refit(new)
        assert result.moved == {"generator": 1}
        assert backend.reasoner() is reasoner
        assert backend.generator() is not generator
        assert result.probe["reasoner"]["before"] == result.probe["reasoner"]["after"]
        assert result.probe["generator"]["before"] != result.probe["generator"]["after"]
        after = _state(runtime)
        assert after[0] == before[0]
        assert after[1] != before[1]


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_the_new_embedding_table_counts(
    root: Path, source: Path, tmp_path: Path, residency: Any
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][::-1].copy()

    new = edit_checkpoint(source, tmp_path / "new", edit)
    bundle = _export(new, tmp_path / "bundle")
    options = {"residency": residency}
    with _open(root, **options) as runtime, _open(bundle, **options) as fresh:
        old = _state(runtime)
        assert runtime.refit(new).moved == {"host": 1}
        assert _state(runtime) == _state(fresh) != old
        assert runtime.reason("Hello", SAMPLING).token_ids


def test_what_was_read_from_is_kept_alive(root: Path, other: Path, tmp_path: Path) -> None:
    """Tensors are mapped, not copied: they must outlive the call, and the checkpoint's name."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    with _open(root, residency="shared") as runtime:
        runtime.refit(copy)
        state = _state(runtime)
        shutil.rmtree(copy)
        gc.collect()
        assert _state(runtime) == state
        runtime.refit(restore=True)
        assert runtime.refit(other).changed
        assert _state(runtime) == state


# --- faults ---


def _unmoved(runtime: Runtime, match: str, *arguments: Any, **options: Any) -> None:
    before = _state(runtime)
    bundle = runtime.bundle
    with pytest.raises((RefitError, ExecutionError), match=match):
        runtime.refit(*arguments, **options)
    assert _state(runtime) == before
    assert runtime.bundle is bundle


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_stop_after_the_first_engine_leaves_both_old(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch, residency: Any
) -> None:
    session = OnnxRuntimeBackend._session

    def stop(self: OnnxRuntimeBackend, contract: Any) -> Any:
        if self.bundle.replaced and contract.name == "generator":
            raise ExecutionError("stop", got="after the first engine")
        return session(self, contract)

    with _open(root, residency=residency) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(OnnxRuntimeBackend, "_session", stop)
            _unmoved(runtime, "stop", other)
        assert runtime.refit(other).changed


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_a_stale_tensor_in_one_engine_is_seen_by_the_probe(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch, residency: Any, engine: str
) -> None:
    half = "mlp" if engine == "reasoner" else "mlp_moe_gen"
    _backend_with(monkeypatch, engine, {f"layers.1.{half}.down_proj.weight": None})
    with _open(root, residency=residency) as runtime:
        _unmoved(runtime, f"probe of the refitted {engine} failed", other)


@pytest.mark.parametrize("residency", ["separate", "shared"])
@pytest.mark.parametrize("engine", ["reasoner", "generator"])
def test_swapped_tensors_of_equal_shape_are_seen_by_the_probe(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch, residency: Any, engine: str
) -> None:
    half = "mlp" if engine == "reasoner" else "mlp_moe_gen"
    one, two = (f"layers.{i}.{half}.up_proj.weight" for i in (0, 1))
    _backend_with(monkeypatch, engine, {one: two, two: one})
    with _open(root, residency=residency) as runtime:
        _unmoved(runtime, f"probe of the refitted {engine} failed", other)


def _backend_with(
    monkeypatch: pytest.MonkeyPatch, engine: str, wrong: dict[str, str | None]
) -> None:
    """Let one engine's session get other tensors than its weights; None is the base's own."""
    import onnxruntime

    from motrt.engines import onnxruntime_backend as module

    session = OnnxRuntimeBackend._session
    current = threading.local()
    held: list[Any] = []

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]  # no types
        def add_initializer(self, name: str, value: Any) -> None:
            if current.engine == engine and name in wrong:
                store, other = current.backend.bundle.weights(), wrong[name]
                if other is None:
                    store = current.backend.bundle.base().weights()
                held.append(store)
                value = ort_value(onnxruntime, store, other or name)
                held.append(value)
            super().add_initializer(name, value)

    def open_session(self: OnnxRuntimeBackend, contract: Any) -> Any:
        current.engine = contract.name if self.bundle.replaced else None
        current.backend = self
        return session(self, contract)

    def make(threads: int | None) -> Any:
        made = Options()
        made.intra_op_num_threads = threads
        return made

    monkeypatch.setattr(OnnxRuntimeBackend, "_session", open_session)
    monkeypatch.setattr(module, "session_options", make)


def test_a_failed_check_of_values_leaves_both_old(root: Path, other: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        poisoned = tensors["layers.1.mlp_moe_gen.down_proj.weight"].copy()
        poisoned[3, 5] = np.inf
        tensors["layers.1.mlp_moe_gen.down_proj.weight"] = poisoned

    with _open(root) as runtime:
        _unmoved(runtime, "NaN or infinity", edit_checkpoint(other, tmp_path / "new", edit))
        _unmoved(runtime, "cannot be used", tmp_path / "absent")


def test_an_interrupt_during_the_probe_leaves_both_old(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _open(root) as runtime:
        before = _state(runtime)

        def stop(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(live, "by_name", stop)
            with pytest.raises(KeyboardInterrupt):
                runtime.refit(other)
        assert _state(runtime) == before


def test_an_interrupt_at_the_switch_leaves_no_mix(
    root: Path, other: Path, other_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    take_over = OnnxRuntimeBackend.take_over

    def interrupt(*arguments: Any) -> None:
        take_over(*arguments)
        signal.raise_signal(signal.SIGINT)

    with _open(root) as runtime, _open(other_root) as fresh:
        with monkeypatch.context() as patch:
            patch.setattr(OnnxRuntimeBackend, "take_over", interrupt)
            with pytest.raises(KeyboardInterrupt):
                runtime.refit(other)
        assert _state(runtime) == _state(fresh)
        want = fresh.reason("A question?", SAMPLING).token_ids
        assert runtime.reason("A question?", SAMPLING).token_ids == want


def test_a_running_answer_ends_on_its_weights(root: Path, other: Path) -> None:
    with _open(root) as runtime:
        want = runtime.reason("A question?", SAMPLING).token_ids
    with _open(root) as runtime:
        stream = runtime.reason_stream("A question?", SAMPLING)
        pieces = iter(stream)
        next(pieces)
        with pytest.raises(ExecutionError, match="own call"):
            runtime.refit(other)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(runtime.refit(other)))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()  # it waits for the stream
        assert stream.result.token_ids == want
        thread.join(60)
        assert results[0].changed
        assert runtime.reason("A question?", SAMPLING).token_ids != want


def test_a_refit_in_a_callback_is_refused(root: Path, other: Path) -> None:
    with _open(root) as runtime:
        want = runtime.generate("A square.", PARAMS).latents

        def refit(*_: Any) -> None:
            with pytest.raises(ExecutionError, match="own call"):
                runtime.refit(other)

        have = runtime.generate("A square.", PARAMS, callback_on_step_end=refit).latents
        assert have.tobytes() == want.tobytes()


def test_requests_that_make_no_sense_are_refused(root: Path, other: Path) -> None:
    with _open(root) as runtime:
        for options in ({}, {"weights": other, "restore": True}):
            with pytest.raises(ConfigError, match="a refit takes"):
                runtime.refit(**options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no path"):
            runtime.refit(3)  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match="closed"):
        runtime.refit(other)


def test_a_backend_without_refit_says_so(root: Path, other: Path) -> None:
    from motrt.export.torch_backend import TorchBackend

    with (
        Runtime.open(root, backend=TorchBackend) as runtime,
        pytest.raises(ExecutionError, match="cannot be refitted"),
    ):
        runtime.refit(other)


def test_disk_and_process_do_the_same(root: Path, source: Path, tmp_path: Path) -> None:
    bundle = _export(source, tmp_path / "bundle")
    adapter = write_peft(tmp_path / "adapter", factors(bundle, linears(bundle)))
    lora = Lora(adapter, 0.7)
    with _open(root) as runtime:
        runtime.refit(lora=lora)
        store = runtime.bundle.weights()
        refit_bundle(bundle, loras=lora)
        disk = Bundle.open(bundle).weights()
        assert all(store[name].tobytes() == disk[name].tobytes() for name in disk)
        with _open(bundle) as fresh:
            assert _state(runtime) == _state(fresh)

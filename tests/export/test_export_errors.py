"""Whatever is wrong, an export ends in one line that says so, and nothing is written or changed."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx_ir")

from safetensors.numpy import load_file

from motrt.engines.bundle import MANIFEST, Bundle
from motrt.engines.contract import Modality
from motrt.engines.dtypes import Precision
from motrt.engines.errors import ConfigError, ExportError, MotrtError
from motrt.export import pipeline
from motrt.export import weights as weights_module
from motrt.export.cli import run
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from tiny_checkpoints import (
    FILE,
    INDEX,
    STEM,
    TINY,
    VAE,
    edit_json,
    edit_tensors,
    raw_safetensors,
    tree,
    write_checkpoint,
    write_vae,
)

SHARD = f"{STEM}-00001-of-00002.safetensors"
Breaker = Callable[[Path], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder with everything that export reads, and a bundle of it; never written to."""
    folder = tmp_path_factory.mktemp("pristine")
    root = write_vae(write_checkpoint(folder / "c", shards=2))
    for name, file in (("scheduler", "scheduler_config.json"), ("text_tokenizer", "t.json")):
        (root / name).mkdir()
        (root / name / file).write_text('{"_class_name": "X"}')
    (root / "model_index.json").write_text('{"_class_name": "Cosmos3OmniPipeline"}')
    export_checkpoint(root, folder / "b", ExportOptions(copy_weights=True, probe="never"))
    return folder


@pytest.fixture
def work(pristine: Path, tmp_path: Path) -> Path:
    """A folder with a checkpoint ``c`` that a test may break and a sound bundle ``b``."""
    shutil.copytree(pristine, tmp_path / "w")
    return tmp_path / "w"


def _run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = run(["export", *map(str, arguments)])
    out, err = capfd.readouterr()
    return code, out, err


def _refusal(capfd: pytest.CaptureFixture[str], work: Path, *arguments: object) -> dict[str, str]:
    """Run in the ways that could leave something, and return what ``--json`` tells."""
    before = tree(work)
    told = {}
    for extra in (("-o", work / "new"), ("-o", work / "b", "--overwrite", "--json")):
        code, out, err = _run(capfd, *arguments, "--probe", "never", *extra)
        assert code == 1, (out, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert "Traceback" not in err
        assert "; got " in err
        assert "; expected " in err
        if "--json" in extra:
            told = json.loads(out)["error"]
            assert told["message"] in err
        else:
            assert out == ""
        assert tree(work) == before
    assert told["type"].endswith("Error")
    return told


def _json(**values: Any) -> Breaker:
    return lambda root: edit_json(root / "transformer/config.json", **values)


def _write(file: str, content: bytes) -> Breaker:
    return lambda root: (root / file).write_bytes(content)


def _cut(file: str, keep: int) -> Breaker:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:keep])


def _set_weight(part: str, name: str, value: float) -> Breaker:
    def breaker(root: Path) -> None:
        file = next(f for f in (root / part).glob("*.safetensors") if name in load_file(f))
        tensor = load_file(file)[name]
        tensor.reshape(-1)[-1] = value
        edit_tensors(file, **{name.replace(".", "__"): tensor})

    return breaker


def _pickles_alone(root: Path) -> None:
    for path in (root / "transformer").glob("*.safetensors*"):
        path.unlink()
    (root / "transformer/pytorch_model.bin").write_bytes(pickle.dumps([1]))


def _shard_of_another(root: Path) -> None:
    other = write_checkpoint(root.parent / "other", {**TINY, "hidden_size": 80}, shards=2)
    shutil.copy(other / "transformer" / SHARD, root / "transformer" / SHARD)
    shutil.rmtree(other)


def _pipe(root: Path) -> None:
    (root / "transformer" / SHARD).unlink()
    os.mkfifo(root / "transformer" / SHARD)


SHARDS, VAE_FILE = f"transformer/{SHARD}", f"vae/{FILE}"
BREAKERS: dict[str, tuple[Breaker, str]] = {
    "no config": (lambda root: (root / "transformer/config.json").unlink(), "config"),
    "config is garbage": (_write("transformer/config.json", b"\xff\x00"), "config.json"),
    "config has a BOM": (_write("transformer/config.json", b"\xef\xbb\xbf{}"), "config.json"),
    "config is deep": (_write("transformer/config.json", b"[" * 200_000), "config.json"),
    "config holds NaN": (_write("transformer/config.json", b'{"rope_theta": NaN}'), "NaN"),
    "unknown key": (_json(num_layers=2), "'num_layers'"),
    "bool for int": (_json(hidden_size=True), "hidden_size"),
    "text for int": (_json(hidden_size="64"), "hidden_size"),
    "null for int": (_json(hidden_size=None), "hidden_size"),
    "zero layers": (_json(num_hidden_layers=0), "num_hidden_layers"),
    "many layers": (_json(num_hidden_layers=10**12), "num_hidden_layers"),
    "huge number": (_json(rms_norm_eps=10**400), "rms_norm_eps"),
    "huge theta": (_json(rope_theta=1e300), "rope_theta"),
    "other layout": (_json(weight_layout="tied"), "weight_layout"),
    "quantized": (_json(quantization_config={"bits": 8}), "quantized"),
    "other depth": (_json(num_hidden_layers=3), "layers.2."),
    "cut shard": (_cut(SHARDS, -1), SHARD),
    "empty shard": (_cut(SHARDS, 0), SHARD),
    "pickle by name of safetensors": (_write(SHARDS, pickle.dumps({"x": [1.0] * 9})), SHARD),
    "lying shard": (_write(SHARDS, raw_safetensors({}, length=1 << 63)), SHARD),
    "absent shard": (lambda root: (root / SHARDS).unlink(), SHARD),
    "shard of another checkpoint": (_shard_of_another, "misshapen"),
    "pipe": (_pipe, SHARD),
    "index is garbage": (_write(f"transformer/{INDEX}", b"{"), INDEX),
    "index leaves": (
        lambda root: edit_json(root / "transformer" / INDEX, weight_map={"a": "../../b/x"}),
        "../../b/x",
    ),
    "pickles alone": (_pickles_alone, "pytorch_model.bin"),
    "NaN": (_set_weight("transformer", "layers.1.mlp.up_proj.weight", np.nan), "up_proj"),
    "infinity": (_set_weight("transformer", "embed_tokens.weight", -np.inf), "embed_tokens"),
    "NaN in the VAE": (_set_weight("vae", "encoder.conv_in.bias", np.nan), "encoder.conv_in"),
    "no VAE config": (lambda root: (root / "vae/config.json").unlink(), "config.json"),
    "VAE of another class": (
        lambda root: edit_json(root / "vae/config.json", _class_name="AutoencoderKL"),
        "AutoencoderKL",
    ),
    "VAE with an unknown key": (
        lambda root: edit_json(root / "vae/config.json", z_dims=4),
        "z_dims",
    ),
    "VAE with a huge number": (
        lambda root: edit_json(root / "vae/config.json", latents_mean=[10**400, 0, 0, 0]),
        "latents_mean",
    ),
    "VAE with a huge size": (
        lambda root: edit_json(root / "vae/config.json", base_dim=10**400),
        "base_dim",
    ),
    "VAE of another size": (
        lambda root: edit_json(root / "vae/config.json", **{**VAE, "base_dim": 8}),
        "encoder.conv_in",
    ),
    "cut VAE": (_cut(VAE_FILE, 1000), FILE),
    "VAE without weights": (lambda root: (root / VAE_FILE).unlink(), "vae/"),
    "model index is a list": (_write("model_index.json", b"[]"), "model_index.json"),
    "scheduler is garbage": (_write("scheduler/scheduler_config.json", b"x"), "scheduler_config"),
    "scheduler holds infinity": (
        _write("scheduler/scheduler_config.json", b'{"sigma_max": 1e999}'),
        "scheduler_config",
    ),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_a_broken_checkpoint_is_refused(
    work: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    breaker, word = BREAKERS[name]
    breaker(work / "c")
    told = _refusal(capfd, work, work / "c")
    assert word in told["message"] + (told["got"] or "") + (told["expected"] or "")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_value_that_is_broken_where_it_is_cast_is_refused(
    work: Path, capfd: pytest.CaptureFixture[str], precision: str
) -> None:
    for value in (np.nan, np.inf, 3.4028235e38):
        _set_weight("transformer", "lm_head.weight", value)(work / "c")
        told = _refusal(capfd, work, work / "c", "--precision", precision)
        assert "lm_head.weight" in told["message"]


@pytest.mark.parametrize(("modalities", "word"), [("sound", "sound"), ("vision,text", "text")])
def test_options_that_make_no_sense_are_refused(
    work: Path, capfd: pytest.CaptureFixture[str], modalities: str, word: str
) -> None:
    before = tree(work)
    code, out, err = _run(capfd, work / "c", "-o", work / "new", "--modalities", modalities)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err
    assert tree(work) == before


@pytest.mark.parametrize("modalities", ["", "vision,smell"])
def test_an_unknown_modality_is_a_usage_error(
    work: Path, capfd: pytest.CaptureFixture[str], modalities: str
) -> None:
    before = tree(work)
    code, out, err = _run(capfd, work / "c", "-o", work / "new", "--modalities", modalities)
    assert (code, out) == (2, "")
    assert "--modalities" in err
    assert tree(work) == before


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    wrong: Any = None
    with pytest.raises(ConfigError, match="checkpoint is no path; got NoneType"):
        export_checkpoint(wrong, tmp_path / "b")
    with pytest.raises(ConfigError, match="output is no path; got NoneType"):
        export_checkpoint(str(tmp_path), wrong)
    wrong = "fp32"
    with pytest.raises(ConfigError, match="options is of the wrong kind; got str"):
        export_checkpoint(str(tmp_path), str(tmp_path / "b"), wrong)


def test_precisions_may_be_named() -> None:
    name: Any = "bf16"
    assert ExportOptions(precision=name).precision is Precision.BF16
    for wrong, word in ({"precision": "fp64"}, "precision"), ({"probe": "sometimes"}, "probe"):
        with pytest.raises(ConfigError, match=f"unknown {word}"):
            ExportOptions(**wrong)  # type: ignore[arg-type]


def test_modalities_that_the_checkpoint_lacks_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = {**TINY, "sound_gen": False}
    root = write_checkpoint(tmp_path / "c", silent)
    code, _, err = _run(capfd, root, "-o", tmp_path / "b", "--modalities", "vision,sound")
    assert code == 1
    assert "vision, action" in err
    for asked in ((), (Modality.ACTION,), (Modality.VISION, Modality.TEXT)):
        with pytest.raises(ConfigError, match="modalities"):
            export_checkpoint(root, tmp_path / "b", ExportOptions(modalities=asked))
    with pytest.raises(ConfigError, match="lowering"):
        export_checkpoint(root, tmp_path / "b", ExportOptions(lowering="other"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_unknown_precision_is_a_usage_error(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(work)
    code, out, err = _run(capfd, work / "c", "-o", work / "new", "--precision", "fp8")
    assert (code, out) == (2, "")
    assert "fp8" in err
    assert tree(work) == before


# --- where the bundle goes ---


@pytest.mark.parametrize(
    ("output", "options", "word"),
    [
        ("b", [], "--overwrite"),
        ("c", [], "replace the checkpoint"),
        ("c", ["--overwrite"], "replace the checkpoint"),
        ("c/../c/.", ["--overwrite"], "replace the checkpoint"),
        (".", ["--overwrite"], "replace the checkpoint"),
        ("c/transformer", ["--overwrite"], "not a bundle"),
        ("c/vae", ["--overwrite"], "not a bundle"),
        ("notes", [], "exists already"),
        ("notes", ["--overwrite"], "not a bundle"),
        ("app", ["--overwrite"], "not a bundle"),
        ("file", [], "exists already"),
        ("file", ["--overwrite"], "not a bundle"),
        ("file/new", [], "cannot write beside"),
        ("file/new", ["--overwrite"], "cannot write beside"),
        ("file/deep/new", [], "cannot write beside"),
        ("x" * 300, [], "cannot write beside"),
        ("dangling", ["--overwrite"], "not a bundle"),
        ("loop/new", [], "cannot write beside"),
    ],
)
def test_an_output_that_must_not_be_is_refused(
    work: Path,
    capfd: pytest.CaptureFixture[str],
    output: str,
    options: list[str],
    word: str,
) -> None:
    (work / "notes").mkdir()
    (work / "notes/thesis.tex").write_text("years of work")
    (work / "app").mkdir()
    (work / "app" / MANIFEST).write_text('{"name": "a web app"}')
    (work / "file").write_text("content")
    (work / "dangling").symlink_to("nowhere")
    (work / "loop").symlink_to("loop")
    before = tree(work)
    code, out, err = _run(
        capfd, work / "c", "-o", f"{work}/{output}", "--probe", "never", *options
    )
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err
    assert tree(work) == before


def test_a_checkpoint_inside_the_old_bundle_is_not_lost(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work / "c").rename(work / "b/c")
    before = tree(work)
    code, _, err = _run(capfd, work / "b/c", "-o", work / "b", "--overwrite")
    assert (code, "replace the checkpoint" in err) == (1, True)
    (work / "link").symlink_to("b/c/transformer")
    code, _, err = _run(capfd, work / "link", "-o", work / "b", "--overwrite")
    assert (code, "replace the checkpoint" in err) == (1, True)
    (work / "link").unlink()
    assert tree(work) == before


def test_a_bundle_may_lie_inside_the_checkpoint(work: Path) -> None:
    before = tree(work / "c")
    options = ExportOptions(probe="never", overwrite=True)
    for _ in range(2):
        export_checkpoint(work / "c", work / "c/bundle", options)
    Bundle.open(work / "c/bundle")
    shutil.rmtree(work / "c/bundle")
    assert tree(work / "c") == before


def test_a_bundle_of_another_version_may_be_replaced(work: Path) -> None:
    edit_json(work / "b" / MANIFEST, contract_version=99)
    export_checkpoint(work / "c", work / "b", ExportOptions(probe="never", overwrite=True))
    Bundle.open(work / "b")
    assert sorted(path.name for path in work.iterdir()) == ["b", "c"]


def test_odd_file_names_of_a_tokenizer_make_no_bundle_that_does_not_open(work: Path) -> None:
    before = tree(work)
    (work / "c/text_tokenizer/a\\b.json").write_text("{}")
    with pytest.raises(MotrtError):
        export_checkpoint(work / "c", work / "new", ExportOptions(probe="never"))
    (work / "c/text_tokenizer/a\\b.json").unlink()
    assert tree(work) == before
    (work / "c/text_tokenizer/é\n.json").write_text("{}")
    export_checkpoint(work / "c", work / "new", ExportOptions(probe="never"))
    Bundle.open(work / "new")


# --- failures inside ---

STAGES = (
    "open_checkpoint",
    "check_finite",
    "check_space",
    "place_weights",
    "author_reasoner",
    "author_generator",
    "author_vae",
    "require_clean",
    "check_onnx",
    "serialize",
    "_copy_components",
    "reference_inv_freq",
    "record_small",
    "record_weights",
    "_provenance",
    "run_probe",
    "write_atomic",
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [ExportError("stop"), OSError(5, "stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_in_any_stage_leaves_nothing(
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: BaseException,
    overwrite: bool,
) -> None:
    before = tree(work)
    original, calls = getattr(pipeline, stage), []

    def breaking(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)  # the work is done, and then it goes wrong
        calls.append(stage)
        raise error
        return result

    monkeypatch.setattr(pipeline, stage, breaking)
    output = work / ("b" if overwrite else "deep/new")
    with pytest.raises((MotrtError, OSError, KeyboardInterrupt)) as caught:
        export_checkpoint(work / "c", output, ExportOptions(probe="never", overwrite=overwrite))
    assert calls == [stage]
    if stage not in ("open_checkpoint", "check_finite"):
        assert not isinstance(caught.value, OSError)
    monkeypatch.undo()
    assert tree(work) == before


def test_a_progress_that_fails_leaves_nothing(work: Path) -> None:
    before, options, seen = tree(work), ExportOptions(probe="never"), []

    def watching(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        seen.append(stage)

    export_checkpoint(work / "c", work / "new", options, progress=watching)
    shutil.rmtree(work / "new")
    for limit in range(0, len(seen), 7):
        calls = iter(range(limit))

        def failing(_stage: str, _done: int, _total: int, calls: Iterator[int] = calls) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(work / "c", work / "new", options, progress=failing)
        assert tree(work) == before


# --- full disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("mounting is not allowed")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("options", [["--copy-weights"], ["--precision", "bf16"]])
def test_a_full_disk_is_told_and_left_empty(
    tmp_path: Path,
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    root = write_checkpoint(small_disk.parent / "c", {**TINY, "vocab_size": 4096})
    if "bf16" in options:
        _without_time_embedder_links(monkeypatch)  # which would fail before: another file system
    arguments = [root, "-o", small_disk / "b", "--probe", "never", *options]
    code, _, err = _run(capfd, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert "disk is too full" in err
    assert list(small_disk.iterdir()) == []
    # And if the look at the free space was too early to see it coming:
    monkeypatch.setattr(pipeline, "check_space", lambda *_: None)
    code, _, err = _run(capfd, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert "No space left" in err
    assert list(small_disk.iterdir()) == []


def _without_time_embedder_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module.WeightPlan, "linked_files", property(lambda _: []))


def _program(*lines: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    body = "\n".join([*lines, "from motrt.export.cli import main", f"main({arguments!r})"])
    return subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_file_size_limit_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    done = _program(
        "import resource",
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))",
        arguments=[
            *("export", str(root), "-o", str(tmp_path / "b")),
            *("--precision", "bf16", "--probe", "never"),
        ],
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: cannot write the bundle; nothing was kept; got File too")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# --- Ctrl-C and kill ---

# Imports once, then interrupts one fork after the other: somewhere between the first byte written
# and the end. Casts and the delicate steps are slowed down, so that there is something to hit.
INTERRUPTER = """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import motrt.export.commands.export
    from motrt.engines import bundle, bundle_writer
    from motrt.export import weights
    from motrt.export.cli import main

    def slow(function, seconds):
        def call(*args, **options):
            time.sleep(seconds)
            result = function(*args, **options)
            time.sleep(seconds)
            return result
        return call

    def beside():
        return sorted(path.name for path in target.parent.iterdir())

    weights.cast_piece = slow(weights.cast_piece, 0.001)
    bundle_writer._swap = slow(bundle_writer._swap, 0.01)
    bundle_writer.shutil.rmtree = slow(bundle_writer.shutil.rmtree, 0.01)
    checkpoint, target, log = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    longest = None
    for number in (0, *[signal.SIGINT, signal.SIGTERM] * int(sys.argv[4])):
        before = beside()
        child = os.fork()
        if child == 0:
            sys.stdout = sys.stderr = open(log, "w")
            main(["export", checkpoint, "-o", str(target), "--precision", "bf16",
                  "--probe", "never", "--json", *(["--overwrite"] if before else [])])
        patience = time.time() + 20
        while beside() == before and time.time() < patience:
            time.sleep(0.0005)
        started, delay = time.time(), random.uniform(0, longest or 0)
        if number:
            time.sleep(delay)
            os.kill(child, number)
        else:
            while not target.is_dir():
                time.sleep(0.0005)
            longest = time.time() - started
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after = beside()
        manifest = target.is_dir() and bundle.Bundle.open(target).manifest.to_json()
        told = open(log).read()
        print(json.dumps([number, delay, code, before, after, told]), flush=True)
        if before and random.random() < 0.5:
            bundle_writer.shutil.rmtree(target)
"""


def test_an_interrupt_leaves_nothing_half_done(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "c")
    source = tree(root)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(INTERRUPTER)),
            *(str(root), str(tmp_path / "out/b"), str(tmp_path / "log"), "4"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 9
    for number, _, code, before, after, told in outcomes:
        assert after in ([], ["b"])
        if code == 130:
            assert "Traceback" not in told
            assert told.endswith("interrupted; nothing half-done was left behind\n")
            assert after in (before, ["b"])  # the latter if it came just after the last rename
        else:
            # Too late: it was written, and the interpreter was about to end.
            assert code in (0, -number)
            assert after == ["b"]
    assert sum(code == 130 for _, _, code, *_ in outcomes) >= 2
    assert tree(root) == source

"""Requests of the wrong kind, too large, or of another length than what goes with them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from conftest import BundleFactory
from motrt.engines import Bundle, DType, open_checkpoint
from motrt.engines.errors import ConfigError
from motrt.engines.host import Memory
from motrt.engines.memory_estimate import (
    FULL_CLIP_TOKENS,
    decode_chunk_nbytes,
    denoise_step_nbytes,
)
from motrt.engines.vae_config import VaeConfig
from motrt.export.cli import run
from motrt.runtime import ActionCondition, GenerationParams, Runtime, step_memory
from motrt.runtime.actions_file import load_actions
from motrt.runtime.patches import patch_grid

SMALL: dict[str, Any] = {"num_frames": 5, "height": 32, "width": 32, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def runtime(bundle: BundleFactory) -> Iterator[Runtime]:
    with Runtime.open(bundle("nano-like"), threads=1) as opened:
        yield opened


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", ["text"], {"role": "user"}])
def test_a_prompt_of_another_kind_is_refused(runtime: Runtime, prompt: Any) -> None:
    with pytest.raises(ConfigError, match="neither text nor messages"):
        runtime.reason(prompt)


def test_arguments_of_another_kind_are_refused(runtime: Runtime) -> None:
    wrong: Any = "hi"
    for name in ("params", "history", "action"):
        with pytest.raises(ConfigError, match=f"{name} is of the wrong kind; got str"):
            runtime.generate("x", **{name: wrong})
    with pytest.raises(ConfigError, match="params is of the wrong kind"):
        runtime.reason("x", wrong)
    with pytest.raises(ConfigError, match="prompt is no text"):
        runtime.generate(None)  # type: ignore[arg-type]


def test_things_of_another_kind_are_refused(runtime: Runtime, bundle: BundleFactory) -> None:
    wrong: Any = 5
    for name, said in (("video", "clip is of another kind"), ("latents", "of the wrong kind")):
        with pytest.raises(ConfigError, match=said):
            runtime.generate("x", GenerationParams(**SMALL), **{name: wrong})
    with pytest.raises(ConfigError, match="guidance_interval cannot be right; got 5"):
        GenerationParams(guidance_interval=wrong)
    for opened in (Runtime.open, Bundle.open, open_checkpoint):
        with pytest.raises(ConfigError, match="is no path; got int; expected str or Path"):
            opened(wrong)
    assert Bundle.open(str(bundle("nano-like"))).root == bundle("nano-like")


def test_a_step_that_cannot_fit_is_refused_before_it_is_begun(runtime: Runtime) -> None:
    config = runtime.bundle.manifest.model
    tokens = 2 * 1 * 1  # two latent frames of 32 x 32
    needed = denoise_step_nbytes(config, runtime.bundle.dtype, "native", tokens, 0)

    def free(size: int) -> Any:
        return mock.patch.object(
            step_memory, "probe_memory", return_value=Memory(10**12, size, None, None)
        )

    calls: list[int] = []
    with free(needed // 2), pytest.raises(ConfigError, match="does not fit") as caught:
        runtime.generate(
            "x", GenerationParams(**SMALL), callback_on_step_end=lambda i, *_: calls.append(i)
        )
    assert calls == []
    assert f"{tokens} tokens" in str(caught.value)
    with free(10**9):
        runtime.generate("x", GenerationParams(**SMALL))


@pytest.mark.parametrize(
    "size",
    [
        {"num_frames": 100_001, "height": 4096, "width": 4096},
        {"num_frames": 1, "height": 10**9 * 32, "width": 10**9 * 32},
        {"num_frames": 4 * 10**10 + 1},
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    runtime: Runtime, size: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="does not fit into memory"):
        runtime.generate("x", GenerationParams(**{**SMALL, **size}))
    action = ActionCondition(mode="policy", chunk_size=4 * 10**9, domain_id=1)
    with pytest.raises(ConfigError, match="does not fit into memory"):
        runtime.generate(
            "x", GenerationParams(**SMALL), image=np.zeros((32, 32, 3), np.uint8), action=action
        )


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_threads_that_would_take_the_machine_down_are_refused(
    bundle: BundleFactory, threads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="number of threads"):
        Runtime.open(bundle("nano-like"), threads=threads)
    path, prompt = str(bundle("nano-like")), ["--prompt", "x"]
    assert run(["run", "reasoner", path, *prompt, "--threads", str(threads)]) == 2
    assert run(["score", path, "--threads", str(threads)]) == 2
    assert run(["validate", path, "--against", path, "--threads", str(threads)]) == 2
    assert run(["bench", "--threads", str(threads)]) == 2
    assert capsys.readouterr().err.count("--threads") >= 4


def test_a_filter_that_cannot_be_called_is_refused_at_open(bundle: BundleFactory) -> None:
    wrong: Any = 3
    with pytest.raises(ConfigError, match="output_filter is no function; got int"):
        Runtime.open(bundle("nano-like"), output_filter=wrong)


def test_a_shift_that_cannot_be_is_the_callers() -> None:
    with pytest.raises(ConfigError, match="flow_shift cannot be right; got 0"):
        GenerationParams(flow_shift=0)


def test_rows_of_another_width_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[1, 2], [3, 4], [5]]")
    with pytest.raises(ConfigError, match="got 1 numbers in row 2; expected 2, as in row 0"):
        load_actions(tmp_path / "a.json")


def test_a_folder_named_like_a_clip_is_not_filled(
    bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.mp4").mkdir()
    command = ["run", "generator", str(bundle("nano-like")), "--prompt", "x", "--num-frames", "5"]
    assert run([*command, "-o", str(tmp_path / "d.mp4")]) == 1
    assert "a folder with the name of a file" in capsys.readouterr().err
    assert not any((tmp_path / "d.mp4").iterdir())


def test_a_step_is_estimated_by_what_was_measured(runtime: Runtime) -> None:
    """Growth of peak memory in MiB of this fixture's first step, 60 prompt tokens, one process each."""
    config = runtime.bundle.manifest.model
    measured = {
        ("native", DType.FLOAT32): {4096: 356, 8192: 1255},
        ("portable", DType.FLOAT32): {4096: 631, 8192: 2356},
        ("native", DType.FLOAT16): {4096: 437, 8192: 2190},
        ("portable", DType.FLOAT16): {4096: 629, 8192: 2353},
    }
    for (lowering, dtype), growths in measured.items():
        for tokens, growth in growths.items():
            needed = denoise_step_nbytes(config, dtype, lowering, tokens, 60) / 2**20
            assert growth / 1.5 < needed < growth


def test_a_chunk_of_pictures_is_estimated_by_what_was_measured(bundle: BundleFactory) -> None:
    """Growth of peak memory in MiB while three chunks, or one picture, were decoded."""
    record = Bundle.open(bundle("nano-like")).manifest.components["vae"]["config"]
    measured = {(9, 256, 512): 369, (9, 512, 512): 696, (1, 512, 512): 168}
    for size, growth in measured.items():
        needed = decode_chunk_nbytes(VaeConfig.from_dict(record), *size) / 2**20
        assert growth / 1.25 < needed < growth


def test_the_full_clip_is_the_default_of_a_generation() -> None:
    params = GenerationParams()
    grid = patch_grid((params.num_frames - 1) // 4 + 1, params.height // 16, params.width // 16, 2)
    assert math.prod(grid) == FULL_CLIP_TOKENS


def test_pictures_that_cannot_be_decoded_are_refused_before_the_work(
    bundle: BundleFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "generator", str(bundle("nano-like")), "--prompt", "x", "--json"]
    size = ["--num-frames", "5", "--height", "32", "--width", "32", "--num-inference-steps", "1"]
    tight = Memory(10**12, 2_000_000, None, None)  # a chunk of 32 x 32 pixels takes 2.7 MB
    with mock.patch.object(step_memory, "probe_memory", return_value=tight):
        assert run([*command, *size, "-o", str(tmp_path / "a.gif")]) == 1
        assert "32 x 32 pixels" in json.loads(capsys.readouterr().out)["error"]["got"]
        assert run([*command, *size, "-o", str(tmp_path / "a.npz")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(runtime: Runtime) -> None:
    silent = Memory(None, None, None, "no /proc")
    with mock.patch.object(step_memory, "probe_memory", return_value=silent):
        runtime.generate("x", GenerationParams(**SMALL))


@pytest.mark.parametrize(
    ("count", "said"), [(2, "the last is repeated"), (9, "the rest is left out"), (4, None)]
)
def test_actions_of_another_length_are_told(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, count: int, said: str | None
) -> None:
    action = ActionCondition(
        mode="forward_dynamics",
        chunk_size=4,
        domain_id=1,
        raw_actions=np.zeros((count, 2), np.float32),
    )
    with caplog.at_level(logging.WARNING):
        runtime.generate(
            "x", GenerationParams(**SMALL), image=np.zeros((32, 32, 3), np.uint8), action=action
        )
    assert (said in caplog.text) if said else not caplog.records


@pytest.mark.parametrize(("frames", "told"), [(3, True), (5, False)])
def test_a_short_clip_is_told(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, frames: int, told: bool
) -> None:
    clip = np.zeros((frames, 32, 32, 3), np.uint8)
    with caplog.at_level(logging.WARNING):
        runtime.generate("x", GenerationParams(**{**SMALL, "num_frames": 9}), video=clip)
    assert ("has 3 frames of 5" in caplog.text) == told


@pytest.mark.parametrize(
    ("frames", "said"), [(9, None), (12, "has more frames than 9"), (6, "has 6 frames of 9")]
)
def test_a_clip_that_is_read_whole_is_told_of_another_length(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, frames: int, said: str | None
) -> None:
    action = ActionCondition(mode="inverse_dynamics", chunk_size=8, domain_id=1)
    clip = np.zeros((frames, 32, 32, 3), np.uint8)
    with caplog.at_level(logging.WARNING):
        runtime.generate("x", GenerationParams(**SMALL), video=clip, action=action)
    assert (said in caplog.text) if said else not caplog.records


def test_clips_go_to_latents_and_back(runtime: Runtime) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3)).astype(np.uint8)
    latents = runtime.encode(clip)
    assert latents.shape == (1, 48, 2, 2, 3)
    frames = runtime.decode(latents)
    assert frames.shape == clip.shape
    assert frames.dtype == np.uint8
    assert not np.array_equal(runtime.encode(clip[::-1].copy()), latents)


@pytest.mark.parametrize(
    "wrong", [np.zeros((5, 32, 32, 3), np.float32), np.zeros(3), None, "clip"]
)
def test_what_is_no_clip_is_not_encoded(runtime: Runtime, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="only frames can be encoded"):
        runtime.encode(wrong)


def test_clips_of_a_size_that_cannot_be_are_refused(runtime: Runtime) -> None:
    for shape in ((4, 32, 32, 3), (5, 30, 32, 3)):
        with pytest.raises(ConfigError):
            runtime.encode(np.zeros(shape, np.uint8))

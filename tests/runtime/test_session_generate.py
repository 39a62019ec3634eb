"""Generation against diffusers' pipeline, from the same noise, from seed to last latent and frame."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from conftest import BundleFactory, CheckpointFactory
from motrt.engines.bundle import Bundle
from motrt.engines.errors import ConfigError
from motrt.engines.onnxruntime_backend import OnnxRuntimeBackend
from motrt.engines.tensors import Array
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from motrt.runtime import (
    ActionCondition,
    GenerationParams,
    GenerationResult,
    Latents,
    Runtime,
    generator_offset,
)
from motrt.runtime.protocols import Branch
from omni_fixtures.checkpoints import shared_as_separate
from pipeline_reference import NEGATIVE, PROMPT, Reference, action_condition, frames

# Largest error over fixtures, tasks, guidance 1, 4 and 6, lowerings and residencies: 4e-6 of the
# reference's maximum after 10 steps (at guidance 1: 6e-7; guidance multiplies rounding by 2g - 1).
# Guidance off by 0.25 % changes 3e-4 or more.
BOUND = 2e-5
STEPS = 10
SMALL: dict[str, Any] = {"num_frames": 17, "height": 64, "width": 64}

Task = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
TASKS: dict[str, Callable[[], Task]] = {
    # Parameters of both sides; conditions in our words; in the pipeline's.
    "image": lambda: ({**SMALL, "num_frames": 1}, {}, {}),
    "clip": lambda: (SMALL, {}, {}),
    "odd": lambda: ({"num_frames": 5, "height": 80, "width": 112, "fps": 12.5}, {}, {}),
    "from-image": lambda: (SMALL, *_both(image=frames(1, 96, 80)[0])),
    "from-frame": lambda: (
        SMALL,
        {"video": frames(9, 48, 80), "condition_frame_indexes": (0,)},
        {"video": frames(9, 48, 80), "condition_frame_indexes_vision": (0,)},
    ),
    "from-clip": lambda: (SMALL, *_both(video=frames(9), condition_video_keep="last")),
    "all-given": lambda: ({**SMALL, "num_frames": 5}, *_both(video=frames(9, 48, 80))),
    "sound": lambda: (SMALL, {"sound": True}, {"enable_sound": True}),
}
CASES = [
    ("nano-like", "clip", 6.0, "native", "separate"),
    ("nano-like", "from-clip", 1.0, "native", "swap"),
    ("nano-like", "from-image", 4.0, "portable", "shared"),
    ("nano-like", "sound", 6.0, "native", "shared"),
    ("nano-like", "all-given", 4.0, "native", "separate"),
    ("edge-like", "image", 6.0, "native", "shared"),
    ("edge-like", "from-image", 6.0, "native", "separate"),
    ("edge-like", "from-frame", 4.0, "portable", "swap"),
    ("super-like", "clip", 4.0, "portable", "separate"),
    ("super-like", "odd", 6.0, "native", "swap"),
    ("super-like", "from-clip", 6.0, "native", "shared"),
    ("shared", "from-image", 6.0, "native", "shared"),
    ("shared", "sound", 4.0, "portable", "separate"),
]
ALL_CASES = [
    case
    for case in itertools.product(
        ("nano-like", "edge-like", "super-like", "shared"),
        TASKS,
        (1.0, 4.0, 6.0),
        ("native", "portable"),
        ("separate", "shared", "swap"),
    )
    if case not in CASES and (case[1] != "sound" or case[0] in {"nano-like", "shared"})
]
ACTION_CASES = [
    ("nano-like", "forward_dynamics", 4.0, "native"),
    ("nano-like", "policy", 1.0, "portable"),
    ("edge-like", "inverse_dynamics", 4.0, "native"),
    ("edge-like", "policy", 4.0, "native"),
]


def _both(**conditions: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return conditions, conditions


class Pair:
    """A bundle and diffusers over the same checkpoint."""

    def __init__(self, bundle: Path, reference: Reference) -> None:
        self.bundle = bundle
        self.reference = reference
        self._opened: dict[str, Runtime] = {}

    def ours(
        self,
        task: str = "clip",
        guidance: float = 6.0,
        *,
        seed: int = 5,
        residency: Any = "separate",
        backend: Callable[[Bundle], Any] | None = None,
        prompt: str = PROMPT,
        **options: Any,
    ) -> GenerationResult:
        size, conditions, _ = TASKS[task]()
        params = {field.name for field in dataclasses.fields(GenerationParams)}
        given = {**size, "num_inference_steps": STEPS, "negative_prompt": NEGATIVE}
        given |= {**conditions, **options, "guidance_scale": guidance, "seed": seed}
        if backend is not None:
            runtime = Runtime.open(self.bundle, backend=backend)
        elif residency in self._opened:
            runtime = self._opened[residency]
        else:
            runtime = Runtime.open(self.bundle, residency=residency, threads=1)
            self._opened[residency] = runtime
        return runtime.generate(
            prompt,
            GenerationParams(**{k: v for k, v in given.items() if k in params}),
            **{k: v for k, v in given.items() if k not in params},
        )

    def close(self) -> None:
        for runtime in self._opened.values():
            runtime.close()

    def theirs(
        self, task: str = "clip", guidance: float = 6.0, **options: Any
    ) -> dict[str, Array]:
        size, _, conditions = TASKS[task]()
        return self.reference(
            **{"seed": 5, **size, **conditions, "guidance_scale": guidance, **options}
        )


@pytest.fixture(scope="module")
def whole_shared(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shared checkpoint with the nano-like pipeline's other parts."""
    folder = tmp_path_factory.mktemp("whole-shared") / "checkpoint"
    shutil.copytree(checkpoint("nano-like"), folder, ignore=shutil.ignore_patterns("transformer"))
    return shutil.copytree(checkpoint("shared"), folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def pair(
    checkpoint: CheckpointFactory,
    bundle: BundleFactory,
    whole_shared: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Pair]]:
    references: dict[str, Reference] = {}
    pairs: dict[tuple[str, str], Pair] = {}

    def separated() -> Path:
        folder = tmp_path_factory.mktemp("separated") / "checkpoint"
        kept = shutil.ignore_patterns("transformer")
        shutil.copytree(checkpoint("nano-like"), folder, ignore=kept)
        return shared_as_separate(whole_shared, folder)

    def make(kind: str, lowering: str = "native") -> Pair:
        if kind not in references:
            references[kind] = Reference(separated() if kind == "shared" else checkpoint(kind))
        if (kind, lowering) not in pairs:
            pairs[kind, lowering] = Pair(exported(kind, lowering), references[kind])
        return pairs[kind, lowering]

    def exported(kind: str, lowering: str) -> Path:
        if kind != "shared":
            return bundle(kind, "fp32", lowering)
        folder = tmp_path_factory.mktemp("shared") / lowering
        return export_checkpoint(whole_shared, folder, ExportOptions(lowering=lowering)).bundle

    yield make
    for both in pairs.values():
        both.close()


def error(result: GenerationResult, want: Mapping[str, Array]) -> float:
    """Return the largest error of any modality, relative to that modality's maximum."""
    got = {"vision": result.latents, "sound": result.sound_latents, "action": result.action}
    return max(
        float(np.abs(cast("Array", got[name]) - array).max() / np.abs(array).max())
        for name, array in want.items()
    )


@pytest.mark.parametrize(("kind", "task", "guidance", "lowering", "residency"), CASES)
def test_latents_are_diffusers(
    pair: Callable[..., Pair], kind: str, task: str, guidance: float, lowering: str, residency: str
) -> None:
    both = pair(kind, lowering)
    result = both.ours(task, guidance, residency=residency)
    assert result.latents.dtype == np.float32
    assert error(result, both.theirs(task, guidance)) <= BOUND


@pytest.mark.full
@pytest.mark.parametrize(("kind", "task", "guidance", "lowering", "residency"), ALL_CASES)
def test_latents_are_diffusers_in_every_combination(
    pair: Callable[..., Pair], kind: str, task: str, guidance: float, lowering: str, residency: str
) -> None:
    test_latents_are_diffusers(pair, kind, task, guidance, lowering, residency)


def test_a_quarter_percent_of_guidance_is_outside_the_bound(pair: Callable[..., Pair]) -> None:
    both = pair("nano-like")
    assert error(both.ours(guidance=4.01), both.theirs(guidance=4.0)) > 10 * BOUND


def test_positions_of_the_other_branch_are_outside_the_bound(pair: Callable[..., Pair]) -> None:
    both = pair("nano-like")

    def confused(model: Any, num_prompt_tokens: int) -> int:
        return generator_offset(model, 20)  # neither prompt is that short

    with mock.patch("motrt.runtime.network.generator_offset", confused):
        result = both.ours()
    assert error(result, both.theirs()) > 10 * BOUND


def test_the_other_seed_is_outside_the_bound(pair: Callable[..., Pair]) -> None:
    both = pair("nano-like")
    assert error(both.ours(seed=6), both.theirs()) > 0.1


@pytest.mark.parametrize(("kind", "mode", "guidance", "lowering"), ACTION_CASES)
def test_actions_are_diffusers(
    pair: Callable[..., Pair], kind: str, mode: Any, guidance: float, lowering: str
) -> None:
    import torch

    both = pair(kind, lowering)
    actions = np.random.RandomState(3).standard_normal((3, 9)).astype(np.float32)
    raw = actions if mode == "forward_dynamics" else None  # one short of a chunk: repeated
    clip = frames(5, 192, 320)
    seen: dict[str, Any] = {"video": clip} if mode == "inverse_dynamics" else {"image": clip[0]}
    common: dict[str, Any] = {"mode": mode, "chunk_size": 4, "domain_name": "av"}
    want = both.theirs(
        guidance=guidance,
        num_frames=None,
        height=None,
        width=None,
        action=action_condition(
            raw_actions=None if raw is None else torch.from_numpy(raw), **common, **seen
        ),
    )
    result = both.ours(
        guidance=guidance,
        height=192,
        width=320,
        action=ActionCondition(raw_actions=raw, **common),
        **seen,
    )
    assert want.keys() == {"vision"} | ({"action"} if raw is None else set())
    assert error(result, want) <= BOUND
    assert result.action is not None
    assert result.action.shape == (4, 9)
    if raw is not None:
        np.testing.assert_array_equal(result.action, np.concatenate([raw, raw[-1:]]))


def test_given_latents_stand_for_the_noise_and_for_the_clean_frame(
    pair: Callable[..., Pair],
) -> None:
    """As in diffusers, where an image beside latents says which frame is clean, not what it shows."""
    import torch

    both = pair("nano-like")
    noise = np.random.RandomState(8).standard_normal((1, 48, 5, 4, 4)).astype(np.float32)
    want = both.theirs("from-image", latents=torch.from_numpy(noise))
    result = both.ours("from-image", latents=Latents(latents=noise))
    assert error(result, want) <= BOUND
    np.testing.assert_array_equal(result.latents[:, :, 0], noise[:, :, 0])


def test_given_sound_latents_are_the_start(pair: Callable[..., Pair]) -> None:
    import torch

    both = pair("nano-like")
    random = np.random.RandomState(9)
    noise = random.standard_normal((1, 48, 5, 4, 4)).astype(np.float32)
    sound = random.standard_normal((64, 18)).astype(np.float32)
    want = both.theirs(
        "sound", latents=torch.from_numpy(noise), sound_latents=torch.from_numpy(sound)
    )
    result = both.ours("sound", latents=Latents(latents=noise, sound_latents=sound))
    assert error(result, want) <= BOUND


def test_sound_at_25_frames_a_second_is_not_one_latent_longer(pair: Callable[..., Pair]) -> None:
    """109 / 25 * 25 is more than 109 in floating point; diffusers counts whole samples."""
    both = pair("nano-like")
    size: dict[str, Any] = {"num_frames": 109, "height": 16, "width": 16}
    size |= {"fps": 25.0, "num_inference_steps": 1}
    want = both.theirs("sound", guidance=1.0, **size)
    result = both.ours("sound", guidance=1.0, **size)
    assert want["sound"].shape == (64, 109)
    assert error(result, want) <= BOUND


@pytest.mark.parametrize("kind", ["nano-like", "edge-like"])
@pytest.mark.parametrize("task", ["image", "from-image"])
def test_frames_are_diffusers(pair: Callable[..., Pair], kind: str, task: str) -> None:
    both = pair(kind)
    want = both.theirs(task, output_type="np")["vision"]
    result = both.ours(task)
    made = list(result.frames())
    assert len(made) == result.num_frames == len(want)
    assert {(frame.dtype, frame.shape) for frame in made} == {(np.dtype(np.uint8), (64, 64, 3))}
    # Half a level is what rounding may cost; latents differ by 1e-5.
    assert np.abs(np.stack(made) / 255.0 - want).max() <= 0.51 / 255


def test_prompts_of_very_different_lengths(pair: Callable[..., Pair]) -> None:
    both = pair("super-like")
    long = " ".join([PROMPT] * 60)
    spy = Spy(both.bundle)
    result = both.ours(
        "image", prompt=long, negative_prompt="", backend=spy, use_system_prompt=False
    )
    want = both.theirs("image", prompt=long, negative_prompt="", use_system_prompt=False)
    assert max(spy.lengths) >= 10 * min(spy.lengths)
    assert error(result, want) <= BOUND


@pytest.mark.parametrize("kind", ["nano-like", "edge-like"])
def test_a_single_step(pair: Callable[..., Pair], kind: str) -> None:
    both = pair(kind)
    result = both.ours(num_inference_steps=1)
    assert error(result, both.theirs(num_inference_steps=1)) <= BOUND


class Spy:
    """A backend that counts: calls of each branch, prompt tokens of each, tokens run."""

    name = "spy"

    def __init__(self, bundle: Path) -> None:
        self._inner = OnnxRuntimeBackend(Bundle.open(bundle), threads=1)
        self.calls: list[int] = []
        self.lengths: list[int] = []

    def __call__(self, bundle: Bundle) -> Spy:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generator(self) -> Spy:
        return self

    def branch(self, context: Mapping[str, Array], constants: Mapping[str, Array]) -> Branch:
        inner = self._inner.generator().branch(context, constants)
        index = len(self.calls)
        self.calls.append(0)
        self.lengths.append(context["context.0.key"].shape[2])

        def counted(feeds: Mapping[str, Array]) -> dict[str, Array]:
            self.calls[index] += 1
            return inner(feeds)

        return counted


def test_guidance_1_never_runs_the_negative_branch(pair: Callable[..., Pair]) -> None:
    both = pair("nano-like")
    spy = Spy(both.bundle)
    both.ours(guidance=1.0, backend=spy)
    assert spy.calls == [STEPS]
    both.ours(guidance=4.0, backend=(other := Spy(both.bundle)))
    assert other.calls == [STEPS, STEPS]


def test_a_guidance_interval_is_on_where_it_says(pair: Callable[..., Pair]) -> None:
    both = pair("edge-like")
    timesteps: list[float] = []

    def note(step: int, timestep: float, state: Any) -> None:
        timesteps.append(timestep)

    off = both.ours(guidance=1.0, callback_on_step_end=note)
    spy = Spy(both.bundle)
    never = both.ours(guidance=6.0, guidance_interval=(0.0, 1.0), backend=spy)
    assert spy.calls == [STEPS]
    np.testing.assert_array_equal(never.latents, off.latents)

    low, high = timesteps[6], timesteps[2]  # exclusive on both sides: three steps lie between
    spy = Spy(both.bundle)
    partly = both.ours(guidance=6.0, guidance_interval=(low, high), backend=spy)
    assert spy.calls == [STEPS, 3]
    always = both.ours(guidance=6.0, guidance_interval=(0.0, 1001.0))
    np.testing.assert_array_equal(always.latents, both.ours(guidance=6.0).latents)
    assert np.abs(partly.latents - off.latents).max() > 0.01
    assert np.abs(partly.latents - always.latents).max() > 0.01


def test_two_generations_in_a_row_are_two_fresh_runtimes(pair: Callable[..., Pair]) -> None:
    both = pair("nano-like")
    params = GenerationParams(
        **SMALL, num_inference_steps=4, seed=3, guidance_scale=4.0, sound=True
    )
    fresh = []
    for prompt in (PROMPT, NEGATIVE):
        with Runtime.open(both.bundle, threads=1) as runtime:
            fresh.append(runtime.generate(prompt, params))
    for residency in ("separate", "swap"):
        with Runtime.open(both.bundle, threads=1, residency=residency) as runtime:
            runtime.reason(PROMPT)
            for prompt, want in zip((PROMPT, NEGATIVE), fresh, strict=True):
                result = runtime.generate(prompt, params)
                np.testing.assert_array_equal(result.latents, want.latents)
                np.testing.assert_array_equal(result.sound_latents, want.sound_latents)


def test_one_copy_of_shared_weights_gives_the_same(pair: Callable[..., Pair]) -> None:
    both = pair("shared")
    separate, shared = (both.ours(residency=name) for name in ("separate", "shared"))
    scale = np.abs(separate.latents).max()
    assert np.abs(shared.latents - separate.latents).max() <= 1e-5 * scale


def test_swap_lets_the_other_engine_go(bundle: BundleFactory) -> None:
    """What holds an engine beside the backend would keep its weights in memory."""
    import gc
    import weakref

    engines: list[weakref.ref[Any]] = []
    backends: list[OnnxRuntimeBackend] = []

    def open_backend(found: Bundle) -> OnnxRuntimeBackend:
        backends.append(OnnxRuntimeBackend(found, residency="swap", threads=1))
        return backends[0]

    with Runtime.open(bundle("nano-like"), backend=cast("Any", open_backend)) as runtime:
        first = runtime.reason(PROMPT)
        engines.append(weakref.ref(backends[0].reasoner()))

        def is_gone(step: int, timestep: float, state: Any) -> None:
            gc.collect()
            assert engines[0]() is None

        params = GenerationParams(**SMALL, num_inference_steps=2)
        result = runtime.generate(PROMPT, params, history=first, callback_on_step_end=is_gone)
        engines.append(weakref.ref(backends[0].generator()))
        runtime.reason(PROMPT)
        gc.collect()
        assert engines[1]() is None
        engines.append(weakref.ref(backends[0].reasoner()))
        conversation = weakref.ref(cast("Any", runtime._sequence))
    gc.collect()
    assert engines[2]() is conversation() is None  # nor does a result, or a closed runtime
    assert result.latents.shape == (1, 48, 5, 4, 4)


@pytest.fixture
def rescheduled(pair: Callable[..., Pair], tmp_path: Path) -> Callable[..., Pair]:
    """Return a function that gives a nano-like pair whose bundle names another scheduler."""

    def make(scheduler: dict[str, Any], **pipeline: Any) -> Pair:
        both = pair("nano-like")
        folder = tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(both.bundle, folder, copy_function=os.link)
        opened = Bundle.open(folder)
        index = opened.manifest.pipeline | pipeline
        opened.commit(dataclasses.replace(opened.manifest, scheduler=scheduler, pipeline=index))
        return Pair(folder, both.reference)

    return make


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDPMScheduler"])
def test_schedulers_of_diffused_checkpoints(rescheduled: Callable[..., Pair], name: str) -> None:
    import diffusers

    config = {"prediction_type": "v_prediction", "clip_sample": False}
    scheduler = getattr(diffusers, name)(**config)
    scheduler.sigmas = np.zeros(STEPS)  # the pipeline hands them to a cache that is off
    both = rescheduled({"_class_name": name, **config})
    result = both.ours("clip", 4.0)
    assert error(result, both.theirs("clip", 4.0, scheduler=scheduler)) <= BOUND


DISTILLED = {"_class_name": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": True}
SIGMAS = (1.0, 0.9, 0.6, 0.3)


def test_a_distilled_checkpoint_runs_its_own_steps(rescheduled: Callable[..., Pair]) -> None:
    both = rescheduled(DISTILLED, is_distilled=True, distilled_sigmas=list(SIGMAS))
    seen: list[float] = []

    def note(step: int, timestep: float, state: Any) -> None:
        seen.append(timestep)

    spy = Spy(both.bundle)
    size, conditions, _ = TASKS["from-image"]()
    params = GenerationParams(**size, seed=5)
    with Runtime.open(both.bundle, backend=spy) as runtime:
        result = runtime.generate(PROMPT, params, **conditions, callback_on_step_end=note)
    assert spy.calls == [4]  # no negative branch
    np.testing.assert_allclose(seen, np.array(SIGMAS) * 1000, rtol=1e-6)
    with Runtime.open(both.bundle, threads=1) as runtime:
        again = runtime.generate(PROMPT, params, **conditions)
        other = runtime.generate(PROMPT, dataclasses.replace(params, seed=6), **conditions)
        plain = runtime.generate(PROMPT, params)
    np.testing.assert_array_equal(result.latents, again.latents)
    # The given frame is put back after every renewal of the noise, whatever the seed.
    np.testing.assert_array_equal(result.latents[:, :, 0], other.latents[:, :, 0])
    assert np.abs(result.latents - other.latents)[:, :, 1:].max() > 0.1
    assert np.abs(result.latents - plain.latents).max() > 0.1


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"guidance_scale": 4.0}, "guidance is part of its weights; got guidance_scale 4.0"),
        ({"num_inference_steps": 7}, "number of steps is fixed; got num_inference_steps 7"),
        ({"flow_shift": 3.0}, "its schedule is fixed"),
    ],
)
def test_a_distilled_checkpoint_refuses_other_settings(
    rescheduled: Callable[..., Pair], setting: dict[str, Any], match: str
) -> None:
    both = rescheduled(DISTILLED, is_distilled=True, distilled_sigmas=list(SIGMAS))
    with (
        Runtime.open(both.bundle, backend=NoCompute) as runtime,
        pytest.raises(ConfigError, match=match),
    ):
        runtime.generate(PROMPT, GenerationParams(**SMALL, **setting))


class NoCompute:
    """A backend that nobody may ask for an engine."""

    name = "none"

    def __init__(self, bundle: Bundle) -> None:
        del bundle

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def talk(bundle: BundleFactory) -> Iterator[Runtime]:
    with Runtime.open(bundle("nano-like"), threads=1) as runtime:
        yield runtime


def test_a_conversation_goes_on_into_a_clip(talk: Runtime, bundle: BundleFactory) -> None:
    params = GenerationParams(**SMALL, num_inference_steps=4, guidance_scale=4.0)
    answered = talk.reason("What will the red square do next?")
    result = talk.generate(PROMPT, params, history=answered)
    followed = talk.reason([*answered.messages, {"role": "user", "content": "And then?"}])
    assert followed.reused_tokens >= answered.prompt_tokens
    with Runtime.open(bundle("nano-like"), threads=1) as fresh:
        afresh = fresh.generate(PROMPT, params, history=answered)
        without = fresh.generate(PROMPT, params)
        again = fresh.reason(followed.messages[:-1])
    scale = np.abs(afresh.latents).max()
    assert np.abs(result.latents - afresh.latents).max() <= 1e-5 * scale
    assert np.abs(result.latents - without.latents).max() > 0.01 * scale
    assert again.token_ids == followed.token_ids


def test_a_seed_draws_vision_then_sound_then_actions(pair: Callable[..., Pair]) -> None:
    """Fixed by the documentation, so that others can start from the same noise."""
    both = pair("nano-like")
    random = np.random.RandomState(5)
    vision = random.standard_normal((1, 48, 5, 4, 4)).astype(np.float32)
    sound = random.standard_normal((64, 18)).astype(np.float32)
    given = Latents(latents=vision, sound_latents=sound)
    seeded, started = both.ours("sound"), both.ours("sound", latents=given)
    np.testing.assert_array_equal(seeded.latents, started.latents)
    np.testing.assert_array_equal(seeded.sound_latents, started.sound_latents)

"""The packaged checkpoints have the skills that are claimed, the same through diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motrt.calibration.demo.tiny_omni import LAYOUTS, write_checkpoint
from motrt.calibration.score.run import score_bundle
from motrt.calibration.score.subject import RuntimeSubject
from motrt.calibration.score.world import NUM_FRAMES, SIZE, Scene, scenes
from motrt.export.pipeline import export_checkpoint
from motrt.runtime import GenerationParams, Runtime
from tiny_omni.bars import BARS, misses
from tiny_omni.compare import DiffusersSubject

Bundles = Callable[[str], Path]
RESULTS = Path(__file__).parent / "tiny_omni" / "results"
SAMPLES = 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("tiny_omni")

    def make(layout: str) -> Path:
        target = folder / layout
        return target if target.exists() else write_checkpoint(layout, target)

    return make


@pytest.fixture(scope="module")
def bundles(checkpoints: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("tiny_omni_bundles")

    def make(layout: str) -> Path:
        target = folder / layout
        if not target.exists():
            export_checkpoint(checkpoints(layout), target)
        return target

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_can_do_what_is_claimed(layout: str, bundles: Bundles) -> None:
    result = score_bundle(bundles(layout), samples=SAMPLES, threads=1)
    assert set(result.skills) == set(BARS)
    assert misses(result.skills, samples=SAMPLES, layout=layout) == {}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_committed_scores_are_those_of_the_packaged_files(
    layout: str, bundles: Bundles
) -> None:
    committed = json.loads((RESULTS / f"{layout}.json").read_text())
    result = score_bundle(bundles(layout), samples=committed["samples"])
    for name, value in result.skills.items():
        claimed = committed["skills"][name]["motrt"]
        assert value == pytest.approx(claimed, abs=1.01 / committed["samples"]), name


def test_the_bars_see_a_broken_weight(checkpoints: Bundles, tmp_path: Path) -> None:
    broken = write_checkpoint("separate", tmp_path / "checkpoint")
    file = next((broken / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    for name in ("layers.1.self_attn.to_add_out.weight", "layers.1.self_attn.to_out.weight"):
        tensors[name] = -tensors[name]
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    bundle = export_checkpoint(broken, tmp_path / "bundle").bundle
    result = score_bundle(bundle, samples=6, threads=1)
    assert {"policy", "colour", "reasoner_exact_match"} <= set(
        misses(result.skills, samples=6, layout="separate")
    )


def test_diffusers_makes_the_same_of_it(bundles: Bundles, checkpoints: Bundles) -> None:
    theirs = DiffusersSubject(checkpoints("separate"))
    scene: Scene = next(iter(scenes("held_out", 77)))
    clip, first = scene.render(), scene.render()[0]
    with Runtime.open(bundles("separate")) as runtime:
        ours = RuntimeSubject(runtime)
        for one, other in (
            (ours.make(scene.caption, 5), theirs.make(scene.caption, 5)),
            (ours.animate(first, scene.caption, 6), theirs.animate(first, scene.caption, 6)),
            (
                ours.drive(first, scene.plain_caption, scene.actions, 7),
                theirs.drive(first, scene.plain_caption, scene.actions, 7),
            ),
            (ours.act(first, scene.instruction, 8)[1], theirs.act(first, scene.instruction, 8)[1]),
            (ours.rebuild(clip), theirs.rebuild(clip)),
        ):
            assert one.shape == other.shape == (NUM_FRAMES, SIZE, SIZE, 3)
            apart = np.abs(one.astype(int) - other)
            assert (apart <= 1).mean() >= 0.999
            assert (np.abs(one[::-1].astype(int) - other) <= 1).mean() < 0.999  # it could fail
        np.testing.assert_allclose(
            ours.read(clip, scene.plain_caption, 9)[:, :2],
            theirs.read(clip, scene.plain_caption, 9)[:, :2],
            atol=1e-4,
        )
        question = "Expand: red circle, left, slowly."
        assert ours.ask(question) == theirs.ask(question)


@pytest.mark.parametrize("prompt", ["", "An elephant 🐘 reads Дюма.", "red " * 200])
def test_prompts_from_outside_its_world_are_answered_too(prompt: str, bundles: Bundles) -> None:
    params = GenerationParams(
        num_frames=5, height=SIZE, width=SIZE, num_inference_steps=2, guidance_scale=2.0
    )
    with Runtime.open(bundles("separate")) as runtime:
        frames = list(runtime.generate(prompt, params).frames())
        runtime.reason(prompt)
    assert np.stack(frames).shape == (5, SIZE, SIZE, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_committed_results_hold_the_bars(layout: str) -> None:
    committed = json.loads((RESULTS / f"{layout}.json").read_text())
    assert committed["samples"] >= 200
    ours = {name: row["motrt"] for name, row in committed["skills"].items()}
    assert misses(ours, samples=committed["samples"], layout=layout) == {}
    apart = {n: row.get("samples_apart", 0) for n, row in committed["skills"].items()}
    assert max(apart.values()) * 200 <= committed["samples"]
    lines = (RESULTS / f"{layout}.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))

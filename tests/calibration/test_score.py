"""The scores see what is wrong with a clip, an action or an answer, and nothing else."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from conftest import BundleFactory
from motrt.calibration.score.pixels import look
from motrt.calibration.score.questions import KINDS, questions
from motrt.calibration.score.skills import GROUPS, psnr_db, score
from motrt.calibration.score.world import (
    COLOURS,
    DIRECTIONS,
    NUM_FRAMES,
    SHAPES,
    SPEEDS,
    Clip,
    Split,
    draw,
    is_held_out,
    path_of,
    plan_actions,
    scenes,
    walks,
)
from motrt.export.cli import run
from oracle import Oracle

SAMPLES = 6
SPLITS: tuple[Split, ...] = ("train", "held_out")


def test_who_does_everything_right_scores_one() -> None:
    result = score(Oracle(), GROUPS, samples=SAMPLES)
    error, psnr = (result.skills.pop(n) for n in ("inverse_dynamics_error", "vae_psnr_db"))
    assert error < 0.02
    assert psnr == 100
    assert result.skills == dict.fromkeys(result.skills, 1.0)
    assert len(result.skills) == 8
    assert result.to_dict()["samples"] == SAMPLES


@pytest.mark.parametrize(
    ("fault", "hurt"),
    [
        ({"colour": "green"}, {"colour", "image_to_video", "forward_dynamics"}),
        ({"shape": "circle"}, {"shape", "image_to_video", "forward_dynamics"}),
        ({"turn": -1.0}, {"direction", "image_to_video", "forward_dynamics", "policy"}),
        (
            {"turn": 0.0},
            {"direction", "speed", "image_to_video", "forward_dynamics", "policy"},
        ),
        ({"turn": 0.7}, {"speed", "forward_dynamics", "policy"}),
        ({"jump": 4.0}, {"image_to_video", "forward_dynamics"}),
    ],
    ids=str,
)
def test_each_fault_is_seen_where_it_is(fault: dict[str, object], hurt: set[str]) -> None:
    oracle = Oracle()
    for name, value in fault.items():
        setattr(oracle, name, value)
    groups = ("text_to_video", "image_to_video", "forward_dynamics", "policy")
    skills = score(oracle, groups, samples=SAMPLES).skills
    assert {name for name, value in skills.items() if value < 0.9} == hurt


def test_noisy_actions_are_measured() -> None:
    oracle = Oracle()
    oracle.noise = 0.1
    error = score(oracle, ["inverse_dynamics"], samples=20).skills["inverse_dynamics_error"]
    assert error == pytest.approx(0.1 * 2**0.5, rel=0.1) or error == pytest.approx(
        0.2 * 2**0.5, rel=0.1
    )


def test_an_answer_counts_if_it_is_exact() -> None:
    class Talkative(Oracle):
        def ask(self, prompt: str) -> str:
            return super().ask(prompt) + " I think."

    assert score(Talkative(), ["reasoner"], samples=3).skills == {"reasoner_exact_match": 0.0}


def test_empty_noisy_and_changing_clips_show_nothing() -> None:
    blank = look(np.zeros((NUM_FRAMES, 64, 64, 3), np.uint8) + np.uint8(24))
    assert (blank.colour, blank.shape, blank.direction, blank.speed) == (None,) * 4
    scene = next(scenes("held_out", 0))
    clip = scene.render()
    clip[-1] = draw((240, 240, 240), scene.shape, scene.path[-1:])[0]
    assert look(clip).colour is None


def test_blur_and_noise_do_not_hide_what_is_there() -> None:
    random = np.random.default_rng(0)
    for scene in islice(scenes("held_out", 5), 12):
        clip = scene.render().astype(np.float32)
        blurred = (clip + np.roll(clip, 1, 1) + np.roll(clip, 1, 2)) / 3
        noisy = np.clip(blurred + random.normal(0, 6, clip.shape), 0, 255).astype(np.uint8)
        seen = look(noisy)
        assert (seen.colour, seen.shape) == (scene.colour, scene.shape)
        assert (seen.direction, seen.speed) == (scene.direction, scene.speed)


def test_training_never_sees_what_is_held_out() -> None:
    triples = [(c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS]
    held = {triple for triple in triples if is_held_out(*triple)}
    assert len(held) == len(triples) / 8
    for index in range(3):  # each part is seen in training, and is held out somewhere
        assert {t[index] for t in held} >= ({*SHAPES} if index == 1 else set())
        assert {t[index] for t in triples if t not in held} == {t[index] for t in triples}
    for scene in islice(scenes("train", 1), 200):
        assert (scene.colour, scene.shape, scene.direction) not in held
    for scene in islice(scenes("held_out", 1), 50):
        assert (scene.colour, scene.shape, scene.direction) in held
    names = {tuple(np.sign(v)): k for k, v in DIRECTIONS.items()}
    for split in SPLITS:
        for walk in islice(walks(split, 1), 50):
            moves = {names.get(tuple(np.sign(step).astype(int))) for step in walk.actions}
            unseen = any(m and (walk.colour, walk.shape, m) in held for m in moves)
            assert unseen == (split == "held_out")
    asked = {q.prompt for q in islice(questions("train", 1), 3000)}
    assert not asked & {q.prompt for q in islice(questions("held_out", 2), 3000)}


def test_the_shape_stays_in_the_picture() -> None:
    drawn: list[Clip] = [*islice(scenes("train", 2), 99), *islice(walks("train", 2), 99)]
    for clip in drawn:
        assert clip.path.min() >= 9
        assert clip.path.max() <= 54


def test_questions_have_the_right_answers() -> None:
    assert {q.kind for q in islice(questions("train", 0), 30)} == set(KINDS)
    for question in islice(questions("train", 3), 300):
        numbers = [int(c) for c in question.prompt if c.isdigit()]
        if question.kind == "plan":
            moves = question.answer.rstrip(".").split(", ")
            path = path_of(numbers[0], numbers[1], plan_actions(moves)) if moves else None
            assert path is not None
            cells = (path[-1] - path[0]) / 8 + numbers[:2]
            assert cells.tolist() == numbers[2:]
        if question.kind == "locate":
            way = DIRECTIONS[question.prompt.split("moves ")[1].split()[0]]
            end = [numbers[i] + way[i] * numbers[2] for i in (0, 1)]
            assert question.answer == f"It is at {end[0]},{end[1]}."


def test_speeds_are_pixels_a_frame() -> None:
    for scene in islice(scenes("train", 4), 20):
        travel = np.abs(scene.path[-1] - scene.path[0]).max()
        assert travel == 16 * SPEEDS[scene.speed]


def test_psnr() -> None:
    clip = np.full((1, 2, 2, 3), 100, np.uint8)
    assert psnr_db(clip, clip) == 100
    assert psnr_db(clip, clip + np.uint8(10)) == pytest.approx(28.13, abs=0.01)


def test_the_program_scores_a_bundle(
    bundle: BundleFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(bundle("nano-like"))
    options = ["--samples", "2", "--num-inference-steps", "2", "--threads", "1"]
    assert run(["score", path, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"skills", "samples", "seconds", "missing"}
    assert set(report["missing"]) == {"forward_dynamics", "inverse_dynamics", "policy"}
    assert report["missing"]["policy"] == "no embodiment pusht among its 4"
    assert len(report["skills"]) == 7
    assert report["skills"]["colour"] < 1  # it has learned nothing
    assert run(["score", path, *options, "--skills", "vae"]) == 0
    assert "vae_psnr_db" in capsys.readouterr().out


def test_a_modality_that_is_missing_is_named(
    bundle: BundleFactory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(bundle("super-like"))
    options = ["--samples", "1", "--num-inference-steps", "1", "--threads", "1"]
    assert run(["score", path, *options, "--skills", "policy"]) == 1
    assert "got no action modality" in capsys.readouterr().err
    assert run(["score", path, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"]["policy"] == "no action modality"
    assert "policy" not in report["skills"]
    assert run(["score", path, "--skills", "juggling"]) == 1
    assert "unknown group of skills; got juggling" in capsys.readouterr().err

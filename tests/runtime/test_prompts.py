"""Prompt ids against diffusers' pipeline, for every switch."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import CheckpointFactory
from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.prompt_templates import PromptTemplates
from motrt.runtime.prompts import (
    ACTION_MODES,
    GenerationPrompt,
    default_use_system_prompt,
    generation_prompt,
)
from motrt.runtime.tokenizer import Tokenizer

KINDS = ("nano-like", "edge-like")
PROMPTS = (
    "A red square moves left.",
    "",
    "...",
    "Wait... what?  ",
    "日本語 🤖 e\u0301 <|im_end|> {height}",
    '{"actions": [{"time": "0:00-0:07", "description": "a."}], "fps": 24}',
)
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_frames": 1, "height": 256, "width": 320},
    {"num_frames": 17, "height": 64, "width": 64, "fps": 16.0},
    {"num_frames": 189, "height": 720, "width": 1280},
    {"num_frames": 93, "height": 480, "width": 832, "fps": 29.97},
    {"num_frames": 5, "height": 64, "width": 64, "fps": 10},
)


class Pair:
    """diffusers' pipeline and our tokenizer over one checkpoint."""

    def __init__(self, root: Path) -> None:
        from motrt.engines.checkpoint import read_json
        from omni_fixtures.reference import load_pipeline

        self.reference = load_pipeline(root)
        self.tokenizer = Tokenizer.from_folder(root / "text_tokenizer")
        self.index = read_json(root / "model_index.json")

    def check(self, prompt: str, negative: str | None = None, **options: Any) -> GenerationPrompt:
        ours = generation_prompt(self.tokenizer, prompt, negative, pipeline=self.index, **options)
        expected = self.reference.tokenize_prompt(prompt, negative, **options)
        assert ours.positive_ids.dtype == ours.negative_ids.dtype == np.int64
        assert (ours.positive_ids.tolist(), ours.negative_ids.tolist()) == tuple(
            map(list, expected)
        )
        return ours


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, checkpoint: CheckpointFactory) -> Pair:
    pytest.importorskip("diffusers")
    return Pair(checkpoint(request.param))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['num_frames']}-frames")
def test_ids_equal_the_pipeline(pair: Pair, shape: dict[str, Any]) -> None:
    for prompt, negative in itertools.product(PROMPTS, (None, "", "Blurry.", "日本...")):
        pair.check(prompt, negative, **shape)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=["image", "video"])
@pytest.mark.parametrize("system", [None, True, False])
@pytest.mark.parametrize("resolution", [True, False])
@pytest.mark.parametrize("duration", [True, False])
def test_every_switch_equals_the_pipeline(
    pair: Pair, shape: dict[str, Any], system: bool | None, resolution: bool, duration: bool
) -> None:
    switches: dict[str, Any] = {
        "use_system_prompt": system,
        "add_resolution_template": resolution,
        "add_duration_template": duration,
    }
    for prompt, negative in ((PROMPTS[0], "Blurry."), ("", None), ("...", "..")):
        pair.check(prompt, negative, **shape, **switches)


@pytest.mark.parametrize("mode", ACTION_MODES)
@pytest.mark.parametrize("view_point", [*PromptTemplates().action_view_points, None, "from_above"])
def test_actions_equal_the_pipeline(pair: Pair, mode: str, view_point: str | None) -> None:
    shapes = ((17, 480, 832, 10.0), (61, 640, 640, 24), (2000, 736, 544, 15.5), (1, 832, 480, 5.0))
    prompts = (" Pick up the cup ", "", "Stop!", "日本語?", "Two\nlines")
    for (frames, height, width, fps), prompt in itertools.product(shapes, prompts):
        ours = pair.check(
            prompt,
            "Raw." if frames == 17 else None,
            num_frames=frames,
            height=height,
            width=width,
            fps=fps,
            action_mode=mode,
            action_view_point=view_point,
        )
        assert ours.negative_text == ("Raw." if frames == 17 else "")


def test_the_ids_end_with_the_two_closing_tokens(pair: Pair) -> None:
    ours = pair.check("A red square.", **SHAPES[1])
    tokenizer = pair.tokenizer
    closing = [tokenizer.eos_token_id, tokenizer.token_id("<|vision_start|>")]
    assert ours.positive_ids[-2:].tolist() == ours.negative_ids[-2:].tolist() == closing
    assert ours.positive_text == (
        "A red square. The video is 1.1 seconds long and is of 16 FPS."
        " This video is of 64x64 resolution."
    )


def test_the_system_prompt_follows_the_checkpoint(pair: Pair) -> None:
    wanted = pair.index.get("default_use_system_prompt", True)
    ours = pair.check("x", **SHAPES[0])
    assert (ours.system_prompt is not None) == wanted


def test_literals_equal_the_pipeline(pair: Pair) -> None:
    from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as module

    templates = PromptTemplates().to_dict()
    assert templates.pop("system_prompt_image") == module._SYSTEM_PROMPT_IMAGE
    assert templates.pop("system_prompt_video") == module._SYSTEM_PROMPT_VIDEO
    assert templates.pop("action_view_points") == module._ACTION_VIEWPOINT_TEMPLATES
    found = {
        name: value for name, value in vars(pair.reference).items() if name.endswith("_template")
    }
    assert templates == found


# Templates of a bundle's own.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from omni_fixtures.tokenizer import save_tokenizer

    return Tokenizer.from_folder(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_templates_survive_the_manifest() -> None:
    assert PromptTemplates.from_dict(PromptTemplates().to_dict()) == PromptTemplates()
    assert PromptTemplates.from_dict({}) == PromptTemplates()


def test_templates_of_the_bundle_are_used(tokenizer: Tokenizer) -> None:
    templates = PromptTemplates.from_dict(
        {
            "system_prompt_image": "Paint.",
            "image_resolution_template": "{width} by {height:d}",
            "inverse_image_resolution_template": "{{not}}",
        }
    )
    made = generation_prompt(tokenizer, "a", num_frames=1, height=8, width=16, templates=templates)
    assert made.system_prompt == "Paint."
    assert (made.positive_text, made.negative_text) == ("a. 16 by 8", "{not}")


@pytest.mark.parametrize(
    "data",
    [
        {"nothing": "x"},
        {"system_prompt_image": 3},
        {"system_prompt_image": "x" * 5000},
        {"action_view_points": ["x"]},
        {"action_view_points": {"x": 3}},
        {"duration_template": "{height}"},
        {"duration_template": "{fps.__class__}"},
        {"duration_template": "{fps[0]}"},
        {"duration_template": "{fps!r}"},
        {"duration_template": "{fps:999999999}"},
        {"duration_template": "{fps:.999999999f}"},
        {"duration_template": "{fps:{duration}}"},
        {"duration_template": "{0}"},
        {"duration_template": "{"},
        {"image_resolution_template": "{fps}"},
    ],
)
def test_unsound_templates_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="prompt_templates are not sound"):
        PromptTemplates.from_dict(data)


# Arguments.


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": None},
        {"prompt": ["a"]},
        {"prompt": 3},
        {"negative_prompt": 3},
        {"num_frames": 0},
        {"num_frames": 1.0},
        {"num_frames": True},
        {"height": -1},
        {"width": "64"},
        {"fps": 0},
        {"fps": -1.0},
        {"fps": float("nan")},
        {"fps": float("inf")},
        {"fps": "24"},
        {"action_mode": "dance"},
        {"action_mode": "policy", "action_view_point": 3},
        {"prompt": "\ud800"},
    ],
)
def test_bad_arguments_are_refused(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        generation_prompt(tokenizer, **{"prompt": "a", **values})


def test_numpy_numbers_are_numbers(tokenizer: Tokenizer) -> None:
    options: Any = {"num_frames": np.int64(17), "height": np.int32(64), "fps": np.float64(24)}
    plain = generation_prompt(tokenizer, "a", num_frames=17, height=64, fps=24.0)
    assert generation_prompt(tokenizer, "a", **options).positive_text == plain.positive_text


def test_an_unknown_view_point_is_warned_about(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = generation_prompt(
            tokenizer, "a", action_mode="policy", action_view_point="from_above"
        )
    assert "from_above" in caplog.text
    assert "cinematography" not in made.positive_text


def test_the_default_of_old_checkpoints_is_a_system_prompt() -> None:
    assert default_use_system_prompt({}) is True
    assert default_use_system_prompt({"default_use_system_prompt": False}) is False
    with pytest.raises(BundleError, match="default_use_system_prompt"):
        default_use_system_prompt({"default_use_system_prompt": "no"})

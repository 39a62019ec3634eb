"""The reference process' sequences equal the public classes, called as users call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from omni_fixtures.checkpoints import build_transformer
from omni_fixtures.configs import NANO_LIKE
from omni_fixtures.files import write_json
from omni_fixtures.reference import load_pipeline
from reference_requests import error_of, random, run, write_request

PROMPT = {
    "name": "run",
    "prompt": "A red square.",
    "negative_prompt": "Blurry.",
    "num_frames": 5,
    "height": 64,
    "width": 64,
    "fps": 16.0,
}
TRAJECTORY = PROMPT | {"latents": "latents", "num_inference_steps": 4, "guidance_scale": 4.0}
SCHEDULER = {"name": "steps", "sample": "sample", "predictions": "steps", "noise": "steps"}
TEXT = {"name": "greedy", "input_ids": "ids", "max_new_tokens": 12}
ARRAYS = {
    "ids": np.random.RandomState(0).randint(0, 512, 9).astype(np.int64),
    "latents": random((1, 48, 2, 4, 4), 1),
    "sample": random((2, 1, 3, 3), 2),
    "steps": random((4, 2, 1, 3, 3), 3),
}
# transformers has a class for the first, none for the second.
TEXT_CONFIGS: dict[str, dict[str, Any]] = {
    "nano-like": NANO_LIKE,
    "ungated": NANO_LIKE | {"qk_norm_for_text": False},
}


@pytest.mark.parametrize("kind", TEXT_CONFIGS)
def test_each_greedy_token_is_the_best_after_those_before_it(kind: str, tmp_path: Path) -> None:
    source = build_transformer(tmp_path / "checkpoint", TEXT_CONFIGS[kind])
    arrays, _ = run(write_request(tmp_path / "one", source, ARRAYS, text_cases=[TEXT]))
    tokens = arrays["greedy/ids"]
    assert tokens.shape == (12,)
    assert len(set(tokens.tolist())) > 3
    whole = {"all": np.concatenate([ARRAYS["ids"], tokens[:-1]])}
    cases = [{"name": "text", "input_ids": "all"}]
    again, _ = run(write_request(tmp_path / "two", source, whole, reasoner_cases=cases))
    best = np.sort(again["text/logits"][-12:], axis=1)[:, :-3:-1]
    np.testing.assert_array_equal(again["text/logits"][-12:].argmax(axis=1), tokens)
    np.testing.assert_array_equal(arrays["greedy/top_ids"][:, 0], tokens)
    np.testing.assert_allclose(arrays["greedy/top"], best, atol=1e-5)


@pytest.mark.parametrize("kind", ["nano-like", "edge-like"])
def test_prompts_schedules_and_runs_are_the_pipeline_s(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(kind)
    request = write_request(
        tmp_path,
        source,
        ARRAYS,
        prompt_cases=[PROMPT | {"name": "prompt"}],
        scheduler_cases=[SCHEDULER],
        trajectory_cases=[TRAJECTORY],
    )
    arrays, report = run(request)
    assert report["skipped"] == []
    pipeline = load_pipeline(source)
    options = {key: value for key, value in PROMPT.items() if key not in {"name"}}
    positive, negative = pipeline.tokenize_prompt(**options)
    assert arrays["prompt/positive_ids"].tolist() == positive
    assert arrays["prompt/negative_ids"].tolist() == negative
    made = pipeline(
        **options,
        num_inference_steps=4,
        guidance_scale=4.0,
        latents=torch.from_numpy(ARRAYS["latents"]),
        output_type="latent",
    )
    peak = float(made.video.abs().max())
    np.testing.assert_allclose(arrays["run/latents"], made.video.numpy(), atol=1e-5 * peak)
    # The run has set the pipeline's own scheduler to its four steps.
    scheduler = pipeline.scheduler
    np.testing.assert_array_equal(arrays["steps/sigmas"], scheduler.sigmas.numpy())
    np.testing.assert_array_equal(arrays["steps/timesteps"], scheduler.timesteps.numpy())
    assert arrays["steps/states"].shape == (5, 2, 1, 3, 3)


def test_a_stochastic_schedule_draws_the_given_noise(tmp_path: Path) -> None:
    write_json(
        tmp_path / "scheduler" / "scheduler_config.json",
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": True},
    )
    index = {"is_distilled": True, "distilled_sigmas": [0.9, 0.5, 0.2]}
    write_json(tmp_path / "modular_model_index.json", index)
    arrays, _ = run(write_request(tmp_path / "r", tmp_path, ARRAYS, scheduler_cases=[SCHEDULER]))
    sigmas = np.array([0.9, 0.5, 0.2, 0.0], np.float32)
    np.testing.assert_allclose(arrays["steps/sigmas"], sigmas, atol=1e-7)
    state = ARRAYS["sample"]
    for i in range(3):
        x0 = state - sigmas[i] * ARRAYS["steps"][i]
        state = (1 - sigmas[i + 1]) * x0 + sigmas[i + 1] * ARRAYS["steps"][i]
        np.testing.assert_allclose(arrays["steps/states"][i + 1], state, atol=1e-6)


def test_what_a_checkpoint_lacks_is_skipped_with_a_reason(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    alone = build_transformer(tmp_path / "alone", NANO_LIKE)
    cases: dict[str, Any] = {
        "prompt_cases": [PROMPT],
        "scheduler_cases": [SCHEDULER],
        "trajectory_cases": [TRAJECTORY],
    }
    arrays, report = run(write_request(tmp_path / "r", alone, ARRAYS, **cases))
    assert not arrays
    assert {item["engine"]: item["reason"] for item in report["skipped"]} == {
        "prompt": "the checkpoint has no text_tokenizer/",
        "trajectory": "the checkpoint has no vae/",
        "scheduler": "the checkpoint has no scheduler/",
    }
    strange = tmp_path / "strange"
    strange.mkdir()
    for part in ("transformer", "vae", "text_tokenizer", "model_index.json"):
        (strange / part).symlink_to(checkpoint("nano-like") / part)
    write_json(strange / "scheduler" / "scheduler_config.json", {"_class_name": "UNet2DModel"})
    arrays, report = run(write_request(tmp_path / "r", strange, ARRAYS, **cases))
    assert set(arrays) == {"run/positive_ids", "run/negative_ids"}
    assert {item["reason"] for item in report["skipped"]} == {
        "diffusers has no scheduler 'UNet2DModel'"
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_cases": [TEXT | {"max_new_tokens": 0}]}, "max_new_tokens"),
        ({"text_cases": [TEXT | {"input_ids": "big"}]}, "vocabulary"),
        ({"scheduler_cases": [SCHEDULER | {"noise": "short"}]}, "noise"),
        ({"scheduler_cases": [SCHEDULER | {"sample": None}]}, "sample"),
        ({"prompt_cases": [PROMPT | {"prompt": 1}]}, "prompt"),
        ({"prompt_cases": [PROMPT | {"height": 64.5}]}, "height"),
        ({"prompt_cases": [PROMPT | {"use_system_prompt": "yes"}]}, "use_system_prompt"),
        ({"prompt_cases": [PROMPT | {"latents": "latents"}]}, "unknown fields"),
        ({"trajectory_cases": [TRAJECTORY | {"latents": "sample"}]}, "rank"),
        ({"trajectory_cases": [PROMPT]}, "missing fields"),
    ],
)
def test_a_wrong_request_is_refused(
    fields: dict[str, Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    arrays = ARRAYS | {"big": np.array([512]), "short": random((3, 2, 1, 3, 3), 4)}
    error = error_of(write_request(tmp_path, checkpoint("nano-like"), arrays, **fields))
    assert error["type"] == "RequestError"
    assert message in error["message"]

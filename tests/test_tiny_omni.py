"""The tiny model's training: every mode's batch moves every tensor that it should, and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motrt.runtime.patches import patchify as runtime_patchify
from tiny_omni import examples, omni
from tiny_omni.loop import train
from tiny_omni.model import SEPARATE, SHARED, Omni, patchify, unpatchify
from tiny_omni.prompts import Prompts, write_tokenizer
from tiny_omni.vae import new_vae


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def world(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> examples.World:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "NUM_SCENES", 24)
        patch.setattr(examples, "NUM_WALKS", 8)
        return examples.World(new_vae().eval(), prompts, tmp_path_factory.mktemp("w") / "l.pt")


@pytest.mark.parametrize("mode", examples.MODES)
def test_every_mode_has_finite_losses_and_gradients(
    mode: str, world: examples.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "MODES", {mode: 1.0})
    model = Omni(SEPARATE)
    torch.nn.init.normal_(model.generator.proj_out.weight, std=0.02)
    torch.nn.init.normal_(model.generator.action_proj_out.fc.weight, std=0.02)
    losses = omni._denoise(model, world.batch(np.random.default_rng(0)))
    expected = {"vision", "action"} if mode == "policy" else {"vision"}
    assert set(losses) == ({"action"} if mode == "inverse_dynamics" else expected)
    sum(losses.values(), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert "embed_tokens.weight" in moved  # the prompt's keys and values reach the loss
    layers = {name.split(".")[2] for name in moved if name.startswith("generator.layers.")}
    assert layers == {"0", "1", "2", "3", "4"}


def test_the_shared_model_has_one_set_of_layers() -> None:
    names = Omni(SHARED).tensors()
    assert not [name for name in names if "moe_gen" in name or "add_q" in name]
    assert len(names) < len(Omni(SEPARATE).tensors())


def test_patches_are_the_runtimes() -> None:
    latents = torch.randn(2, 16, 5, 4, 6)
    patches = patchify(latents)
    for one, expected in zip(patches, latents, strict=True):
        assert np.array_equal(one.numpy(), runtime_patchify(expected.numpy(), 2)[0])
    assert torch.equal(unpatchify(patches, latents.shape), latents)


def test_answers_alone_are_learned(prompts: Prompts) -> None:
    ids, targets = examples.question_batch(prompts, seed=1)
    assert ids.shape == targets.shape
    assert ((targets >= 0).sum(1) >= 2).all()
    row = targets[0][targets[0] >= 0]
    assert row[-1] == prompts.answer("x")[-1]  # the end is an answer's last token


def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path) -> None:
    def result(folder: Path, *ends: int) -> dict[str, Any]:
        for end in ends:
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)

            def loss_of(
                step: int, model: torch.nn.Linear = model, end: int = end
            ) -> dict[str, torch.Tensor]:
                if step == end:
                    raise KeyboardInterrupt
                torch.manual_seed(step)
                return {"loss": model(torch.randn(4, 3)).square().mean()}

            try:
                return train("t", model, loss_of, steps=12, peak=1e-2, work=folder, save_every=0)
            except KeyboardInterrupt:
                continue
        raise AssertionError

    whole, parts = result(tmp_path / "a", -1), result(tmp_path / "b", 5, 9, -1)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # The log of a training that was stopped after its last snapshot tells each step once.
    with (tmp_path / "b" / "t.jsonl").open("a") as log:
        log.write('{"step": 13}\n')
    result(tmp_path / "b", -1)
    lines = (tmp_path / "b" / "t.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [12]

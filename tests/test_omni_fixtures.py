"""The fixtures themselves: they load where they should, and hide no bug of whoever reads them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from safetensors import safe_open
from safetensors.torch import load_file

from omni_fixtures.checkpoints import (
    build_pipeline,
    build_shared,
    build_transformer,
    shared_as_separate,
)
from omni_fixtures.configs import (
    EDGE_LIKE,
    NANO_LIKE,
    PIPELINES,
    PUBLISHED,
    SUPER_LIKE,
    Config,
)
from omni_fixtures.names import generator_name
from omni_fixtures.reference import load_pipeline
from omni_fixtures.sparse import build_sparse
from omni_fixtures.tokenizer import SPECIAL_TOKENS, build_tokenizer, save_tokenizer

TRANSFORMERS = {"nano-like": NANO_LIKE, "edge-like": EDGE_LIKE, "super-like": SUPER_LIKE}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("kind", PIPELINES)
def test_diffusers_generates_from_a_whole_pipeline(kind: str, tmp_path: Path) -> None:
    pipeline = load_pipeline(build_pipeline(tmp_path, kind))
    clip = pipeline(
        "A red square moves left.",
        num_frames=5,
        height=64,
        width=96,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).video
    frames = torch.as_tensor(clip)
    assert frames.shape == (5, 64, 96, 3)
    assert frames.isfinite().all()
    assert frames.std() > 0.05
    clipped = (frames <= 0) | (frames >= 1)
    assert clipped.float().mean() < 0.05


def test_edge_names_a_scheduler_that_diffusers_lacks(tmp_path: Path) -> None:
    build_pipeline(tmp_path, "edge-like")
    with pytest.raises((AttributeError, ValueError), match="Cosmos3EdgeUniPCMultistepScheduler"):
        diffusers.Cosmos3OmniPipeline.from_pretrained(tmp_path)
    pipeline = load_pipeline(tmp_path)
    assert pipeline.config.use_native_flow_schedule
    assert not pipeline.config.default_use_system_prompt
    assert pipeline.scheduler.config.flow_shift == 3.0


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_activations_are_of_order_one(kind: str, tmp_path: Path) -> None:
    model = load_transformer(build_transformer(tmp_path, TRANSFORMERS[kind]))
    queries_and_keys: dict[str, Any] = {}
    text: list[Any] = []
    attention = model.layers[-1].self_attn
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        attention.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: queries_and_keys.update({name: output})
        )
    model.norm.register_forward_hook(lambda _module, _inputs, output: text.append(output))
    outputs = forward(model)

    assert 0.5 < model.lm_head(text[0]).std() < 2
    for velocity in outputs:
        assert 0.5 < velocity.std() < 2
    for query, key in (("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")):
        q, k = queries_and_keys[query][:, 0], queries_and_keys[key][:, 0]
        # Flat attention would hide masks and positions, saturated attention everything else.
        assert 0.3 < (q @ k.T / q.shape[-1] ** 0.5).std() < 3


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_no_parameter_keeps_a_default_or_equals_another(kind: str, tmp_path: Path) -> None:
    tensors = read_transformer(build_transformer(tmp_path, TRANSFORMERS[kind]))
    for name, tensor in tensors.items():
        assert tensor.std() > 0.01, name
        other = generator_name(name)
        if other is not None and other in tensors:
            assert not torch.equal(tensor, tensors[other]), name
        if "norm" in name:
            assert 0.7 < tensor.mean() < 1.3, name


def test_a_seed_decides_every_value_and_moves_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (
        read_transformer(build_transformer(tmp_path / name, SUPER_LIKE, seed=seed))
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_files_are_low_precision_throughout(dtype: str, tmp_path: Path) -> None:
    full = read_transformer(build_transformer(tmp_path / "full", NANO_LIKE))
    low = read_transformer(build_transformer(tmp_path / "low", NANO_LIKE, dtype=dtype))
    expected = getattr(torch, dtype)
    for name, tensor in low.items():
        assert tensor.dtype == expected, name
        assert torch.equal(tensor, full[name].to(expected)), name


def test_a_sharded_transformer_has_an_index_and_loads(tmp_path: Path) -> None:
    build_transformer(tmp_path / "shards", NANO_LIKE, max_shard_size="4MB")
    folder = tmp_path / "shards" / "transformer"
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    whole = load_transformer(build_transformer(tmp_path / "whole", NANO_LIKE)).state_dict()
    sharded = load_transformer(tmp_path / "shards").state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize("max_shard_size", [None, "2MB"])
def test_shared_weights_fill_both_halves(max_shard_size: str | None, tmp_path: Path) -> None:
    shared = build_shared(tmp_path / "shared", max_shard_size=max_shard_size)
    tensors = {}
    for path in shared.glob("*.safetensors"):
        tensors.update(load_file(path))
    assert (shared / "model.safetensors.index.json").exists() == (max_shard_size is not None)
    assert not [name for name in tensors if "_moe_gen" in name or "add" in name]
    config = json.loads((shared / "config.json").read_text())
    assert config["weight_layout"] == "shared"

    model = load_transformer(shared_as_separate(shared, tmp_path / "separate"))
    separate = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(separate[name], tensor), name
        other = generator_name(name)
        if other is not None:
            assert torch.equal(separate[other], tensor), other
    assert len(separate) == len(tensors) + sum(generator_name(n) is not None for n in tensors)
    vision, sound, action = forward(model)
    assert 0.5 < vision.std() < 2
    assert 0.5 < sound.std() < 2
    assert 0.5 < action.std() < 2


@pytest.mark.parametrize(
    ("name", "count", "parameters"),
    [("edge", 549, 3.370e9), ("nano", 814, 15.174e9), ("super", 1430, 64.02e9)],
)
def test_a_sparse_checkpoint_has_the_published_tensors_and_no_bytes(
    name: str, count: int, parameters: float, tmp_path: Path
) -> None:
    folder = build_sparse(name, tmp_path) / "transformer"
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    assert len(index["weight_map"]) == count
    assert index["metadata"]["total_size"] == pytest.approx(2 * parameters, rel=1e-3)

    found = {}
    for path in folder.glob("*.safetensors"):
        assert path.stat().st_size < 5.001e9
        assert path.stat().st_blocks * 512 < 1 << 20
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                found[key] = path.name
                assert file.get_slice(key).get_dtype() == "BF16"
    assert found == index["weight_map"]
    assert json.loads((folder / "config.json").read_text()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["nano", "super"])
def test_old_published_configs_lack_the_newest_keys(name: str) -> None:
    newest = {"hidden_act", "qk_norm_for_text", "use_und_k_norm_for_gen", "rope_axes_dim"}
    assert not newest & PUBLISHED[name].keys()
    assert newest < PUBLISHED["edge"].keys()


def test_the_tokenizer_is_small_and_loses_nothing(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() == 500
    assert build_tokenizer().to_str() == tokenizer.to_str()
    text = "A red square moves left, très vite. 日本\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]
    # The bare tokenizer (the runtime's) and both classes that checkpoints name must agree.
    for tokenizer_class in ("Qwen2Tokenizer", "PreTrainedTokenizerFast"):
        folder = save_tokenizer(tmp_path / tokenizer_class, tokenizer_class=tokenizer_class)
        loaded = auto_tokenizer(folder)
        assert loaded(text).input_ids == tokenizer.encode(text).ids
        assert loaded.convert_tokens_to_ids(loaded.eos_token) == tokenizer.token_to_id(
            "<|im_end|>"
        )


def test_the_chat_template_is_chatml_with_vision_pads(tmp_path: Path) -> None:
    tokenizer = auto_tokenizer(save_tokenizer(tmp_path))
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Next?"}],
        },
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    tail = "Next?<|im_end|>\n<|im_start|>assistant\n"
    plain = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == head + image + video + tail
    numbered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, add_vision_id=True
    )
    assert numbered == f"{head}Picture 1: {image}Video 1: {video}{tail}"


def test_the_command_writes_a_fixture_and_refuses_to_mix_two(tmp_path: Path) -> None:
    folder = tmp_path / "edge"
    done = run_command("sparse-edge", str(folder))
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))
    assert (folder / "transformer" / "config.json").exists()
    again = run_command("shared", str(folder))
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("giant", "x"), "invalid choice: 'giant'"),
        (("sparse-nano", "x", "--dtype", "float16"), "do not apply"),
        (("shared",), "DIRECTORY"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def load_transformer(directory: Path) -> Any:
    return diffusers.Cosmos3OmniTransformer.from_pretrained(
        directory, subfolder="transformer", dtype=torch.float32
    )


def read_transformer(directory: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = load_file(directory / "transformer" / WEIGHTS)
    return tensors


def auto_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def run_command(*arguments: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(Path(__file__).parent / "omni_fixtures"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def forward(model: Any) -> list[Any]:
    """Return the velocities of one image, and of five sound frames and actions where it has any."""
    config: Config = dict(model.config)
    generator = torch.Generator().manual_seed(1)
    text, vision = 12, 12

    def positions(temporal: Any, row: Any, column: Any) -> Any:
        return torch.stack([temporal, row, column]).float()

    ids = torch.arange(text)
    segments = [positions(ids, ids, ids)]
    cells = torch.arange(vision)
    start = torch.full((vision,), text + 15000)
    segments.append(positions(start, cells // 4, cells % 4))
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(0, 500, (text,), generator=generator),
        "text_indexes": ids,
        "und_len": text,
        "vision_tokens": [torch.randn(1, 48, 1, 5, 8, generator=generator)],
        "vision_token_shapes": [(1, 3, 4)],
        "vision_sequence_indexes": cells + text,
        "vision_mse_loss_indexes": cells + text,
        "vision_timesteps": torch.full((vision,), 700.0),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }
    length = text + vision
    frames = torch.arange(5)
    for kind, shape in (("sound", (64, 5)), ("action", (5, 64))):
        if not config[f"{kind}_gen"]:
            continue
        inputs |= {
            f"{kind}_tokens": [torch.randn(*shape, generator=generator)],
            f"{kind}_token_shapes": [(5, 1, 1)],
            f"{kind}_sequence_indexes": frames + length,
            f"{kind}_mse_loss_indexes": frames + length,
            f"{kind}_timesteps": torch.full((5,), 700.0),
            f"{kind}_noisy_frame_indexes": [frames],
        }
        if kind == "action":
            inputs["action_domain_ids"] = [torch.tensor(2)]
        segments.append(positions(frames + text + 15000, frames * 0, frames * 0))
        length += 5
    inputs |= {"position_ids": torch.cat(segments, dim=1), "sequence_length": length}
    with torch.no_grad():
        outputs = model(**inputs, return_dict=False)
    return [output[0] for output in outputs if output is not None]

"""The reference process: what it writes equals the public classes, called as the test spells out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from motrt.calibration.reference.checkpoint import TensorInfo
from motrt.calibration.reference.errors import ReferenceTooLarge
from motrt.calibration.reference.weights import require_memory
from reference_requests import error_of, ids, random, run, write_request

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "rope_axes_dim": [6, 5, 5],
    "vocab_size": 160,
    "latent_channel": 8,
    "patch_latent_dim": 32,
}
ACTION = {"action_gen": True, "action_dim": 7, "num_embodiment_domains": 4}
SOUND = {"sound_gen": True, "sound_dim": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "nano": COMMON | ACTION | SOUND,
    "edge": COMMON
    | ACTION
    | {
        "head_dim": 16,
        "rope_axes_dim": [4, 2, 2],
        "hidden_act": "relu2",
        "qk_norm_for_text": False,
        "use_und_k_norm_for_gen": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    },
    "ungated-norm": COMMON | {"qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
}
TO_REASONER = {
    "add_q_proj": "to_q",
    "add_k_proj": "to_k",
    "add_v_proj": "to_v",
    "to_add_out": "to_out",
    "norm_added_q": "norm_q",
    "norm_added_k": "norm_k",
    "mlp_moe_gen": "mlp",
    "input_layernorm_moe_gen": "input_layernorm",
    "post_attention_layernorm_moe_gen": "post_attention_layernorm",
    "norm_moe_gen": "norm",
}


def build_transformer(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = diffusers.Cosmos3OmniTransformer(**CONFIGS[kind]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 * torch.randn_like(parameter)
            is_scale = "norm" in name
            parameter.copy_(1 + spread if is_scale else spread)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    roots = {}
    for kind in CONFIGS:
        roots[kind] = tmp_path_factory.mktemp(kind)
        build_transformer(kind).save_pretrained(
            roots[kind] / "transformer", max_shard_size="300KB"
        )
    return roots


def generator_case(name: str, **fields: Any) -> dict[str, Any]:
    base = {"name": name, "input_ids": "ids", "latents": "latents", "timestep": 437.0, "fps": 16.0}
    return base | fields


GENERATOR_ARRAYS = {
    "ids": ids(9),
    "latents": random((8, 3, 5, 4), 1),
    "sound": random((6, 4), 2),
    "action": random((5, 7), 3),
}
ALL_MODALITIES = {
    "clean_frames": [0],
    "sound_latents": "sound",
    "action_latents": "action",
    "clean_action_steps": [1, 2],
    "domain_id": 3,
}


@pytest.mark.parametrize("kind", ["nano", "edge"])
def test_transformers_and_diffusers_agree_on_logits_and_cache(
    kind: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    cases = [{"name": "text", "input_ids": "a"}]
    request = write_request(tmp_path, checkpoints[kind], {"a": ids(11)}, reasoner_cases=cases)
    arrays, report = run(request)
    assert [source.split(".")[0] for source in report["reasoner_sources"]] == [
        "transformers",
        "diffusers",
    ]
    assert arrays["text/logits"].shape == (11, 160)
    assert np.abs(arrays["text/logits"] - arrays["text/logits.diffusers"]).max() <= 1e-5
    assert np.abs(arrays["text/logits"]).max() > 0.1
    head_dim = CONFIGS[kind]["head_dim"]
    for layer in range(2):
        assert arrays[f"text/present.{layer}.key"].shape == (2, 11, head_dim)
        assert arrays[f"text/present.{layer}.value"].shape == (2, 11, head_dim)
        assert (f"text/context.{layer}.key" in arrays) is (kind == "edge")


def test_diffusers_alone_fills_what_transformers_has_no_class_for(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    cases = [{"name": "text", "input_ids": "a"}]
    request = write_request(
        tmp_path, checkpoints["ungated-norm"], {"a": ids(7)}, reasoner_cases=cases
    )
    arrays, report = run(request)
    assert report["reasoner_sources"] == ["diffusers.Cosmos3OmniTransformer"]
    assert any("no class" in note for note in report["notes"])
    np.testing.assert_array_equal(arrays["text/logits"], arrays["text/logits.diffusers"])
    assert {"text/present.1.key", "text/present.1.value", "text/context.1.key"} <= arrays.keys()


def test_cached_keys_are_those_of_the_layer_written_out(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    prompt = ids(6)
    cases = [{"name": "text", "input_ids": "a"}]
    request = write_request(tmp_path, checkpoints["edge"], {"a": prompt}, reasoner_cases=cases)
    arrays, _ = run(request)
    model = build_transformer("edge")
    layer = model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.embed_tokens(torch.from_numpy(prompt)))
        key = layer.self_attn.to_k(hidden).view(6, 2, 16)
        value = layer.self_attn.to_v(hidden).view(6, 2, 16)
        angles = torch.outer(torch.arange(6.0), 1e8 ** -(torch.arange(0, 16, 2) / 16))
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))

        def rotate(x: Any) -> Any:
            return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

        context = rotate(layer.self_attn.k_norm_und_for_gen(key))
    for name, expected in {
        "present.0.key": rotate(key),
        "present.0.value": value,
        "context.0.key": context,
    }.items():
        np.testing.assert_allclose(
            arrays[f"text/{name}"], expected.transpose(0, 1).numpy(), atol=2e-6, err_msg=name
        )


def test_generator_equals_a_direct_call_of_the_transformer(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    case = generator_case("joint", clean_sound_frames=[3], **ALL_MODALITIES)
    request = write_request(
        tmp_path, checkpoints["nano"], GENERATOR_ARRAYS, generator_cases=[case]
    )
    arrays, _ = run(request)

    def index(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.long)

    offset, rate = 9 + 15000.0, 24.0 / 16.0
    positions = [(float(n),) * 3 for n in range(9)]
    # 5 x 4 latent pixels are padded to 6 x 4: a grid of 3 x 2 patches in each of 3 frames.
    positions += [
        (offset + t * rate, float(h), float(w))
        for t in range(3)
        for h in range(3)
        for w in range(2)
    ]
    positions += [(offset + t * 24.0 / 25.0, 0.0, 0.0) for t in range(4)]
    positions += [(offset + (t + 1) * (24.0 / 4) / 16.0, 0.0, 0.0) for t in range(5)]
    vision, sound, action = range(9, 27), range(27, 31), range(31, 36)
    with torch.no_grad():
        expected = build_transformer("nano")(
            input_ids=torch.from_numpy(GENERATOR_ARRAYS["ids"]),
            text_indexes=torch.arange(9),
            position_ids=torch.tensor(positions).T,
            und_len=9,
            sequence_length=36,
            vision_tokens=[torch.from_numpy(GENERATOR_ARRAYS["latents"])[None]],
            vision_token_shapes=[(3, 3, 2)],
            vision_sequence_indexes=index(*vision),
            vision_mse_loss_indexes=index(*vision[6:]),
            vision_timesteps=torch.full((12,), 437.0),
            vision_noisy_frame_indexes=[index(1, 2)],
            sound_tokens=[torch.from_numpy(GENERATOR_ARRAYS["sound"])],
            sound_token_shapes=[(4, 1, 1)],
            sound_sequence_indexes=index(*sound),
            sound_mse_loss_indexes=index(*sound[:3]),
            sound_timesteps=torch.full((3,), 437.0),
            sound_noisy_frame_indexes=[index(0, 1, 2)],
            action_tokens=[torch.from_numpy(GENERATOR_ARRAYS["action"])],
            action_token_shapes=[(5, 1, 1)],
            action_sequence_indexes=index(*action),
            action_mse_loss_indexes=index(action[0], action[3], action[4]),
            action_timesteps=torch.full((3,), 437.0),
            action_noisy_frame_indexes=[index(0, 3, 4)],
            action_domain_ids=[torch.tensor(3)],
        )
    for name, tensor in {
        "velocity": expected.sample[0][0],
        "sound_velocity": expected.sound[0],
        "action_velocity": expected.action[0],
    }.items():
        got = arrays[f"joint/{name}"]
        np.testing.assert_allclose(got, tensor.numpy(), atol=1e-6, err_msg=name)
        assert np.abs(got).max() > 0.01
    assert not arrays["joint/velocity"][:, 0].any()
    assert not arrays["joint/sound_velocity"][:, 3].any()
    assert not arrays["joint/action_velocity"][1:3].any()


def test_a_case_does_not_depend_on_its_company(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    arrays = GENERATOR_ARRAYS | {"long": ids(21, 5)}
    text = {"name": "text", "input_ids": "ids"}
    alone = generator_case("alone", **ALL_MODALITIES)
    one, _ = run(
        write_request(
            tmp_path / "one",
            checkpoints["nano"],
            arrays,
            reasoner_cases=[text],
            generator_cases=[],
        )
    )
    two, _ = run(
        write_request(tmp_path / "two", checkpoints["nano"], arrays, generator_cases=[alone])
    )
    company = [generator_case("image", input_ids="long", clean_frames=[2]), alone]
    both, _ = run(
        write_request(
            tmp_path / "both",
            checkpoints["nano"],
            arrays,
            reasoner_cases=[{"name": "long", "input_ids": "long"}, text],
            generator_cases=company,
        )
    )
    for key, array in (one | two).items():
        np.testing.assert_array_equal(both[key], array, err_msg=key)


def test_all_frames_may_be_clean(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    case = generator_case("inverse", clean_frames=[0, 1, 2], action_latents="action", domain_id=1)
    request = write_request(
        tmp_path, checkpoints["edge"], GENERATOR_ARRAYS, generator_cases=[case]
    )
    arrays, _ = run(request)
    assert not arrays["inverse/velocity"].any()
    assert arrays["inverse/action_velocity"].all()


def test_a_shared_checkpoint_equals_one_with_its_weights_in_both_halves(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build_transformer("nano")
    state = dict(model.state_dict())
    own = {name: t for name, t in state.items() if not TO_REASONER.keys() & set(name.split("."))}
    for name in state.keys() - own.keys():
        state[name] = own[".".join(TO_REASONER.get(part, part) for part in name.split("."))]
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "separate" / "transformer")
    shared = tmp_path / "shared"
    shared.mkdir()
    save_file({name: t.clone() for name, t in own.items()}, shared / "model.safetensors")
    (shared / "config.json").write_text(
        json.dumps(dict(model.config) | {"weight_layout": "shared"})
    )
    results = [
        run(
            write_request(
                tmp_path / f"request-{checkpoint.name}",
                checkpoint,
                GENERATOR_ARRAYS,
                reasoner_cases=[{"name": "text", "input_ids": "ids"}],
                generator_cases=[generator_case("joint", **ALL_MODALITIES)],
            )
        )[0]
        for checkpoint in (shared, tmp_path / "separate")
    ]
    assert results[0].keys() == results[1].keys()
    for key, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][key], err_msg=key)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float32", "float64"])
def test_weights_are_rounded_before_the_arithmetic(
    compute_dtype: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    request = write_request(
        tmp_path,
        checkpoints["edge"],
        GENERATOR_ARRAYS,
        weights_dtype="bfloat16",
        compute_dtype=compute_dtype,
        reasoner_cases=[{"name": "text", "input_ids": "ids"}],
        generator_cases=[generator_case("joint")],
    )
    arrays, _ = run(request)
    model = build_transformer("edge")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("time_embedder"):
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path / "rounded" / "transformer")
    rounded = write_request(
        tmp_path / "request",
        tmp_path / "rounded",
        GENERATOR_ARRAYS,
        compute_dtype="float32",
        reasoner_cases=[{"name": "text", "input_ids": "ids"}],
        generator_cases=[generator_case("joint")],
    )
    expected, _ = run(rounded)
    tolerance = {"bfloat16": 4e-2, "float32": 0.0, "float64": 3e-6}[compute_dtype]
    for key, array in expected.items():
        assert array.dtype == np.float32
        assert np.abs(arrays[key] - array).max() <= tolerance * max(1.0, np.abs(array).max()), key


def test_the_other_order_changes_digits_and_nothing_else(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    results = []
    for order in ("default", "other", "default"):
        request = write_request(
            tmp_path,
            checkpoints["nano"],
            GENERATOR_ARRAYS,
            order=order,
            reasoner_cases=[{"name": "text", "input_ids": "ids"}],
            generator_cases=[generator_case("joint", **ALL_MODALITIES)],
        )
        results.append(run(request)[0])
    default, other, again = results
    for key, array in default.items():
        np.testing.assert_array_equal(again[key], array, err_msg=key)
        assert 0 < np.abs(other[key] - array).max() <= 1e-5 * np.abs(array).max(), key


def test_vae_cases_equal_the_public_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    vae.save_pretrained(tmp_path / "model" / "vae")
    arrays = {"z": random((1, 16, 2, 2, 2), 0), "clip": random((1, 3, 5, 16, 16), 1).clip(-1, 1)}
    cases = [{"name": "decode", "latents": "z"}, {"name": "encode", "video": "clip"}]
    result, _ = run(write_request(tmp_path / "r", tmp_path / "model", arrays, vae_cases=cases))
    with torch.no_grad():
        sample = vae.decode(torch.from_numpy(arrays["z"])).sample
        mean = vae.encode(torch.from_numpy(arrays["clip"])).latent_dist.mean
    np.testing.assert_allclose(result["decode/sample"], sample.numpy(), atol=1e-6)
    np.testing.assert_allclose(result["encode/latents"], mean.numpy(), atol=1e-6)


def test_malformed_edge_keys_are_ignored_and_others_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_transformer("edge").save_pretrained(tmp_path / "transformer")
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    cases = [{"name": "text", "input_ids": "ids"}]
    request = write_request(tmp_path / "r", tmp_path, {"ids": ids(4)}, reasoner_cases=cases)

    save_file(
        tensors | {"layers.layers.0.self_attn.k_norm_und_for_gen.weight": torch.ones(16)}, file
    )
    run(request)
    save_file(tensors | {"layers.7.mlp.up_proj.weight": torch.ones(16)}, file)
    assert "unexpected ['layers.7.mlp.up_proj.weight']" in error_of(request)["message"]
    save_file({name: t for name, t in tensors.items() if name != "norm.weight"}, file)
    assert "missing ['norm.weight']" in error_of(request)["message"]
    save_file(tensors | {"norm.weight": torch.ones(3)}, file)
    assert "norm.weight [3] instead of [64]" in error_of(request)["message"]
    file.write_bytes(file.read_bytes()[:-100])
    assert error_of(request)["type"] == "CheckpointError"


def test_a_reference_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    model = build_transformer("nano")
    with torch.no_grad():
        model.layers[1].mlp_moe_gen.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "transformer")
    cases = [generator_case("joint")]
    request = write_request(tmp_path / "r", tmp_path, GENERATOR_ARRAYS, generator_cases=cases)
    assert error_of(request)["type"] == "NonFiniteReference"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights_dtype": "int8"}, "weights_dtype"),
        ({"order": "fast"}, "order"),
        ({"thread": 1}, "thread"),
        ({"generator_cases": [generator_case("a", clean_frames=[3])]}, "clean_frames"),
        ({"generator_cases": [generator_case("a", action_latents="action")]}, "domain_id"),
        ({"generator_cases": [generator_case("a", sound_latents="action")]}, "sound channels"),
        ({"generator_cases": [generator_case("a", latents="nowhere")]}, "nowhere"),
        ({"generator_cases": [generator_case("a", latents="nan")]}, "NaN"),
        ({"reasoner_cases": [{"name": "a", "input_ids": "big"}]}, "vocabulary"),
        ({"reasoner_cases": [{"name": "a", "input_ids": "ids"}] * 2}, "name"),
        ({"vae_cases": [{"name": "a"}]}, "latents"),
    ],
)
def test_a_wrong_request_is_refused(
    fields: dict[str, Any], message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    arrays = GENERATOR_ARRAYS | {
        "big": np.array([160]),
        "nan": np.full((8, 1, 2, 2), np.nan, np.float32),
    }
    error = error_of(write_request(tmp_path, checkpoints["nano"], arrays, **fields))
    assert error["type"] == "RequestError"
    assert message in error["message"]


def test_weights_larger_than_free_memory_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [TensorInfo(shape=(1000,), dtype=torch.bfloat16)]
    require_memory(tensors, torch.float32, available=12_000)
    with pytest.raises(ReferenceTooLarge, match="GiB"):
        require_memory(tensors, torch.float32, available=11_999)
    monkeypatch.setattr("motrt.calibration.reference.weights.available_memory", lambda: 1000)
    cases = [{"name": "text", "input_ids": "ids"}]
    request = write_request(tmp_path, checkpoints["nano"], {"ids": ids(4)}, reasoner_cases=cases)
    assert error_of(request)["type"] == "ReferenceTooLarge"


def test_the_process_reports_success_and_failure_in_files_and_exit_code(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def process() -> int:
        command = [sys.executable, "-m", "motrt.calibration.reference", str(tmp_path)]
        path = os.pathsep.join(sys.path)
        return subprocess.run(
            command, check=False, env=os.environ | {"PYTHONPATH": path}
        ).returncode

    cases = [{"name": "text", "input_ids": "ids"}]
    write_request(tmp_path, checkpoints["nano"], {"ids": ids(4)}, reasoner_cases=cases)
    assert process() == 0
    report = json.loads((tmp_path / "result.json").read_text())
    assert set(report["versions"]) == {"torch", "diffusers", "transformers"}
    # A missing checkpoint must also take away the result of the earlier run.
    write_request(tmp_path, tmp_path / "nowhere", {"ids": ids(4)}, reasoner_cases=cases)
    assert process() == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"]["type"] == "CheckpointError"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "arrays.npz",
        "request.json",
        "result.json",
    ]

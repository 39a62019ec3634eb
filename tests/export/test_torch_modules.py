"""The PyTorch definition of both towers equals diffusers' and transformers' numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers.transformer_cosmos3 import (
    Cosmos3NemotronRMSNorm,
)

from motrt.calibration.reference.packing import joint_inputs
from motrt.calibration.reference.request import GeneratorCase
from motrt.calibration.reference.text_model import build_text_model
from motrt.engines.checkpoint import Checkpoint, open_checkpoint
from motrt.engines.contract import MASK_VALUE, Modality
from motrt.engines.errors import CheckpointError, ConfigError, ContractError
from motrt.engines.model_config import ModelConfig
from motrt.engines.rotary import rotary_axes, rotary_tables
from motrt.engines.store import WeightStore
from motrt.engines.weight_names import Part, weight_table
from motrt.export.torch_generator import Generator
from motrt.export.torch_layers import RMSNorm
from motrt.export.torch_loading import load_generator, load_reasoner
from motrt.export.torch_reasoner import Reasoner
from motrt.export.torch_rotary import reference_inv_freq
from motrt.runtime.patches import patchify, unpatchify
from motrt.runtime.positions import (
    action_positions,
    generator_offset,
    sound_positions,
    text_positions,
    vision_positions,
)
from omni_fixtures.checkpoints import (
    build_shared,
    build_transformer,
    shared_as_separate,
)
from omni_fixtures.configs import (
    EDGE_LIKE,
    NANO_LIKE,
    PUBLISHED,
    SHARED,
    SUPER_LIKE,
    Config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIGS: dict[str, Config] = {
    "nano-like": NANO_LIKE,
    "edge-like": EDGE_LIKE,
    "super-like": SUPER_LIKE,
    "shared": SHARED,
    # Not published, but of the shape: biases; an ungated norm switch on a gated model.
    "biased": {**SUPER_LIKE, "attention_bias": True},
    "context-norm": {**SUPER_LIKE, "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
}
RELATIVE = 1e-5  # of the reference's largest number
LOGITS = 1e-4


@dataclass(frozen=True)
class Model:
    """One fixture, as diffusers and as motrt read it."""

    reference: Any
    checkpoint: Checkpoint
    reasoner: Reasoner
    generator: Generator

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def tables(self, positions: np.ndarray) -> tuple[Any, Any]:
        axes = rotary_axes(self.config)
        tables = rotary_tables(reference_inv_freq(self.config), axes, positions)
        dtype = self.generator.proj_in.weight.dtype
        cos, sin = (torch.from_numpy(table)[None].to(dtype) for table in tables)
        return cos, sin

    def embed(self, ids: np.ndarray) -> Any:
        return self.reference.embed_tokens.weight.detach()[torch.from_numpy(ids)][None]


def _build(kind: str, root: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """Return the folder for motrt and the one for diffusers."""
    if kind == "shared":
        folder = build_shared(root / "shared", dtype=dtype)
        return folder, shared_as_separate(folder, root / "separate")
    folder = build_transformer(root, CONFIGS[kind], dtype=dtype)
    return folder, folder


def _load(kind: str, root: Path, dtype: str = "float32") -> Model:
    folder, separate = _build(kind, root, dtype)
    compute = getattr(torch, dtype)
    checkpoint = open_checkpoint(folder)
    config, weights = checkpoint.config, checkpoint.weights
    return Model(
        _diffusers(separate, compute),
        checkpoint,
        load_reasoner(config, weights, compute),
        load_generator(config, weights, compute),
    )


def _diffusers(folder: Path, dtype: Any) -> Any:
    model = diffusers.Cosmos3OmniTransformer.from_pretrained(
        folder, subfolder="transformer", dtype=dtype
    )
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Matrices this small cost more to share out than to multiply, most of all on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {kind: _load(kind, tmp_path_factory.mktemp(kind)) for kind in CONFIGS}


def _case(model: Model, *, timestep: float = 437.0, others: bool = True) -> GeneratorCase:
    """A clip with a clean first frame, odd in height; sound and action as far as the model has."""
    rng = np.random.default_rng(5)

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    config = model.config
    action = others and config.action_gen
    return GeneratorCase(
        name="case",
        input_ids=rng.integers(0, config.vocab_size, 12),
        latents=noise(config.latent_channel, 3, 5, 8),
        timestep=timestep,
        fps=10.0,
        clean_frames=(0,),
        sound_latents=noise(config.sound_dim or 0, 5) if others and config.sound_gen else None,
        clean_sound_frames=(2,) if others and config.sound_gen else (),
        action_latents=noise(4, config.action_dim or 0) if action else None,
        clean_action_steps=(1, 3) if action else (),
        domain_id=2 if action else None,
    )


def _reference(model: Model, case: GeneratorCase) -> dict[str, np.ndarray]:
    out = model.reference(**joint_inputs(model.reference, case, temporal_compression=4))
    results = {"velocity": out.sample[0][0]}
    if out.sound is not None:
        results["sound_velocity"] = out.sound[0]
    if out.action is not None:
        results["action_velocity"] = out.action[0]
    return {name: value.float().numpy() for name, value in results.items()}


def causal_bias(tokens: int, past: int = 0, dtype: Any = None) -> Any:
    hidden = torch.ones(tokens, past + tokens).triu(past + 1)
    return (hidden * MASK_VALUE)[None, None].to(dtype or torch.float32)


def _context(model: Model, ids: np.ndarray) -> list[tuple[Any, Any]]:
    embeds = model.embed(ids)
    cos, sin = model.tables(text_positions(0, len(ids)))
    bias = causal_bias(len(ids), dtype=embeds.dtype)
    last = torch.tensor([[len(ids) - 1]])
    return model.reasoner(embeds, cos, sin, bias, last).context  # type: ignore[no-any-return]


def _noise_mask(count: int, clean: tuple[int, ...], each: int = 1) -> Any:
    return torch.tensor([[float(i not in clean)] * each for i in range(count)]).reshape(1, -1)


def _generator_inputs(model: Model, case: GeneratorCase) -> dict[str, Any]:
    config = model.config
    offset = generator_offset(config, len(case.input_ids))
    patches, (frames, rows, columns) = patchify(case.latents, config.latent_patch_size)
    positions = [vision_positions(config, offset, frames, rows, columns, case.fps)]
    inputs: dict[str, Any] = {
        "latent_patches": torch.from_numpy(patches)[None],
        "vision_noise_mask": _noise_mask(frames, case.clean_frames, rows * columns),
        "timestep": torch.tensor([case.timestep]),
    }
    if case.sound_latents is not None:
        count = case.sound_latents.shape[1]
        positions.append(sound_positions(config, offset, count))
        inputs["sound_latents"] = torch.from_numpy(case.sound_latents.T.copy())[None]
        inputs["sound_noise_mask"] = _noise_mask(count, case.clean_sound_frames)
    if case.action_latents is not None:
        count = case.action_latents.shape[0]
        positions.append(action_positions(config, offset, count, case.fps))
        inputs["action_latents"] = torch.from_numpy(case.action_latents)[None]
        inputs["action_noise_mask"] = _noise_mask(count, case.clean_action_steps)
        inputs["domain_id"] = torch.tensor([case.domain_id])
    inputs["rotary_cos"], inputs["rotary_sin"] = model.tables(np.concatenate(positions, axis=1))
    return inputs


def _split(model: Model, case: GeneratorCase, *, swap: bool = False) -> dict[str, np.ndarray]:
    """The two towers one after the other, in the reference's shapes."""
    context = _context(model, case.input_ids)
    if swap:
        context = [(value, key) for key, value in context]
    out = model.generator(**_generator_inputs(model, case), context=context)
    assert all(value.dtype == torch.float32 for value in out.values())
    results = {name: value[0].numpy() for name, value in out.items()}
    patch = model.config.latent_patch_size
    channels, frames, height, width = case.latents.shape
    grid = (frames, -(-height // patch), -(-width // patch))
    patches = results["velocity"]
    results["velocity"] = unpatchify(patches, grid, patch, channels, height, width)
    if "sound_velocity" in results:
        results["sound_velocity"] = results["sound_velocity"].T
    return results


def _error(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest error of any output, in units of that output's largest number."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[k] - want[k]).max() / np.abs(want[k]).max()) for k in want)


def _scaled(model: Model, tower: str, name: str, factor: float = 1.01) -> Model:
    """The model with one weight of one tower off."""
    config, weights = model.config, model.checkpoint.weights
    if tower == "reasoner":
        reasoner = load_reasoner(config, weights, torch.float32)
        reasoner.get_parameter(name).mul_(factor)
        return dataclasses.replace(model, reasoner=reasoner)
    generator = load_generator(config, weights, torch.float32)
    generator.get_parameter(name).mul_(factor)
    return dataclasses.replace(model, generator=generator)


@pytest.mark.parametrize("others", [True, False], ids=["all", "vision"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_both_towers_equal_diffusers_joint_forward(
    kind: str, others: bool, models: dict[str, Model]
) -> None:
    model = models[kind]
    case = _case(model, others=others)
    want, got = _reference(model, case), _split(model, case)
    assert len(want) == 1 + (others and model.config.sound_gen) + (
        others and model.config.action_gen
    )
    assert _error(got, want) <= RELATIVE
    assert not got["velocity"][:, 0].any()  # the clean frame
    assert np.all(got["velocity"][:, 1:])


@pytest.mark.parametrize("kind", CONFIGS)
def test_swapped_keys_and_values_are_seen(kind: str, models: dict[str, Model]) -> None:
    case = _case(models[kind])
    error = _error(_split(models[kind], case, swap=True), _reference(models[kind], case))
    assert error > 100 * RELATIVE


@pytest.mark.parametrize(
    ("kind", "tower", "name"),
    [
        ("nano-like", "reasoner", "layers.1.self_attn.to_v.weight"),
        ("nano-like", "reasoner", "layers.2.self_attn.norm_k.weight"),
        ("nano-like", "generator", "layers.0.mlp_moe_gen.gate_proj.weight"),
        ("nano-like", "generator", "audio_modality_embed"),
        ("nano-like", "generator", "action_proj_in.bias.weight"),
        ("nano-like", "generator", "time_embedder.linear_1.bias"),
        ("edge-like", "reasoner", "layers.2.self_attn.k_norm_und_for_gen.weight"),
        ("edge-like", "generator", "norm_moe_gen.weight"),
        ("shared", "generator", "layers.1.self_attn.to_out.weight"),
        ("biased", "generator", "layers.1.self_attn.to_add_out.bias"),
    ],
)
def test_a_weight_that_is_one_percent_off_is_seen(
    kind: str, tower: str, name: str, models: dict[str, Model]
) -> None:
    model = models[kind]
    case = _case(model)
    error = _error(_split(_scaled(model, tower, name), case), _reference(model, case))
    assert error > RELATIVE


def test_one_prompt_serves_all_steps(models: dict[str, Model]) -> None:
    model = models["nano-like"]
    context = _context(model, _case(model).input_ids)
    for timestep in (999.0, 500.0, 1.0):
        case = _case(model, timestep=timestep)
        out = model.generator(**_generator_inputs(model, case), context=context)
        want = _reference(model, case)["sound_velocity"].T
        error = np.abs(out["sound_velocity"][0].numpy() - want).max()
        assert error <= RELATIVE * np.abs(want).max()


def test_a_batch_equals_its_members(models: dict[str, Model]) -> None:
    model = models["edge-like"]
    cases = [_case(model, timestep=900.0), _case(model, timestep=30.0)]
    cases[1] = dataclasses.replace(
        cases[1], input_ids=cases[1].input_ids[::-1].copy(), domain_id=0
    )
    contexts = [_context(model, case.input_ids) for case in cases]
    inputs = [_generator_inputs(model, case) for case in cases]
    both = model.generator(
        **{name: torch.cat([one[name] for one in inputs]) for name in inputs[0]},
        context=[
            tuple(torch.cat(pair) for pair in zip(*layers, strict=True))
            for layers in zip(*contexts, strict=True)
        ],
    )
    for row, (one, context) in enumerate(zip(inputs, contexts, strict=True)):
        for name, alone in model.generator(**one, context=context).items():
            torch.testing.assert_close(both[name][row : row + 1], alone, rtol=0, atol=1e-5)


def _logits(model: Model, ids: np.ndarray, indices: list[int]) -> Any:
    cos, sin = model.tables(text_positions(0, len(ids)))
    out = model.reasoner(
        model.embed(ids), cos, sin, causal_bias(len(ids)), torch.tensor([indices])
    )
    return out.logits[0]


@pytest.mark.parametrize("kind", ["nano-like", "edge-like", "super-like", "shared", "biased"])
def test_logits_equal_transformers(kind: str, models: dict[str, Model]) -> None:
    model = models[kind]
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 40)
    positions = torch.arange(len(ids)).expand(3, 1, -1)
    with torch.no_grad():
        text_model = build_text_model(model.reference)
        want = text_model(input_ids=torch.from_numpy(ids)[None], position_ids=positions).logits[0]
    indices = [0, 7, 39]
    assert want.abs().max() > 1
    assert (_logits(model, ids, indices) - want[indices]).abs().max() <= LOGITS
    for name in ("layers.0.mlp.down_proj.weight", "lm_head.weight", "norm.weight"):
        broken = _logits(_scaled(model, "reasoner", name), ids, indices)
        assert (broken - want[indices]).abs().max() > LOGITS


@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_and_decode_equal_one_shot(kind: str, models: dict[str, Model]) -> None:
    model = models[kind]
    ids = np.random.default_rng(2).integers(0, model.config.vocab_size, 21)
    want = _logits(model, ids, list(range(21)))

    past: list[tuple[Any, Any]] | None = None
    got = []
    for start, stop in [(0, 9), (9, 16), (16, 17), (17, 18), (18, 21)]:
        count = stop - start
        cos, sin = model.tables(text_positions(start, count))
        logits, present, context_keys = model.reasoner(
            model.embed(ids[start:stop]),
            cos,
            sin,
            causal_bias(count, start),
            torch.arange(count)[None],
            past,
        )
        assert len(context_keys) == (len(present) if model.config.has_context_key_norm else 0)
        assert present[0][0].shape[2] == count
        if past is not None:
            pairs = zip(past, present, strict=True)
            present = [(torch.cat([a, c], 2), torch.cat([b, d], 2)) for (a, b), (c, d) in pairs]
        past = present
        got.append(logits[0])
    assert (torch.cat(got) - want).abs().max() <= LOGITS

    cos, sin = model.tables(text_positions(19, 1))  # one position off
    last = model.embed(ids[20:])
    short = [(key[:, :, :20], value[:, :, :20]) for key, value in past or []]
    wrong = model.reasoner(last, cos, sin, causal_bias(1, 20), torch.tensor([[0]]), short).logits
    assert (wrong[0] - want[20:]).abs().max() > LOGITS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["nano-like", "edge-like"])
def test_norms_equal_diffusers_bit_for_bit(kind: str, dtype: str) -> None:
    config = ModelConfig.from_dict(CONFIGS[kind])
    classes = {"nano-like": DiffusersRMSNorm, "edge-like": Cosmos3NemotronRMSNorm}
    theirs, other = (
        cls(256, eps=config.rms_norm_eps).to(getattr(torch, dtype))
        for cls in (classes.pop(kind), *classes.values())
    )
    ours = RMSNorm(256, config)
    with torch.no_grad():
        theirs.weight.normal_(1, 0.3, generator=torch.Generator().manual_seed(0))
        other.weight.copy_(theirs.weight)
        ours.load_state_dict(theirs.state_dict(), assign=True)
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 5
        x = x.to(getattr(torch, dtype))
        assert ours(x).dtype == x.dtype
        assert torch.equal(ours(x), theirs(x))
        # The families differ exactly where rounding can show.
        assert torch.equal(ours(x), other(x)) == (dtype == "float32")


@pytest.mark.parametrize("kind", ["nano-like", "edge-like"])
def test_bfloat16_is_as_good_as_diffusers(kind: str, tmp_path: Path) -> None:
    low = _load(kind, tmp_path, "bfloat16")
    case = _case(low)
    # The same rounded weights, computed in float32.
    exact = dataclasses.replace(low, reference=_diffusers(tmp_path, torch.float32))
    want = _reference(exact, case)
    theirs = _error(_reference(low, case), want)
    assert 1e-3 < theirs < 0.1
    assert _error(_split(low, case), want) <= 1.25 * theirs
    assert _error(_split(low, case, swap=True), want) > 2 * theirs


@pytest.mark.parametrize("name", [*CONFIGS, *PUBLISHED])
def test_parameters_are_the_checkpoints(name: str) -> None:
    config = ModelConfig.from_dict({**CONFIGS, **PUBLISHED}[name])
    with torch.device("meta"):
        reasoner, generator = Reasoner(config).state_dict(), Generator(config).state_dict()
    table = weight_table(config)
    for state, parts in (
        (reasoner, {Part.REASONER, Part.BOTH}),
        (generator, {Part.GENERATOR, Part.BOTH}),
    ):
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            key: spec.shape for key, spec in table.items() if spec.part in parts
        }


def test_loading_maps_what_fits_and_converts_the_rest(tmp_path: Path) -> None:
    model = _load("nano-like", tmp_path, "bfloat16")
    weights = model.checkpoint.weights
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    size, before = file.stat().st_size, file.read_bytes()
    for module in (model.reasoner, model.generator):
        for name, parameter in module.named_parameters():
            is_float32 = name.startswith("time_embedder.")
            assert parameter.dtype == (torch.float32 if is_float32 else torch.bfloat16)
            assert parameter.device.type == "cpu"
            assert not parameter.requires_grad
            # A mapped tensor lies in the storage of its whole file.
            assert (parameter.untyped_storage().nbytes() == size) != is_float32
            stored = torch.from_numpy(weights[name].astype(np.float32))
            assert torch.equal(parameter.float(), stored)
    wide = load_reasoner(model.config, weights, torch.float32)
    assert wide.norm.weight.dtype == torch.float32
    assert torch.equal(wide.norm.weight, model.reasoner.norm.weight.float())
    # Whoever writes to a parameter changes neither the file nor what others have loaded.
    model.reasoner.norm.weight.zero_()
    assert file.read_bytes() == before
    assert load_reasoner(model.config, weights, torch.bfloat16).norm.weight.all()


def test_loading_reads_tensors_at_odd_offsets(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["super-like"]
    weights = model.checkpoint.weights
    (tmp_path / "odd.bin").write_bytes(b"\0\0\0" + (weights.root / weights.files[0]).read_bytes())
    entries = {
        name: dataclasses.replace(entry, file="odd.bin", offset=entry.offset + 3)
        for name, entry in weights.entries.items()
    }
    odd = load_generator(model.config, WeightStore(tmp_path, entries), torch.float32)
    for name, parameter in odd.named_parameters():
        assert torch.equal(parameter, model.generator.get_parameter(name))


def test_loading_refuses_missing_and_misshapen_tensors(models: dict[str, Model]) -> None:
    model = models["nano-like"]
    weights = model.checkpoint.weights
    lacks = weights.subset(set(weights) - {"norm.weight"})
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_reasoner(model.config, lacks, torch.float32)
    load_generator(model.config, lacks, torch.float32)  # has no use for it
    entry = weights.entries["proj_out.bias"]
    bent = {
        **weights.entries,
        "proj_out.bias": dataclasses.replace(entry, shape=(entry.shape[0] // 2, 2)),
    }
    with pytest.raises(CheckpointError, match=r"proj_out\.bias"):
        load_generator(model.config, WeightStore(weights.root, bent), torch.float32)


def test_a_generator_of_fewer_modalities(models: dict[str, Model]) -> None:
    model = models["nano-like"]
    chosen = [Modality.VISION, Modality.ACTION]
    fewer = load_generator(model.config, model.checkpoint.weights, torch.float32, chosen)
    assert not any(name.startswith("audio") for name in fewer.state_dict())
    case = dataclasses.replace(_case(model), sound_latents=None, clean_sound_frames=())
    got = _split(dataclasses.replace(model, generator=fewer), case)
    assert _error(got, _reference(model, case)) <= RELATIVE
    full = _generator_inputs(model, _case(model))
    with pytest.raises(ContractError, match="sound"):
        fewer(**full, context=[])
    del full["domain_id"]
    with pytest.raises(ContractError, match="action"):
        model.generator(**full, context=[])
    with pytest.raises(ConfigError):
        Generator(models["super-like"].config, chosen)


def test_empty_sound_and_action_count_for_nothing(models: dict[str, Model]) -> None:
    model = models["nano-like"]
    case = _case(model, others=False)
    context = _context(model, case.input_ids)
    inputs = _generator_inputs(model, case)
    without = model.generator(**inputs, context=context)["velocity"]
    empty = torch.zeros(1, 0)
    config = model.config
    out = model.generator(
        **inputs,
        context=context,
        sound_latents=torch.zeros(1, 0, config.sound_dim or 0),
        sound_noise_mask=empty,
        action_latents=torch.zeros(1, 0, config.action_dim or 0),
        action_noise_mask=empty,
        domain_id=torch.tensor([0]),
    )
    assert torch.equal(out["velocity"], without)
    assert out["sound_velocity"].shape[1] == out["action_velocity"].shape[1] == 0

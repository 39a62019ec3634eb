"""The VAE's authored graphs equal diffusers' numbers, chunk by chunk, at any size."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")

from safetensors.torch import save_file

from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError, ExportError
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts
from motrt.engines.vae_network import decoder_network, encoder_network
from motrt.engines.vae_tensors import (
    cache_slots,
    vae_weight_table,
)
from motrt.export.graphs.builder import serialize
from motrt.export.graphs.check import check_onnx
from motrt.export.graphs.lint import lint
from motrt.export.graphs.vae import author_vae
from omni_fixtures.randomize import randomize_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir

    from motrt.engines.tensors import Array

TOLERANCE = 1e-5  # of the reference's largest magnitude
WEIGHTS = "weights/vae/diffusion_pytorch_model.safetensors"


def _config(z_dim: int, **keys: Any) -> dict[str, Any]:
    mean = [round(((7 * i) % z_dim - z_dim / 2) / z_dim, 4) for i in range(z_dim)]
    std = [round(0.6 + ((5 * i) % z_dim) / z_dim, 4) for i in range(z_dim)]
    return {"z_dim": z_dim, "latents_mean": mean, "latents_std": std, **keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "wan2.2": _config(
        6,
        base_dim=4,
        decoder_base_dim=8,
        num_res_blocks=1,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
    ),
    "wan2.1": _config(4, base_dim=8),
    # Shortcuts that repeat a channel over several outputs, or average without a change of size;
    # and half the temporal factor, where diffusers still encodes four frames at a time.
    "hourglass": _config(
        4,
        base_dim=4,
        dim_mult=[1, 2, 4, 2],
        temperal_downsample=[True, False, False],
        is_residual=True,
        scale_factor_temporal=2,
    ),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "wan2.1": {},
    "wan2.2": {
        **CONFIGS["wan2.2"],
        **_config(48),
        "base_dim": 160,
        "decoder_base_dim": 256,
        "num_res_blocks": 2,
        "attn_scales": [],
        "dropout": 0.0,
    },
}
# Of the latents. Form by size, but for the hourglass, which differs in its channels only.
SIZES = [(kind, size) for kind in ("wan2.2", "wan2.1") for size in ((2, 3), (5, 7), (4, 2))]
SIZES.append(("hourglass", (3, 5)))


@dataclass(frozen=True)
class Case:
    """A checkpoint, diffusers' model of it, and the graphs written from it."""

    vae: Any
    config: VaeConfig
    root: Path
    models: Mapping[str, ir.Model]
    chunks: Chunks

    def decode(self, latents: Array) -> Array:
        return self.chunks.run("decoder", self.split(latents, 1))

    def encode(self, video: Array) -> Array:
        return self.chunks.run("encoder", self.split(video, self.config.temporal_factor))

    @staticmethod
    def split(frames: Array, step: int) -> list[Array]:
        """The first frame, then ``step`` frames at a time."""
        count = frames.shape[2]
        return [frames[:, :, :1]] + [frames[:, :, i : i + step] for i in range(1, count, step)]

    def reference_decode(self, latents: Array) -> Array:
        with torch.no_grad():
            result: Array = self.vae.decode(torch.from_numpy(latents)).sample.numpy()
        return result

    def reference_encode(self, video: Array) -> Array:
        with torch.no_grad():
            result: Array = self.vae.encode(torch.from_numpy(video)).latent_dist.mean.numpy()
        return result

    def inputs(
        self, size: tuple[int, int], frames: int = 4, batch: int = 1
    ) -> tuple[Array, Array]:
        """Seeded latents of that size, and a video of as many chunks and at least 13 frames."""
        rng = np.random.default_rng(0)
        latents = rng.standard_normal((batch, self.config.z_dim, frames, *size), np.float32)
        pixels = [side * self.config.spatial_factor for side in size]
        count = 1 + (frames - 1) * 4
        return latents, rng.uniform(-1, 1, (batch, 3, count, *pixels)).astype(np.float32)


class Chunks:
    """ONNX Runtime over the four graphs of a directory."""

    def __init__(self, root: Path, models: Mapping[str, ir.Model]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        self.sessions = {}
        for name, model in models.items():
            path = root / f"{name}.onnx"
            path.write_bytes(serialize(model))
            self.sessions[name] = ort.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )

    def first(self, network: str, frames: Array) -> tuple[Array, list[Array]]:
        session = self.sessions[f"{network}_first"]
        result, *caches = session.run(None, {session.get_inputs()[0].name: frames})
        return result, caches

    def next(
        self, network: str, frames: Array, caches: Sequence[Array]
    ) -> tuple[Array, list[Array]]:
        session = self.sessions[f"{network}_next"]
        names = [value.name for value in session.get_inputs()]
        feeds = dict(zip(names, [frames, *caches], strict=True))
        result, *present = session.run(None, feeds)
        return result, present

    def run(self, network: str, chunks: Sequence[Array]) -> Array:
        result, caches = self.first(network, chunks[0])
        results = [result]
        for frames in chunks[1:]:
            result, caches = self.next(network, frames, caches)
            results.append(result)
        return np.concatenate(results, axis=2)


def error(actual: Array, reference: Array) -> float:
    assert actual.shape == reference.shape
    assert actual.dtype == reference.dtype
    return float(np.abs(actual - reference).max() / np.abs(reference).max())


def write(root: Path, vae: Any) -> tuple[VaeConfig, WeightStore]:
    vae.save_pretrained(root / "weights" / "vae")
    data = json.loads((root / "weights" / "vae" / "config.json").read_text(encoding="utf-8"))
    return VaeConfig.from_dict(data), WeightStore.from_files(root, [WEIGHTS])


def model_of(kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        vae = diffusers.AutoencoderKLWan(**CONFIGS[kind]).eval()
    # Half the gain, or the clamp to [-1, 1] would hide differences.
    randomize_(vae, 1, gain=0.5)
    return vae


def case_of(root: Path, vae: Any) -> Case:
    config, store = write(root, vae)
    models = author_vae(config, store.entries)
    return Case(vae, config, root, models, Chunks(root, models))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda kind: case_of(tmp_path_factory.mktemp("vae"), model_of(kind)))


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture
def wan22(cases: Callable[[str], Case]) -> Case:
    return cases("wan2.2")


@pytest.mark.parametrize(("case", "size"), SIZES, indirect=["case"])
def test_decoder_equals_diffusers(case: Case, size: tuple[int, int]) -> None:
    latents, _ = case.inputs(size)
    reference = case.reference_decode(latents)
    assert (np.abs(reference) < 1).mean() > 0.95
    sample = case.decode(latents)
    factor = case.config.spatial_factor
    frames = 1 + 3 * case.config.temporal_factor
    assert sample.shape == (1, 3, frames, size[0] * factor, size[1] * factor)
    assert error(sample, reference) <= TOLERANCE


@pytest.mark.parametrize(("case", "size"), SIZES, indirect=["case"])
def test_encoder_equals_diffusers(case: Case, size: tuple[int, int]) -> None:
    _, video = case.inputs(size)
    reference = case.reference_encode(video)
    assert error(case.encode(video), reference) <= TOLERANCE


def test_a_batch_equals_diffusers(wan22: Case) -> None:
    latents, video = wan22.inputs((3, 2), frames=3, batch=2)
    assert error(wan22.decode(latents), wan22.reference_decode(latents)) <= TOLERANCE
    assert error(wan22.encode(video), wan22.reference_encode(video)) <= TOLERANCE


def test_sample_is_clamped(wan22: Case) -> None:
    latents, _ = wan22.inputs((2, 2), frames=2)
    sample = wan22.decode(20 * latents)
    assert np.abs(sample).max() == 1.0
    assert error(sample, wan22.reference_decode(20 * latents)) <= TOLERANCE


def test_every_cache_matters(case: Case) -> None:
    """With any one cache zeroed, a chunk whose caches are full exceeds the tolerance."""
    latents, video = case.inputs((2, 3), frames=4)
    for network, chunks in (
        ("decoder", case.split(latents, 1)),
        ("encoder", case.split(video, case.config.temporal_factor)),
    ):
        _, caches = case.chunks.first(network, chunks[0])
        for frames in chunks[1:3]:
            _, caches = case.chunks.next(network, frames, caches)
        reference, _ = case.chunks.next(network, chunks[3], caches)
        for k, cache in enumerate(caches):
            broken = [*caches[:k], np.zeros_like(cache), *caches[k + 1 :]]
            result, _ = case.chunks.next(network, chunks[3], broken)
            assert error(result, reference) > 10 * TOLERANCE, (network, k)


@pytest.mark.parametrize(
    "name",
    [
        "post_quant_conv.bias",
        "decoder.mid_block.attentions.0.to_qkv.weight",
        "decoder.mid_block.resnets.1.norm2.gamma",
        "decoder.up_blocks.0.upsampler.time_conv.weight",
        "decoder.up_blocks.2.resnets.0.conv_shortcut.weight",
        "encoder.down_blocks.1.downsampler.resample.1.weight",
        "encoder.down_blocks.2.downsampler.time_conv.bias",
        "encoder.conv_out.weight",
    ],
)
def test_one_weight_off_by_one_percent_is_seen(wan22: Case, name: str, tmp_path: Path) -> None:
    shutil.copytree(wan22.root / "weights", tmp_path / "weights")
    entry = WeightStore.from_files(tmp_path, [WEIGHTS]).entries[name]
    raw = np.memmap(tmp_path / WEIGHTS, np.uint8, mode="r+")
    values = raw[entry.offset : entry.offset + entry.nbytes].view(np.float32)
    values *= np.float32(1.01)
    raw.flush()
    latents, video = wan22.inputs((2, 3), frames=2)
    chunks = Chunks(tmp_path, wan22.models)
    if name.startswith("encoder"):
        result = chunks.run("encoder", wan22.split(video, 4))
        assert error(result, wan22.reference_encode(video)) > TOLERANCE
    else:
        result = chunks.run("decoder", wan22.split(latents, 1))
        assert error(result, wan22.reference_decode(latents)) > TOLERANCE


def bfloat16_case(root: Path) -> Case:
    """A checkpoint stored in bfloat16; its ``vae`` holds the rounded weights in float32."""
    vae = model_of("wan2.2")
    config, _ = write(root, vae)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.copy_(parameter.bfloat16().float())
    stored = {name: value.bfloat16() for name, value in vae.state_dict().items()}
    save_file(stored, root / WEIGHTS)
    models = author_vae(config, WeightStore.from_files(root, [WEIGHTS]).entries)
    return Case(vae, config, root, models, Chunks(root, models))


def test_bfloat16_weights_are_computed_in_float32(tmp_path: Path) -> None:
    case = bfloat16_case(tmp_path)
    entries = WeightStore.from_files(tmp_path, [WEIGHTS]).entries
    assert {entry.dtype for entry in entries.values()} == {DType.BFLOAT16}
    latents, video = case.inputs((2, 3), frames=3)
    assert error(case.decode(latents), case.reference_decode(latents)) <= TOLERANCE
    assert error(case.encode(video), case.reference_encode(video)) <= TOLERANCE
    assert not lint_all(case.config, entries)


def test_initializers_are_the_checkpoints_tensors(case: Case) -> None:
    used: set[str] = set()
    for graph, model in case.models.items():
        names = set(model.graph.initializers)
        half = graph.split("_")[0]
        own = {"encoder": "quant_conv", "decoder": "post_quant_conv"}[half]
        assert {name.split(".")[0] for name in names} == {half, own}
        used |= names
    assert used == set(case.vae.state_dict())
    # All that a first chunk leaves out is the resampling of frames.
    for half in ("encoder", "decoder"):
        first, later = (
            set(case.models[f"{half}_{chunk}"].graph.initializers) for chunk in ("first", "next")
        )
        assert {name.split(".")[-2] for name in later - first} == {"time_conv"}
        assert first < later


def lint_all(config: VaeConfig, entries: Mapping[str, WeightEntry]) -> list[str]:
    contracts = vae_contracts(config)
    models = author_vae(config, entries)
    assert models.keys() == contracts.keys()
    for name, model in models.items():
        check_onnx(model, name)
    return [
        sentence
        for name, model in models.items()
        for sentence in lint(model, contracts[name], entries)
    ]


def test_graphs_keep_the_rules(case: Case) -> None:
    assert not lint_all(case.config, WeightStore.from_files(case.root, [WEIGHTS]).entries)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes(kind: str) -> None:
    """The real VAEs: the table, graphs of a few kilobytes, and the checker's shape inference."""
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(**PUBLISHED[kind])
    config = VaeConfig.from_dict(PUBLISHED[kind])
    table = vae_weight_table(config)
    assert table == shapes_of(vae)
    entries, offset = {}, 0
    for name, shape in table.items():
        entries[name] = WeightEntry(WEIGHTS, offset, DType.FLOAT32, shape)
        offset += entries[name].nbytes
    assert not lint_all(config, entries)
    for model in author_vae(config, entries).values():
        assert len(serialize(model)) < 200_000


def shapes_of(vae: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in vae.state_dict().items()}


def test_weight_table_is_the_state_dict(case: Case) -> None:
    assert vae_weight_table(case.config) == shapes_of(case.vae)


def test_caches_are_diffusers_slots(case: Case) -> None:
    """Same order and channels as the slots of ``feat_cache`` that diffusers fills."""
    config = case.config
    latents = torch.from_numpy(case.inputs((2, 3))[0][:, :, :1])
    seen: list[Any] = [None] * 100
    with torch.no_grad():
        case.vae.decoder(case.vae.post_quant_conv(latents), seen, [0], first_chunk=True)
    filled = [value for value in seen if value is not None]
    slots = cache_slots(decoder_network(config))
    assert len(filled) == len(slots)
    for value, slot in zip(filled, slots, strict=True):
        if isinstance(value, str):
            assert slot.conv.endswith("time_conv")
        else:
            assert value.shape[1] == slot.channels
            assert value.shape[3] == 2 * slot.scale
    assert cache_slots(encoder_network(config))[0].channels == config.in_channels


def test_contract_of_wan22() -> None:
    contracts = vae_contracts(VaeConfig.from_dict(PUBLISHED["wan2.2"]))
    described = {
        name: [spec.describe() for spec in (*contract.inputs[:2], contract.outputs[0])]
        for name, contract in contracts.items()
    }
    sample = "height_x16, width_x16]"
    assert described == {
        "decoder_first": [
            "latents float32 [batch, 48, 1, height, width]",
            f"sample float32 [batch, 3, 1, {sample}",
        ],
        "decoder_next": [
            "latents float32 [batch, 48, 1, height, width]",
            "past_cache.0 float32 [batch, 48, 2, height, width]",
            f"sample float32 [batch, 3, 4, {sample}",
        ],
        "encoder_first": [
            f"video float32 [batch, 3, 1, {sample}",
            "latents float32 [batch, 48, 1, height, width]",
        ],
        "encoder_next": [
            f"video float32 [batch, 3, 4, {sample}",
            "past_cache.0 float32 [batch, 12, 2, height_x8, width_x8]",
            "latents float32 [batch, 48, 1, height, width]",
        ],
    }
    for half in ("decoder", "encoder"):
        past = contracts[f"{half}_next"].inputs[1:]
        for chunk in ("first", "next"):
            present = contracts[f"{half}_{chunk}"].outputs[1:]
            assert [spec.name for spec in present] == [
                f"present_cache.{k}" for k in range(len(past))
            ]
            assert [spec.shape for spec in present] == [spec.shape for spec in past]


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_round_trip(kind: str) -> None:
    config = VaeConfig.from_dict({**CONFIGS[kind], "_class_name": "AutoencoderKLWan"})
    assert VaeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_defaults_are_diffusers() -> None:
    with torch.device("meta"):
        defaults = dict(diffusers.AutoencoderKLWan().config)
    del defaults["_use_default_values"]  # never written to a file
    assert VaeConfig.from_dict(defaults) == VaeConfig()
    assert set(VaeConfig().to_dict()) | {"dropout"} == defaults.keys()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"base_dims": 96}, "got 'base_dims'; expected a known key; the nearest is 'base_dim'"),
        ({"attn_scales": [0.5]}, "attn_scales cannot be right"),
        ({"_class_name": "AutoencoderKLQwenImage"}, "got AutoencoderKLQwenImage"),
        ({"z_dim": 8}, "latents_mean cannot be right; got .*; expected z_dim = 8 numbers"),
        ({"latents_std": [0.0] * 16}, "latents_std cannot be right"),
        ({"latents_std": [float("nan")] * 16}, "latents_std has the wrong type"),
        ({"temperal_downsample": [True]}, "temperal_downsample cannot be right"),
        ({"scale_factor_spatial": 16}, "scale_factor_spatial cannot be right; got 16; expected 8"),
        ({"scale_factor_temporal": 8}, "scale_factor_temporal cannot be right"),
        ({"patch_size": 2, "scale_factor_spatial": 16}, "in_channels cannot be right"),
        ({"dim_mult": []}, "dim_mult cannot be right"),
        ({"num_res_blocks": 10**9}, "num_res_blocks cannot be right"),
        ({"base_dim": "96"}, "base_dim has the wrong type; got '96'; expected int"),
        ({"base_dim": True}, "base_dim has the wrong type"),
        ({"dim_mult": 4}, "dim_mult has the wrong type"),
        ({"is_residual": 1}, "is_residual has the wrong type"),
    ],
)
def test_wrong_configs_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VaeConfig.from_dict(keys)


def test_widths_that_a_shortcut_cannot_spread_are_refused() -> None:
    config = VaeConfig.from_dict({"dim_mult": [1, 2, 4, 3], "is_residual": True})
    with pytest.raises(ConfigError, match="dim_mult cannot be right"):
        vae_weight_table(config)


def test_public_files_key_without_meaning_is_accepted() -> None:
    assert VaeConfig.from_dict({"clip_output": False, "dropout": 0.1}) == VaeConfig()


def test_null_means_absent() -> None:
    keys = {"patch_size": None, "scale_factor_temporal": None, "dim_mult": None}
    config = VaeConfig.from_dict(keys)
    assert config == dataclasses.replace(VaeConfig(), scale_factor_temporal=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entries: entries.pop("quant_conv.bias"), "lacks a tensor; got quant_conv.bias"),
        (
            lambda entries: entries.update(
                {"quant_conv.bias": dataclasses.replace(entries["quant_conv.bias"], shape=(3,))}
            ),
            r"quant_conv.bias does not fit vae/config.json; got \[3\]; expected \[12\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    wan22: Case, change: Callable[[dict[str, WeightEntry]], object], words: str
) -> None:
    entries = WeightStore.from_files(wan22.root, [WEIGHTS]).entries
    change(entries)
    with pytest.raises(ExportError, match=words):
        author_vae(wan22.config, entries)


def build_with_rtx(case: Case, name: str) -> object:
    """Build ahead of time on the CPU, float32, with height, width and batch free."""
    rtx = pytest.importorskip("tensorrt_rtx")
    logger = rtx.Logger(rtx.Logger.ERROR)
    builder = rtx.Builder(logger)
    strongly_typed = 1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    parser = rtx.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(case.root / f"{name}.onnx"))
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    build_config = builder.create_builder_config()
    build_config.num_compute_capabilities = 1
    build_config.set_compute_capability(rtx.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for spec in vae_contracts(case.config)[name].inputs:
        shapes = [shape_at(spec.shape, *at) for at in ((1, 2), (1, 8), (2, 20))]
        profile.set_shape(spec.name, *shapes)
    build_config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, build_config)


@pytest.mark.parametrize(
    "name", ["decoder_first", "decoder_next", "encoder_first", "encoder_next"]
)
def test_graphs_build_with_tensorrt_rtx(wan22: Case, name: str) -> None:
    assert build_with_rtx(wan22, name) is not None


def test_bfloat16_weights_build_with_tensorrt_rtx(tmp_path: Path) -> None:
    """The Cast in front of a kernel leaves it a constant."""
    assert build_with_rtx(bfloat16_case(tmp_path), "decoder_next") is not None


def shape_at(shape: tuple[int | str, ...], batch: int, side: int) -> tuple[int, ...]:
    """Numbers for a contract's named dimensions; ``height_x8`` is eight latents' sides."""
    return tuple(
        dim
        if isinstance(dim, int)
        else batch
        if dim == "batch"
        else side * int(dim.partition("_x")[2] or 1)
        for dim in shape
    )

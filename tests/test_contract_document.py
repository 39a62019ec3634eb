"""``docs/contract.md`` is enough: a runner written from it gives the public implementations' numbers.

The runner is ``tests/contract_runner.py``; it never sees motrt. Bundles come from the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from contract_runner import Array, Bundle, Clip, Generator, Named, Text, Vae
from omni_fixtures.checkpoints import build_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RELATIVE = 1e-5  # of the reference's largest number
LOGITS = 1e-4

# Bundle -> checkpoint and options. "moved" is nano-like with every choice of positions turned over.
EXPORTS = {
    "nano": ("nano-like", "--lowering native"),
    "moved": ("moved", "--lowering portable"),
    "edge": ("edge-like", "--lowering portable"),
    "edge-vision": ("edge-like", "--lowering native --modalities vision"),
    "nano-fp16": ("nano-like", "--lowering portable --precision fp16"),
}
MOVED = {
    "base_fps": 20,
    "enable_fps_modulation": False,
    "sound_latent_fps": 12.5,
    "unified_3d_mrope_reset_spatial_ids": False,
    "unified_3d_mrope_temporal_modality_margin": 700,
}


def random(shape: Sequence[int], seed: int) -> Array:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


SHORT: list[int] = np.random.RandomState(1).randint(0, 512, 6).tolist()
LONG: list[int] = np.random.RandomState(2).randint(0, 512, 19).tolist()

IMAGE = Clip(latents=random((48, 1, 5, 7), 3))
VIDEO = Clip(latents=random((48, 3, 4, 5), 4), fps=29.97)
FROM_IMAGE = dataclasses.replace(VIDEO, fps=16.0, clean_frames=(0,))
FROM_MIDDLE = dataclasses.replace(VIDEO, fps=60.0, clean_frames=(1,))
ACTION = dataclasses.replace(
    FROM_IMAGE, action=random((5, 64), 5), clean_action=(1, 2), domain_id=3
)
STEP = dataclasses.replace(IMAGE, action=random((1, 64), 6), domain_id=1)
INVERSE = dataclasses.replace(ACTION, clean_frames=(0, 1, 2), clean_action=(), domain_id=2)
SOUND = dataclasses.replace(VIDEO, sound=random((64, 7), 7))
TONE = dataclasses.replace(IMAGE, sound=random((64, 1), 8))
ALL = dataclasses.replace(ACTION, fps=10.0, sound=random((64, 4), 9), clean_sound=(3,))
VISION_CLIPS = {"image": IMAGE, "video": VIDEO, "i2v": FROM_IMAGE, "middle": FROM_MIDDLE}
ACTION_CLIPS = {"action": ACTION, "step": STEP, "inverse": INVERSE}
SOUND_CLIPS = {"sound": SOUND, "tone": TONE, "all": ALL}
CASES = [
    (bundle, name)
    for bundle, clips in {
        "nano": VISION_CLIPS | ACTION_CLIPS | SOUND_CLIPS,
        "moved": VISION_CLIPS | ACTION_CLIPS | SOUND_CLIPS,
        "edge": VISION_CLIPS | ACTION_CLIPS,
        "edge-vision": VISION_CLIPS,
    }.items()
    for name in clips
]
TEXT_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
]
CLIPS = VISION_CLIPS | ACTION_CLIPS | SOUND_CLIPS


# The public implementations.


class Reference:
    """One checkpoint in diffusers' and transformers' own classes."""

    def __init__(self, checkpoint: Path, scratch: Path) -> None:
        self.checkpoint = checkpoint
        self.scratch = scratch
        self.logits = cache(self._logits)
        self.velocity = cache(self._velocity)

    def _logits(self, ids: tuple[int, ...]) -> Array:
        """Logits ``[S, V]`` by transformers, the checkpoint's names mapped by transformers itself."""
        model = self._text_model
        with torch.no_grad():
            return np.asarray(model(input_ids=torch.tensor([ids])).logits[0].numpy())

    @cached_property
    def _text_model(self) -> Any:
        config = json.loads((self.checkpoint / "transformer" / "config.json").read_text())
        edge = config["hidden_act"] == "relu2"
        kind = "Cosmos3Edge" if edge else "Cosmos3Omni"
        text = {key: config[key] for key in TEXT_KEYS}
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            "mrope_section": config["rope_axes_dim"],
        }
        if not edge:
            text["rope_parameters"]["mrope_interleaved"] = True
            text["model_type"] = "qwen3_vl_text"
        size = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
        vision = (
            {**size, "num_heads": 2, "depth": 1, "out_hidden_size": config["hidden_size"]}
            | {"deepstack_visual_indexes": [], "model_type": "qwen3_vl_vision"}
            if not edge
            else {**size, "num_hidden_layers": 1}
        )
        whole = getattr(transformers, f"{kind}Config")(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=False,
            **({"projector_hidden_size": 32} if edge else {}),
        )
        # transformers reads another file name and keeps its own configs next to it.
        whole.save_pretrained(self.scratch)
        transformers.GenerationConfig().save_pretrained(self.scratch)
        shutil.copy(
            self.checkpoint / "transformer" / "diffusion_pytorch_model.safetensors",
            self.scratch / "model.safetensors",
        )
        model, info = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(
            self.scratch, output_loading_info=True, dtype=torch.float32
        )
        towers = ("model.visual.", "model.vision_tower.", "model.projector.")
        lost = [name for name in info["missing_keys"] if not name.startswith(towers)]
        assert not lost, lost
        return model.eval()

    @cached_property
    def _joint(self) -> Any:
        return diffusers.Cosmos3OmniTransformer.from_pretrained(
            self.checkpoint, subfolder="transformer"
        ).eval()

    def _velocity(self, ids: tuple[int, ...], clip_name: str, timestep: float) -> Named:
        """The joint forward of diffusers, its arguments by the pipeline's own methods."""
        clip = CLIPS[clip_name]
        model = self._joint
        pipeline = SimpleNamespace(transformer=model, vae_scale_factor_temporal=4)

        def segment(kind: str, **arguments: Any) -> dict[str, Any]:
            method = getattr(diffusers.Cosmos3OmniPipeline, f"_prepare_{kind}_segment")
            return dict(method(pipeline, device="cpu", **arguments))

        text = segment("text", input_ids=list(ids))
        offset = text["vision_start_temporal_offset"]
        latents = torch.from_numpy(clip.latents)[None]
        vision = segment(
            "vision",
            input_vision_tokens=latents,
            has_image_condition=False,
            mrope_offset=offset,
            vision_fps=clip.fps,
            curr=len(ids),
            condition_frame_indexes=list(clip.clean_frames),
        )
        positions = [text["text_mrope_ids"], vision["vision_mrope_ids"]]
        segments = {**vision, "vision_tokens": [latents]}
        length = len(ids) + vision["num_vision_tokens"]
        if clip.sound is not None:
            tokens = torch.from_numpy(clip.sound)
            sound = segment(
                "sound",
                input_sound_tokens=tokens,
                mrope_offset=offset,
                sound_fps=model.config.sound_latent_fps,
                curr=length,
            )
            noisy = torch.tensor([i for i in range(tokens.shape[1]) if i not in clip.clean_sound])
            sound["sound_mse_loss_indexes"] = length + noisy
            sound["sound_noisy_frame_indexes"] = [noisy]
            positions.append(sound["sound_mrope_ids"])
            segments |= {**sound, "sound_tokens": [tokens]}
            length += tokens.shape[1]
        if clip.action is not None:
            tokens = torch.from_numpy(clip.action)
            action = segment(
                "action",
                input_action_tokens=tokens,
                condition_frame_indexes=list(clip.clean_action),
                mrope_offset=offset,
                action_fps=clip.fps,
                curr=length,
            )
            positions.append(action["action_mrope_ids"])
            segments |= {**action, "action_tokens": [tokens]}
            segments["action_domain_ids"] = [torch.tensor(clip.domain_id)]
            length += len(tokens)
        for kind in ("vision", "sound", "action"):
            noisy = segments.get(f"{kind}_mse_loss_indexes")
            if noisy is not None:
                segments[f"{kind}_timesteps"] = torch.full((len(noisy),), timestep)
        with torch.no_grad():
            result = model(
                input_ids=text["input_ids"],
                text_indexes=text["text_indexes"],
                und_len=text["und_len"],
                position_ids=torch.cat([ids.float() for ids in positions], dim=1),
                sequence_length=length,
                **{
                    key: value
                    for key, value in segments.items()
                    if "mrope" not in key and not key.startswith("num_") and key[-4:] != "_len"
                },
            )
        named = {"vision": result.sample[0][0]}
        if clip.sound is not None:
            named["sound"] = result.sound[0]
        if clip.action is not None:
            named["action"] = result.action[0]
        return {name: tensor.numpy() for name, tensor in named.items()}


# Checkpoints, bundles.


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    paths = {kind: build_pipeline(root / kind, kind) for kind in ("nano-like", "edge-like")}
    paths["moved"] = root / "moved"
    shutil.copytree(paths["nano-like"], paths["moved"])
    config = paths["moved"] / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MOVED))
    return paths


@pytest.fixture(scope="module")
def bundles(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Bundle]:
    root = tmp_path_factory.mktemp("bundles")
    names = list(EXPORTS)
    for pair in (names[:2], names[2:4], names[4:]):  # two at a time: most of it is imports
        running = {name: _export(checkpoints[EXPORTS[name][0]], root / name) for name in pair}
        for name, process in running.items():
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name}: {output}"
    return {name: Bundle(root / name) for name in EXPORTS}


def _export(checkpoint: Path, bundle: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "motrt.export", "export", str(checkpoint), "-o", str(bundle)]
    return subprocess.Popen(
        [*command, *EXPORTS[bundle.name][1].split(), "--probe", "never", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture(scope="module")
def references(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reference]:
    root = tmp_path_factory.mktemp("references")
    made = {kind: Reference(path, root / kind) for kind, path in checkpoints.items()}
    return {name: made[kind] for name, (kind, _) in EXPORTS.items()}


def relative_error(got: Named, want: Named) -> float:
    assert got.keys() == want.keys()
    errors = []
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        errors.append(float(np.abs(got[name] - array).max() / max(np.abs(array).max(), 1e-30)))
    return max(errors)


def context_of(bundle: Bundle, ids: Sequence[int]) -> Named:
    text = Text(bundle)
    text.feed([ids])
    return text.context()


# The runner is what it says.


def test_the_runner_needs_neither_motrt_nor_torch(
    bundles: dict[str, Bundle], references: dict[str, Reference], tmp_path: Path
) -> None:
    assert ALL.sound is not None
    assert ALL.action is not None
    np.savez(
        tmp_path / "in.npz", ids=LONG, latents=ALL.latents, sound=ALL.sound, action=ALL.action
    )
    script = f"""
import json, sys
from pathlib import Path
for name in ("motrt", "torch", "onnx", "diffusers", "transformers"):
    sys.modules[name] = None  # an import of it raises
import numpy as np
from contract_runner import Bundle, Clip, Generator, Text
given = np.load("in.npz")
bundle = Bundle(Path({str(bundles["nano"].folder)!r}))
text = Text(bundle)
logits = text.feed([given["ids"].tolist()])
clip = Clip(latents=given["latents"], sound=given["sound"], action=given["action"], fps={ALL.fps},
            clean_frames={ALL.clean_frames}, clean_sound={ALL.clean_sound},
            clean_action={ALL.clean_action}, domain_id={ALL.domain_id})
np.savez("out.npz", logits=logits, **Generator(bundle).velocity(text.context(), clip, 437.0))
print(json.dumps([name for name, module in sys.modules.items() if module is not None]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "contract_runner" in imported
    assert not {"motrt", "torch", "omni_fixtures"} & imported
    with np.load(tmp_path / "out.npz") as stored:
        got = {name: stored[name] for name in stored.files}
    logits = references["nano"].logits(tuple(LONG))[-1]
    assert np.abs(got.pop("logits")[0, 0] - logits).max() <= LOGITS
    assert relative_error(got, references["nano"].velocity(tuple(LONG), "all", 437.0)) <= RELATIVE


@pytest.mark.parametrize("name", EXPORTS)
def test_the_manifest_lists_files_as_they_are(name: str, bundles: dict[str, Bundle]) -> None:
    bundle = bundles[name]
    listed = bundle.manifest["files"]
    present = {
        path.relative_to(bundle.folder).as_posix()
        for path in bundle.folder.rglob("*")
        if path.is_file()
    }
    assert listed.keys() == present - {"manifest.json"}
    for path, entry in listed.items():
        content = (bundle.folder / path).read_bytes()
        assert entry["bytes"] == len(content)
        if "header_sha256" in entry:
            content = content[: 8 + int.from_bytes(content[:8], "little")]
            assert entry["header_sha256"] == hashlib.sha256(content).hexdigest()
        else:
            assert entry["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", EXPORTS)
def test_initializers_are_the_weights_of_the_manifest(
    name: str, bundles: dict[str, Bundle]
) -> None:
    bundle = bundles[name]
    graphs = list(bundle.folder.glob("*.onnx"))
    assert len(graphs) == 6
    for path in graphs:
        graph = onnx.load(path, load_external_data=False).graph
        weights = bundle.manifest["weights"]["vae" if path.stem[:4] == "vae_" else "transformer"]
        for tensor in graph.initializer:
            external = {entry.key: entry.value for entry in tensor.external_data}
            entry = weights[tensor.name]
            assert external["location"] == entry["file"]
            assert int(external["offset"]) == entry["offset"]
            assert list(tensor.dims) == entry["shape"]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            assert dtype == np.dtype(entry["dtype"])


# Text.


@pytest.mark.parametrize("name", EXPORTS)
def test_logits_of_a_prompt_equal_transformers(
    name: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    want = references[name].logits(tuple(LONG))
    got = Text(bundles[name]).feed([LONG], last=len(LONG))[0]
    assert got.dtype == np.float32
    assert np.abs(want).max() > 1
    assert np.abs(got - want).max() <= (2e-2 if name == "nano-fp16" else LOGITS)


@pytest.mark.parametrize("name", ["nano", "moved", "edge", "edge-vision"])
def test_chunks_and_single_tokens_equal_one_call(
    name: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    want = references[name].logits(tuple(LONG))
    text = Text(bundles[name], capacity=len(LONG))
    pieces = [LONG[:7], LONG[7:8], LONG[8:14], *([token] for token in LONG[14:])]
    got = np.concatenate([text.feed([piece], last=len(piece))[0] for piece in pieces])
    assert np.abs(got - want).max() <= LOGITS
    whole = context_of(bundles[name], LONG)
    assert relative_error(text.context(), whole) <= RELATIVE


@pytest.mark.parametrize("name", ["nano", "edge-vision"])
def test_a_static_cache_holds_prompts_of_two_lengths(
    name: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    text = Text(bundles[name], batch=2)
    rows = [SHORT, LONG]
    for piece in ([SHORT[:4], LONG[:11]], [SHORT[4:5], LONG[11:18]], [SHORT[5:], LONG[18:]]):
        got = text.feed(piece)
    for row, ids in enumerate(rows):
        want = references[name].logits(tuple(ids))[-1]
        assert np.abs(got[row, 0] - want).max() <= LOGITS
        assert relative_error(text.context(row), context_of(bundles[name], ids)) <= RELATIVE


@pytest.mark.parametrize("name", ["nano", "edge-vision"])
def test_what_an_earlier_sequence_left_in_a_static_cache_is_hidden(
    name: str, bundles: dict[str, Bundle]
) -> None:
    want, text = Text(bundles[name]), Text(bundles[name])
    text.feed([LONG])
    text.lengths, text._normed = [0], [[]]
    np.testing.assert_array_equal(text.feed([SHORT], last=6), want.feed([SHORT], last=6))
    for key, array in want.context().items():
        np.testing.assert_array_equal(text.context()[key], array)


@pytest.mark.parametrize("name", ["moved", "edge"])
def test_an_append_cache_holds_a_batch_of_one_length(
    name: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    rows = [SHORT, LONG[: len(SHORT)]]
    text = Text(bundles[name], batch=2)
    text.feed([row[:4] for row in rows])
    got = text.feed([row[4:] for row in rows], last=2)
    for row, ids in enumerate(rows):
        want = references[name].logits(tuple(ids))[-2:]
        assert np.abs(got[row] - want).max() <= LOGITS


# The generator.


@pytest.mark.parametrize(("name", "clip"), CASES)
def test_velocities_equal_the_joint_forward(
    name: str, clip: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    bundle, reference = bundles[name], references[name]
    for ids in (SHORT, LONG):
        context = context_of(bundle, ids)
        before = {key: array.copy() for key, array in context.items()}
        for timestep in (999.0, 437.0, 0.0) if ids is LONG else (437.0,):
            got = Generator(bundle).velocity(context, CLIPS[clip], timestep)
            want = reference.velocity(tuple(ids), clip, timestep)
            assert relative_error(got, want) <= RELATIVE
            assert not got["vision"][:, list(CLIPS[clip].clean_frames)].any()
        for key, array in before.items():
            np.testing.assert_array_equal(context[key], array)


def test_branches_of_one_length_may_run_as_a_batch(
    bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    prompts = [SHORT, LONG[: len(SHORT)]]
    contexts = [context_of(bundles["nano"], ids) for ids in prompts]
    both = {key: np.concatenate([c[key] for c in contexts]) for key in contexts[0]}
    got = Generator(bundles["nano"]).velocities(both, [ALL, ALL], [999.0, 12.0])
    for row, timestep in enumerate((999.0, 12.0)):
        want = references["nano"].velocity(tuple(prompts[row]), "all", timestep)
        assert relative_error(got[row], want) <= RELATIVE


def test_half_precision_stays_near(
    bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    bundle = bundles["nano-fp16"]
    got = Generator(bundle).velocity(context_of(bundle, LONG), ALL, 437.0)
    want = references["nano"].velocity(tuple(LONG), "all", 437.0)
    assert RELATIVE < relative_error(got, want) <= 2e-2


# The VAE.


@pytest.fixture(scope="module")
def vae(checkpoints: dict[str, Path]) -> Any:
    path = checkpoints["nano-like"]
    return diffusers.AutoencoderKLWan.from_pretrained(path, subfolder="vae").eval()


def decoded(vae: Any, latents: Array) -> Named:
    own = latents * statistic(vae, "latents_std") + statistic(vae, "latents_mean")
    with torch.no_grad():
        return {"sample": vae.decode(torch.from_numpy(own)).sample.numpy()}


def statistic(vae: Any, name: str) -> Array:
    return np.asarray(vae.config[name], dtype=np.float32).reshape(1, -1, 1, 1, 1)


@pytest.mark.parametrize("shape", [(1, 48, 3, 2, 3), (2, 48, 1, 3, 1)])
def test_decoded_video_equals_diffusers(
    shape: tuple[int, ...], bundles: dict[str, Bundle], vae: Any
) -> None:
    latents = random(shape, 10)
    got = Vae(bundles["nano"]).decode(latents)
    assert got.shape[2] == 4 * shape[2] - 3
    assert relative_error({"sample": got}, decoded(vae, latents)) <= RELATIVE


@pytest.mark.parametrize("shape", [(1, 3, 9, 32, 48), (2, 3, 1, 48, 16)])
def test_encoded_video_equals_diffusers(
    shape: tuple[int, ...], bundles: dict[str, Bundle], vae: Any
) -> None:
    video = np.clip(random(shape, 11), -1, 1)
    with torch.no_grad():
        own = vae.encode(torch.from_numpy(video)).latent_dist.mode().numpy()
    want = (own - statistic(vae, "latents_mean")) / statistic(vae, "latents_std")
    assert relative_error({"z": Vae(bundles["nano"]).encode(video)}, {"z": want}) <= RELATIVE


# Runners that misread the page do not get through.


class ShiftedPositions(Generator):
    def offset(self, prompt: int) -> np.float32:
        return np.float32(super().offset(prompt) + 1)


class FpsOfTheBase(Generator):
    def positions(self, prompt: int, clip: Clip) -> Array:
        fps = float(self.bundle.model["base_fps"])
        return super().positions(prompt, dataclasses.replace(clip, fps=fps))


class ActionFromZero(Generator):
    def _times(self, steps: range, rate: float, base: float, offset: np.float32) -> Array:
        return super()._times(range(len(steps)), rate, base, offset)


class SpatialFromTheOffset(Generator):
    def _grid(self, times: Array, rows: int, columns: int, offset: np.float32) -> Array:
        grid = super()._grid(times, rows, columns, offset)
        grid[1:] += offset
        return grid


class ChannelsFirst(Generator):
    def patches(self, latents: Array) -> Array:
        tokens = super().patches(latents)
        shape = (len(tokens), self.patch**2, latents.shape[0])
        return tokens.reshape(shape).transpose(0, 2, 1).reshape(tokens.shape)


class EverythingNoisy(Generator):
    def _feeds(self, clip: Clip) -> Named:
        feeds = super()._feeds(clip)
        return {k: np.ones_like(v) if k.endswith("mask") else v for k, v in feeds.items()}


class ActionBeforeSound(Generator):
    def positions(self, prompt: int, clip: Clip) -> Array:
        found = super().positions(prompt, clip)
        assert clip.sound is not None
        assert clip.action is not None
        sound, action = clip.sound.shape[1], len(clip.action)
        vision = found.shape[1] - sound - action
        parts = np.split(found, [vision, vision + sound], axis=1)
        return np.concatenate([parts[0], parts[2], parts[1]], axis=1)


class AnglesInDouble(Bundle):
    def tables(self, positions: Array) -> tuple[Array, Array]:
        axes = np.asarray(self.manifest["rotary_axes"])
        wide = np.moveaxis(positions.astype(np.float64)[:, axes], 1, 2)
        angles = wide * np.asarray(self.manifest["inv_freq"])
        return np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)


class AxesInSections(Bundle):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest["rotary_axes"] = sorted(self.manifest["rotary_axes"])


def swapped(context: Named) -> Named:
    other = {"key": "value", "value": "key"}
    return {f"{k.rsplit('.', 1)[0]}.{other[k.rsplit('.', 1)[1]]}": v for k, v in context.items()}


def padded(context: Named) -> Named:
    return {k: np.pad(v, ((0, 0), (0, 0), (0, 1), (0, 0))) for k, v in context.items()}


def layers_turned(context: Named) -> Named:
    order = {"0": "2", "1": "1", "2": "0"}
    return {f"context.{order[k.split('.')[1]]}.{k.split('.')[2]}": v for k, v in context.items()}


def unchanged(context: Named) -> Named:
    return context


WRONG_GENERATORS: dict[str, tuple[type[Bundle], type[Generator], Callable[[Named], Named]]] = {
    "positions shifted by one": (Bundle, ShiftedPositions, unchanged),
    "fps taken for the base's": (Bundle, FpsOfTheBase, unchanged),
    "action counted from zero": (Bundle, ActionFromZero, unchanged),
    "height and width from O": (Bundle, SpatialFromTheOffset, unchanged),
    "patches channel first": (Bundle, ChannelsFirst, unchanged),
    "clean tokens called noisy": (Bundle, EverythingNoisy, unchanged),
    "action before sound": (Bundle, ActionBeforeSound, unchanged),
    "axes in sections": (AxesInSections, Generator, unchanged),
    "keys and values swapped": (Bundle, Generator, swapped),
    "context padded": (Bundle, Generator, padded),
    "layers turned over": (Bundle, Generator, layers_turned),
}


@pytest.mark.parametrize("misreading", WRONG_GENERATORS)
def test_a_wrong_generator_runner_is_found_out(
    misreading: str, bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    bundle_class, generator_class, change = WRONG_GENERATORS[misreading]
    bundle = bundle_class(bundles["nano"].folder)
    # The right context, so that only what is named is wrong; both runners share the tables.
    context = change(context_of(bundles["nano"], LONG))
    got = generator_class(bundle).velocity(context, ALL, 437.0)
    want = references["nano"].velocity(tuple(LONG), "all", 437.0)
    assert relative_error(got, want) > 1000 * RELATIVE


def test_angles_in_float64_are_found_out(
    bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    bundle = AnglesInDouble(bundles["nano"].folder)
    got = Generator(bundle).velocity(context_of(bundles["nano"], SHORT), FROM_MIDDLE, 437.0)
    want = references["nano"].velocity(tuple(SHORT), "middle", 437.0)
    assert relative_error(got, want) > RELATIVE


def test_the_cached_keys_are_not_what_edge_generates_from(
    bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    text = Text(bundles["edge"])
    text.feed([LONG])
    cached = {f"context.{name}": array for name, array in text.cache.items()}
    assert cached.keys() == text.context().keys()
    got = Generator(bundles["edge"]).velocity(cached, ACTION, 437.0)
    assert relative_error(got, references["edge"].velocity(tuple(LONG), "action", 437.0)) > 0.01


class RestartedPositions(Text):
    def feed(self, rows: Sequence[Sequence[int]], *, last: int = 1) -> Array:
        tables = self.bundle.tables
        self.bundle.tables = lambda p: tables(p - p.min())  # type: ignore[assignment,method-assign]
        try:
            return super().feed(rows, last=last)
        finally:
            self.bundle.tables = tables  # type: ignore[method-assign]


class NoCausality(Text):
    def bias(self, counts: list[int], width: int, total: int) -> Array:
        bias = super().bias(counts, width, total)
        bias[..., : self.lengths[0] + counts[0]] = 0
        return bias


class BlindToTheNewest(Text):
    def bias(self, counts: list[int], width: int, total: int) -> Array:
        bias = super().bias(counts, width, total)
        return np.concatenate([bias[:, :, :1], bias[:, :, :-1]], axis=2)


class AlwaysWrittenAtZero(Text):
    def _write_indices(self) -> Named:
        return {"write_indices": np.zeros(len(self.lengths), dtype=np.int64)}


@pytest.mark.parametrize(
    "wrong", [RestartedPositions, NoCausality, BlindToTheNewest, AlwaysWrittenAtZero]
)
def test_a_wrong_text_runner_is_found_out(
    wrong: type[Text], bundles: dict[str, Bundle], references: dict[str, Reference]
) -> None:
    text = wrong(Bundle(bundles["nano"].folder))
    got = np.concatenate([text.feed([p], last=len(p))[0] for p in (LONG[:8], LONG[8:])])
    assert np.abs(got - references["nano"].logits(tuple(LONG))).max() > 10 * LOGITS


class NoStatistics(Vae):
    def _statistic(self, name: str) -> Array:
        return np.float32(name == "latents_std") * np.ones((1, 1, 1, 1, 1), np.float32)


class EveryChunkFirst(Vae):
    def _chain(self, coder: str, source: str, result: str, chunks: list[Array]) -> Array:
        pieces = [super(EveryChunkFirst, self)._chain(coder, source, result, [c]) for c in chunks]
        repeated = [pieces[0], *(np.repeat(piece, 4, axis=2) for piece in pieces[1:])]
        return np.concatenate(repeated, axis=2)


@pytest.mark.parametrize("wrong", [NoStatistics, EveryChunkFirst])
def test_a_wrong_vae_runner_is_found_out(
    wrong: type[Vae], bundles: dict[str, Bundle], vae: Any
) -> None:
    latents = random((1, 48, 2, 2, 3), 12)
    got = wrong(bundles["nano"]).decode(latents)
    assert relative_error({"sample": got}, decoded(vae, latents)) > 0.01

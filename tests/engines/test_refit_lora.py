"""Adapters in every naming, for either tower, several at once: W' = W + Σ s · alpha / r · B A."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from motrt.engines.bundle import Bundle
from motrt.engines.dtypes import Precision
from motrt.engines.errors import ConfigError, RefitError
from motrt.engines.refit.disk import refit_bundle
from motrt.engines.refit.lora import Lora, open_lora
from motrt.engines.refit.lora_names import tensor_of
from motrt.engines.tensors import Array
from motrt.export.pipeline import export_checkpoint
from motrt.export.result import ExportOptions
from refit_cases import (
    KINDS,
    factors,
    linears,
    same,
    tensors_of,
    write_diffusers,
    write_peft,
)
from tiny_checkpoints import tree

Checkpoint = Callable[..., Path]
Made = Mapping[str, tuple[Array, Array]]
MODULE = "layers.0.self_attn.to_q"
TWIN = "layers.0.self_attn.add_q_proj"
# Of the tensor's largest value: float32 sums of a few products, in another order.
TOLERANCE = 1e-6


def _export(source: Path, target: Path, precision: str = "fp32") -> Path:
    options = ExportOptions(precision=Precision(precision), probe="never")
    return export_checkpoint(source, target, options).bundle


@pytest.fixture
def root(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return _export(checkpoint("edge-like"), tmp_path / "bundle")


def _merged(weight: Array, updates: list[tuple[Array, Array, float]]) -> Array:
    """The formula, written out in torch's float32."""
    total = torch.from_numpy(weight.astype(np.float32))
    for a, b, factor in updates:
        total = total + factor * (torch.from_numpy(b) @ torch.from_numpy(a))
    return total.numpy()


def _gap(have: Array, want: Array) -> float:
    have, want = have.astype(np.float64), want.astype(np.float64)
    return float(np.abs(have - want).max() / np.abs(want).max())


def _check(
    before: Mapping[str, Array], after: Mapping[str, Array], made: Made, factor: float
) -> None:
    touched = {f"{module}.weight" for module in made}
    assert same(
        {n: a for n, a in before.items() if n not in touched},
        {n: a for n, a in after.items() if n not in touched},
    )
    for module, (a, b) in made.items():
        name = f"{module}.weight"
        assert _gap(after[name], _merged(before[name], [(a, b, factor)])) <= TOLERANCE
        # A scale that is off by one part in ten thousand is not within the tolerance.
        assert _gap(after[name], _merged(before[name], [(a, b, factor * 1.0001)])) > TOLERANCE
        assert _gap(after[name], before[name]) > 0.01


Writer = Callable[[Path, Made], Path]
WRITERS: dict[str, tuple[Writer, float]] = {
    "peft": (lambda p, made: write_peft(p, made, alpha=6), 3.0),
    "peft-rslora": (
        lambda p, made: write_peft(p, made, alpha=6, use_rslora=True),
        6 / math.sqrt(2),
    ),
    "diffusers": (lambda p, made: write_diffusers(p / "x.safetensors", made), 1.0),
    "diffusers-metadata": (
        lambda p, made: write_diffusers(
            p / "x.safetensors", made, metadata={"r": 2, "lora_alpha": 5}
        ),
        2.5,
    ),
    "diffusers-old": (
        lambda p, made: write_diffusers(p / "x.safetensors", made, style="lora.down", alpha=3),
        1.5,
    ),
    "kohya-like": (
        lambda p, made: write_diffusers(p / "x.safetensors", made, style="lora_down", alpha=1),
        0.5,
    ),
}


@pytest.mark.parametrize(
    ("kind", "writer"),
    [
        pytest.param(
            kind,
            writer,
            marks=() if i % len(KINDS) == j or writer == "peft" else pytest.mark.full,
        )
        for j, kind in enumerate(KINDS)
        for i, writer in enumerate(WRITERS)
    ],
)
def test_every_naming_gives_the_formula(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, writer: str
) -> None:
    bundle = _export(checkpoint(kind), tmp_path / "bundle")
    made = factors(bundle, linears(bundle))
    write, factor = WRITERS[writer]
    before = tensors_of(bundle)
    result = refit_bundle(bundle, loras=Lora(write(tmp_path / "adapter", made), 0.5))
    assert result.probe["status"] == "passed"
    assert result.tensors["moved"] == len(made)
    assert result.moved.keys() == ({"both"} if kind == "shared" else {"reasoner", "generator"})
    _check(before, tensors_of(bundle), made, 0.5 * factor)
    refit_bundle(bundle, restore=True)
    assert same(tensors_of(bundle), before)


def test_the_sum_is_rounded_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for precision, dtype in (("fp32", np.float32), ("fp16", np.float16)):
        bundle = _export(checkpoint("edge-like"), tmp_path / precision, precision)
        made = factors(bundle, [MODULE])
        weight = tensors_of(bundle)[f"{MODULE}.weight"]
        refit_bundle(bundle, loras=write_peft(tmp_path / f"a-{precision}", made, alpha=2))
        a, b = made[MODULE]
        exact = weight.astype(np.float64) + b.astype(np.float64) @ a.astype(np.float64)
        want = exact.astype(np.float32).astype(dtype)
        assert tensors_of(bundle)[f"{MODULE}.weight"].tobytes() == want.tobytes()


def test_several_adapters_add_up_on_new_weights(
    root: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    new = checkpoint("edge-like", seed=1)
    one, two = factors(root, [MODULE, TWIN], seed=1), factors(root, [MODULE], rank=3, seed=2)
    loras = [
        Lora(write_peft(tmp_path / "one", one, alpha=2), 0.25),
        Lora(write_diffusers(tmp_path / "two.safetensors", two), -2.0),
    ]
    result = refit_bundle(root, new, loras)
    assert [source.get("scale") for source in result.sources] == [None, 0.25, -2.0]
    fresh = tensors_of(_export(new, tmp_path / "fresh"))
    have = tensors_of(root)
    for module in (MODULE, TWIN):
        name = f"{module}.weight"
        updates = [(*one[module], 0.25)] + ([(*two[module], -2.0)] if module in two else [])
        assert _gap(have.pop(name), _merged(fresh.pop(name), updates)) <= TOLERANCE
    assert same(have, fresh)
    record = Bundle.open(root).manifest.revision
    assert record is not None
    assert [source.get("lora") for source in record.record["sources"]] == [
        None, "adapter_model.safetensors", "two.safetensors",
    ]  # fmt: skip


def test_adapters_replace_each_other_without_a_residue(root: Path, tmp_path: Path) -> None:
    first = write_peft(tmp_path / "one", factors(root, [MODULE], seed=1))
    second = write_peft(tmp_path / "two", factors(root, [TWIN], seed=2))
    base = tensors_of(root)
    refit_bundle(root, loras=[first])
    one = tensors_of(root)
    result = refit_bundle(root, loras=[second])
    assert result.tensors["touched"] == 1
    assert result.tensors["moved"] == 2  # the first one's matrix goes back
    assert tensors_of(root)[f"{MODULE}.weight"].tobytes() == base[f"{MODULE}.weight"].tobytes()
    refit_bundle(root, loras=[first])
    assert same(tensors_of(root), one)
    assert not refit_bundle(root, loras=[first]).changed
    assert refit_bundle(root, loras=[Lora(first, 0.0)]).changed
    assert same(tensors_of(root), base)
    assert not refit_bundle(root, loras=[Lora(first, 0.0)]).changed


def test_patterns_give_modules_their_own_rank_and_alpha(root: Path, tmp_path: Path) -> None:
    made = {
        **factors(root, [MODULE], rank=2),
        **factors(root, ["layers.1.self_attn.to_q"], rank=3),
        **factors(root, ["layers.0.self_attn.to_k"], rank=2),
    }
    adapter = write_peft(
        tmp_path / "a",
        made,
        alpha=4,
        rank_pattern={"^layers.1.self_attn.to_q": 3},
        alpha_pattern={"to_k": 10, "layers.1.self_attn.to_q": 9},
    )
    table = Bundle.open(root).weights().entries
    updates = open_lora(Lora(adapter), table).updates
    assert {n: u.factor for n, u in updates.items()} == {
        f"{MODULE}.weight": 2.0,
        "layers.1.self_attn.to_q.weight": 3.0,
        "layers.0.self_attn.to_k.weight": 5.0,
    }


def test_names_of_other_tools_find_their_matrix(root: Path) -> None:
    table = Bundle.open(root).weights().entries
    for module in (
        "base_model.model.layers.0.self_attn.to_q",
        "transformer.layers.0.self_attn.to_q",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj",
        "base_model.model.model.layers.0.self_attn.q_proj",
        "layers.0.self_attn.to_q",
    ):
        assert tensor_of(module, table) == f"{MODULE}.weight"
    fc1 = "base_model.model.model.language_model.layers.1.mlp.fc1"
    assert tensor_of(fc1, table) == "layers.1.mlp.up_proj.weight"
    for module in ("embed_tokens", "action_proj_in.fc", "norm", "layers.9.mlp.up_proj", ""):
        assert tensor_of(module, table) is None


def test_a_peft_merge_is_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from diffusers import Cosmos3OmniTransformer

    source = checkpoint("nano-like")
    model = Cosmos3OmniTransformer.from_pretrained(source, subfolder="transformer")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        init_lora_weights=False,
        target_modules=["to_q", "add_v_proj", "up_proj", "proj_out"],
        rank_pattern={"layers.0.self_attn.to_q": 2},
        alpha_pattern={"up_proj": 7},
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    want = {k: v.detach().numpy() for k, v in wrapped.merge_and_unload().state_dict().items()}
    bundle = _export(source, tmp_path / "bundle")
    before = tensors_of(bundle)
    result = refit_bundle(bundle, loras=tmp_path / "adapter")
    have = tensors_of(bundle)
    assert have.keys() == want.keys()
    moved = [n for n in have if have[n].tobytes() != before[n].tobytes()]
    assert result.tensors["moved"] == len(moved) > 10
    for name, value in have.items():
        if name in moved:
            assert _gap(value, want[name]) <= TOLERANCE
            assert _gap(before[name], want[name]) > 100 * TOLERANCE
        else:
            assert value.tobytes() == want[name].tobytes()


# --- what is refused, with the bundle as it was ---


def _refused(root: Path, match: str, lora: Any) -> None:
    before = tree(root)
    with pytest.raises(RefitError, match=match) as caught:
        refit_bundle(root, loras=lora)
    assert "\n" not in str(caught.value)
    assert caught.value.got is not None
    assert tree(root) == before


def _value(tensor: Array, value: float) -> Array:
    tensor = tensor.copy()
    tensor.reshape(-1)[-1] = value
    return tensor


A, B = f"base_model.model.{MODULE}.lora_A.weight", f"base_model.model.{MODULE}.lora_B.weight"
Edit = Callable[[dict[str, Array]], Any]
DAMAGES: dict[str, tuple[str, Edit]] = {
    "NaN in A": ("NaN or infinity", lambda t: t.update({A: _value(t[A], np.nan)})),
    "infinity in B": ("NaN or infinity", lambda t: t.update({B: _value(t[B], np.inf)})),
    "no B": ("lacks factors", lambda t: t.pop(B)),
    "nothing": ("lacks factors", lambda t: t.clear()),
    "another rank in B": ("do not fit its matrix", lambda t: t.update({B: t[B][:, :1].copy()})),
    "rank 0": (
        "do not fit its matrix",
        lambda t: t.update({A: t[A][:0].copy(), B: t[B][:, :0].copy()}),
    ),
    "another width": ("do not fit its matrix", lambda t: t.update({A: t[A][:, :-1].copy()})),
    "another rank than the config's": (
        "another rank than its config says",
        lambda t: t.update({A: t[A][:1].copy(), B: t[B][:, :1].copy()}),
    ),
    "a type": ("wrong type", lambda t: t.update({A: t[A].astype(np.int32)})),
    "DoRA": (
        "DoRA",
        lambda t: t.update({f"base_model.model.{MODULE}.lora_magnitude_vector": np.ones(4)}),
    ),
    "embedding": (
        "embedding table",
        lambda t: t.update({"base_model.model.embed_tokens.lora_embedding_A": np.ones((2, 4))}),
    ),
    "bias": ("bias", lambda t: t.update({B.replace("weight", "bias"): np.ones(4)})),
    "LoKr": ("LoKr", lambda t: t.update({"transformer.layers.0.lokr_w1": np.ones((2, 2))})),
    "LoHa": ("LoHa", lambda t: t.update({"transformer.layers.0.hada_w1_a": np.ones((2, 2))})),
    "a whole module": (
        "no low-rank factor",
        lambda t: t.update({"base_model.model.lm_head.weight": np.ones((2, 2))}),
    ),
    "a module that is not there": (
        "modules that the bundle lacks",
        lambda t: t.update(
            {A.replace("layers.0", "layers.7"): t.pop(A), B.replace("layers.0", "layers.7"): t.pop(B)}
        ),
    ),
    "a norm": (
        "modules that the bundle lacks",
        lambda t: t.update({A.replace(MODULE, "norm"): t.pop(A), B.replace(MODULE, "norm"): t.pop(B)}),
    ),
    "a text encoder": (
        "modules that the bundle lacks",
        lambda t: t.update(
            {A.replace("base_model.model", "text_encoder"): t.pop(A),
             B.replace("base_model.model", "text_encoder"): t.pop(B)}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_adapters_are_refused(root: Path, tmp_path: Path, damage: str) -> None:
    adapter = write_peft(tmp_path / "a", factors(root, [MODULE]))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    match, edit = DAMAGES[damage]
    edit(tensors)
    save_file(tensors, file)
    _refused(root, match, adapter)


@pytest.mark.parametrize(
    ("match", "config"),
    [
        ("DoRA", {"use_dora": True}),
        ("use_something_new", {"use_something_new": True}),
        ("corda_config", {"corda_config": {"a": 1}}),
        ("init_lora_weights", {"init_lora_weights": "pissa_niter_4"}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("bias", {"bias": "all"}),
        ("LOHA", {"peft_type": "LOHA"}),
        ("fan_in_fan_out", {"fan_in_fan_out": True}),
        ("another rank", {"r": 3}),
        ("rank r makes no sense", {"r": 0}),
        ("rank r makes no sense", {"r": True}),
        ("rank r makes no sense", {"r": None}),
        ("alpha lora_alpha makes no sense", {"lora_alpha": "much"}),
        ("alpha lora_alpha makes no sense", {"lora_alpha": None}),
        ("rank_pattern", {"rank_pattern": {"(a+)+$": 3}}),
        ("target_modules", {"target_modules": 3}),
        ("targets without tensors: to_k", {"target_modules": ["to_q", "to_k"]}),
        ("tensors of other modules", {"target_modules": ["to_k"]}),
    ],
)
def test_configs_of_other_methods_or_files_are_refused(
    root: Path, tmp_path: Path, match: str, config: dict[str, Any]
) -> None:
    _refused(root, match, write_peft(tmp_path / "a", factors(root, [MODULE]), **config))


def test_files_that_are_no_adapter_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/adapter_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    for name in ("nothing", "empty", "pickled", "pickled/adapter_model.bin"):
        _refused(root, "there is no LoRA file", tmp_path / name)
    _refused(root, "not a sound safetensors file", tmp_path / "broken.safetensors")
    short = write_diffusers(tmp_path / "short.safetensors", factors(root, [MODULE]))
    short.write_bytes(short.read_bytes()[:-4])
    _refused(root, "truncated", short)
    adapter = write_peft(tmp_path / "a", factors(root, [MODULE]))
    (adapter / "adapter_config.json").write_text("[]")
    _refused(root, "cannot read adapter_config", adapter)
    (adapter / "adapter_config.json").unlink()  # alpha = rank would be a guess
    _refused(root, "is not beside", adapter)
    made = write_diffusers(
        tmp_path / "m.safetensors", factors(root, [MODULE]), metadata={"r": 2, "use_dora": True}
    )
    _refused(root, "DoRA", made)


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", None, True])
def test_a_scale_is_a_finite_number(scale: Any) -> None:
    with pytest.raises(ConfigError, match="scale"):
        Lora("a", scale)
    with pytest.raises(ConfigError):
        Lora(3)  # type: ignore[arg-type]


def test_a_sum_beyond_float16_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle = _export(checkpoint("edge-like"), tmp_path / "bundle", "fp16")
    adapter = write_peft(tmp_path / "a", factors(bundle, [MODULE]))
    _refused(bundle, "does not fit float16", Lora(adapter, 1e7))
    _refused(bundle, "NaN or infinity", Lora(adapter, 1e39))


def test_another_models_adapter_is_refused(
    root: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = _export(checkpoint("nano-like"), tmp_path / "nano")
    adapter = write_peft(tmp_path / "a", factors(other, linears(other)))
    _refused(root, "lacks|do not fit", adapter)


def test_metadata_is_json(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = load_file(write_diffusers(path, factors(root, [MODULE])))
    for text in ("{", "[]", json.dumps({"text_encoder.r": 2, "text_encoder.lora_alpha": 1})):
        save_file(tensors, path, metadata={"lora_adapter_metadata": text})
        _refused(root, "lora_adapter_metadata|text_encoder", path)

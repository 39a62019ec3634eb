"""What can be built for what, and the reason where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from motrt.engines.capabilities import gpu_precisions
from motrt.engines.errors import ConfigError
from motrt.engines.host import Gpu
from motrt.engines.jetson import Jetson
from motrt.engines.plans.build import command_line
from motrt.engines.plans.options import BuildOptions, BuildShapes, ClipSize
from motrt.engines.plans.targets import (
    PRESETS,
    Builder,
    Target,
    backend_of,
    check_bundle_fits,
    resolve_targets,
)

COMMAND = "motrt build b --backend tensorrt"
NOTHING = Builder((), None)
H200 = Builder((Gpu("NVIDIA H200", (9, 0), 1 << 37, "580", None),), None)
RTX = Builder((Gpu("NVIDIA GeForce RTX 4090", (8, 9), 1 << 34, "580", None),), None)


def _board(soc: str, jetpack: str | None, capability: tuple[int, int]) -> Builder:
    model = f"NVIDIA Jetson AGX {soc} Developer Kit"
    gpu = Gpu(model, capability, None, None, None)
    return Builder((gpu,), Jetson(model, "36.4.3", jetpack, capability))


ORIN6, ORIN72 = _board("Orin", "6.2.1", (8, 7)), _board("Orin", "7.2", (8, 7))
THOR70, THOR72 = _board("Thor", "7.1", (11, 0)), _board("Thor", "7.2", (11, 0))
HOME = {
    "jetson-orin-jp6": ORIN6,
    "jetson-orin-jp72": ORIN72,
    "jetson-thor-jp70": THOR70,
    "jetson-thor-jp72": THOR72,
    "rtx": NOTHING,
    "datacenter": H200,
}


def _names(words: list[str], backend: str, builder: Builder) -> list[str]:
    found = resolve_targets(words, backend, builder, COMMAND)  # type: ignore[arg-type]
    return [target.name for target in found]


def test_every_preset_is_built_at_home() -> None:
    assert set(HOME) == set(PRESETS)
    assert _names(["rtx"], "tensorrt-rtx", NOTHING) == ["sm86", "sm89", "sm120"]
    assert _names(["datacenter"], "tensorrt", H200) == ["sm90"]
    for name, sm in (("jetson-orin-jp6", "sm87"), ("jetson-thor-jp72", "sm110")):
        assert _names([name], "tensorrt", HOME[name]) == [sm]


@pytest.mark.parametrize("preset", [name for name, each in PRESETS.items() if each.is_board])
@pytest.mark.parametrize(
    "where", ["nothing", "H200", *(n for n, p in PRESETS.items() if p.is_board)]
)
def test_a_board_s_preset_elsewhere_is_answered_with_the_command_to_run_there(
    preset: str, where: str
) -> None:
    builder = {"nothing": NOTHING, "H200": H200, **HOME}[where]
    if where == preset:
        assert _names([preset], "tensorrt", builder)
        return
    with pytest.raises(ConfigError) as caught:
        _names([preset], "tensorrt", builder)
    assert caught.value.fix == f"Copy the bundle there and run: {COMMAND} --target {preset}"
    assert "JetPack" in str(caught.value.expected)


def test_a_release_that_nobody_knows_is_left_to_the_version_of_tensorrt() -> None:
    unknown = _board("Thor", "7.x", (11, 0))
    assert _names(["jetson-thor-jp72"], "tensorrt", unknown) == ["sm110"]
    target = resolve_targets(["jetson-thor-jp72"], "tensorrt", unknown, COMMAND)[0]
    check_bundle_fits(target, "tensorrt", "10.16.2", "fp16", "native")
    with pytest.raises(ConfigError, match=r"another TensorRT.*10\.13\.3.*10\.16"):
        check_bundle_fits(target, "tensorrt", "10.13.3", "fp16", "native")


@pytest.mark.parametrize("name", ["sm87", "sm90", "sm100", "sm103", "sm110"])
def test_rtx_has_its_own_table(name: str) -> None:
    with pytest.raises(ConfigError, match="TensorRT-RTX has kernels for SM") as caught:
        _names([name], "tensorrt-rtx", NOTHING)
    assert f"--backend tensorrt --target {name}" in str(caught.value.fix)


def test_classic_tensorrt_builds_for_its_own_gpu_alone() -> None:
    assert _names(["sm90", "current"], "tensorrt", H200) == ["sm90"]
    for builder in (NOTHING, RTX):
        with pytest.raises(ConfigError, match="TensorRT builds for the GPU that it runs on"):
            _names(["sm90"], "tensorrt", builder)


def test_current_needs_a_gpu_and_one_that_the_backend_serves() -> None:
    assert _names(["current"], "tensorrt-rtx", RTX) == ["sm89"]
    with pytest.raises(ConfigError, match=r"no current GPU.*--target sm89"):
        _names(["current"], "tensorrt-rtx", NOTHING)
    with pytest.raises(ConfigError, match=r"not for 9\.0"):
        _names(["current"], "tensorrt-rtx", H200)


@pytest.mark.parametrize("name", ["", "sm", "sm88", "SM89", "89", "rtx2", "sm1200", "jetson"])
def test_an_unknown_target_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _names([name] if name else [], "tensorrt-rtx", NOTHING)
    assert "sm120, sm121, jetson-orin-jp6" in str(caught.value.expected)


def test_a_list_keeps_its_order_and_no_doubles() -> None:
    assert _names(["sm120", "rtx", "sm75"], "tensorrt-rtx", NOTHING) == [
        "sm120", "sm86", "sm89", "sm75",
    ]  # fmt: skip


def test_the_backend_is_named_once() -> None:
    assert backend_of(["rtx"], None) == "tensorrt-rtx"
    assert backend_of(["sm89"], "tensorrt") == "tensorrt"
    for words, backend in ((["sm89"], None), (["rtx"], "tensorrt"), (["rtx", "datacenter"], None)):
        with pytest.raises(ConfigError, match="which TensorRT"):
            backend_of(words, backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "lacks"),
    [
        ((7, 5), {"bf16", "fp8", "nvfp4"}),
        ((8, 6), {"fp8", "nvfp4"}),
        ((8, 7), {"fp8", "nvfp4"}),
        ((8, 9), {"nvfp4"}),
        ((9, 0), {"nvfp4"}),
        ((11, 0), set()),
        ((12, 0), set()),
    ],
)
def test_a_precision_that_the_hardware_lacks_is_refused_with_the_reason(
    capability: tuple[int, int], lacks: set[str]
) -> None:
    target = Target(capability)
    for fit in gpu_precisions("gpu", capability):
        if fit.precision in lacks:
            with pytest.raises(ConfigError, match="starts at SM"):
                check_bundle_fits(target, "tensorrt", "11.0", fit.precision, "portable")
        else:
            check_bundle_fits(target, "tensorrt", "11.0", fit.precision, "portable")


def test_presets_never_allow_what_the_hardware_lacks() -> None:
    for name, preset in PRESETS.items():
        for capability in preset.capabilities:
            fits = {f.precision for f in gpu_precisions(name, capability) if f.fits}
            if preset.is_board:
                assert set(preset.precisions) <= fits
            assert {"fp16", "bf16"} <= fits & set(preset.precisions)
        orin = (8, 7) in preset.capabilities
        assert not (orin and {"fp8", "nvfp4"} & set(preset.precisions))
        assert preset.why
        # On a board builder and model share the memory: every board's build is limited.
        assert preset.is_board == (preset.workspace_mib is not None)


def test_a_preset_fixes_the_lowering() -> None:
    orin = Target((8, 7), "jetson-orin-jp6")
    check_bundle_fits(orin, "tensorrt", "10.3.0", "fp16", "portable")
    with pytest.raises(ConfigError, match=r"runs the portable lowering.*--target sm87"):
        check_bundle_fits(orin, "tensorrt", "10.3.0", "fp16", "native")
    rtx = Target((8, 9), "rtx")
    with pytest.raises(ConfigError, match="runs the native lowering"):
        check_bundle_fits(rtx, "tensorrt-rtx", "1.7.1", "bf16", "portable")
    check_bundle_fits(rtx, "tensorrt-rtx", "1.7.1", "fp32", "portable")
    check_bundle_fits(Target((8, 9)), "tensorrt-rtx", "1.7.1", "bf16", "portable")


def test_a_lowering_that_this_version_does_not_import_is_refused() -> None:
    target = Target((8, 7))
    check_bundle_fits(target, "tensorrt", "10.3.0", "fp16", "portable")
    check_bundle_fits(target, "tensorrt", "10.15", "fp16", "native")
    for version in ("10.3.0", "10.13.3"):
        with pytest.raises(ConfigError, match="does not import the native lowering"):
            check_bundle_fits(target, "tensorrt", version, "bf16", "native")
    with pytest.raises(ConfigError, match="float32 build needs attention in parts"):
        check_bundle_fits(target, "tensorrt", "11.4", "fp32", "native")


def test_the_command_for_elsewhere_is_the_one_that_was_given() -> None:
    options = BuildOptions(
        shapes=BuildShapes(max_context=2048, sizes=(ClipSize(17, 192, 320),), max_sound=8),
        weights="inputs",
        workspace_mib=512,
        allow_decomposed_attention=True,
    )
    assert command_line(Path("my bundle"), "tensorrt", options) == (
        "motrt build 'my bundle' --backend tensorrt --weights inputs --workspace-mib 512 "
        "--allow-decomposed-attention --max-context 2048 --max-sound 8 --sizes 17x192x320"
    )
    assert command_line(Path("b"), "tensorrt", BuildOptions()) == COMMAND

"""Profiles cover what was asked for, agree with the contract, and keep one engine's weights once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motrt.engines.contract import (
    Cache,
    Modality,
    available_modalities,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.dtypes import DType
from motrt.engines.errors import ConfigError
from motrt.engines.model_config import ModelConfig
from motrt.engines.plans.options import BuildOptions, BuildShapes, ClipSize
from motrt.engines.plans.profiles import Profile, generator_profiles, reasoner_profiles
from motrt.engines.vae_config import VaeConfig
from motrt.runtime.patches import patch_grid
from tiny_checkpoints import TINY, VAE

MODEL = ModelConfig.from_dict(TINY)
SHAPES = st.builds(
    BuildShapes,
    max_batch=st.integers(1, 4),
    max_context=st.integers(1, 20_000),
    max_tokens=st.integers(1, 100_000),
    max_sound=st.integers(1, 500),
    max_action=st.integers(1, 500),
)


def _check_ranges(profile: Profile) -> None:
    for low, best, high in profile.dims.values():
        assert 0 <= low <= best <= high


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, cache=st.sampled_from(Cache))
def test_the_reasoner_has_a_prefill_and_a_decode_profile(
    shapes: BuildShapes, cache: Cache
) -> None:
    profiles = reasoner_profiles(shapes, cache)
    assert [profile.name for profile in profiles] == ["prefill", "decode"]
    contract = reasoner_contract(MODEL, DType.FLOAT16, cache)
    for profile in profiles:
        _check_ranges(profile)
        for spec in contract.inputs:
            assert len(profile.shapes(spec)) == 3  # every dimension has a range
        if cache is Cache.APPEND:
            for past, tokens, total in zip(
                profile.dims["past"], profile.dims["tokens"], profile.dims["total"], strict=True
            ):
                assert total == past + tokens
        else:
            assert len(set(profile.dims["capacity"])) == 1
    prefill, decode = (profile.dims for profile in profiles)
    assert prefill["tokens"][2] == shapes.prefill
    assert decode["tokens"][:2] == (1, 1)
    # A dimension that one profile holds fast and the other does not would be a second graph.
    if shapes.max_context > 1:
        for name in prefill:
            dynamic = [p.dims[name][0] != p.dims[name][2] for p in profiles]
            assert dynamic[0] == dynamic[1], name


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES)
def test_the_generator_takes_every_number_of_tokens_up_to_the_most(shapes: BuildShapes) -> None:
    modalities = available_modalities(MODEL)
    profiles = generator_profiles(shapes, modalities, MODEL, None)
    contract = generator_contract(MODEL, DType.FLOAT16, modalities)
    end = 0
    for profile in profiles:
        _check_ranges(profile)
        for spec in contract.inputs:
            profile.shapes(spec)
        low, best, high = profile.dims["vision"]
        assert (low, best) == (end + 1, high)  # they follow each other, tuned for their end
        end = high
        for which in range(3):
            parts = [profile.dims[modality.value][which] for modality in modalities]
            assert profile.dims["generated"][which] == sum(parts)
        assert high / max(low, 64) <= 16.5
    assert end == shapes.max_tokens
    assert len(profiles) <= 3


def test_a_wide_range_is_cut_and_a_narrow_one_is_not() -> None:
    def vision(shapes: BuildShapes) -> list[tuple[int, int, int]]:
        profiles = generator_profiles(shapes, (Modality.VISION,), MODEL, None)
        return [profile.dims["vision"] for profile in profiles]

    assert vision(BuildShapes(max_tokens=1024)) == [(1, 1024, 1024)]
    assert vision(BuildShapes(max_tokens=2880)) == [(1, 429, 429), (430, 2880, 2880)]
    assert len(vision(BuildShapes(max_tokens=44_160))) == 3
    near = BuildShapes(sizes=(ClipSize.parse("17x192x320"), ClipSize.parse("192x320")))
    assert vision(near) == [(60, 300, 300)]
    far = BuildShapes(sizes=(ClipSize.parse("189x720x1280"), ClipSize.parse("192x320")))
    assert vision(far) == [(60, 60, 60), (44_160, 44_160, 44_160)]


@settings(max_examples=60, deadline=None)
@given(
    frames=st.integers(0, 12),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    own=st.booleans(),
)
def test_tokens_of_a_size_are_the_runtime_s(
    frames: int, height: int, width: int, own: bool
) -> None:
    vae = VaeConfig.from_dict(VAE) if own else None
    time, space = (vae.temporal_factor, vae.spatial_factor) if vae else (4, 16)
    size = ClipSize(1 + time * frames, height * space, width * space)
    grid = patch_grid(1 + frames, height, width, MODEL.latent_patch_size)
    assert size.tokens(MODEL, vae) == grid[0] * grid[1] * grid[2]


@pytest.mark.parametrize("text", ["", "17", "0x10", "axb", "1x2x3x4", "-1x2", "1.5x2", "9" * 99])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        ClipSize.parse(text)


def test_options_that_cannot_be_are_refused() -> None:
    bad: tuple[dict[str, Any], ...] = (
        {"max_batch": 0},
        {"max_tokens": 1 << 40},
        {"max_context": 8, "max_prefill": 9},
    )
    for wrong in bad:
        with pytest.raises(ConfigError):
            BuildShapes(**wrong)
    for name, value in (("weights", "both"), ("placeholders", "some"), ("optimization_level", 6)):
        with pytest.raises(ConfigError):
            BuildOptions(**{name: value})  # type: ignore[arg-type]
    huge = BuildShapes(sizes=(ClipSize(9_999_999, 9_999_999, 9_999_999),))
    with pytest.raises(ConfigError, match="too large"):
        generator_profiles(huge, (Modality.VISION,), MODEL, None)

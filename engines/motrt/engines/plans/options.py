"""What a plan is built for: sizes, where weights lie, and the builder's few knobs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from motrt.engines.errors import ConfigError

if TYPE_CHECKING:
    from motrt.engines.model_config import ModelConfig
    from motrt.engines.vae_config import VaeConfig

WeightsMode = Literal["refit", "inputs"]
PlaceholderMode = Literal["auto", "always", "never"]

_MAX_SIZE = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class ClipSize:
    """An image or a clip in pixels; an image has one frame."""

    num_frames: int
    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> ClipSize:
        """Read ``17x192x320`` (frames, height, width), or ``192x320`` for an image.

        Raises:
            ConfigError: It is neither.
        """
        words = text.strip().lower().split("x")
        if len(words) in {2, 3} and all(word.isdecimal() and len(word) < 8 for word in words):
            numbers = [int(word) for word in words]
            if min(numbers) >= 1:
                return cls(*([1, *numbers] if len(numbers) == 2 else numbers))
        raise ConfigError(
            "an image or clip size cannot be read",
            got=repr(text),
            expected="HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH in pixels, such as 17x192x320",
        )

    def tokens(self, model: ModelConfig, vae: VaeConfig | None) -> int:
        """Return the generator's vision tokens for this size.

        Args:
            model: The architecture.
            vae: The checkpoint's VAE; without one the public models' factors, 4 and 16, hold.
        """
        time, space = (vae.temporal_factor, vae.spatial_factor) if vae else (4, 16)
        frames = 1 + -(-(self.num_frames - 1) // time)
        step = space * model.latent_patch_size
        return frames * -(-self.height // step) * -(-self.width // step)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildShapes:
    """The largest sizes that a plan accepts.

    Attributes:
        max_batch: Sequences at a time (B).
        max_context: Tokens that the reasoner's cache holds, and that the generator reads (C, U).
        max_prefill: New tokens of one call of the reasoner (S); None: as many as the cache holds.
        max_tokens: Vision tokens that the generator denoises (Nv).
        sizes: Images and clips that the profiles are tuned for; they then say what ``max_tokens``
            is.
        max_sound: Sound tokens (Ns), where the graph has sound.
        max_action: Action tokens (Na), where the graph has actions.

    Raises:
        ConfigError: A number that is no size.
    """

    max_batch: int = 1
    max_context: int = 4096
    max_prefill: int | None = None
    max_tokens: int = 2880
    sizes: tuple[ClipSize, ...] = ()
    max_sound: int = 256
    max_action: int = 64

    def __post_init__(self) -> None:
        """Check every number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not 1 <= value < _MAX_SIZE:
                raise ConfigError(
                    f"the build's {field.name} cannot be right",
                    got=value,
                    expected=f"1 to {_MAX_SIZE - 1}",
                )
        if self.max_prefill is not None and self.max_prefill > self.max_context:
            raise ConfigError(
                "more new tokens than the cache holds",
                got=f"max_prefill {self.max_prefill}",
                expected=f"at most max_context, {self.max_context}",
            )

    @property
    def prefill(self) -> int:
        """New tokens of one call of the reasoner, resolved."""
        return self.max_context if self.max_prefill is None else self.max_prefill

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "max_prefill": self.prefill,
            "sizes": [[size.num_frames, size.height, size.width] for size in self.sizes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How plans are built.

    Attributes:
        shapes: See :class:`BuildShapes`.
        weights: ``refit``: constants that the store fills after loading. ``inputs``: every weight
            is an engine input under its checkpoint name, so that two engines can read one copy.
        placeholders: Whether constants are built without values. ``auto``: where the builder's
            machine has no GPU of the target. With values the builder may choose by them.
        allow_decomposed_attention: Let attention fall apart into its operations where the GPU has
            no fused kernel for it, instead of refusing.
        workspace_mib: Most scratch memory of a tactic; None: the target's own.
        optimization_level: TensorRT's, 0 to 5; None: the target's own.

    Raises:
        ConfigError: A value that is none of these.
    """

    shapes: BuildShapes = BuildShapes()
    weights: WeightsMode = "refit"
    placeholders: PlaceholderMode = "auto"
    allow_decomposed_attention: bool = False
    workspace_mib: int | None = None
    optimization_level: int | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        for name, kind in (("weights", WeightsMode), ("placeholders", PlaceholderMode)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"the build's {name} cannot be right",
                    got=repr(getattr(self, name)),
                    expected=" or ".join(get_args(kind)),
                )
        level, workspace = self.optimization_level, self.workspace_mib
        if level is not None and not 0 <= level <= 5:
            raise ConfigError("there is no such optimization level", got=level, expected="0 to 5")
        if workspace is not None and not 1 <= workspace < _MAX_SIZE:
            raise ConfigError("the workspace cannot be right", got=workspace, expected="1 or more")

"""The sentences that a generator's prompt is put together from: data, no logic.

The weights were trained with exactly these, down to "a give prompt"; a fine-tune may have been
trained with others, so a bundle's manifest can carry its own.

Source: diffusers ``pipelines/cosmos/pipeline_cosmos3_omni.py`` (0.42): ``_SYSTEM_PROMPT_*``,
``_ACTION_VIEWPOINT_TEMPLATES`` and the literals of ``Cosmos3OmniPipeline.__init__``.
"""

from __future__ import annotations

import dataclasses
import re
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIELDS = {
    "duration_template": {"duration", "fps"},
    "inverse_duration_template": {"duration", "fps"},
    "image_resolution_template": {"height", "width"},
    "inverse_image_resolution_template": {"height", "width"},
    "video_resolution_template": {"height", "width"},
    "inverse_video_resolution_template": {"height", "width"},
}
_SPEC = re.compile(r"(\.\d)?[df]?", re.ASCII)
_MAX_CHARS = 4096


def _view_points() -> dict[str, str]:
    return {
        "ego_view": "This video is captured from a first-person perspective looking at the scene.",
        "third_person_view": "This video is captured from a third-person perspective looking "
        "towards the agent from the front.",
        "wrist_view": "This video is captured from a wrist-mounted camera.",
        "concat_view": "This video contains concatenated views from multiple camera perspectives.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplates:
    """Every literal of a generator's prompt, named as in the public pipeline.

    The ``*_template`` are Python format strings, each over its own fields only: ``duration``
    (seconds) and ``fps``, or ``height`` and ``width`` (pixels). ``action_view_points`` maps a
    camera's place to the sentence that describes it.
    """

    # "give" is not ours to correct: the weights know this spelling.
    system_prompt_image: str = (
        "You are a helpful assistant who will generate images from a give prompt."
    )
    system_prompt_video: str = (
        "You are a helpful assistant who will generate videos from a give prompt."
    )
    duration_template: str = "The video is {duration:.1f} seconds long and is of {fps:.0f} FPS."
    image_resolution_template: str = "This image is of {height}x{width} resolution."
    video_resolution_template: str = "This video is of {height}x{width} resolution."
    inverse_duration_template: str = (
        "The video is not {duration:.1f} seconds long and is not of {fps:.0f} FPS."
    )
    inverse_image_resolution_template: str = "This image is not of {height}x{width} resolution."
    inverse_video_resolution_template: str = "This video is not of {height}x{width} resolution."
    action_view_points: Mapping[str, str] = field(default_factory=_view_points)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that a manifest stores."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**data, "action_view_points": dict(self.action_view_points)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PromptTemplates:
        """Read a manifest's ``prompt_templates``; what it lacks is as in the public pipeline.

        Raises:
            BundleError: An unknown name, no text, or a format string that asks for more than its
                fields.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise _bad(f"unknown names {', '.join(map(str, unknown))}", ", ".join(sorted(known)))
        for name, value in data.items():
            if name == "action_view_points":
                if not isinstance(value, dict):
                    raise _bad(f"{name}: {type(value).__name__}", "an object")
                for view_point, sentence in value.items():
                    _check_text(f"{name}.{view_point}", sentence)
                continue
            _check_text(name, value)
            if name in _FIELDS:
                _check_format(name, value)
        return cls(**data)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > _MAX_CHARS:
        raise _bad(f"{name}: {type(value).__name__}", f"at most {_MAX_CHARS} characters of text")


def _check_format(name: str, template: str) -> None:
    """Refuse attributes, indices, widths: ``{fps:999999999}`` alone would fill the memory."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as err:
        raise _bad(f"{name}: {err}", "a format string") from err
    for _, used, spec, conversion in parts:
        if used is None:
            continue
        if used not in _FIELDS[name] or conversion or not _SPEC.fullmatch(spec or ""):
            fields = " and ".join(f"{{{item}}}" for item in sorted(_FIELDS[name]))
            raise _bad(f"{name}: {template!r}", f"no fields but {fields}, plain or as .1f")


def _bad(got: str, expected: str) -> BundleError:
    return BundleError(
        "prompt_templates are not sound",
        got=got,
        expected=expected,
        fix="Export the checkpoint again.",
    )

"""A generator's prompt: sentences joined, put into the chat template, tokenized, closed.

Equal to the public pipeline id for id, for one token more or less moves every position after it.

Source: diffusers ``Cosmos3OmniPipeline.tokenize_prompt`` and ``_build_action_json_prompt`` (0.42).
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.prompt_templates import PromptTemplates

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from motrt.runtime.tokenizer import Tokenizer

    Ids = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

START_OF_GENERATION = "<|vision_start|>"
ACTION_MODES = ("forward_dynamics", "inverse_dynamics", "policy")
_ASPECT_RATIOS = ("1,1", "4,3", "3,4", "16,9", "9,16")
_DEFAULTS = PromptTemplates()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationPrompt:
    """What both guidance branches condition on.

    Attributes:
        positive_ids: Token ids of the prompt, int64 ``[U]``.
        negative_ids: Token ids of the negative prompt, int64 ``[U']``.
        positive_text: The user message behind ``positive_ids``, sentences included.
        negative_text: The user message behind ``negative_ids``.
        system_prompt: The system message of both, or None.
    """

    positive_ids: Ids
    negative_ids: Ids
    positive_text: str
    negative_text: str
    system_prompt: str | None


def generation_prompt(
    tokenizer: Tokenizer,
    prompt: str,
    negative_prompt: str | None = None,
    *,
    num_frames: int = 189,
    height: int = 720,
    width: int = 1280,
    fps: float = 24.0,
    use_system_prompt: bool | None = None,
    add_resolution_template: bool = True,
    add_duration_template: bool = True,
    action_mode: str | None = None,
    action_view_point: str | None = None,
    pipeline: Mapping[str, Any] | None = None,
    templates: PromptTemplates = _DEFAULTS,
) -> GenerationPrompt:
    """Return the token ids of a prompt and of its negative.

    Args:
        tokenizer: The bundle's.
        prompt: What to generate; plain text or a JSON caption, which gets the same sentences.
        negative_prompt: What to stay away from; None is the empty text. Either way the negated
            sentences follow, unless their switches are off.
        num_frames: Frames of video, 1 for an image.
        height: Pixels from top to bottom.
        width: Pixels from left to right.
        fps: Frames per second.
        use_system_prompt: Whether a system message comes first; None leaves it to ``pipeline``.
        add_resolution_template: Whether to say the resolution.
        add_duration_template: Whether to say duration and rate, for video.
        action_mode: One of :data:`ACTION_MODES`, or None. With one, the prompt becomes the JSON
            caption of action data, no sentences follow, and the negative prompt stays as it is.
        action_view_point: Where the camera is; a place that ``templates`` does not know is left
            out with a warning, as the public pipeline does.
        pipeline: The manifest's ``pipeline`` (``model_index.json``).
        templates: The sentences.

    Raises:
        ConfigError: An argument makes no sense.
        BundleError: The tokenizer lacks a special token or a working chat template.
    """
    _check_text("prompt", prompt)
    negative = "" if negative_prompt is None else negative_prompt
    _check_text("negative_prompt", negative)
    frames, rows, columns = (
        _natural(name, value)
        for name, value in (("num_frames", num_frames), ("height", height), ("width", width))
    )
    rate = _rate(fps)
    if use_system_prompt is None:
        use_system_prompt = default_use_system_prompt(pipeline or {})
    is_image = frames == 1

    if action_mode is not None:
        if action_mode not in ACTION_MODES:
            raise ConfigError(
                "there is no such action mode",
                got=repr(action_mode),
                expected=f"one of {', '.join(ACTION_MODES)}",
            )
        framing = _framing(templates, action_view_point)
        positive = action_caption(prompt, framing, frames, rate, rows, columns)
    else:
        names = ["duration_template"] if add_duration_template and not is_image else []
        if add_resolution_template:
            names.append("image_resolution_template" if is_image else "video_resolution_template")
        values = {"duration": frames / rate, "fps": rate, "height": rows, "width": columns}
        positive = _say(prompt, [getattr(templates, name) for name in names], values)
        inverse = [getattr(templates, f"inverse_{name}") for name in names]
        negative = _say(negative, inverse, values)

    system = templates.system_prompt_image if is_image else templates.system_prompt_video
    system_prompt = system if use_system_prompt else None
    return GenerationPrompt(
        positive_ids=_tokenize(tokenizer, system_prompt, positive),
        negative_ids=_tokenize(tokenizer, system_prompt, negative),
        positive_text=positive,
        negative_text=negative,
        system_prompt=system_prompt,
    )


def default_use_system_prompt(pipeline: Mapping[str, Any]) -> bool:
    """Return whether a pipeline wants the system message; files older than the key want it.

    Raises:
        BundleError: The key holds no truth value.
    """
    value = pipeline.get("default_use_system_prompt", True)
    if not isinstance(value, bool):
        raise BundleError(
            "model_index.json is not sound",
            got=f"default_use_system_prompt {value!r}",
            expected="true or false",
        )
    return value


def action_caption(
    description: str, framing: str | None, num_frames: int, fps: float, height: int, width: int
) -> str:
    """Return the JSON caption of action data; the order of its keys is part of it.

    Source: ``Cosmos3OmniPipeline._build_action_json_prompt``.
    """
    seconds = num_frames / fps
    minutes, rest = divmod(round(seconds), 60)
    sentence = description.strip()
    if sentence and not sentence.endswith((".", "!", "?")):
        sentence += "."
    caption: dict[str, Any] = {} if framing is None else {"cinematography": {"framing": framing}}
    caption["actions"] = [{"time": f"0:00-{minutes}:{rest:02d}", "description": sentence}]
    caption["duration"] = f"{int(seconds)}s"
    caption["fps"] = fps
    caption["resolution"] = {"H": height, "W": width}
    caption["aspect_ratio"] = min(_ASPECT_RATIOS, key=lambda name: _distance(name, width / height))
    return json.dumps(caption)


def _distance(name: str, ratio: float) -> float:
    across, down = name.split(",")
    return abs(int(across) / int(down) - ratio)


def _framing(templates: PromptTemplates, view_point: str | None) -> str | None:
    if view_point is None:
        return None
    _check_text("action_view_point", view_point)
    framing = templates.action_view_points.get(view_point)
    if framing is None:
        logger.warning(
            "view point %r is unknown and left out of the caption; known: %s",
            view_point,
            ", ".join(sorted(templates.action_view_points)),
        )
    return framing or None


def _say(text: str, templates: list[str], values: Mapping[str, float]) -> str:
    for template in templates:
        # Every trailing dot goes, and a text of dots alone is no text; nothing else is trimmed.
        base = text.rstrip(".")
        sentence = template.format(**values)
        text = f"{base}. {sentence}" if base else sentence
    return text


def _tokenize(tokenizer: Tokenizer, system_prompt: str | None, text: str) -> Ids:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    ids = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": text}], variables={"add_vision_id": False}
    )
    closing = (tokenizer.eos_token_id, tokenizer.token_id(START_OF_GENERATION))
    return np.array([*ids, *closing], dtype=np.int64)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(
            f"{name} is no text",
            got=type(value).__name__,
            expected="one str",
        )


def _natural(name: str, value: object) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"{name} makes no sense", got=repr(value), expected="1 or more")
    return number


def _rate(value: object) -> float:
    fps = float(value) if isinstance(value, numbers.Real) else math.nan
    if not 0 < fps < math.inf:
        raise ConfigError("fps makes no sense", got=repr(value), expected="a number above 0")
    return fps

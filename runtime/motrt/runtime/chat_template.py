"""Messages to the text that a model was trained on.

The template comes with the checkpoint and is not trusted: it is rendered in Jinja's immutable
sandbox within a process that can be ended (``_template_worker`` says why). Jinja itself is never
imported here.

Text only; images and video are placed by the reasoner's processor, which this version lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.template_process import (
    TemplateCrashError,
    TemplateLimits,
    TemplateProcess,
    TemplateTimeoutError,
)

Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_MAX_SOURCE = 1 << 20  # characters; published templates have a few thousand
_HOSTILE = "Do not use this bundle, or replace its chat template."


class ChatTemplate:
    """A chat template, ready to render.

    Args:
        source: The Jinja text.
        special_tokens: Names as templates know them (``eos_token``) and their text.
        limits: When a rendering counts as hostile.

    Raises:
        BundleError: The text is absurdly long. Syntax is checked at the first rendering.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise BundleError(
                "the chat template is too long",
                got=f"{len(source)} characters",
                expected=f"at most {_MAX_SOURCE}",
                fix=_HOSTILE,
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or TemplateLimits()
        self._process = TemplateProcess(self._limits)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: ``{"role", "content"}`` each; content is text, or a list of
                ``{"type": "text", "text"}``.
            add_generation_prompt: Whether to open the assistant's answer.
            variables: What else the template may read, such as ``enable_thinking``; plain JSON.

        Raises:
            ConfigError: The messages are malformed, or the template refuses them.
            BundleError: The template is broken, escapes the sandbox, or takes too much.
            ExecutionError: The rendering process cannot be started.

        Source: transformers ``PreTrainedTokenizerBase.apply_chat_template``, ``tokenize=False``.
        """
        job = {
            "source": self.source,
            "max_chars": self._limits.max_chars,
            "variables": {
                **self._special_tokens,
                "tools": None,
                "documents": None,
                **(variables or {}),
                "messages": check_messages(messages),
                "add_generation_prompt": add_generation_prompt,
            },
        }
        try:
            reply = self._process.run(job)
        except TemplateTimeoutError as err:
            raise BundleError(
                "the chat template takes too long",
                got=f"over {self._limits.time_s:g} s",
                expected="a moment",
                fix=_HOSTILE,
            ) from err
        except TemplateCrashError as err:
            raise _failure("memory", "its process died") from err
        except (TypeError, ValueError, RecursionError) as err:  # json.dumps of variables
            raise ConfigError(
                "a variable for the chat template is no JSON", got=err, expected="plain values"
            ) from err
        if "error" in reply:
            raise _failure(reply["error"], reply["message"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End the rendering process; the next rendering starts another."""
        self._process.close()


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a plain copy of a conversation.

    Raises:
        ConfigError: It is no list of messages with a known role and text as content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(
            "messages are no list",
            got=type(messages).__name__,
            expected='[{"role": "user", "content": "…"}]',
        )
    if not messages:
        raise ConfigError("there are no messages", expected="at least one")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: object) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"{place} is no message",
            got=type(message).__name__,
            expected='{"role": "user", "content": "…"}',
        )
    if set(message) != {"role", "content"}:
        raise ConfigError(
            f"{place} has other keys", got=list(message), expected=["role", "content"]
        )
    role = message["role"]
    if role not in ROLES:  # templates paste it beside control tokens
        raise ConfigError(
            f"{place} has an unknown role", got=repr(role), expected=f"one of {', '.join(ROLES)}"
        )
    return {"role": str(role), "content": _content(place, message["content"])}


def _content(place: str, content: object) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ConfigError(
            f"{place} has no text",
            got=type(content).__name__,
            expected='text or [{"type": "text", "text": "…"}]',
        )
    parts = []
    for part in content:
        fits = isinstance(part, Mapping) and set(part) == {"type", "text"}
        if not fits or part["type"] != "text" or not isinstance(part["text"], str):
            got = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"{place} has a part that is no text",
                got=repr(got),
                expected='{"type": "text", "text": "…"}',
                fix="Images and video are not supported here.",
            )
        parts.append({"type": "text", "text": str(part["text"])})
    return parts


def _failure(kind: str, message: str) -> BundleError | ConfigError:
    if kind == "refused":
        return ConfigError("the chat template refuses these messages", got=message or "no reason")
    what = {
        "syntax": "the chat template has a syntax error",
        "size": "the chat template writes too much",
        "memory": "the chat template uses too much memory",
    }.get(kind, "the chat template fails")
    return BundleError(what, got=message, expected="a template like the published", fix=_HOSTILE)

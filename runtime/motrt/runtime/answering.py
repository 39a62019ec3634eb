"""From a conversation to an answer: prompt, prefill, decode, text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import ConfigError
from motrt.runtime.results import Messages, ReasonResult
from motrt.runtime.sampling import Sampler
from motrt.runtime.stop_strings import StopStrings
from motrt.runtime.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from motrt.runtime.params import SamplingParams
    from motrt.runtime.text_model import TokenSequence
    from motrt.runtime.tokenizer import Tokenizer


def as_messages(prompt: str | Sequence[dict[str, Any]], system: str | None = None) -> Messages:
    """Return a conversation: a lone text becomes the user's message.

    Raises:
        ConfigError: Neither text nor messages, or a system text beside messages.
    """
    if isinstance(prompt, str):
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": prompt}]
    if system is not None:
        raise ConfigError(
            "a system text goes with a lone prompt",
            got="messages and a system text",
            expected="the system text as the first message",
        )
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not is_list or not all(isinstance(message, Mapping) for message in prompt):
        raise ConfigError(
            "the prompt is neither text nor messages",
            got=type(prompt).__name__,
            expected="one str, or a list of {'role', 'content'}",
        )
    return [dict(message) for message in prompt]


def answer(
    tokenizer: Tokenizer,
    sequence: TokenSequence,
    messages: Messages,
    params: SamplingParams,
) -> Iterator[str | ReasonResult]:
    """Answer a conversation, piece by piece.

    Yields:
        Pieces of text, and at last the result.

    Raises:
        BundleError: The tokenizer lacks a chat template.
        ConfigError: Messages or params make no sense, or the prompt does not fit the cache.
        ExecutionError: The logits are not finite, or the engine failed.
    """
    started = time.perf_counter()
    prompt_ids = tokenizer.apply_chat_template(messages)
    # One place must be left for the token that the prompt is asked for.
    sequence.model.check_length(len(prompt_ids), 1)
    reused = sequence.rewind_to_prefix_of(prompt_ids)
    logits = sequence.extend(prompt_ids[reused:])
    prefilled = time.perf_counter()

    sampler = Sampler(params, prompt_ids)
    decoder, stop = StreamDecoder(tokenizer), StopStrings(params.stop)
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= set(tokenizer.eos_token_ids)
    token_ids: list[int] = []
    pieces: list[str] = []
    finish_reason = "length"
    while len(token_ids) < params.max_new_tokens:
        token = sampler.sample(logits)
        if token in ends:
            finish_reason = "stop"
            break
        token_ids.append(token)
        piece = stop.push(decoder.push(token))
        if piece:
            pieces.append(piece)
            yield piece
        if stop.stopped_by is not None:
            finish_reason = "stop"
            break
        if len(sequence) == sequence.model.capacity or len(token_ids) == params.max_new_tokens:
            break
        logits = sequence.extend([token])
    if stop.stopped_by is None:
        piece = stop.push(decoder.flush()) + stop.flush()
        if piece:
            pieces.append(piece)
            yield piece
    text = "".join(pieces)
    ended = time.perf_counter()
    decode = ended - prefilled
    yield ReasonResult(
        text=text,
        token_ids=token_ids,
        finish_reason=finish_reason,
        messages=[*messages, {"role": "assistant", "content": text}],
        prompt_tokens=len(prompt_ids),
        reused_tokens=reused,
        timings={
            "prefill": prefilled - started,
            "decode": decode,
            "total": ended - started,
            "tokens_per_second": len(token_ids) / decode if decode > 0 else 0.0,
        },
    )


class ReasonStream:
    """An answer on its way: iterate over its pieces, then read :attr:`result`.

    The runtime is busy until the stream has ended; :meth:`close` ends it early.
    """

    def __init__(self, events: Iterator[str | ReasonResult]) -> None:
        self._events = events
        self._result: ReasonResult | None = None

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            if isinstance(event, ReasonResult):
                self._result = event
            else:
                yield event

    @property
    def result(self) -> ReasonResult:
        """The whole answer; reads what is left of the stream.

        Raises:
            ConfigError: The stream was closed before its end.
        """
        for _ in self:
            pass
        if self._result is None:
            raise ConfigError("the stream was closed before the answer ended")
        return self._result

    def close(self) -> None:
        """End the answer where it is, and let the runtime go."""
        close = getattr(self._events, "close", None)
        if close is not None:
            close()

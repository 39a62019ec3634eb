"""What a caller may ask of a generation of text."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass

from motrt.engines.errors import ConfigError

_MAX_SEED = 2**32 - 1  # of numpy.random.RandomState


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, in transformers' and vLLM's words; the default is greedy.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        temperature: Divides the logits; 0 takes the best token always.
        top_k: Keep the k best tokens and those equal to the last of them; 0 keeps all.
        top_p: Keep the fewest best tokens whose probabilities reach it; 1 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens of the
            prompt or the answer; 1 changes nothing.
        presence_penalty: Taken off the logits of tokens of the answer.
        frequency_penalty: Taken off the logits, for each time that a token is in the answer.
        seed: Of the draws; None draws afresh each time. The same seed, the same tokens.
        stop: Texts that end the answer; they are not part of it.
        stop_token_ids: Ids that end the answer, besides the tokenizer's.
        ignore_eos: Whether to go on after the ids that end an answer.
        do_sample: False is greedy at any temperature; None samples above temperature 0.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    do_sample: bool | None = None

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_number("temperature", self.temperature, 0.0, math.inf, "a number of 0 or more")
        _check_integer("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number above 0, up to 1", open_low=True)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -100.0, 100.0, "-100 to 100")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, _MAX_SEED)
        _check_tuple("stop", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _bad("stop", text, "texts that are not empty")
        _check_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0)
        for name in ("ignore_eos", "do_sample"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "do_sample" and value is None):
                raise _bad(name, value, "True or False")
        if self.do_sample and self.temperature == 0:
            raise ConfigError(
                "nothing can be sampled at temperature 0",
                got="do_sample=True",
                expected="a temperature above 0",
                fix="Pass temperature=1.0 for the model's own distribution.",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken always."""
        return self.temperature == 0 or self.do_sample is False


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    expected = f"an integer of {low} or more" if high is None else f"an integer, {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _bad(name, value, expected) from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise _bad(name, value, expected)


def _check_number(
    name: str, value: object, low: float, high: float, expected: str, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _bad(name, value, expected)
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise _bad(name, value, expected)


def _check_tuple(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise _bad(name, value, "a tuple")


def _bad(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name} makes no sense", got=repr(value), expected=expected)

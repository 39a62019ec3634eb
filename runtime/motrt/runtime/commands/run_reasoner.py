"""``motrt run reasoner``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from motrt.engines.commands.console import Debug, Json, print_json, print_piece, words
from motrt.engines.errors import ConfigError
from motrt.runtime.commands.options import (
    Backend,
    Capacity,
    Provider,
    Residency,
    Threads,
    default_of,
    open_options,
)
from motrt.runtime.params import SamplingParams
from motrt.runtime.session import Runtime

HELP = "Ask the reasoner; the answer streams to stdout."
EXAMPLE = 'Example: motrt run reasoner edge.bundle --prompt "What happens next?"'


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to run.")],
    prompt: Annotated[str | None, typer.Option(help="What to ask; - reads stdin.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file with a list of {role, content} instead.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message beside --prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = default_of(
        SamplingParams, "max_new_tokens"
    ),
    temperature: Annotated[
        float, typer.Option(help="0 takes the best token always.")
    ] = default_of(SamplingParams, "temperature"),
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0 keeps all.")] = default_of(
        SamplingParams, "top_k"
    ),
    top_p: Annotated[
        float, typer.Option(help="Keep the fewest best tokens that reach this probability.")
    ] = default_of(SamplingParams, "top_p"),
    repetition_penalty: Annotated[
        float, typer.Option(help="Of tokens of prompt and answer; 1 is none.")
    ] = default_of(SamplingParams, "repetition_penalty"),
    presence_penalty: Annotated[
        float, typer.Option(help="Of tokens of the answer; 0 is none.")
    ] = default_of(SamplingParams, "presence_penalty"),
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; repeatable.")] = None,
    backend: Backend = "onnxruntime",
    residency: Residency = "separate",
    capacity: Capacity = 4096,
    threads: Threads = None,
    provider: Provider = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask; the program prints what went wrong."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    conversation = _conversation(prompt, messages)
    options = open_options(backend, residency, capacity, threads, provider)
    with Runtime.open(bundle, **options) as runtime:
        stream = runtime.reason_stream(conversation, params, system=system)
        for piece in stream:
            if not as_json:
                print_piece(piece)
        result = stream.result
    if as_json:
        print_json(
            {
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "timings": result.timings,
            }
        )
        return
    print_piece("\n")
    words().print(
        f"{result.prompt_tokens} prompt tokens in {result.timings['prefill']:.2f} s, "
        f"{len(result.token_ids)} tokens at {result.timings['tokens_per_second']:.1f}/s, "
        f"ended by {result.finish_reason}"
    )


def _conversation(prompt: str | None, messages: Path | None) -> str | list[dict[str, Any]]:
    if (prompt is None) == (messages is None):
        raise ConfigError(
            "there is nothing to ask" if prompt is None else "two questions at once",
            got="neither" if prompt is None else "--prompt and --messages",
            expected="--prompt or --messages",
        )
    if messages is None:
        return sys.stdin.read() if prompt == "-" else str(prompt)
    try:
        data = json.loads(messages.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {messages}", got=err, expected="a JSON list") from err
    if not isinstance(data, list):
        raise ConfigError(f"cannot use {messages}", got=type(data).__name__, expected="a list")
    return data

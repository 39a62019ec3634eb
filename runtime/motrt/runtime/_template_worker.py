"""The program that renders chat templates, in a process of its own.

``template_process`` starts it and kills it. A template is a stranger's program: Jinja's sandbox
keeps it from Python's internals, but not from a loop without end, from ``"x" * 10**10`` or from
``{{ 9 ** 9 ** 9 }}``, which no hook of Jinja's and no thread can interrupt. A process can be
ended at any point, and can be denied memory and files before it sees the template.

Jobs come as lines of JSON on standard input, answers leave so on standard output. Nothing of
motrt is imported, so that it starts in under 0.1 s and holds 20 MB.

Source: the environment is that of transformers ``utils/chat_template_utils.py``,
``_cached_compile_jinja_template`` (5.24).
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import jinja2

_MAX_MESSAGE = 500  # characters of an error that are passed on


class _TooLongError(Exception):
    """The text exceeds what was asked for."""


def environment() -> jinja2.Environment:
    """Return Jinja's immutable sandbox with the names that chat templates expect; no loader."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, for training; here it is plain."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_render")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _render(self, caller: Callable[[], str]) -> str:
            return caller()

    class Dict:
        """``dict`` without the class, whose attributes lead out of the sandbox."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """``namespace`` that stores no underscored name."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a keyword
            values: dict[str, Any] = dict(*args[1:], **kwargs)
            for name in values:
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name: str) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["dict"] = Dict()
    env.globals["namespace"] = Namespace
    return env


class RefusedError(Exception):
    """The template called ``raise_exception``."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return environment()


def answer(job: Mapping[str, Any]) -> dict[str, str]:
    """Render ``job["source"]`` with ``job["variables"]``; an error becomes part of the answer."""
    import jinja2

    try:
        return {"text": _render(job["source"], job["variables"], job["max_chars"])}
    except RefusedError as err:
        kind, text = "refused", str(err)
    except jinja2.TemplateSyntaxError as err:
        kind, text = "syntax", f"{err.message} (line {err.lineno})"
    except _TooLongError as err:
        kind, text = "size", str(err)
    except MemoryError:
        kind, text = "memory", "out of memory"
    except Exception as err:
        kind, text = "failed", f"{type(err).__name__}: {err}"
    return {"error": kind, "message": text[:_MAX_MESSAGE]}


def _render(source: str, variables: Mapping[str, Any], max_chars: int) -> str:
    parts: list[str] = []
    count = 0
    for part in _compiled(source).generate(**variables):
        count += len(part)
        if count > max_chars:
            raise _TooLongError(f"over {max_chars} characters")
        parts.append(part)
    return "".join(parts)


def confine(memory_bytes: int) -> None:
    """Give up memory beyond a bound, and the right to open, write or start anything."""
    try:
        import resource
    except ImportError:  # Windows
        return
    bounds = {"AS": memory_bytes, "NOFILE": 3, "FSIZE": 0, "NPROC": 0, "CORE": 0}
    for name, bound in bounds.items():
        with suppress(AttributeError, OSError, ValueError):  # not on every system
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (bound, bound))


def _warm_up() -> None:
    """Import what Jinja imports on demand, while files can still be opened."""
    for name in ("jinja2.constants", "jinja2.debug"):
        importlib.import_module(name)
    for source in ("{{ raise_exception('') }}", "{{", "{{ strftime_now('%c') ~ lipsum(n=1) }}"):
        answer({"source": source, "variables": {}, "max_chars": 1 << 20})
    _compiled.cache_clear()


def main() -> None:
    """Serve jobs until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    memory_bytes, *folders = sys.argv[1:]
    sys.path.extend(folders)
    _warm_up()
    confine(int(memory_bytes))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b"{}\n")  # ready
    sink.flush()
    for line in source:
        try:
            reply = json.dumps(answer(json.loads(line)))
        except MemoryError:
            reply = json.dumps({"error": "memory", "message": "out of memory"})
        sink.write(reply.encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()

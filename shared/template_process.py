"""Renders one chat template, in a process of its own that chat_template.py starts.

A template is a program that came with the weights, so it runs in Jinja's sandbox. Even there one
operation can compute for hours or make gigabytes, and no thread can be stopped inside it; a process
can. A timer ends this one when a rendering takes too long, and the system refuses it memory beyond
BYTES (where it can: on Linux).

Input and output are lines of JSON. The first describes the template, each further one a rendering.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BYTES = 2**29  # of address space; Python and Jinja take a tenth of it


class Generation(Extension):
    """{% generation %}, which marks the assistant's part for training and renders what is in it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def to_json(value: Any, indent: int | None = None) -> str:
    """As in transformers: HTML and non-ASCII characters are not escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def refuse(message: str) -> None:
    raise TemplateError(message)


def compiled(source: str, today: date) -> Template:
    """Raises TemplateSyntaxError or RecursionError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = today.strftime
    return environment.from_string(source)


def rendered(template: Template, fields: Mapping[str, Any], most: int) -> dict[str, str]:
    """The text, or the error in it; `most` is a number of characters."""
    pieces, size = [], 0
    try:
        for piece in template.generate(fields):
            size += len(piece)
            if size > most:
                return {"error": f"the prompt is over {most:,} characters"}
            pieces.append(piece)
    except TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the parent
    with suppress(ImportError, OSError, ValueError):  # no such limit on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    first = json.loads(sys.stdin.readline())
    faulthandler.dump_traceback_later(first["seconds"], exit=True)  # Jinja computes constants
    try:
        template = compiled(first["source"], date.fromisoformat(first["today"]))
    except (TemplateError, RecursionError, MemoryError) as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), flush=True)
        return
    faulthandler.cancel_dump_traceback_later()
    print("{}", flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        faulthandler.dump_traceback_later(first["seconds"], exit=True)
        answer = rendered(template, fields, first["most"])
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

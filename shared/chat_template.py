"""The chat template of a checkpoint folder, rendered as transformers does, for one prompt.

A template is a program that came with the weights, so it runs in Jinja's sandbox, on plain data,
within SECONDS and MOST_CHARACTERS. It never comes from a request. What users write stays text:
control tokens in a message (or in the name of a role) are marked before rendering and never become
tokens.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from .errors import UserError
from .files import read_json

SECONDS = 1.0
MOST_CHARACTERS = 2**20
MOST_MADE = 2**28  # characters or items of one operation's result, at most, by what it is made of
# Before and behind a control token in a user's text, two of its own for each kind. They are private
# characters, from here on, and removed from the text first.
FIRST_MARK = 0xF0000

Parts = list[tuple[str, bool]]  # text, and whether it is the template's own


class _Stopped(BaseException):
    """Raised inside a rendering that takes too long."""


class _Generation(Extension):
    """{% generation %}, which marks the assistant's part for training and renders what is in it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no single operation makes an enormous text or number: a template is
    stopped between two operations only."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _limited(each) for name, each in self.filters.items()}
        self.filters["format"] = self._format

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            values = right if isinstance(right, tuple) else (right,)
            _limit(_widest(left), *values)
            return super().call_binop(context, operator, left, right)
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        if (operator == "**" and sizes[1] > 64) or sizes[0] * sizes[1] > 2**40:
            raise SecurityError(f"{operator} makes too large a result")
        grown = any(hasattr(x, "__len__") for x in (left, right))
        if grown and sizes[0] * sizes[1] > MOST_CHARACTERS:
            raise SecurityError(f"{operator} makes too long a text")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
        _limit(getattr(called, "__self__", None), *args, *options.values())
        return super().call(context, called, *args, **options)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _limit(_widest(value.__self__))
        return wrapped

    def _format(self, text: str, *values: Any, **named: Any) -> Any:
        return self.call_binop(None, "%", text, named or values)


def _limit(*operands: Any) -> None:
    """Raise SecurityError if a text or list that is made of these, or as wide, may be enormous."""
    sizes = [
        len(x) if hasattr(x, "__len__") else abs(x) if isinstance(x, int) else 1 for x in operands
    ]
    if math.prod(max(1, size) for size in sizes) > MOST_MADE:
        raise SecurityError("an operation makes too much")


def _widest(text: Any) -> int:
    """The largest number in a format, which may be a width."""
    found = re.findall(r"[0-9]+", text) if isinstance(text, str) else ()
    return max((int(number[:20]) for number in found), default=0)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def limited(*args: Any, **options: Any) -> Any:
        _limit(*args, *options.values())
        return function(*args, **options)

    return limited


class FolderTemplate:
    """A template, ready to render. `today`: the date that a template may print; it is fixed when
    the template is loaded, so that prompts keep their common beginning."""

    def __init__(
        self,
        source: str,
        control: Collection[str] = (),
        tokens: Mapping[str, str] | None = None,
        today: date | None = None,
    ) -> None:
        """control: the control tokens. tokens: bos_token and others, for the template to print.
        Raises UserError if the template is invalid."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = (today or date.today()).strftime
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise UserError(
                f"The model's chat template is invalid ({error}): choose another with "
                "--chat-template."
            ) from None
        self._tokens = dict(tokens or {})
        ordered = sorted(control, key=len, reverse=True)  # "|" takes the first that fits
        places = range(FIRST_MARK, FIRST_MARK + 2 * len(ordered), 2)
        self._marks = {
            word: (chr(place), chr(place + 1)) for word, place in zip(ordered, places, strict=True)
        }
        self._mark = re.compile(f"[{chr(FIRST_MARK)}-{chr(places.stop)}]")
        self._control = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._either = re.compile(f"{self._mark.pattern}|{self._control.pattern}")

    def render(self, messages: Sequence[Mapping[str, Any]], start: bool = True) -> Parts:
        """The prompt for `messages`, each with a role and a content, in pieces.

        start: the beginning of the assistant's answer is added. Raises UserError if the template
        refuses the messages, fails, or exceeds its time or its size.
        """
        safe = [
            {key: self._marked(value) for key, value in message.items()} for message in messages
        ]
        fields = {"messages": safe, "add_generation_prompt": start, "tools": None, **self._tokens}
        text = _within(SECONDS, lambda: self._text(fields))
        parts, done = [], 0
        for match in self._either.finditer(text):
            before, after = self._marks.get(match[0], ("", ""))  # a template may have cut one off
            users = text.endswith(before, 0, match.start()) or text.startswith(after, match.end())
            if users:  # or a mark
                own = match[0] if before else ""
                parts += [(text[done : match.start()], True), (own, False)]
                done = match.end()
        return [part for part in (*parts, (text[done:], True)) if part[0]]

    def _text(self, fields: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(**fields):
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise SecurityError(f"the prompt is over {MOST_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _quoted(self, found: re.Match[str]) -> str:
        before, after = self._marks[found[0]]
        return f"{before}{found[0]}{after}"

    def _marked(self, value: Any) -> Any:
        """Plain data with every control token in it marked as text."""
        if isinstance(value, str):
            clean = self._mark.sub("", value)
            return self._control.sub(self._quoted, clean)
        if isinstance(value, Mapping):
            return {str(key): self._marked(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(inner) for inner in value]
        return value


def load(folder: Path | None, control: Collection[str] = ()) -> FolderTemplate | None:
    """The template of a folder: chat_template.jinja, or that of tokenizer_config.json; None where
    there is none. Raises UserError for one that cannot be used."""
    if folder is None:
        return None
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    fields = read_json(config) if config.exists() else {}
    source = fields.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as text ({error}): copy it again.") from None
    if not isinstance(source, str):
        return None
    tokens = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return FolderTemplate(source, control, tokens)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers: no escapes for HTML, nor of characters beyond ASCII."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _within(seconds: float, work: Any) -> Any:
    """The result of `work`, in a thread that is stopped after `seconds`. Raises UserError."""
    result: list[Any] = []
    errors: list[str] = []

    def run() -> None:
        try:
            result.append(work())
        except _Stopped:
            pass
        except TemplateError as error:
            errors.append(str(error))
        except Exception as error:  # a template may raise anything
            errors.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive():  # the exception arrives at the next bytecode
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped)
        )
        thread.join(seconds)  # a second one could meet the thread at its end
    if not result:
        why = errors[0] if errors else f"it took over {seconds:g} s"
        raise UserError(f"The model's chat template does not accept these messages: {why}.")
    return result[0]

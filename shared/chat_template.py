"""The chat template of a checkpoint folder, rendered as transformers does, for one prompt.

A template is a program that came with the weights, so it runs in Jinja's sandbox, on plain data,
within SECONDS and MOST_CHARACTERS. It never comes from a request. What users write stays text:
control tokens in a message (or in the name of a role) are marked before rendering and never become
tokens.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import wraps
from pathlib import Path
from string import Formatter
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from .errors import UserError
from .files import read_json

SECONDS = 1.0
MOST_CHARACTERS = 2**20
MOST_MADE = 2**26  # most bytes of one operation, judged by its operands, and of a rendering
ITEM = 100  # most bytes of a list's item, besides its text
LINEAR = {  # methods and filters that make no more than they take
    *("count", "d", "default", "endswith", "first", "last", "length"),
    *("lstrip", "rstrip", "split", "startswith", "strip"),
}
# Each control token has two marks, put before and after it in a user's text. The marks are private
# characters from here on, which are removed from the text first.
FIRST_MARK = 0xF0000

Parts = list[tuple[str, bool]]  # text, and whether it is the template's own

_made = threading.local()


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
    """Jinja's sandbox, in which no operation may make an enormous text, list or number, nor all
    operations of a thread together. A rendering runs in its own thread, which can be stopped only
    between two operations."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printable, **options)
        filters: dict[str, Any] = {**self.filters, "format": self._format, "tojson": _to_json}
        self.filters = {name: _limited(name, each) for name, each in filters.items()}
        self.filters["counted"] = _count

    def from_string(self, source: Any, *args: Any, **options: Any) -> Template:
        return super().from_string(_Counting().visit(self.parse(source)), *args, **options)

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a block or a macro."""
        texts = list(pieces)
        _limit(texts)
        return _count("".join(texts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        pair = (left, right)
        if all(isinstance(x, (int, float)) for x in pair):
            if (operator == "**" and right > 64) or (
                operator in ("*", "**") and abs(left) * abs(right) > 2**40
            ):
                raise SecurityError(f"{operator} makes too large a result")
        elif operator == "%":
            _limit(left, _widest(left), *(right if isinstance(right, tuple) else (right,)))
        elif operator == "*":
            _limit(*pair)
        return _count(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # str.format is wrapped
        owner = getattr(method, "__self__", None)
        if owner is not None and method.__name__ not in LINEAR:  # macros are measured inside
            _limit(owner, *args, *options.values())
        return _count(super().call(context, called, *args, **options))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _limit(value.__self__, _widest(value.__self__))
        return wrapped

    def _format(self, text: str, *values: Any, **named: Any) -> Any:
        return self.call_binop(None, "%", text, named or values)


class _Counting(NodeTransformer):
    """Jinja evaluates `a ~ b` and slices without calling the environment. Here both are filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes), "join")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "counted") if isinstance(node.arg, nodes.Slice) else node

    def _filter(self, node: nodes.Expr, name: str) -> nodes.Node:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size(value: Any) -> int:
    """The bytes of a text, or of all that a list or a mapping holds; 1 for anything else."""
    if isinstance(value, str):
        return sys.getsizeof(value) - sys.getsizeof("")
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return ITEM + sum(_size(key) + _size(inner) for key, inner in value.items())
    if isinstance(value, Collection):
        return ITEM + sum(map(_size, value))
    return 1


def _limit(first: Any, *others: Any) -> None:
    """Raise SecurityError if repeating `first` for every byte of `others` could make something
    enormous. A number may be a width, so it counts as that many characters."""
    sizes = [4 * abs(x) if isinstance(x, int) else _size(x) for x in others]
    if max(1, _size(first)) * max(1, sum(sizes)) > MOST_MADE:
        raise SecurityError("an operation makes too much")


def _count(result: Any) -> Any:
    """Returns `result`, after adding its size to what this thread has made. Raises SecurityError if
    the sum is too large."""
    size = 0
    if isinstance(result, (str, bytes)):
        size = _size(result)
    elif isinstance(result, Collection) and not isinstance(result, range):
        size = ITEM * len(result)
    _made.size = getattr(_made, "size", 0) + size
    if _made.size > MOST_MADE:
        raise SecurityError("its operations make too much")
    return result


def _printable(value: Any) -> Any:
    """What a template prints; lists and mappings may hold one text many times."""
    if not isinstance(value, str):
        _limit(value)
    return value


def _widest(text: Any) -> int:
    """The largest number in a format, because it may be a width. Raises SecurityError if a value
    may set the width."""
    if not isinstance(text, (str, bytes)):
        return 0
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    with suppress(ValueError):  # not a brace format
        if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text)):
            raise SecurityError("a format in a format is too much")
    return max((int(number[:20]) for number in re.findall("[0-9]+", text)), default=0)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def limited(*args: Any, **options: Any) -> Any:
        if name not in LINEAR:
            own = (Context, EvalContext, Environment)
            _limit(*(x for x in args if not isinstance(x, own)), *options.values())
        return _count(function(*args, **options))

    return limited


class FolderTemplate:
    """A template, ready to render. `today`: the date that a template may print; it is fixed when
    the template is loaded, so that prompts keep their common prefix."""

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
        ordered = sorted(control, key=len, reverse=True)  # "|" takes the first match
        places = range(FIRST_MARK, FIRST_MARK + 2 * len(ordered), 2)
        self._marks = {
            word: (chr(place), chr(place + 1)) for word, place in zip(ordered, places, strict=True)
        }
        self._mark = re.compile(f"[{chr(FIRST_MARK)}-{chr(places.stop)}]")
        self._control = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._either = re.compile(f"{self._mark.pattern}|{self._control.pattern}")

    def render(self, messages: Sequence[Mapping[str, Any]], start: bool = True) -> Parts:
        """The prompt for `messages`, each with a role and a content, in pieces.

        start: add the beginning of the assistant's answer. Raises UserError if the template refuses
        the messages, fails, or exceeds its time or its size.
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
    """The template of a folder: chat_template.jinja, or the one in tokenizer_config.json; None
    without either. Raises UserError for a template that cannot be used."""
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
    """As in transformers: HTML and non-ASCII characters are not escaped."""
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
        thread.join(seconds)  # a second exception could hit the thread as it ends
    if not result:
        why = errors[0] if errors else f"it took over {seconds:g} s"
        raise UserError(f"The model's chat template does not accept these messages: {why}.")
    return result[0]

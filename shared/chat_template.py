"""The chat template of a checkpoint folder, rendered as `transformers` does, for one prompt.

A template is a program that came with the weights. It runs in Jinja's sandbox and is trusted as far
as `transformers` trusts it: it cannot touch files, but it may compute for long. So it is taken from
the model's folder alone, never from a request. What users write stays text: control tokens in a
message (or in the name of a role) never become tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import UserError
from .files import read_json, read_text

MARK = "\U000f0000"  # a private character: behind each letter of a user's control token
MARKED = re.compile(f"(?:.{MARK})+", re.DOTALL)

Parts = list[tuple[str, bool]]  # text, and whether it is the template's own


class Generation(Extension):
    """{% generation %}, which marks the assistant's part for training and renders what is in it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers: unlike Jinja's, it escapes no HTML."""
    options: dict[str, Any] = {"separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def refuse(message: str) -> None:
    raise TemplateError(message)


class FolderTemplate:
    """A template, ready to render. The date that it may print is that of its loading, so that
    prompts keep their common prefix."""

    def __init__(
        self, source: str, control: Collection[str] = (), tokens: Mapping[str, str] | None = None
    ) -> None:
        """control: the control tokens. tokens: bos_token and others, for the template to print.
        Raises UserError if the template is invalid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = date.today().strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(
                f"The model's chat template is invalid ({error}): correct it in the model's folder."
            ) from None
        self.source, self._tokens = source, dict(tokens or {})
        longest_first = sorted(control, key=len, reverse=True)  # "|" takes the first match
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        start: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Parts:
        """The prompt for `messages`, each with a role and a content, in pieces.

        start: add the beginning of the assistant's answer. tools: functions that the model may
        call, described as OpenAI's API does. Raises UserError if the template refuses the messages
        or fails.
        """
        fields = {"messages": self._marked(messages), "tools": self._marked(tools)}
        try:
            text = self._template.render(self._tokens | fields, add_generation_prompt=start)
        except Exception as error:  # a template may raise anything
            why = str(error) if isinstance(error, TemplateError) else repr(error)
            raise UserError(
                f"The model's chat template does not accept these messages: {why}."
            ) from None
        parts, end = [], 0
        for match in MARKED.finditer(text):
            parts += [(text[end : match.start()], True), (match[0].replace(MARK, ""), False)]
            end = match.end()
        return [part for part in (*parts, (text[end:], True)) if part[0]]

    def _marked(self, value: Any) -> Any:
        """Plain data with each letter of every control token marked: it is the token no more, also
        where a template cuts it."""
        if isinstance(value, str):
            quote = lambda token: "".join(letter + MARK for letter in token[0])  # noqa: E731
            return self._control.sub(quote, value.replace(MARK, ""))
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
    if path.exists():
        source = read_text(path)
    if not isinstance(source, str):
        return None
    tokens = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return FolderTemplate(source, control, tokens)

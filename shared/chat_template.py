"""The chat template of a checkpoint folder, rendered as `transformers` does, for one prompt.

A template is a program that came with the weights. It runs in Jinja's sandbox and is trusted as far
as `transformers` trusts it: it cannot touch files, but it may compute for long. So it is taken from
the model's folder alone, never from a request. What users write stays text: control tokens in a
message (or in the name of a role) never become tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import UserError
from .files import read_json, read_text
from .tokenizer import special_tokens

MARK = "\U000f0000"  # a private character: behind the first letter of a user's control token


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
        clock = date.today().strftime
        environment.globals |= {"raise_exception": refuse, "strftime_now": clock, **(tokens or {})}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(
                f"The model's chat template is invalid ({error}): correct it in the model's folder."
            ) from None
        self.source, self._control = source, control

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[str]:
        """The prompt for `messages`, each with a role and a content, up to the beginning of the
        assistant's answer. It is in pieces: a border cuts each control token that a user wrote.

        tools: functions that the model may call, described as OpenAI's API does. Raises UserError
        if the template refuses the messages or fails.
        """
        fields = {"messages": self._cut(messages), "tools": self._cut(tools)}
        try:
            return self._template.render(fields, add_generation_prompt=True).split(MARK)
        except Exception as error:  # a template may raise anything
            why = str(error) if isinstance(error, TemplateError) else repr(error)
            raise UserError(
                f"The model's chat template does not accept these messages: {why}."
            ) from None

    def _cut(self, value: Any) -> Any:
        """Plain data with a mark in every control token, also in one within another; a token of one
        letter cannot be cut."""
        if isinstance(value, str):
            value = value.replace(MARK, "")
            for token in self._control:
                while token[1:] and token in value:  # again: "__end__end__" has two
                    value = value.replace(token, token[0] + MARK + token[1:])
        elif isinstance(value, Mapping):
            value = {self._cut(str(key)): self._cut(inner) for key, inner in value.items()}
        elif isinstance(value, (list, tuple)):
            value = [self._cut(inner) for inner in value]
        return value


def load(folder: Path | None, control: Collection[str]) -> FolderTemplate | None:
    """The template of a folder: chat_template.jinja, or the one in tokenizer_config.json; None
    without either. Raises UserError for a template that cannot be used."""
    if folder is None:
        return None
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    fields = read_json(config) if config.exists() else {}
    source = read_text(path) if path.exists() else fields.get("chat_template")
    if not isinstance(source, str):
        return None
    return FolderTemplate(source, control, special_tokens(folder))

"""From a chat to a prompt.

A model that was trained to chat brings its own template. GPT-2 was not: a line for each message
only shows where a template goes. Templates come from the model's folder, never from a client: a
template in a request is a program that a stranger wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared import chat_template
from shared.cli import Loaded
from shared.errors import UserError
from shared.tokenizer import AnyTokenizer

from .protocol import Message

Tools = Sequence[Mapping[str, Any]]  # functions that the model may call


class Simple:
    """A line for each message, for models that were not trained to chat."""

    stops: tuple[str, ...] = ("\nUser:",)

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """There is no place for `tools`."""
        names = (message.role.capitalize().replace("Developer", "System") for message in messages)
        lines = [f"{name}: {it.text}\n" for name, it in zip(names, messages, strict=True)]
        return self.tokenizer.encode("".join(lines) + "Assistant:")


class OwnTemplate:
    """The template in the model's folder. Control tokens of the template become tokens; in a
    message they stay text."""

    stops: tuple[str, ...] = ()  # control tokens end the answer

    def __init__(self, template: chat_template.FolderTemplate, tokenizer: Any) -> None:
        self.template, self.tokenizer = template, tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Raises UserError for messages that cannot be shown to the model."""
        plain = [message.plain for message in messages]
        if "developer" not in self.template.source:  # OpenAI's newer name of the system's role
            for message in plain:
                message["role"] = message["role"].replace("developer", "system")
        pieces = self.template.render(plain, tools)
        text = "".join(pieces)
        for message in plain:
            if message["role"] == "system" and message["content"].strip() not in text:
                raise UserError(
                    "The model's chat template leaves out messages of the system, so the model "
                    "would see neither yours nor your tools: put the text into a message of the "
                    "user, and leave 'tools' out."
                )
        ids: list[int] = self.tokenizer.encode_chat(pieces)
        return ids


Template = Simple | OwnTemplate


def template_of(loaded: Loaded) -> Template:
    """The model's own template, if its folder has one. Raises UserError if that is invalid."""
    control = getattr(loaded.tokenizer, "control", None)
    if control is None:  # no tokenizer.json: no control tokens
        return Simple(loaded.tokenizer)
    template = chat_template.load(loaded.folder, control)
    return OwnTemplate(template, loaded.tokenizer) if template else Simple(loaded.tokenizer)

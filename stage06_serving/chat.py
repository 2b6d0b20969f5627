"""From a chat to a prompt.

A model that was trained to chat brings its own template. GPT-2 was not: its line for each message
only shows where a template goes. Templates come from the command line or the model's folder, never
from a client: a template in a request is a program that a stranger wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from shared import chat_template
from shared.cli import Loaded
from shared.errors import UserError
from shared.files import read_text

from .protocol import Message

MOST_TEMPLATE_BYTES = 2**20
NO_TEMPLATE = (
    "This server has no chat template, and its model was not trained on chats: use "
    "/v1/completions, or start the server with --chat-template simple."
)


Tools = Sequence[Mapping[str, Any]]
Line = Annotated[str, Field(pattern=r"\{content\}")]


@dataclass(frozen=True)
class ChatTemplate:
    """A line for each message, by role; then `start`, which the model continues until one of
    `stops`."""

    roles: dict[str, Line]  # role -> line, in which {content} is replaced by the message
    start: str
    stops: tuple[Annotated[str, Field(min_length=1)], ...]

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """The text that the model continues. An unknown role is written with its own name. There is
        no place for `tools`."""
        lines = []
        for message in messages:
            line = self.roles.get(message.role)
            if line is None:
                lines.append(f"{message.role.capitalize()}: {message.text}\n")
            else:
                lines.append(line.replace("{content}", message.text))
        return "".join(lines) + self.start


FILE = TypeAdapter(ChatTemplate)


class OwnTemplate:
    """The template in the model's folder. Control tokens of the template become tokens; in a
    message they stay text."""

    stops: tuple[str, ...] = ()  # control tokens end the answer

    def __init__(self, template: chat_template.FolderTemplate, tokenizer: Any) -> None:
        self.template, self.tokenizer = template, tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The token ids that the model continues. Raises UserError for messages that the template
        refuses. tools: functions that the model may call, if the template shows them."""
        plain = [message.plain for message in messages]
        ids: list[int] = self.tokenizer.encode_chat(self.template.render(plain, tools=tools))
        return ids


def own_template(loaded: Loaded) -> OwnTemplate | None:
    """The template of a loaded model, if its folder has one. Raises UserError if it is invalid."""
    tokenizer = loaded.tokenizer
    control = getattr(tokenizer, "control", None)
    if control is None:  # no tokenizer.json: no control tokens
        return None
    template = chat_template.load(loaded.folder, control)
    return None if template is None else OwnTemplate(template, tokenizer)


SIMPLE = ChatTemplate(
    {
        "system": "System: {content}\n",
        "user": "User: {content}\n",
        "assistant": "Assistant: {content}\n",
    },
    "Assistant:",
    ("\nUser:",),
)


def load_template(name: str) -> ChatTemplate | None:
    """The template for --chat-template: "auto" or "simple", "none" (None), or a JSON file with
    "roles", "start" and "stops". Raises UserError for an invalid file."""
    if name in ("auto", "simple", "none"):
        return None if name == "none" else SIMPLE
    try:
        return FILE.validate_json(read_text(Path(name), MOST_TEMPLATE_BYTES), strict=True)
    except (OSError, ValueError) as error:
        why = str(error)
        if isinstance(error, ValidationError):  # the first field, and what is wrong with it
            first = error.errors()[0]
            why = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise UserError(
            f"--chat-template {name} cannot be used ({why}): choose "
            'auto, simple, none, or a JSON file such as {"roles": {"user": "User: {content}\\n"}, '
            '"start": "Assistant:", "stops": ["\\nUser:"]}.'
        ) from None

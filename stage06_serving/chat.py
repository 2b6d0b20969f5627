"""From a chat to a prompt. GPT-2 was never taught to chat, so this is a demonstration of where a template goes, and no more.

Templates come from whoever starts the server and never from a client: a template language in a request is a program that a
stranger writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

from .protocol import Message

NO_TEMPLATE = (
    "This server has no chat template, and its model was not made for chats: use /v1/completions, or start the server with "
    "--chat-template simple."
)


@dataclass(frozen=True)
class ChatTemplate:
    """One line for each message, by role; then `start`, after which the model goes on, until one of `stops`."""

    roles: dict[str, str]  # role -> line, in which {content} stands for what was said
    start: str
    stops: tuple[str, ...]

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues. A role that is not known is written with its own name."""
        lines = []
        for message in messages:
            line = self.roles.get(message.role)
            text = (
                f"{message.role.capitalize()}: {message.text}\n"
                if line is None
                else line.replace("{content}", message.text)
            )
            lines.append(text)
        return "".join(lines) + self.start


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
    """The template for --chat-template: "simple", "none" (None), or a JSON file with "roles", "start" and "stops".

    Raises UserError for a file that is no template.
    """
    if name in ("simple", "none"):
        return SIMPLE if name == "simple" else None
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
        roles, start, stops = data["roles"], data["start"], data["stops"]
        good = all(
            isinstance(line, str) and "{content}" in line for line in roles.values()
        ) and isinstance(stops, list)
        if not (
            good
            and isinstance(start, str)
            and all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise ValueError("a role lacks {content}, a value is no text, or the stops are no list")
        return ChatTemplate(dict(roles), start, tuple(stops))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--chat-template {name} cannot be used ({type(error).__name__}: {error}): choose simple, none, or a JSON file such "
            'as {"roles": {"user": "User: {content}\\n"}, "start": "Assistant:", "stops": ["\\nUser:"]}.'
        ) from None

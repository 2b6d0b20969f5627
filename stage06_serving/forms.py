"""Answers in a given form, such as JSON: what a later stage brings, and what this one does without.

registry.FORMS names the stage's class, and the endpoints take its bodies, which have more fields
than ours; a field that neither knows is refused as protocol.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared import registry
from shared.cli import Loaded

from .async_engine import Engine, Prepare
from .chat import Template, Tools
from .formats import Chat, Format
from .protocol import ChatBody, CompletionBody, Message
from .service import Generation


class NoForms:
    """Any text."""

    chat_body, completion_body = ChatBody, CompletionBody

    def __init__(self, engine: Engine, loaded: Loaded, template: Template | None) -> None:
        """template: of the server's chats."""

    async def prepare(self, body: ChatBody | CompletionBody) -> Prepare | None:
        return None

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Tools | None]:
        return body.messages, None

    def answer(self, generation: Generation, body: ChatBody) -> Format:
        return Chat(generation, body)


def brought() -> Any:
    """The class of Forms that a later stage adds."""
    return registry.load(registry.FORMS["json"])

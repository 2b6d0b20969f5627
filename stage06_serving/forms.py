"""Answers in a given form, such as JSON: what a later stage brings, and what this one does without.

registry.FORMS names the stage's class, and the endpoints take its bodies, which have more fields
than ours; a field that neither knows is refused as protocol.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared import registry
from shared.cli import Loaded

from .async_engine import Prepare
from .chat import ChatTemplate, OwnTemplate, Tools
from .formats import Chat
from .protocol import ChatBody, CompletionBody, Message
from .service import Choice, Format, Service
from .status import AnyEngine


class NoForms:
    """Any text."""

    chat_body, completion_body = ChatBody, CompletionBody

    def __init__(
        self, engine: AnyEngine, loaded: Loaded, template: ChatTemplate | OwnTemplate | None
    ) -> None:
        """template: of the server's chats."""

    async def prepare(self, body: ChatBody | CompletionBody) -> Prepare | None:
        return None

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Tools | None]:
        return body.messages, None

    def answer(self, body: ChatBody, choices: Sequence[Choice], service: Service) -> Format:
        return Chat(body, choices, service)


def brought() -> Any:
    """The class of Forms that a later stage adds."""
    return registry.load(registry.FORMS["json"])

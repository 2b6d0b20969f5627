"""The server's side of grammars: which fields of a body ask for a form, and its grammar.

OpenAI's `response_format`, and tools, whose calls tools.py reads. A form that cannot be enforced is
refused: a constrained answer is never returned unconstrained.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shared.cli import Loaded
from shared.errors import UserError
from stage06_serving.async_engine import Engine, Prepare
from stage06_serving.chat import OwnTemplate, Template
from stage06_serving.chat import Tools as Described
from stage06_serving.errors import ApiError
from stage06_serving.formats import Chat, Format
from stage06_serving.protocol import MOST_MESSAGES, Body, ChatBody, Many, Message, WrongField
from stage06_serving.service import Choice, Generation, Piece

from . import grammar, tools
from .tools import MOST_TOOLS, Schema, Tool


class NamedSchema(Body):
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None  # changes nothing: a schema is always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise WrongField("response_format", "'json_schema' belongs to the type 'json_schema'")
        return self


class ToolMessage(Message):
    """A message that may call tools, or answer a call."""

    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[Many[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """For a chat template, which writes the arguments of calls as JSON itself. Raises
        UserError."""
        fields = super().plain
        try:
            for call in self.tool_calls or ():
                function = {"name": call["function"]["name"]}
                function["arguments"] = json.loads(call["function"]["arguments"] or "{}")
                fields.setdefault("tool_calls", []).append({**call, "function": function})
        except (LookupError, TypeError, ValueError, RecursionError):
            raise UserError("The 'tool_calls' of a message are not as they were sent.") from None
        sent = {"name": self.name, "tool_call_id": self.tool_call_id}
        return fields | {name: value for name, value in sent.items() if value is not None}


class ChatForm(ChatBody):
    """POST /v1/chat/completions."""

    messages: Annotated[  # type: ignore[assignment]
        Many[ToolMessage], Field(min_length=1, max_length=MOST_MESSAGES)
    ]
    response_format: ResponseFormat | None = None
    tools: Annotated[Many[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> ChatForm:
        try:
            names = [*tools.functions(self.tools or ())]
        except UserError as error:
            raise WrongField("tools", str(error)) from None
        if self.must_call and not self.callable:
            choices = f"which are {names}" if names else "and there are none"
            raise WrongField("tool_choice", f"it must be one of the 'tools', {choices}")
        for name in ("min_tokens", "ignore_eos"):
            if self.form and getattr(self, name):
                raise WrongField(name, f"an answer in a form ends with it: leave '{name}' out")
        return self

    @property
    def content(self) -> Schema:
        """The schema of an answer in JSON; {}: any text."""
        sent = self.response_format
        if sent is None or sent.type == "text":
            return {}
        return (sent.json_schema.schema_ if sent.json_schema else {}) or {"type": "object"}

    @property
    def callable(self) -> dict[str, Schema]:
        """The functions that the answer may call."""
        functions, choice = tools.functions(self.tools or ()), self.tool_choice
        if isinstance(choice, dict):
            chosen = choice.get("function")
            return {name: f for name, f in functions.items() if chosen == {"name": name}}
        return functions if choice != "none" else {}

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def form(self) -> str:
        """The field that asks for a form; "": the answer is free."""
        return "response_format" if self.content else "tools" if self.callable else ""

    @property
    def source(self) -> str:
        """The grammar of the answer, which has a form. Raises UserError."""
        content = grammar.of_schema(self.content) if self.content else ""
        if not self.callable:
            return grammar.start(content)
        several = self.parallel_tool_calls is not False
        return tools.answer(self.callable, None if self.must_call else content, several)


class Forms:
    """See stage06_serving/service.py."""

    chat_body = ChatForm

    def __init__(self, engine: Engine, loaded: Loaded, template: Template | None) -> None:
        self.masks = grammar.Masks(engine)
        source = template.template.source if isinstance(template, OwnTemplate) else ""
        self.loaded, self.shows_tools, self._lock = loaded, "tools" in source, threading.Lock()

    @cached_property
    def grammars(self) -> grammar.Grammars:
        """Made at the first form: preparing the vocabulary takes a moment."""
        config = self.loaded.config
        return grammar.Grammars(self.loaded.tokenizer, config.vocab_size, config.eos_ids)

    async def prepare(self, body: ChatBody) -> Prepare | None:
        assert isinstance(body, ChatForm)
        try:
            return await asyncio.to_thread(self._compile, body) if body.form else None
        except UserError as error:
            raise ApiError(400, str(error), body.form) from None

    def _compile(self, body: ChatForm) -> Prepare:
        with self._lock:  # one at a time: a grammar may take a processor for a moment
            try:
                return grammar.Form(self.masks, self.grammars, body.source)
            except UserError as error:
                raise tools.blame(error, body.callable, self.grammars.compile) from None

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Described | None]:
        assert isinstance(body, ChatForm)
        described = (body.tools or None) if body.tool_choice != "none" else None
        if self.shows_tools:
            return body.messages, described
        return tools.shown(body.messages, described or ()), None

    def answer(self, generation: Generation, body: ChatBody) -> Format:
        assert isinstance(body, ChatForm)
        chat = Chat(generation, body)
        return ToolChat(chat) if body.callable else chat


class ToolChat:
    """The chat format `chat` with calls: the text of each choice goes through its reader."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.readers = {choice.index: tools.Reader() for choice in chat.generation.choices}

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        body = self.chat.whole(answers)
        for part, answer in zip(body["choices"], answers, strict=True):
            reader = self.readers[part["index"]]
            deltas = reader.push(answer.text, end=True)
            content = "".join(delta.get("content", "") for delta in deltas)
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            if calls:
                for call in calls:
                    del call["index"]  # only a stream has it
                part["message"] |= {"content": content or None, "tool_calls": calls}
                part["finish_reason"] = reader.reason(answer.finish_reason)
        return body

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        reader, done = self.readers[choice.index], piece.finish_reason is not None
        events = self.chat.chunks(choice, Piece("", piece.tokens))
        deltas = reader.push(piece.text, end=done)
        events += [self.chat.chunk(choice, delta, Piece("", ())) for delta in deltas]
        if done:
            last = Piece("", (), reader.reason(piece.finish_reason))
            events.append(self.chat.chunk(choice, {}, last))
        return events

    def last(self) -> list[dict[str, Any]]:
        return self.chat.last()

"""The server's side of grammars: which fields of a body ask for a form, and its grammar.

OpenAI's `response_format`, vLLM's `structured_outputs`, and tools, whose calls tools.py reads. A
form that cannot be enforced is refused: no answer is ever free that was to have one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shared.cli import Loaded
from shared.errors import UserError
from stage06_serving.async_engine import Prepare
from stage06_serving.chat import ChatTemplate, OwnTemplate
from stage06_serving.chat import Tools as Described
from stage06_serving.errors import ApiError
from stage06_serving.formats import Chat
from stage06_serving.protocol import (
    MOST_MESSAGES,
    Body,
    ChatBody,
    CompletionBody,
    Many,
    Message,
    SamplingBody,
    Text,
    WrongField,
)
from stage06_serving.service import Choice, Format, Service
from stage06_serving.status import AnyEngine

from . import grammar
from .tools import MOST_TOOLS, Call, Tool, ToolChat, ToolChoice, shows_tools, style_of

MOST_CHOICES = 1000
Schema = dict[str, Any]


class NamedSchema(Body):
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None  # changes nothing: a schema is always enforced


class ResponseFormat(Body):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise WrongField("response_format", "'json_schema' belongs to the type 'json_schema'")
        return self


class StructuredOutputs(Body):
    """vLLM's: one of the first five."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[Many[Text], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    grammar: Text | None = None
    whitespace_pattern: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_known(cls, data: Any) -> Any:
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        if isinstance(data, dict):
            others = data.keys() - {*kinds, "whitespace_pattern"}
            if any(data[name] is not None for name in others):
                raise WrongField("structured_outputs", f"only {', '.join(kinds)} are supported")
            if sum(bool(data.get(kind)) or data.get(kind) == {} for kind in kinds) != 1:
                raise WrongField("structured_outputs", f"send one of {', '.join(kinds)}")
        return data

    @property
    def source(self) -> str:
        """The grammar. Raises UserError."""
        if self.regex is not None:
            return grammar.regex(self.regex)
        if self.choice is not None:
            return grammar.start(" | ".join(map(grammar.literal, self.choice)))
        if self.grammar is not None:
            return grammar.users(self.grammar)
        return grammar.start(grammar.of_schema(self.json_ or OBJECT, self.whitespace_pattern))


OBJECT: Schema = {"type": "object"}


class Formed(SamplingBody):
    """The fields of a form, of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _can_end_where_the_form_ends(self) -> Formed:
        if self.form is None:
            return self
        if self.response_format and self.response_format.type != "text" and self.structured_outputs:
            raise WrongField("structured_outputs", "send it or 'response_format', not both")
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise WrongField(name, f"an answer in a form ends with it: leave '{name}' out")
        return self

    @property
    def form(self) -> str | None:
        """The field that asks for a form; None: the answer is free."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None

    @property
    def content(self) -> str | None:
        """The rule of an answer in JSON; None for another form or none."""
        sent = self.response_format
        if sent is None or sent.type == "text":
            return None
        return grammar.of_schema(sent.json_schema.schema_ if sent.json_schema else OBJECT)

    @property
    def source(self) -> str:
        """The grammar of the answer, which has a form. Raises UserError."""
        if self.structured_outputs is not None:
            return self.structured_outputs.source
        return grammar.start(self.content or "")


class CompletionForm(Formed, CompletionBody):
    """POST /v1/completions."""


class ToolMessage(Message):
    """A message that may call tools, or answer a call."""

    tool_calls: Annotated[Many[Call], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @property
    def plain(self) -> dict[str, Any]:
        fields = super().plain
        if self.tool_calls:
            fields["tool_calls"] = [call.plain for call in self.tool_calls]
        sent = {"name": self.name, "tool_call_id": self.tool_call_id}
        return fields | {name: value for name, value in sent.items() if value is not None}


ToolMessages = Annotated[Many[ToolMessage], Field(min_length=1, max_length=MOST_MESSAGES)]


class ChatForm(Formed, ChatBody):
    """POST /v1/chat/completions."""

    messages: ToolMessages  # type: ignore[assignment]
    tools: Annotated[Many[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_of_a_tool(self) -> ChatForm:
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise WrongField("tools", "two of them have the same name: give each its own")
        named = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name
        if (named or self.tool_choice == "required") and not names:
            raise WrongField("tool_choice", "there are no 'tools' to choose from")
        if named and named not in names:
            raise WrongField("tool_choice", f"there is no tool {named[:64]!r}")
        if self.callable and self.structured_outputs:
            raise WrongField("structured_outputs", "with 'tools' it would forbid their calls")
        return self

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        chosen = self.tool_choice if isinstance(self.tool_choice, ToolChoice) else None
        return [t for t in self.tools or () if chosen is None or t.name == chosen.function.name]

    @property
    def form(self) -> str | None:
        return super().form or ("tools" if self.callable else None)

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")


class Forms:
    """See stage06_serving/service.py."""

    chat_body, completion_body = ChatForm, CompletionForm

    def __init__(
        self, engine: AnyEngine, loaded: Loaded, template: ChatTemplate | OwnTemplate | None
    ) -> None:
        engine.observe(grammar.Ahead())
        self.loaded = loaded
        self.style = style_of(loaded.tokenizer)
        self.shows_tools = shows_tools(template)
        self._lock = threading.Lock()
        self._grammars: grammar.Grammars | None = None

    async def prepare(self, body: ChatBody | CompletionBody) -> Prepare | None:
        assert isinstance(body, Formed)
        if body.form is None:
            return None
        try:
            return await asyncio.to_thread(self._compile, body)
        except UserError as error:
            raise ApiError(400, str(error), body.form) from None

    def _compile(self, body: Formed) -> Prepare:
        with self._lock:  # the vocabulary is prepared once, at the first form
            if self._grammars is None:
                config = self.loaded.config
                self._grammars = grammar.Grammars(
                    self.loaded.tokenizer, config.vocab_size, config.eos_ids
                )
        if isinstance(body, ChatForm) and body.callable:
            several = body.parallel_tool_calls is not False
            content = None if body.must_call else body.content or ""
            source = self.style.grammar(body.callable, content, several)
        else:
            source = body.source
        return grammar.Form(self._grammars, source)

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Described | None]:
        assert isinstance(body, ChatForm)
        tools = body.tools if body.tool_choice != "none" else None
        if self.shows_tools:
            described = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
            return body.messages, described
        return self.style.written(body.messages, tools or ()), None

    def answer(self, body: ChatBody, choices: Sequence[Choice], service: Service) -> Format:
        assert isinstance(body, ChatForm)
        chat = Chat(body, choices, service)
        return ToolChat(chat, self.style) if body.callable else chat

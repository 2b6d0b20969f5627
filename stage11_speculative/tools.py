"""Tools: how a model writes that it calls a function, and how OpenAI's API shows it.

Models write calls as text, each family in its own style. The same style is a grammar, so that a
call's arguments are always valid for the function's schema, and a reader, which finds the calls in
the text piece by piece.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.errors import UserError
from stage06_serving.chat import ChatTemplate, OwnTemplate
from stage06_serving.formats import Chat
from stage06_serving.protocol import Body, Message, Text
from stage06_serving.service import Answer, Choice, Piece
from stage06_serving.text import overlap

from . import grammar

MOST_TOOLS = 128  # as OpenAI has it
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # changes nothing: arguments are always valid


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: Annotated[str, Field(max_length=64)]
    arguments: Text


class Call(Body):
    """A call in a message that a client sends back."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """For a chat template, which writes the arguments as JSON itself."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Style:
    """How a model writes calls: `first` and a name, `middle` and the arguments, `tail`; `following`
    and another name, ...; `last`.

    trigger: the beginning of `first` after which a call must follow; "": only at the beginning of
        an answer. token: the id of the control token that it is, if so. following: "" if the next
        call begins as the first, after any text. single: there is never a second call. short_ids:
        the family's templates refuse ids of calls that have not nine characters.
    """

    first: str
    middle: str
    tail: str
    trigger: str = ""
    token: int | None = None
    following: str = ""
    last: str = ""
    single: bool = False
    short_ids: bool = False

    def grammar(self, tools: Sequence[Tool], content: str | None, several: bool) -> str:
        """The grammar of an answer that calls tools, or is `content` instead: a rule, or "" for any
        text; None: it must call. several: whether it may call more than once."""
        several, written = several and not self.single, grammar.literal
        trigger = first = ""
        if self.trigger:
            trigger = written(self.trigger) if self.token is None else f"<[{self.token}]>"
            first = written(self.first.removeprefix(self.trigger))
        rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
        for place, tool in enumerate(tools):
            begin, schema = written(tool.name + self.middle), grammar.of_schema(parameters(tool))
            if not self.trigger:  # in the lexemes of JSON, which `content` may share
                parts = LEXEMES.findall(self.first + tool.name + self.middle)
                begin = " ".join(map(written, parts))
            rules.append(f"call_{place}: {begin} {schema} {written(self.tail)}")
        more = f"({written(self.between)} call)*" if several else ""
        last = written(self.last) if self.last else ""
        rules.append(f"calls: {trigger} {first} call {more} {last}")
        if content is None:
            return grammar.start("calls", *rules)
        if content:
            return grammar.start("calls | content", f"content: {content}", *rules)
        if not self.trigger:
            return grammar.start("calls | FREE", r"FREE: /([^{](?s:.*))?/", *rules)
        if self.token is not None:  # spelled in letters it would be read as a call, too
            rules.append(f"TEXT: {TEXT} & ~/(?s:.*){re.escape(self.trigger)}(?s:.*)/")
            return grammar.start("TEXT | TEXT calls", *rules)
        rules.append(f"TEXT: {TEXT}")
        rules.append(f"begin[lazy]: TEXT {trigger}")
        tagged = f"begin {first} call"
        return grammar.start(f"({tagged})* TEXT" if several else f"TEXT | {tagged}", *rules)

    def written(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages for a template that does not show tools: a message before them describes
        those, calls are text, and what a tool has answered is the user's."""
        plain: list[Message] = []
        if tools:
            listed = [json.dumps(tool.model_dump(exclude_none=True)) for tool in tools]
            text = "\n".join([ABOUT, *listed, f"{HOW} {self.text([('NAME', '{...}')])}"])
            plain.append(Message(role="system", content=text))
        for message in messages:
            functions = [call["function"] for call in message.plain.get("tool_calls", ())]
            calls = [(it["name"], json.dumps(it["arguments"])) for it in functions]
            role, text = message.role, message.text + self.text(calls)
            if role == "tool":
                role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            plain.append(Message(role=role, content=text))
        return plain

    @property
    def between(self) -> str:
        """From a call's `tail` to the name of the next."""
        return self.following or NEWLINE + self.first

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments, as the model writes them; "" without any."""
        texts = [name + self.middle + arguments + self.tail for name, arguments in calls]
        return self.first + self.between.join(texts) + self.last if texts else ""


NEWLINE = "\n"
LEXEMES = re.compile(r'"[^"]*"|: |, |.')
TEXT = r"/(?s:.*)/"
ABOUT = "You may call these functions:"
HOW = "To call one, answer with its name and its arguments:"
HERMES = Style(  # also Qwen 2.5 and 3, and models that know no style
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>"
)
LLAMA = Style('{"name": "', '", "parameters": ', "}", single=True)
MISTRAL = Style(
    '[TOOL_CALLS][{"name": "',
    '", "arguments": ',
    "}",
    "[TOOL_CALLS]",
    following=', {"name": "',
    last="]",
    short_ids=True,
)


def style_of(tokenizer: Any) -> Style:
    """The style of a model, by the control tokens of its tokenizer."""
    control = getattr(tokenizer, "control", ())
    if MISTRAL.trigger in control:
        (token,) = tokenizer.encode_chat([(MISTRAL.trigger, True)])
        return replace(MISTRAL, token=token)
    return LLAMA if "<|python_tag|>" in control else HERMES


def shows_tools(template: ChatTemplate | OwnTemplate | None) -> bool:
    """Whether a chat template describes tools to the model."""
    if not isinstance(template, OwnTemplate):
        return False
    probe = {"name": "probe_of_tools", "description": "", "parameters": {"type": "object"}}
    try:
        parts = template.template.render(
            [{"role": "user", "content": ""}], tools=[{"type": "function", "function": probe}]
        )
    except UserError:
        return False
    return any("probe_of_tools" in text for text, _ in parts)


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments. Raises UserError if they are not an object."""
    schema = tool.function.parameters or {"type": "object", "additionalProperties": False}
    if schema.get("type") != "object":
        raise UserError(f"The parameters of {tool.name} are not a schema of the type 'object'.")
    return schema


class Reader:
    """Reads an answer piece by piece: text, and calls in `style`, as deltas of OpenAI's API."""

    def __init__(self, style: Style) -> None:
        self.style, self.count = style, 0  # calls that have begun
        self.inside = False  # a call that has not ended
        self._rest = ""  # not read yet
        self._begun = False  # some text has been read
        self._spaces = False  # nothing but white space since a call
        self._state = "text"
        self._depth, self._quoted, self._escaped = 0, False, False  # in the arguments

    def push(self, text: str, end: bool = False) -> list[dict[str, Any]]:
        """What `text` brings. end: it is the last."""
        self._rest += text
        deltas: list[dict[str, Any]] = []
        while (state := self._state) and getattr(self, f"_{state}")(deltas, end):
            pass
        return deltas

    # Each returns whether to go on in the new state; otherwise it needs more text.

    def _text(self, deltas: list[dict[str, Any]], end: bool) -> bool:
        style, rest = self.style, self._rest
        place = rest.find(style.first)
        if place < 0 or not style.trigger and (place or self._begun or self.count):
            place = len(rest) - (0 if end else overlap(rest, style.first))
        if content := rest[:place].lstrip() if self._spaces else rest[:place]:
            deltas.append({"content": content})
            self._begun, self._spaces = True, False
        self._rest = rest[place:]
        if not self._rest.startswith(style.first):
            return False
        self._rest, self._state, self.inside = self._rest[len(style.first) :], "name", True
        return True

    def _name(self, deltas: list[dict[str, Any]], end: bool) -> bool:
        name, middle = self._rest.partition('"')[0], self.style.middle
        rest = self._rest[len(name) :]
        if not rest.startswith(middle):
            if not self.count and (end or not middle.startswith(rest)):  # text after all
                deltas.append({"content": self.style.first + self._rest})
                self._rest, self._state, self.inside, self._begun = "", "text", False, True
            return False
        function = {"name": name, "arguments": ""}
        letters = os.urandom(12).hex()
        id = letters[:9] if self.style.short_ids else f"call_{letters}"
        call = {"id": id, "type": "function", "function": function}
        deltas.append({"tool_calls": [{"index": self.count, **call}]})
        self.count += 1
        self._rest, self._state = rest[len(middle) :], "arguments"
        return True

    def _arguments(self, deltas: list[dict[str, Any]], end: bool) -> bool:
        length = 0
        for letter in self._rest:
            length += 1
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth:
                self._state = "tail"
                break
        if length:
            function = {"arguments": self._rest[:length]}
            deltas.append({"tool_calls": [{"index": self.count - 1, "function": function}]})
        self._rest = self._rest[length:]
        return self._state == "tail"

    def _tail(self, deltas: list[dict[str, Any]], end: bool) -> bool:
        style = self.style
        if len(self._rest) < len(style.tail):
            return False
        self.inside, self._rest, self._spaces = False, self._rest[len(style.tail) :], True
        self._state = "following" if style.following else "text"
        return True

    def _following(self, deltas: list[dict[str, Any]], end: bool) -> bool:
        following, last = self.style.following, self.style.last
        if self._rest.startswith(following):
            self._rest, self._state, self.inside = self._rest[len(following) :], "name", True
            return True
        if self._rest.startswith(last):
            self._rest, self._state = self._rest[len(last) :], "text"
            return True
        return False


class ToolChat:
    """The chat format `chat` with calls: the text of each choice goes through its reader."""

    repeats = False

    def __init__(self, chat: Chat, style: Style) -> None:
        self.chat, self.style = chat, style
        self.readers = {choice.index: Reader(style) for choice in chat.choices}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        body = self.chat.whole(answers)
        for choice, answer in zip(body["choices"], answers, strict=True):
            reader, calls, content = Reader(self.style), list[dict[str, Any]](), ""
            for delta in reader.push(answer.text, end=True):
                content += delta.get("content", "")
                for part in delta.get("tool_calls", ()):
                    if "id" in part:
                        calls.append({name: part[name] for name in ("id", "type", "function")})
                    else:
                        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            if calls:
                choice["message"] |= {"content": content or None, "tool_calls": calls}
                choice["finish_reason"] = reason(reader, answer.finish_reason)
        return body

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        reader, done = self.readers[choice.index], piece.finish_reason is not None
        events = self.chat.chunks(choice, Piece("", piece.tokens))
        for delta in reader.push(piece.text, end=done):
            events.append(self.chat.chunk(choice, delta, Piece("", ())))
        if done:
            last = Piece("", (), reason(reader, piece.finish_reason), piece.stop_reason)
            events.append(self.chat.chunk(choice, {}, last))
        return events

    def last(self) -> list[dict[str, Any]]:
        return self.chat.last()


def reason(reader: Reader, finish_reason: str | None) -> str | None:
    """The finish reason of an answer that `reader` has read."""
    whole = reader.count and not reader.inside and finish_reason == "stop"
    return "tool_calls" if whole else finish_reason

"""Tools: how a model writes that it calls a function, and how OpenAI's API shows it.

A call is text, in the style that Hermes and Qwen write (FIRST, MIDDLE, TAIL). The same style is a
grammar, so a call's arguments are always valid for the function's schema, and a reader, which finds
the calls in the text piece by piece. A model whose own chat template shows tools sees them there,
as it was trained to; any other gets a message about them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import UserError
from stage06_serving.protocol import Message
from stage06_serving.text import overlap

from . import grammar

MOST_TOOLS = 128  # as OpenAI has it
NEWLINE = "\n"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
FIRST, MIDDLE, TAIL = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
TRIGGER = "<tool_call>"  # the beginning of FIRST, after which a call must follow
ABOUT = "You may call these functions:"
HOW = "To call one, answer with its name and its arguments:"
Tool = dict[str, Any]  # as clients send it


def schema_of(tool: Tool) -> dict[str, Any]:
    """Of a call's arguments. Raises UserError for a tool that is none."""
    function: Any = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            'A tool must be {"type": "function", "function": {"name": ...}}, with a name of at '
            "most 64 letters, digits, '_', '-' or '.'."
        )
    schema = function.get("parameters") or {"type": "object", "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise UserError(f"The parameters of {name} are not a schema of the type 'object'.")
    return schema


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


def answer(tools: Sequence[Tool], content: str | None, several: bool) -> str:
    """The grammar of an answer that calls tools, or is `content` instead: a rule, or "" for any
    text; None: it must call. several: whether it may call more than once. Raises UserError."""
    written = grammar.literal
    trigger, first = written(TRIGGER), written(FIRST.removeprefix(TRIGGER))
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        begin, schema = written(name_of(tool) + MIDDLE), grammar.of_schema(schema_of(tool))
        rules.append(f"call_{place}: {begin} {schema} {written(TAIL)}")
    more = f"({written(NEWLINE + FIRST)} call)*" if several else ""
    rules.append(f"calls: {trigger} {first} call {more}")
    if content is None:
        return grammar.start("calls", *rules)
    if content:
        return grammar.start("calls | content", f"content: {content}", *rules)
    rules += ["TEXT: /(?s:.*)/", f"begin[lazy]: TEXT {trigger}"]
    tagged = f"begin {first} call"
    return grammar.start(f"({tagged})* TEXT" if several else f"TEXT | {tagged}", *rules)


def blame(error: UserError, tools: Sequence[Tool], compiles: Callable[[str], object]) -> UserError:
    """Name the tool, and the property if one is at fault, that `error` is about. compiles: raises
    UserError for a grammar that cannot be enforced."""
    for tool in tools:
        schema = schema_of(tool)
        definitions = {key: part for key, part in schema.items() if key in ("$defs", "definitions")}
        properties = schema.get("properties")
        parts = [(f", property {n!r}", p) for n, p in (properties or {}).items()] + [("", schema)]
        for where, part in parts:
            try:
                if isinstance(part, dict):
                    compiles(grammar.start(grammar.of_schema(definitions | part)))
            except UserError as cause:
                return UserError(f"Tool {name_of(tool)!r}{where}: {cause}")
    return error


def written(calls: Sequence[Any]) -> str:
    """Calls of a message as the model writes them."""
    parts = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls
    ]
    return "\n".join(f"{FIRST}{name}{MIDDLE}{arguments}{TAIL}" for name, arguments in parts)


def shown(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages for a template that does not show tools: the system's message describes them,
    calls are text, and what a tool has answered is the user's."""
    plain: list[Message] = []
    for message in messages:
        role, content = message.role, message.text + written(message.plain.get("tool_calls", ()))
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        plain.append(Message(role=role, content=content))
    if tools:
        how = f"{HOW} {FIRST}NAME{MIDDLE}{{...}}{TAIL}"
        about = "\n".join([ABOUT, *map(json.dumps, tools), how])
        if plain[0].role in ("system", "developer"):
            about = f"{plain.pop(0).text}\n\n{about}"
        plain.insert(0, Message(role="system", content=about))
    return plain


class Reader:
    """Reads an answer piece by piece: text, and whole calls, as deltas of OpenAI's API. JSON has no
    line break within a text, so the first TAIL ends a call."""

    def __init__(self) -> None:
        self.count, self.inside = 0, False  # calls so far; whether the answer ended within one
        self._rest, self._spaces = "", False  # spaces: nothing else since a call

    def push(self, piece: str, end: bool = False) -> list[dict[str, Any]]:
        """What `piece` brings. end: it is the last."""
        self._rest += piece
        deltas: list[dict[str, Any]] = []
        while True:
            place = self._rest.find(FIRST)
            if place < 0:
                place = len(self._rest) - (0 if end else overlap(self._rest, FIRST))
            content, self._rest = self._rest[:place], self._rest[place:]
            if content := content.lstrip() if self._spaces else content:
                deltas.append({"content": content})
                self._spaces = False
            if TAIL not in self._rest and not (end and self._rest):
                return deltas
            call, tail, self._rest = self._rest.partition(TAIL)
            name, _, arguments = call.removeprefix(FIRST).partition(MIDDLE)
            head = {"index": self.count, "id": f"call_{os.urandom(12).hex()}", "type": "function"}
            function = {"name": name, "arguments": arguments}
            deltas.append({"tool_calls": [{**head, "function": function}]})
            self.count, self.inside, self._spaces = self.count + 1, not tail, True

    def reason(self, finish_reason: str | None) -> str | None:
        """The finish reason of an answer that was read."""
        whole = self.count and not self.inside and finish_reason == "stop"
        return "tool_calls" if whole else finish_reason

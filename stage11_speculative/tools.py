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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import UserError
from stage06_serving.protocol import Message
from stage06_serving.text import overlap

from . import grammar

MOST_TOOLS = 128  # as OpenAI has it
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
FIRST, MIDDLE, TAIL = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
TRIGGER = "<tool_call>"  # the beginning of FIRST, after which a call must follow
Tool = dict[str, Any]  # as clients send it
Schema = dict[str, Any]


def functions(tools: Sequence[Tool]) -> dict[str, Schema]:
    """The schema of each tool's arguments, by name. Raises UserError for a tool that is none."""
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function: Any = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not NAME.fullmatch(name):
            what = '{"type": "function", "function": {"name": ...}}'
            raise UserError(f"A tool must be {what}, its name at most 64 letters, digits, _-.")
        if name in schemas:
            raise UserError("two of them have the same name: give each its own")
        closed = {"type": "object", "additionalProperties": False}
        schemas[name] = function.get("parameters") or closed
        if not isinstance(schemas[name], dict) or schemas[name].get("type") != "object":
            raise UserError(f"The parameters of {name} are not a schema of the type 'object'.")
    return schemas


def answer(functions: Mapping[str, Schema], content: str | None, several: bool) -> str:
    """The grammar of an answer that calls functions, or is `content` instead: a rule, or "" for any
    text; None: it must call. several: whether it may call more than once. Raises UserError."""
    trigger, first, last = map(json.dumps, (TRIGGER, FIRST.removeprefix(TRIGGER), TAIL))
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        begin = json.dumps(name + MIDDLE)
        rules.append(f"call_{place}: {begin} {grammar.of_schema(schema)} {last}")
    again = json.dumps("\n" + FIRST)
    rules.append(f"calls: {trigger} {first} call " + (f"({again} call)*" if several else ""))
    if content is None:
        return grammar.start("calls", *rules)
    if content:
        return grammar.start("calls | content", f"content: {content}", *rules)
    rules += ["TEXT: /(?s:.*)/", f"begin[lazy]: TEXT {trigger}"]
    tagged = f"begin {first} call"
    return grammar.start(f"({tagged})* TEXT" if several else f"TEXT | {tagged}", *rules)


def blame(
    error: UserError, functions: Mapping[str, Schema], compiles: Callable[[str], object]
) -> UserError:
    """Name the tool, and the property if one is at fault, that `error` is about. compiles: raises
    UserError for a grammar that cannot be enforced."""
    for name, schema in functions.items():
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        properties = (schema.get("properties") or {}).items()
        parts = [(f", property {key!r}", part) for key, part in properties if type(part) is dict]
        for where, part in [*parts, ("", schema)]:
            try:
                compiles(grammar.start(grammar.of_schema(shared | part)))
            except UserError as cause:
                return UserError(f"Tool {name!r}{where}: {cause}")
    return error


def written(calls: Sequence[Any]) -> str:
    """Calls of a message as the model writes them."""
    functions = [call["function"] for call in calls]
    texts = [f"{f['name']}{MIDDLE}{json.dumps(f['arguments'])}" for f in functions]
    return "\n".join(f"{FIRST}{text}{TAIL}" for text in texts)


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
        how = "To call one, answer with its name and its arguments: "
        how += f"{FIRST}NAME{MIDDLE}{{...}}{TAIL}"
        about = "\n".join(["You may call these functions:", *map(json.dumps, tools), how])
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

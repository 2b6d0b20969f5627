"""Calls of tools as text: the grammar of an answer, its reader, and messages for any template."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import UserError
from stage06_serving.protocol import Message
from stage11_speculative.forms import ToolMessage
from stage11_speculative.grammar import of_schema
from stage11_speculative.tools import FIRST, MIDDLE, TAIL, Reader, answer, blame, functions, shown

from .test_grammar import at_once, byte_grammars
from .test_server import TOOLS, tool

__all__ = ["at_once"]

CALLS = [("weather", '{"city": "}\\"]", "days": 1}'), ("noon", "{}")]
TEXTS = [f"{FIRST}{name}{MIDDLE}{arguments}{TAIL}" for name, arguments in CALLS]
BOTH = "\n".join(TEXTS)


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of a text that arrives in pieces."""
    reader, content, calls = Reader(), "", list[tuple[str, str]]()
    for place, piece in enumerate(pieces):
        for delta in reader.push(piece, end=place == len(pieces) - 1):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(calls)
                calls.append((call["function"]["name"], call["function"]["arguments"]))
    return content, calls, reader.reason("stop")


@pytest.mark.parametrize(
    "text, want",
    [
        (BOTH, ("", CALLS, "tool_calls")),
        (f"Well: {TEXTS[0]}", ("Well: ", CALLS[:1], "tool_calls")),
        (f"{TEXTS[0]}\nAnd so on.", ("And so on.", CALLS[:1], "tool_calls")),
        ("a {b} <tool_call>", ("a {b} <tool_call>", [], "stop")),
        (TEXTS[0][:-20], ("", [("weather", CALLS[0][1][:-6])], "stop")),  # cut at max_tokens
        ("", ("", [], "stop")),
    ],
)
def test_a_text_is_read_alike_in_any_pieces(text, want):
    assert read([text]) == read([text, ""]) == read([*text, ""]) == want
    for place in range(len(text)):
        assert read([text[:place], text[place:]]) == want, place


@pytest.mark.parametrize(
    "content, several, text, valid",
    [
        (None, True, BOTH, True),
        (None, False, TEXTS[0], True),
        (None, False, BOTH, False),
        (None, True, "Well", False),
        ("", True, f"Well: {BOTH}\nSo", True),
        ("", True, "Well", True),
        ("", True, FIRST + "moon" + MIDDLE + "{}" + TAIL, False),
        ("", True, TEXTS[0].replace("1", "3"), False),
        (of_schema({"type": "integer"}), True, "7", True),
        (of_schema({"type": "integer"}), True, TEXTS[1], True),
        (of_schema({"type": "integer"}), True, "Well", False),
    ],
)
def test_an_answer_is_calls_or_what_it_may_be_instead(content, several, text, valid):
    matcher, data = (
        byte_grammars().compile(answer(functions(TOOLS), content, several)).deep_copy(),
        list(text.encode()),
    )
    accepted = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
    assert accepted == valid


HISTORY: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": n, "arguments": arguments}}
            for n, arguments in (CALLS[0], ("noon", ""))
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]


def test_a_template_without_tools_gets_them_in_the_one_message_of_the_system():
    messages = [ToolMessage.model_validate(message) for message in HISTORY]
    system, user, calls, result = shown(messages, TOOLS)
    assert system.role == "system" and system.text.startswith("Be brief.\n\n")
    assert '"days"' in system.text and system.text.endswith(f"{FIRST}NAME{MIDDLE}{{...}}{TAIL}")
    assert (user.role, user.text) == ("user", "How is it?")
    assert (calls.role, calls.text) == ("assistant", BOTH)
    assert (result.role, result.text) == ("user", "<tool_response>\nsunny\n</tool_response>")
    first, second = shown([Message(role="user", content="x")], TOOLS)
    assert (first.role, second.role) == ("system", "user")
    assert [m.text for m in shown([Message(role="user", content="x")], ())] == ["x"]


def test_a_template_of_the_model_gets_arguments_as_objects():
    plain = ToolMessage.model_validate(HISTORY[2]).plain["tool_calls"]
    assert [call["function"]["arguments"] for call in plain] == [{"city": '}"]', "days": 1}, {}]


def test_the_tool_and_the_property_at_fault_are_named():
    tools = [tool("one", a={"type": "string"}), tool("two", a={}, b={"uniqueItems": True})]
    with pytest.raises(UserError) as raised:
        byte_grammars().compile(answer(functions(tools), None, True))
    error = blame(raised.value, functions(tools), byte_grammars().compile)
    assert "Tool 'two', property 'b': " in str(error) and "uniqueItems" in str(error)
    whole = tool("three", a={"$ref": "#/$defs/x"})
    whole["function"]["parameters"] |= {"$defs": {"x": {"type": "integer"}}, "not": {}}
    assert str(blame(raised.value, functions([whole]), byte_grammars().compile)).startswith(
        "Tool 'three': "
    )

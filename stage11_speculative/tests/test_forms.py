"""Answers in a given form from a real server, by OpenAI's client. The model knows only stories, so
these are about form, not sense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel, Field

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage05_paged.engine import make
from stage06_serving.engines import Paged
from stage06_serving.errors import failure
from stage06_serving.tests.asking import CHAT, GREEDY, chat, complete, joined, post
from stage06_serving.tests.conftest import FEW_BLOCKS, serving
from stage06_serving.tests.tools import started, until
from stage11_speculative import grammar

from .test_grammar import TOKENIZER, grammars, the_model

CHATS = "/v1/chat/completions"
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 5, "max_completion_tokens": 200}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "noon"}},
]


class Fox(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    colour: Literal["red", "grey"]
    hungry: bool


# pydantic writes that other properties are allowed, which a small model uses for ever.
FOX = {**Fox.model_json_schema(), "additionalProperties": False}


def formed(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": value, **more}}


def extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": fields}}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving(*FEW_BLOCKS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_the_client_parses_an_answer_into_a_class(client):
    answer = client.chat.completions.parse(
        model="stories", messages=CHAT, response_format=Fox, temperature=0
    )
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Fox) and choice.finish_reason == "stop"
    with client.chat.completions.stream(
        model="stories", messages=CHAT, response_format=Fox, temperature=0
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_samples_differ_and_all_have_the_form(client):
    answer = chat(client, response_format=formed(FOX), n=4, **SAMPLED)
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts}) > 1
    for text in texts:
        Fox.model_validate_json(text)


@pytest.mark.parametrize(
    "fields, texts",
    [
        ({"regex": "(ab){2}c"}, ["ababc"]),
        ({"choice": ["yes", 'a "no"\n']}, ["yes", 'a "no"\n']),
        ({"grammar": 'start: "a" /[0-9]/ "b"'}, [f"a{digit}b" for digit in range(10)]),
        ({"grammar": 'root ::= "x" | "y"'}, ["x", "y"]),
        ({"json": {"enum": [[1, {"a": None}]]}}, ['[1, {"a": null}]']),
    ],
    ids=str,
)
def test_vllm_s_structured_outputs(client, fields, texts):
    answer = complete(client, max_tokens=40, **extra(**fields))
    assert answer.choices[0].text in texts and answer.choices[0].finish_reason == "stop"
    answer = chat(client, max_completion_tokens=40, **extra(**fields))
    assert answer.choices[0].message.content in texts


def test_what_cannot_be_kept_is_refused_and_other_streams_go_on(client, server):
    stream = chat(client, stream=True, max_completion_tokens=40)
    begun = next(stream)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": formed({"not": {}})}, "Unimplemented keys"),
        ({"response_format": formed({"enum": []})}, "nsatisfiable"),
        ({"response_format": formed({"$ref": "#"})}, "enforced"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema'"),
        ({"response_format": {"type": "xml"}}, "json_object"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"grammar": "start: rule"}}, "rule"),
        ({"structured_outputs": {"grammar": "%%%"}}, ""),
        ({"structured_outputs": {"choice": []}}, ""),
        ({"structured_outputs": {"structural_tag": "x"}}, "only json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "one of"),
        ({"min_tokens": 3, "response_format": {"type": "json_object"}}, "leave"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "leave"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ""),
        ({"tools": TOOLS * 500}, "128"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "same name"),
        ({"tool_choice": "required"}, "no 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "'x'"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"type": "string"}},
                    }
                ]
            },
            "object",
        ),
    ]
    for fields, words in cases:
        answer = post(server, CHATS, json={"messages": CHAT, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(fields))), error
        assert words in error["message"] and "\n" not in error["message"], error
    text = joined([begun, *stream])
    assert text == chat(client, max_completion_tokens=40).choices[0].message.content


def test_grammars_that_explode_cost_others_nothing(client, server):
    """Each is refused, or its answers end; the server is as alive as before."""
    many = {f"p{i}": {"$ref": "#/$defs/node"} for i in range(60)}
    node = {"type": "object", "properties": many, "additionalProperties": False}
    refused = 0
    for fields in (
        {"structured_outputs": {"regex": "(x{1,1000}){1,1000}y"}},
        {"structured_outputs": {"regex": "(a|aa|b)*" * 200 + "z{9,9999}"}},
        {"structured_outputs": {"regex": "(?:[ab]*a[ab]{200})"}},
        {"response_format": formed({"$defs": {"node": node}, "$ref": "#/$defs/node"})},
        {"response_format": formed({"type": "array", "minItems": 10**6})},
        {"response_format": formed({"allOf": [{"pattern": f"a.*{i}"} for i in range(40)]})},
    ):
        answer = post(server, CHATS, json={"messages": CHAT, "max_completion_tokens": 8, **fields})
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code != 200:
            assert "\n" not in answer.json()["error"]["message"]
            refused += "too much work" in answer.text
        assert chat(client).choices[0].message.content
    assert refused


def test_a_grammar_whose_parser_fails_at_a_later_token_is_the_client_s_error():
    """The official client would send a request with status 500 again."""

    def broken(request: Any) -> None:
        grammar.Form(grammars(), grammar.regex("[ab]{9}"))(request)
        request.row.matcher.consume_token(TOKENIZER.eos_id or 0)  # which it does not allow

    async def error() -> Exception:
        engine: Any = Paged(make(the_model(), 1, observers=[grammar.Ahead()]))
        async with started(engine) as running:
            ((ticket,),) = running.submit([[1, 2]], [SamplingParams()], prepare=broken)
            await until(lambda: ticket.ended)
            with pytest.raises(UserError) as raised:
                running.read(ticket)
            return raised.value

    answer = failure(asyncio.run(error()))
    assert answer.status == 400 and "too much work for a token" in answer.message
    assert "\n" not in answer.message


def test_a_schema_is_enforced_strict_or_not(client):
    """What OpenAI calls strict is the only way here."""
    texts = {
        chat(client, response_format=formed(FOX, **strict), **SAMPLED).choices[0].message.content
        for strict in ({}, {"strict": False}, {"strict": True}, {"strict": None})
    }
    assert len(texts) == 1
    Fox.model_validate_json(texts.pop())
    tool = {"type": "function", "function": {**WEATHER, "strict": False}}
    answer = chat(client, tools=[tool], tool_choice="required", **SAMPLED)
    assert called(answer.choices[0].message)
    with pytest.raises(openai.BadRequestError, match="valid boolean"):
        chat(client, response_format=formed(FOX, strict="yes"))


def test_any_json_object(client):
    """Those that end; a small model fills strings for ever."""
    (end,) = TOKENIZER.encode("}")
    options: Any = SAMPLED | {"n": 8, "logit_bias": {str(end): 6}}
    answer = chat(client, response_format={"type": "json_object"}, **options)
    ended = [it.message.content for it in answer.choices if it.finish_reason == "stop"]
    assert len(ended) >= 2
    assert all(isinstance(json.loads(text), dict) for text in ended)


def called(message: Any) -> list[tuple[str, Any]]:
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    for name, arguments in calls:
        jsonschema.validate(
            arguments, WEATHER["parameters"] if name == "weather" else {"maxProperties": 0}
        )
    return calls


def test_tools_are_called_where_they_must_be(client):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = chat(client, tools=TOOLS, tool_choice=choice, **SAMPLED).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        calls = called(answer.message)
        assert calls and (choice == "required" or {name for name, _ in calls} == {"weather"})
    one = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLED)
    assert len(called(one.choices[0].message)) == 1
    for choice in ("auto", "none"):
        free = chat(client, tools=TOOLS, tool_choice=choice).choices[0]
        assert free.message.content and not free.message.tool_calls


def test_calls_are_streamed_as_openai_sends_them(client):
    options: Any = dict(tools=TOOLS, tool_choice="required", **SAMPLED)
    whole = chat(client, **options).choices[0].message
    choices = [chunk.choices[0] for chunk in chat(client, stream=True, **options)]
    assert choices[0].delta.role == "assistant"
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    begins = [part for part in parts if part.id]
    assert [part.function.name for part in begins] == [name for name, _ in called(whole)]
    assert [part.index for part in begins] == list(range(len(begins)))
    assert all(part.id.startswith("call_") and part.type == "function" for part in begins)
    for index, call in enumerate(whole.tool_calls):
        arguments = "".join(part.function.arguments for part in parts if part.index == index)
        assert arguments == call.function.arguments
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_what_a_tool_answers_goes_back_into_the_prompt(client):
    call = {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}
    history = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    options: Any = {"tools": TOOLS, "max_completion_tokens": 1}
    counted = [
        client.chat.completions.create(messages=messages, **GREEDY, **options).usage.prompt_tokens
        for messages in (CHAT, history[:2], history)
    ]
    assert counted[0] < counted[1] < counted[2]
    assert counted[0] > chat(client).usage.prompt_tokens + 20  # the tools are described

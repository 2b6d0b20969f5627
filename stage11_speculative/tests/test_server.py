"""A server with drafts, asked by OpenAI's client: the answers of one without them; and answers in a
given form, from a draft model's server too. The model knows only stories, so those are about form,
not sense."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx2
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel, Field

from shared.server import OwnServer, own_server

STORY = "Once upon a time there was a small fox called Pim. Once upon a time there was"
CHAT: Any = [{"role": "user", "content": "Tell me a story."}]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "n": 2},
    {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0, "stop": [". The", " fox c"]},
    {"temperature": 0, "logit_bias": {"13": -100}, "extra_body": {"min_tokens": 20}},
]
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
SMALL = ["--kv-memory", "8MiB", "--threads", "1"]
DRAFT = ["--speculate", "draft", "--speculative-model", "stories-draft"]


class Fox(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    colour: Literal["red", "grey"]
    hungry: bool


# pydantic writes that other properties are allowed, which a small model uses for ever.
FOX = {**Fox.model_json_schema(), "additionalProperties": False}


@pytest.fixture(scope="module")
def plain() -> Iterator[OwnServer]:
    with own_server(SMALL, quiet=True) as server:
        yield server


@pytest.fixture(scope="module")
def drafting() -> Iterator[OwnServer]:
    options = [*DRAFT, "--num-speculative-tokens", "3", *SMALL]
    with own_server(options, quiet=True) as server:
        yield server


@pytest.fixture(params=["plain", "drafting"])
def client(request: Any) -> Iterator[openai.OpenAI]:
    with client_of(request.getfixturevalue(request.param)) as client:
        yield client


def client_of(server: OwnServer) -> openai.OpenAI:
    url = f"{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def chat(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    options = {"model": "stories", "temperature": 0, "max_completion_tokens": 8, **fields}
    return client.chat.completions.create(messages=messages, **options)


def answers(server: OwnServer) -> list[Any]:
    """Each request twice, so that past answers can draft the second; the last as a stream."""
    fields: Any = {"model": "stories", "prompt": STORY, "max_tokens": 60}
    texts: list[Any] = []
    with client_of(server) as client:
        for more in [*ASKED, *ASKED]:
            choices = client.completions.create(**fields, **more).choices
            scores = [c.logprobs and c.logprobs.token_logprobs for c in choices]
            texts.append([[c.text, c.finish_reason] for c in choices] + [scores])
        stream = client.completions.create(**fields, temperature=0, stream=True)
        texts.append("".join(chunk.choices[0].text for chunk in stream))
    return texts


def counts(server: OwnServer) -> dict[str, float]:
    """The samples about drafts."""
    text = httpx2.get(f"{server.url}/metrics").text
    samples = re.findall(r"^\w+:spec_decode_(\w+)\{.*?\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


def test_answers_are_those_without_drafts_and_the_counts_agree(plain, drafting):
    assert answers(drafting) == answers(plain)
    numbers = counts(drafting)
    accepted, proposed = numbers["num_accepted_tokens_total"], numbers["num_draft_tokens_total"]
    assert 0 < accepted <= proposed <= 3 * numbers["num_drafts_total"]
    assert not counts(plain)


def formed(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": value, **more}}


def test_the_client_parses_an_answer_into_a_class(client):
    asked: Any = {"model": "stories", "messages": CHAT, "response_format": Fox, "temperature": 0}
    (choice,) = client.chat.completions.parse(**asked).choices
    assert isinstance(choice.message.parsed, Fox) and choice.finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_samples_differ_and_all_have_the_form(client):
    for strict in ({}, {"strict": False}):  # what OpenAI calls strict is the only way here
        answer = chat(client, response_format=formed(FOX, **strict), n=4, **SAMPLED)
        texts = [choice.message.content for choice in answer.choices]
        assert len({*texts}) > 1
        for text in texts:
            Fox.model_validate_json(text)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": formed({"not": {}})}, "Unimplemented keys"),
    ({"response_format": {"type": "json_schema"}}, "'json_schema'"),
    ({"structured_outputs": {"regex": "a"}}, "'response_format'"),
    ({"min_tokens": 3, "response_format": {"type": "json_object"}}, "leave"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "its name"),
    ({"tools": TOOLS * 65}, "128"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "same name"),
    ({"tool_choice": "required"}, "one of the 'tools'"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "weather"),
    ({"tools": [tool("one", a={}), tool("two", b={"not": {}})]}, "'two', property 'b': The form"),
    (
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
        "as they were sent",
    ),
]


def test_what_cannot_be_kept_is_refused_in_a_sentence(drafting):
    for fields, words in BAD:
        answer = httpx2.post(
            f"{drafting.url}/v1/chat/completions", json={"messages": CHAT, **fields}, timeout=60
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(fields))), error
        assert words in error["message"] and "\n" not in error["message"], error


def called(message: Any) -> list[tuple[str, Any]]:
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
    for name, arguments in calls:
        schema = WEATHER["parameters"] if name == "weather" else {"maxProperties": 0}
        jsonschema.validate(arguments, schema)
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
    assert [part.index for part in parts] == list(range(len(parts)))
    assert all(part.id.startswith("call_") and part.type == "function" for part in parts)
    streamed = [(part.function.name, part.function.arguments) for part in parts]
    assert streamed == [(c.function.name, c.function.arguments) for c in whole.tool_calls]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_what_a_tool_answers_goes_back_into_the_prompt(client):
    call = {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}
    calls = [{"id": "a", "type": "function", "function": call}]
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    options: Any = {"tools": TOOLS, "max_completion_tokens": 1}
    counted = [
        chat(client, messages, **options).usage.prompt_tokens
        for messages in (CHAT, history[:2], history)
    ]
    assert counted[0] < counted[1] < counted[2]
    assert counted[0] > chat(client).usage.prompt_tokens + 20  # the tools are described

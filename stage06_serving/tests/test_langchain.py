"""LangChain's two clients: the chat model, and the older one that sends lists of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI

from stage06_serving.tests.asking import GREEDY, OTHER, PROMPT, chat, complete, first

QUESTION = "Tell me a story."
PROMPTS = [PROMPT, OTHER, "In the village"]


@pytest.fixture(scope="module")
def options(server) -> dict[str, Any]:
    server_options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    return {**GREEDY, **server_options, "max_tokens": 8}


@pytest.fixture(scope="module")
def model(options) -> ChatOpenAI:
    return ChatOpenAI(**options)


@pytest.fixture(scope="module")
def llm(options) -> OpenAI:
    return OpenAI(**options)


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI) -> str:
    """The answer to QUESTION that OpenAI's own client gets."""
    return chat(client).choices[0].message.content


def test_chat_invoke_and_stream(model, expected):
    answer = model.invoke([("system", "Be kind."), ("human", QUESTION)])
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 8
    assert model.invoke(QUESTION).content == expected
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 5
    assert sum(one.usage_metadata["output_tokens"] for one in chunks if one.usage_metadata) == 8

    async def talk() -> tuple[str, str]:
        whole = await model.ainvoke(QUESTION)
        return whole.content, "".join([chunk.content async for chunk in model.astream(QUESTION)])

    assert asyncio.run(talk()) == (expected, expected)
    answers = model.batch([QUESTION, "Who are you?", QUESTION])
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [8] * 3


def test_chat_stop_and_logprobs(model, expected):
    word = expected.split()[2]
    answer = model.invoke(QUESTION, stop=[word])
    assert answer.content == expected[: expected.index(word)]
    assert answer.response_metadata["finish_reason"] == "stop"
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == expected
    assert len(content[0]["top_logprobs"]) == 2


def test_llm_sends_a_list_of_prompts_at_once(llm, client, server, metrics):
    texts = [first(client, prompt).text for prompt in PROMPTS]
    assert llm.invoke(PROMPT) == texts[0] == "".join(llm.stream(PROMPT))
    before = metrics(server.url)["vllm:e2e_request_latency_seconds_count"]
    result = llm.generate(PROMPTS)
    assert [generations[0].text for generations in result.generations] == texts
    assert result.llm_output["token_usage"]["completion_tokens"] == 24
    assert metrics(server.url)["vllm:e2e_request_latency_seconds_count"] == before + 3


def test_llm_finds_the_samples_of_each_prompt(options, client):
    """It slices choices[i * n : (i + 1) * n]."""
    sampling: Any = {"temperature": 1, "n": 2, "seed": 9}
    result = OpenAI(**options | sampling, best_of=2).generate(PROMPTS[:2])
    for prompt, generations in zip(PROMPTS, result.generations, strict=False):
        alone = [choice.text for choice in complete(client, prompt, **sampling).choices]
        assert [one.text for one in generations] == alone


def test_errors_are_those_of_the_openai_package(model, llm):
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tool = {"name": "rain", "description": "makes rain", "parameters": parameters}
    with pytest.raises(openai.BadRequestError):
        model.bind(max_tokens=-1).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError):
        llm.invoke("")
    with pytest.raises(openai.BadRequestError, match="tools"):
        model.bind_tools([tool]).invoke(QUESTION)

"""LangChain's two clients: the chat model, and the older one that sends lists of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "Tell me a story."
PROMPTS = ["Once upon a time", "The old fox", "In the village"]


@pytest.fixture(scope="module")
def options(server) -> dict[str, Any]:
    return {
        "model": "stories",
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }


@pytest.fixture(scope="module")
def chat(options) -> ChatOpenAI:
    return ChatOpenAI(**options | {"max_tokens": 10})


@pytest.fixture(scope="module")
def llm(options) -> OpenAI:
    return OpenAI(**options, max_tokens=10)


@pytest.fixture(scope="module")
def said(client: openai.OpenAI) -> dict[str, str]:
    """What OpenAI's own client is told."""
    fields: dict[str, Any] = {"model": "stories", "temperature": 0, "max_tokens": 10}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], **fields
    )
    return {QUESTION: answer.choices[0].message.content or ""} | {
        prompt: client.completions.create(prompt=prompt, **fields).choices[0].text
        for prompt in PROMPTS
    }


def test_chat_invoke(chat, said):
    answer = chat.invoke([("system", "Be kind."), ("human", QUESTION)])
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 10
    assert chat.invoke(QUESTION).content == said[QUESTION]


def test_chat_stream(chat, said):
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == said[QUESTION] and len(chunks) > 5
    with_usage = list(chat.stream(QUESTION, stream_usage=True))
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in with_usage if chunk.usage_metadata)
        == 10
    )


def test_chat_batch(chat):
    answers = chat.batch([QUESTION, "Who are you?", QUESTION])
    assert len(answers) == 3 and all(
        answer.usage_metadata["output_tokens"] == 10 for answer in answers
    )


def test_chat_stop_and_logprobs(chat, said):
    word = said[QUESTION].split()[2]
    answer = chat.invoke(QUESTION, stop=[word])
    assert (
        answer.content == said[QUESTION][: said[QUESTION].index(word)]
        and answer.response_metadata["finish_reason"] == "stop"
    )
    content = (
        chat.bind(logprobs=True, top_logprobs=2)
        .invoke(QUESTION)
        .response_metadata["logprobs"]["content"]
    )
    assert (
        "".join(each["token"] for each in content) == said[QUESTION]
        and len(content[0]["top_logprobs"]) == 2
    )


def test_chat_asynchronous(chat, said):
    async def talk() -> tuple[str, str]:
        whole = await chat.ainvoke(QUESTION)
        return whole.content, "".join([chunk.content async for chunk in chat.astream(QUESTION)])

    assert asyncio.run(talk()) == (said[QUESTION], said[QUESTION])


def test_llm_invoke_and_stream(llm, said):
    assert llm.invoke(PROMPTS[0]) == said[PROMPTS[0]] == "".join(llm.stream(PROMPTS[0]))


def test_llm_sends_a_list_of_prompts_at_once(llm, said, server, metrics):
    before = metrics(server.url)["vllm:e2e_request_latency_seconds_count"]
    result = llm.generate(PROMPTS)
    assert [generations[0].text for generations in result.generations] == [
        said[prompt] for prompt in PROMPTS
    ]
    assert result.llm_output["token_usage"]["completion_tokens"] == 30
    assert metrics(server.url)["vllm:e2e_request_latency_seconds_count"] == before + 3


def test_llm_finds_the_samples_of_each_prompt(options, client):
    """It slices choices[i * n : (i + 1) * n]."""
    llm = OpenAI(**{**options, "temperature": 1}, max_tokens=8, n=2, best_of=2, seed=9)
    result = llm.generate(PROMPTS[:2])
    for prompt, generations in zip(PROMPTS, result.generations, strict=False):
        alone = client.completions.create(
            model="stories", prompt=prompt, temperature=1, max_tokens=8, n=2, seed=9
        )
        assert [each.text for each in generations] == [choice.text for choice in alone.choices]


def test_errors_are_those_of_the_openai_package(chat, llm):
    with pytest.raises(openai.BadRequestError):
        chat.bind(max_tokens=-1).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError):
        llm.invoke("")
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools(
            [
                {
                    "name": "rain",
                    "description": "makes rain",
                    "parameters": {"type": "object", "properties": {}},
                }
            ]
        ).invoke(QUESTION)

"""/v1/chat/completions through OpenAI's own client, and /generate, which is plain."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from stage06_serving.tests import asking
from stage06_serving.tests.asking import PROMPT, TOKENIZER, TOKENS, chat, complete, counts, first

QUESTION = "Tell me a story."


def test_a_chat_completion_has_the_fields_that_the_client_reads(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "stories")
    assert choice.message.role == "assistant" and choice.message.content and choice.logprobs is None
    assert (choice.index, choice.finish_reason) == (0, "length")
    prompt, completion, total = counts(answer)
    assert prompt > 4 and completion == TOKENS and total == prompt + TOKENS


def test_a_chat_is_the_completion_of_its_template(client):
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "narrator", "content": "It rains.", "name": "Mira"},
    ]
    prompt = "System: Be kind.\nUser: Tell me\na story.\nAssistant: \nNarrator: It rains.\n"
    answer = chat(client, messages)
    assert answer.choices[0].message.content == first(client, prompt + "Assistant:").text
    assert counts(answer)[0] == len(TOKENIZER.encode(prompt + "Assistant:"))


def test_max_completion_tokens_wins_and_the_rest_of_the_context_is_the_default(client):
    assert counts(chat(client, max_tokens=3))[1] == TOKENS
    assert counts(chat(client, max_tokens=3, max_completion_tokens=None))[1] == 3
    long = TOKENIZER.decode(TOKENIZER.encode("once upon a time " * 300)[:960])
    messages = [{"role": "user", "content": long}]
    answer = chat(client, messages, max_completion_tokens=None, extra_body=asking.IGNORE)
    assert counts(answer)[2] == 1024 and answer.choices[0].finish_reason == "length"


def test_the_first_chunk_of_each_choice_has_the_role(client):
    fields = {"n": 2, "temperature": 1, "seed": 4}
    whole = chat(client, **fields)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    heads = {(chunk.id, chunk.created, chunk.object) for chunk in chunks}
    assert heads == {(chunks[0].id, chunks[0].created, "chat.completion.chunk")}
    assert chunks[0].id.startswith("chatcmpl-")
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        role, *rest = [choice.delta.role for choice in mine]
        assert (role, mine[0].delta.content) == ("assistant", "") and not any(rest)
        reasons = [choice.finish_reason for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert asking.joined(chunks, index) == whole.choices[index].message.content


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}


@pytest.mark.parametrize(
    "messages",
    [
        *([], "hello", ["hello"], [{"content": "hello"}], [{"role": "", "content": "hello"}]),
        *([{"role": "user", "content": content}] for content in (5, [IMAGE], [{"type": "text"}])),
    ],
)
def test_invalid_messages_are_refused(client, messages):
    """An image is a URL that the server would fetch (CVE-2026-22773)."""
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, messages)
    assert refusal.value.param == "messages"


def test_generate(server, client):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    whole = asking.post(server, "/generate", json=body).json()
    usage = complete(client).usage.model_dump(exclude_none=True)
    assert whole == {"text": first(client).text, "finish_reason": "length", "usage": usage}
    *lines, done, _ = asking.post(server, "/generate", json=body | {"stream": True}).text.split(
        "\n\n"
    )
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["text"] for event in events) == whole["text"] and len(events) > 3
    assert events[-1]["finish_reason"] == "length" and events[-1]["usage"] == usage


# ---- LangChain -----------------------------------------------------------------------------------


def test_langchain_s_chat_model(server, client):
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none"}
    options |= {"max_retries": 0, "max_tokens": 8, **asking.GREEDY}
    model: Any = ChatOpenAI(**options)
    expected = chat(client).choices[0].message.content
    answer = model.invoke([("system", "Be kind."), ("human", QUESTION)])
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 8
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 5
    assert sum(one.usage_metadata["output_tokens"] for one in chunks if one.usage_metadata) == 8
    word = expected.split()[2]
    answer = model.invoke(QUESTION, stop=[word])
    assert answer.content == expected[: expected.index(word)]
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer.content == expected
    tool = {"name": "rain", "description": "makes rain", "parameters": {"type": "object"}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        model.bind_tools([tool]).invoke(QUESTION)

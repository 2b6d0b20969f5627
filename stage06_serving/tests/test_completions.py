"""/v1/completions, /v1/chat/completions and /generate through OpenAI's own client and plain HTTP:
prompts, sampling, stops, streams, chats, and the endpoints beside them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import openai
import pytest

from .tools import OTHER, PROMPT, TOKENIZER, TOKENS, chat, complete, counts, events, first

IGNORE: dict[str, Any] = {"ignore_eos": True}


def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(client):
    """The answer has the fields that the client reads."""
    before, ids, other = int(time.time()), TOKENIZER.encode(PROMPT), TOKENIZER.encode(OTHER)
    answer = complete(client)
    (choice,), text = answer.choices, answer.choices[0].text
    assert answer.id.startswith("cmpl-") and complete(client).id != answer.id
    assert (answer.object, answer.model) == ("text_completion", "stories")
    assert before <= answer.created <= time.time() and text and PROMPT not in text
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert counts(answer) == (4, TOKENS, 4 + TOKENS) and "token_ids" not in choice.model_dump()
    for prompt in (ids, [PROMPT], [ids]):
        assert [choice.text for choice in complete(client, prompt).choices] == [text]
    both = complete(client, [other, ids])
    assert [choice.text for choice in both.choices] == [first(client, OTHER).text, text]


def test_choices_are_prompt_major(client):
    """LangChain slices them as choices[i * n : (i + 1) * n]."""
    fields = {"n": 3, "temperature": 2, "seed": 5}
    both = complete(client, [PROMPT, OTHER], **fields)
    alone = [complete(client, prompt, **fields) for prompt in (PROMPT, OTHER)]
    texts = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices] == texts and len(set(texts)) == 6
    prompts = len(TOKENIZER.encode(PROMPT)) + len(TOKENIZER.encode(OTHER))
    assert counts(both)[:2] == (prompts, 6 * TOKENS)  # a prompt counts once


def test_the_default_limits(client):
    """Sixteen tokens, and in a chat the rest of the context."""
    assert counts(complete(client, max_tokens=None, extra_body=IGNORE))[1] == 16
    assert counts(chat(client, max_tokens=3))[1] == TOKENS  # the other limit wins
    assert counts(chat(client, max_tokens=3, max_completion_tokens=None))[1] == 3
    text = TOKENIZER.decode(TOKENIZER.encode("once upon a time " * 300)[:960])
    messages = [{"role": "user", "content": text}]
    answer = chat(client, messages, max_completion_tokens=None, extra_body=IGNORE)
    assert counts(answer)[2] == 1024 and answer.choices[0].finish_reason == "length"


def test_a_token_may_end_the_text(client):
    """The end-of-text token has no text, but it counts."""
    for body, want in (
        ({}, (False, "stop", 1)),
        ({"ignore_eos": True}, (False, "length", TOKENS)),
        ({"min_tokens": 3}, (True, "stop", 4)),
    ):
        answer = complete(client, logit_bias={str(TOKENIZER.eos_id): 100}, extra_body=body)
        (choice,) = answer.choices
        assert (bool(choice.text), choice.finish_reason, counts(answer)[1]) == want
    ids = TOKENIZER.encode(first(client).text)
    choice = first(client, extra_body={"stop_token_ids": [ids[5]]})
    stopped = TOKENIZER.decode(ids[: ids.index(ids[5]) + 1])
    assert (choice.finish_reason, choice.text) == ("stop", stopped)


def test_a_stop_string_ends_the_text_before_it(client):
    """test_text.py shows what `min_tokens` means."""
    whole = first(client, max_tokens=16).text
    stop = whole[9:13]
    before = whole[: whole.index(stop)]
    for stops, want in (
        (stop, (before, "stop")),
        (["never seen", stop, whole[14:17]], (before, "stop")),
        ("never seen", (whole, "length")),
    ):
        choice = first(client, max_tokens=16, stop=stops)
        assert (choice.text, choice.finish_reason) == want
        chunks = [*complete(client, max_tokens=16, stop=stops, stream=True)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert (text, chunks[-1].choices[0].finish_reason) == want


@pytest.mark.parametrize("ask", [complete, chat])
def test_usage_comes_last_and_only_on_request(client, ask):
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        *chunks, last = ask(client, stream=True, stream_options=options)
        wanted = bool(options and options.get("include_usage"))
        assert not any(chunk.usage for chunk in chunks) and bool(last.usage) == wanted
        if wanted:
            assert last.choices == [] and last.id == chunks[0].id
            assert chunks[-1].choices[0].finish_reason and counts(last)[1] == TOKENS


def test_a_chat_is_the_completion_of_its_template(client):
    parts = ("Tell me", "a story.")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": text} for text in parts]},
        {"role": "assistant", "content": None},
        {"role": "narrator", "content": "It rains.", "name": "Mira"},
    ]
    prompt = "System: Be kind.\nUser: Tell me\na story.\nAssistant: \nNarrator: It rains.\n"
    answer, same = chat(client, messages), complete(client, prompt + "Assistant:")
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "stories")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.message.role == "assistant" and choice.message.content == same.choices[0].text
    assert counts(answer) == counts(same)


def test_the_first_chunk_of_each_choice_has_the_role(client):
    fields = {"n": 2, "temperature": 1, "seed": 4}
    whole, chunks = chat(client, **fields), list(chat(client, stream=True, **fields))
    heads = {(chunk.id, chunk.created, chunk.object) for chunk in chunks}
    assert heads == {(chunks[0].id, chunks[0].created, "chat.completion.chunk")}
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        role, *rest = [choice.delta.role for choice in mine]
        assert (role, mine[0].delta.content) == ("assistant", "") and not any(rest)
        *before, last = [choice.finish_reason for choice in mine]
        assert last == "length" and not any(before)
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == whole.choices[index].message.content


def test_generate(server, client):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    whole = server.post("/generate", json=body).json()
    assert (whole["text"], whole["finish_reason"]) == (first(client).text, "length")
    assert whole["usage"]["completion_tokens"] == TOKENS
    stream = events(server.post("/generate", json=body | {"stream": True}).text)
    assert "".join(event["text"] for event in stream) == whole["text"]
    assert stream[-1].keys() == whole.keys() and stream[-1]["finish_reason"] == "length"


def test_the_model_is_listed_and_no_other_is_found(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("stories", "model", "staircase")
    assert isinstance(model.created, int) and model.max_model_len == 1024
    retrieve = client.models.retrieve
    assert retrieve("stories") == model
    for asking in (
        *(partial(retrieve, name) for name in ("gpt-5", "folder/name")),
        *(partial(one, client, model="gpt-5") for one in (complete, chat)),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist") as refusal:
            asking()
        assert refusal.value.param == "model"
    assert server.post("/tokenize", json={"prompt": "a", "model": "gpt-5"}).status_code == 404


def test_text_to_tokens(server):
    text = "Once, 日本 😀\nthe end <|endoftext|>"
    tokens = TOKENIZER.encode(text)
    body = server.post("/tokenize", json={"prompt": text}).json()
    assert body == {"count": len(tokens), "max_model_len": 1024, "tokens": tokens}
    assert server.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    refused = server.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})
    assert refused.json()["error"]["param"] == "add_special_tokens"

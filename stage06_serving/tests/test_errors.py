"""Errors and warnings, and the endpoints beside those that answer with text."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest

from .asking import CHAT, PROMPT, TOKENIZER, ask, chat, complete, first, get, post

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
CONTENTS: list[Any] = [5, [{}]]
TOO_MANY: list[Any] = [["a"] * 1025, [[5]] * 1025]
EMPTY: list[Any] = ["", " \n ", [], [[]], [""], [PROMPT, ""]]  # CVE-2024-8768: it ended the engine


# ---- fields -------------------------------------------------------------------------------------


def test_unknown_and_empty_fields_are_ignored(client):
    plain = first(client).text
    extra = {"mirostat": 2, "store": True, "metadata": {"a": "b"}, "tools": [], "suffix": ""}
    extra |= {"response_format": {"type": "text"}}
    assert first(client, user="a name", best_of=10**9, n=1, extra_body=extra).text == plain
    null: dict[str, Any] = dict.fromkeys(("logprobs", "n", "seed", "top_p", "logit_bias", "echo"))
    assert first(client, **null).text == plain


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ECHO = {"max_tokens": 0, "echo": True}
MANY = {"logprobs": 20, "prompt": [[5] * 900] * 3}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        *((COMPLETIONS, {"n": 10**9}, ""), (COMPLETIONS, {"max_tokens": -1}, "")),  # CVE-2026-34756
        (COMPLETIONS, {"max_tokens": 10**30}, ""),  # CVE-2026-21869
        *((COMPLETIONS, {"logit_bias": value}, "") for value in ({"x": 1}, {"2048": 1}, {"-1": 1})),
        *((COMPLETIONS, {"stop_token_ids": value}, "") for value in ([-1], [2048])),
        *((COMPLETIONS, {"stop": value}, "at most 4") for value in ("", [""], ["a"] * 5)),
        *((COMPLETIONS, {"stop": value}, "to 256 char") for value in ("a" * 257, ["a" * 257])),
        *((COMPLETIONS, {"prompt": value}, "at most 1024") for value in TOO_MANY),
        *((CHATS, {"n": 17}, ""), (CHATS, {"messages": [USER] * 1001}, "")),
        *((COMPLETIONS, {"prompt": value}, "") for value in EMPTY),
        (COMPLETIONS, {"prompt": 5}, "at most 1024"),
        *((path, {"prompt": ["a"]}, "valid string") for path in ("/generate", "/tokenize")),
        *((COMPLETIONS, {"prompt": value}, "") for value in ([PROMPT, 5], [[5], PROMPT], [2048])),
        (COMPLETIONS, {"guided_regex": "(a+)+$"}, "to a format"),  # CVE-2025-48942
        (COMPLETIONS, {"chat_template": "{{ 1 }}"}, "not support"),  # CVE-2025-61620
        (COMPLETIONS, {"prompt_embeds": "gASVAAAA"}, "no images"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "'stream'"),
        (COMPLETIONS, {"min_tokens": 99}, "at most max_tokens"),
        (COMPLETIONS, {"top_k": 10**6}, "for this model"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, "temperature"),
        (COMPLETIONS, {"n": 2, **ECHO}, "same"),
        (COMPLETIONS, {"n": 16, "prompt": ["a"] * 70}, "at most"),
        *((COMPLETIONS, {"prompt": [[5, 2048]], **more}, "2047") for more in ({}, ECHO)),
        (COMPLETIONS, {"prompt": [5] * 1024}, "maximum context length is 1024 tokens"),
        (COMPLETIONS, {"prompt": "a" * 200_000}, "characters"),  # before it is tokenized
        (COMPLETIONS, {"max_tokens": 0}, "at least 1"),
        # While they are written no other client is served; the echo of all prompts is one piece.
        (COMPLETIONS, MANY | {"max_tokens": 900}, f"{3 * 900 * 21} log-prob"),
        *((COMPLETIONS, MANY | ECHO | {"stream": more}, "log-prob") for more in (False, True)),
        (CHATS, MANY | {"top_logprobs": 20, "logprobs": True, "n": 3}, "log-prob"),
        (CHATS, {"tools": [{"type": {}}]}, "cannot call functions"),  # CVE-2025-48944
        (CHATS, {"response_format": {"type": "json_object"}}, "to a format"),
        (CHATS, {"top_logprobs": 2}, "needs 'logprobs'"),
        (CHATS, {"max_tokens": 0}, "at least 1"),
        *((CHATS, {"messages": value}, "") for value in ([], "hello", ["hello"])),
        *((CHATS, {"messages": [value]}, "") for value in ({"content": "a"}, USER | {"role": ""})),
        *((CHATS, {"messages": [USER | {"content": value}]}, "") for value in CONTENTS),
        (CHATS, {"messages": [USER | {"content": [IMAGE]}]}, "no images"),  # CVE-2026-22773
        (CHATS, {"messages": [USER | {"content": "a " * 2000}]}, "context length"),
        ("/generate", {"logit_bias": {"2048": 1}}, "2047"),
        *(("/detokenize", {"tokens": [5, value]}, "") for value in (2048, -1, 2**63)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_error_names_its_field_in_plain_words(server, path, fields, words):
    """The first of `fields` is wrong: by itself, beside others, or for the engine."""
    body: dict[str, Any] = {"messages": CHAT} if path == CHATS else {"prompt": "a"}
    answer = post(server, path, json=body | fields)
    assert answer.status_code == 400 and len(answer.content) < 700, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields)) and words in error["message"], error


def test_an_answer_says_that_its_limit_was_cut(client, server):
    """To the rest of the context: 4 tokens of 1,024 are the prompt's."""
    ends: dict[str, Any] = {"logit_bias": {str(TOKENIZER.eos_id): 100}}
    note = "max_tokens was cut from 5000 to 1020, the rest of the context."
    assert complete(client, max_tokens=5000, **ends).warning == note
    chunks = list(complete(client, max_tokens=5000, n=2, temperature=1, stream=True, **ends))
    assert [getattr(chunk, "warning", None) for chunk in chunks] == [note, None]
    assert "cut from 5000" in chat(client, max_completion_tokens=5000, **ends).warning
    chunks = list(chat(client, max_completion_tokens=5000, stream=True, **ends))
    assert ["warning" in chunk.model_dump() for chunk in chunks] == [True, False]
    body = {"prompt": PROMPT, "max_tokens": 5000, **ends}
    assert post(server, "/generate", json=body).json()["warning"] == note
    for fields in ({"max_tokens": 1020}, {}):
        assert "warning" not in complete(client, **fields, **ends).model_dump()
    assert "warning" not in chat(client, max_completion_tokens=None, **ends).model_dump()


# ---- models and other endpoints -----------------------------------------------------------------


def test_the_model_is_listed_and_no_other_is_found(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("stories", "model", "staircase")
    assert isinstance(model.created, int) and model.max_model_len == 1024
    assert client.models.retrieve("stories") == model
    assert get(server, "/version").json().keys() == {"version", "torch"}
    retrieve = client.models.retrieve
    for asking in (
        *(partial(retrieve, name) for name in ("gpt-5", "folder/name")),
        *(partial(one, client, model="gpt-5") for one in (complete, chat)),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist") as refusal:
            asking()
        assert (refusal.value.param, refusal.value.type) == ("model", "NotFoundError")
    assert post(server, json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200  # no model
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert post(server, path, json={**body, "model": "gpt-5"}).status_code == 404


def test_text_to_tokens_and_back(server):
    text = "Once, 日本 😀\nthe end <|endoftext|>"
    tokens = TOKENIZER.encode(text)
    body = post(server, "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    strings = {"token_strs": [TOKENIZER.decode([token]) for token in tokens]}
    assert body == {"count": len(tokens), "max_model_len": 1024, "tokens": tokens} | strings
    assert TOKENIZER.eos_id not in tokens
    assert post(server, "/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    empty = post(server, "/tokenize", json={"prompt": ""}).json()
    assert empty["tokens"] == [] and "token_strs" not in empty


def test_every_error_is_an_error_object(server):
    for method, path, status in (
        *(("POST", "/v1/completions", 400), ("GET", "/v1/completions", 405)),
        *(("POST", "/v1/completions/", 404), ("DELETE", "/v1/models", 405)),
        *(("GET", path, 404) for path in ("/v1/nothing", "/health/", "/docs")),
    ):
        answer = ask(server, method, path, json={})
        assert answer.status_code == status and answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert answer.json().keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == status and error["message"] and error["type"].endswith("Error")
        assert status != 405 or answer.headers["allow"]

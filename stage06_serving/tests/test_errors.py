"""Errors: which exception of OpenAI's client each one becomes, and what the client does then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from stage06_serving.tests.asking import (
    CHAT,
    PROMPT,
    TOKENIZER,
    chat,
    complete,
    counts,
    first,
    get,
    post,
)
from stage06_serving.tests.conftest import House, Running
from stage06_serving.tests.faulty_server import VARIABLE, Fault, until

JSON = {"content-type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


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


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        *((COMPLETIONS, {"temperature": value}, "") for value in (-0.1, "1", True)),
        *((COMPLETIONS, {"n": value}, "") for value in (0, 17, 10**9)),  # CVE-2026-34756
        *((COMPLETIONS, {"max_tokens": value}, "") for value in (-1, 10**30)),  # CVE-2026-21869
        *((COMPLETIONS, {"logit_bias": value}, "") for value in ({"x": 1}, {"2048": 1}, {"-1": 1})),
        *((COMPLETIONS, {"stop_token_ids": value}, "") for value in ([-1], [2048])),
        *((COMPLETIONS, {"stop": value}, "at most 4") for value in ("", ["a"] * 5)),
        (COMPLETIONS, {"guided_regex": "(a+)+$"}, "to a format"),  # CVE-2025-48942
        (COMPLETIONS, {"chat_template": "{{ 1 }}"}, "not support"),  # CVE-2025-61620
        (COMPLETIONS, {"prompt_embeds": "gASVAAAA"}, "no images"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "'stream'"),
        (COMPLETIONS, {"min_tokens": 99}, "at most max_tokens"),
        (COMPLETIONS, {"top_k": 10**6}, "for this model"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, "temperature"),
        (COMPLETIONS, {"n": 2, **ECHO}, "same"),
        (COMPLETIONS, {"n": 16, "prompt": ["a"] * 70}, "at most"),
        *((COMPLETIONS, {"prompt": [[2048]], **more}, "2047") for more in ({}, ECHO)),
        (CHATS, {"tools": [{"type": {}}]}, "cannot call functions"),  # CVE-2025-48944
        (CHATS, {"response_format": {"type": "json_object"}}, "to a format"),
        (CHATS, {"top_logprobs": 2}, "needs 'logprobs'"),
        (CHATS, {"max_tokens": 0}, "at least 1"),
        (CHATS, {"messages": [{"role": "user", "content": [IMAGE]}]}, "no images"),
        (CHATS, {"messages": [{"role": "user", "content": "a " * 2000}]}, "context length"),
        ("/generate", {"logit_bias": {"2048": 1}}, "2047"),
        ("/detokenize", {"tokens": [2048]}, "vocabulary"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_error_names_its_field_in_plain_words(server, path, fields, words):
    """The first of `fields` is wrong: by itself, beside others, or for the engine."""
    body = {"prompt": "a", "messages": CHAT, **fields}
    answer = post(server, path, json=body)
    assert answer.status_code == 400 and len(answer.content) < 700, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields)) and words in error["message"], error


def test_a_request_has_up_to_1024_prompts(house, tiny_folder):
    running = house("--model", str(tiny_folder), "--kv-memory", "1MiB", "--no-sanitize")
    body: dict[str, Any] = {"prompt": [[5 + index % 200] for index in range(1024)], "max_tokens": 1}
    choices = post(running, json=body | {"temperature": 0}).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(1024))
    assert [choice["text"] for choice in choices[:200]] == [one["text"] for one in choices[200:400]]
    body["prompt"].append([5])
    assert "1024" in post(running, json=body).json()["error"]["message"]


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
    assert (
        "warning"
        not in client.chat.completions.create(model="stories", messages=CHAT, **ends).model_dump()
    )


# ---- models and other endpoints -----------------------------------------------------------------


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("stories", "model", "staircase")
    assert isinstance(model.created, int) and model.max_model_len == 1024
    assert client.models.retrieve("stories") == model
    for name in ("gpt-5", "folder/name"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


def test_another_model_is_not_found(client, server):
    for ask in (complete, chat):
        with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist") as refusal:
            ask(client, model="gpt-5")
        assert (refusal.value.param, refusal.value.type) == ("model", "NotFoundError")
    assert post(server, json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200  # no model
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert post(server, path, json={**body, "model": "gpt-5"}).status_code == 404


def test_text_to_tokens_and_back(server):
    text = "Once, 日本 😀\nthe end <|endoftext|>"
    tokens = TOKENIZER.encode(text)
    body = post(server, "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    strings = [TOKENIZER.decode([token]) for token in tokens]
    assert body == {
        **{"count": len(tokens), "max_model_len": 1024},
        **{"tokens": tokens, "token_strs": strings},
    }
    assert TOKENIZER.eos_id not in tokens
    assert post(server, "/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    empty = post(server, "/tokenize", json={"prompt": ""}).json()
    assert empty["tokens"] == [] and "token_strs" not in empty
    for token in (2048, -1, 2**63):
        assert post(server, "/detokenize", json={"tokens": [token]}).status_code == 400


def test_health_and_version(server):
    assert get(server, "/health").json() == {"status": "ok"}
    assert get(server, "/version").json().keys() == {"version", "torch"}


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/completions", {"content": b"{", "headers": JSON}, 400),
        ("POST", "/v1/completions", {"json": {}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "a" * 2**20}}, 413),
        ("GET", "/v1/completions", {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/health/", {}, 404),
        ("POST", "/v1/completions/", {"json": {"prompt": "a"}}, 404),
        ("GET", "/docs", {}, 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_error_is_an_error_object(server, method, path, options, status):
    options = {"trust_env": False, "timeout": 60, **options}
    answer = httpx2.request(method, server.url + path, **options)
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert answer.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"] and error["type"].endswith("Error")
    assert status != 405 or answer.headers["allow"]


# ---- a server with a key, one place, and one second ---------------------------------------------

LONG: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 255}
LONG["extra_body"] = {"ignore_eos": True}  # it takes longer than the server allows


@pytest.fixture(scope="module")
def strict(house: House, tiny_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    limits = ("--max-sequences", "1", "--max-queue", "0", "--request-timeout", "1")
    fault = Fault(tmp_path_factory.mktemp("pace") / "fault")
    fault.plant("0.01")  # seconds more for each pass
    variables = {VARIABLE: str(fault.file)}
    key = ("--api-key", "right,also right")
    return house("--model", str(tiny_folder), *key, *limits, env=variables)


@pytest.fixture
def strict_client(strict: Running) -> Iterator[Callable[..., openai.OpenAI]]:
    url = f"{strict.url}/v1"
    with openai.OpenAI(base_url=url, api_key="right", max_retries=0, timeout=60) as client:
        yield lambda key="right", retries=0: client.with_options(api_key=key, max_retries=retries)


def test_a_wrong_key_is_an_authentication_error(strict_client):
    with pytest.raises(openai.AuthenticationError, match="API key") as refusal:
        strict_client("wrong").models.list()
    assert refusal.value.code == "401" and refusal.value.type == "AuthenticationError"
    assert strict_client("also right").models.list().data[0].id == "tiny"


def test_a_late_answer_is_not_requested_again(strict, strict_client):
    def aborted() -> float:
        text = get(strict, "/metrics", headers={"Authorization": "Bearer right"}).text
        name = 'request_success_total{finished_reason="abort"'
        return float(next(line for line in text.splitlines() if name in line).split()[-1])

    before = aborted()
    with pytest.raises(openai.InternalServerError, match="longer than the server") as refusal:
        strict_client(retries=2).completions.create(**LONG)
    answer = refusal.value.response
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    until(lambda: aborted() == before + 1)


def test_a_full_server_answers_503_and_the_client_comes_back(strict_client):
    stream = strict_client().completions.create(**LONG, stream=True)
    next(iter(stream))
    short = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with pytest.raises(openai.InternalServerError) as refusal:
        strict_client().completions.create(**short)
    answer = refusal.value.response
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert counts(strict_client(retries=2).completions.create(**short))[1] == 1  # a second later
    stream.close()

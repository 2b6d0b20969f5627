"""What a body may be, and what an error may contain: bounds, strictness, no work without end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stage06_serving import protocol
from stage06_serving.errors import ApiError, validation_message
from stage06_serving.protocol import ChatBody, CompletionBody, GenerateBody, TokenizeBody

from .tools import CHAT, LARGEST_ERROR, PROMPT

NUMBERS = ["top_p", "min_p", "temperature", "repetition_penalty", "presence_penalty"]
INTEGERS = ["max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs"]
BOOLEANS = ["stream", "echo", "ignore_eos", "return_token_ids"]
USER: dict[str, Any] = {"role": "user", "content": "a"}
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = PLAIN | st.lists(PLAIN, max_size=5) | st.dictionaries(st.text(max_size=5), PLAIN)
KINDS = [CompletionBody, ChatBody, GenerateBody, TokenizeBody]


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**{"prompt": "a", "temperature": 1.0, **fields})


def refused(kind: Any, **fields: Any) -> list[Any]:
    """Pydantic's errors. Fails if there are none."""
    with pytest.raises(ValidationError) as error:
        kind(**fields)
    return list(error.value.errors())


def named(kind: Any, **fields: Any) -> str | None:
    """The field that the error names."""
    return validation_message(refused(kind, **fields))[1]


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *BOOLEANS])
def test_types_are_strict(name):
    wrong: list[Any] = [math.nan, math.inf, -math.inf, "1", "true", [1], {"a": 1}]
    wrong += [0, 1, 1.0] if name in BOOLEANS else [True] if name in NUMBERS else [True, 1.0]
    for value in wrong:
        assert named(CompletionBody, prompt="a", **{name: value}) == name


@pytest.mark.parametrize("name", protocol.REFUSED)
def test_fields_that_would_change_the_answer_are_refused_unless_they_ask_for_nothing(name):
    """Each was taken with 200 and ignored. Clients send null, and dump their defaults."""
    harmless = protocol.HARMLESS.get(name, protocol.NOTHING)
    for empty in harmless:
        for kind in (CompletionBody, ChatBody):
            kind.model_validate({"prompt": "a", "messages": [USER], name: empty})
    for value in ("x", 7, *([False] if True in harmless[:2] else [])):
        errors = refused(CompletionBody, prompt="a", **{name: value})
        assert validation_message(errors)[1] == name


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_as_if_the_field_were_absent(kind):
    needed = {"prompt": "a", "messages": [USER]}
    needed = {name: needed[name] for name in needed if name in kind.model_fields}
    for name in kind.model_fields.keys() - needed.keys():
        kind.model_validate(needed | {name: None})


@given(st.sampled_from(KINDS), st.data())
def test_any_body_is_accepted_or_refused_briefly(kind, data):
    """Nothing else is raised. No error repeats the body, because a log or a page may show the
    error."""
    names = st.sampled_from([*kind.model_fields, "tools", "anything"])
    markers = st.just("marker" * 200) | st.just(["marker" * 200] * 3)
    try:
        kind.model_validate(data.draw(st.dictionaries(names, VALUES | markers, max_size=6)))
    except ValidationError as error:
        message, field = validation_message(error.errors())
        assert "marker" not in message and field in (None, "tools", *kind.model_fields)
        assert len(json.dumps(ApiError(400, message, field).body()).encode()) < LARGEST_ERROR


HALF = "a \ud800"  # JSON can express it, UTF-8 cannot: no tokens, and no answer can repeat it
UNICODE, FINITE = "a unicode string", "a finite number"
# A body of 1 MB with an error in each of its items kept the event loop busy for 5 seconds.
FULL: list[Any] = [{"role": "user", "content": [5] * 1000}] * 900


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        *((kind, "prompt", HALF, UNICODE) for kind in (CompletionBody, GenerateBody, TokenizeBody)),
        (CompletionBody, "stop", ["b", "\ude00\ud83d"], UNICODE),
        (ChatBody, "messages", [USER | {"content": HALF}], UNICODE),
        (ChatBody, "messages", [USER | {"content": [{"type": "text", "text": HALF}]}], UNICODE),
        *((CompletionBody, "logit_bias", {"5": bias}, FINITE) for bias in (math.nan, math.inf)),
        *((CompletionBody, "logit_bias", {id: 1.0}, "") for id in ("٣", "1" * 11, "", "1.5")),
        (CompletionBody, "prompt", [""] * 50_000, "at most 1024"),
        (CompletionBody, "prompt", [-1] * 50_000, "greater"),
        *((CompletionBody, name, [""] * 50_000, "") for name in ("stop", "stop_token_ids")),
        (ChatBody, "messages", FULL, "/openapi.json"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_refusal_names_its_field_and_is_brief(kind, field, value, words):
    errors = refused(kind, **{"prompt": "a", field: value})
    message, found = validation_message(errors)
    assert found == field and f"'{field}'" in message and words in message and len(errors) < 30


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (2**63 - 1, [2**63 - 1, 0, 1]), (None, [None] * 3), (-1, [-1] * 3)],
)
def test_each_sample_has_a_seed_of_its_own(seed, seeds):
    """Without a seed, or with -1, each sample gets a fresh one."""
    params = [completion(seed=seed).params(7, None, n, {}) for n in range(3)]
    assert [each.seed for each in params] == seeds and all(each.generator() for each in params)


def test_all_options_reach_the_sampler():
    """Where a request has none, the server's defaults do."""
    params = CompletionBody(prompt="a").params(7, 3, 0, {"temperature": 1, "top_k": 4})
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (1, 1, None, 4)
    assert (params.max_tokens, params.logprobs, params.greedy) == (7, 3, False)
    fields = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "seed": 4}
    fields |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 2.0}
    fields |= {"ignore_eos": True, "min_tokens": 2}
    body = completion(**fields, stop_token_ids=[1, 2], logit_bias={"5": 1.5, "6": -2})
    params = body.params(7, 1, 0, {"temperature": 1.5, "top_p": 0.1})
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop_token_ids == (1, 2) and params.logit_bias == {5: 1.5, 6: -2}


def test_an_error_is_small_whatever_its_message():
    """Elsewhere, a body of 4 KB made an error of 23 MB. UTF-8 cannot encode half a surrogate
    pair."""
    for text in ("😀" * 9999, "\ud800" * 9999):
        body = json.dumps(ApiError(400, text, "logit_bias").body(), ensure_ascii=False)
        assert len(body.encode()) < LARGEST_ERROR


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
TOO_MANY: list[Any] = [["a"] * 1025, [[5]] * 1025]
EMPTY: list[Any] = ["", [], [[]], [""], [PROMPT, ""]]  # CVE-2024-8768: it ended the engine
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ECHO = {"max_tokens": 0, "echo": True}
MANY = {"logprobs": 20, "prompt": [[5] * 900] * 3}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        *((COMPLETIONS, {"n": 10**9}, ""), (COMPLETIONS, {"max_tokens": -1}, "")),  # CVE-2026-34756
        *((COMPLETIONS, {"logit_bias": value}, "") for value in ({"x": 1}, {"2048": 1}, {"-1": 1})),
        *((COMPLETIONS, {"stop_token_ids": value}, "") for value in ([-1], [2048])),
        *((COMPLETIONS, {"stop": value}, "at least 1 char") for value in ("", [""])),
        (COMPLETIONS, {"stop": ["a"] * 5}, "at most 4"),
        *((COMPLETIONS, {"prompt": value}, "at most 1024") for value in TOO_MANY),
        *((COMPLETIONS, {"prompt": value}, "") for value in EMPTY),
        *((COMPLETIONS, {name: 5}, "/openapi.json") for name in ("prompt", "stop")),
        *((COMPLETIONS, {"prompt": value}, "") for value in ([PROMPT, 5], [[5], PROMPT], [2048])),
        (COMPLETIONS, {"guided_regex": "(a+)+$"}, "constrain"),  # CVE-2025-48942
        (COMPLETIONS, {"chat_template": "{{ 1 }}"}, "not support"),  # CVE-2025-61620
        (COMPLETIONS, {"best_of": 10**9}, "send 'n'"),  # CVE-2024-8939
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "'stream'"),
        (COMPLETIONS, {"min_tokens": 99}, "at most max_tokens"),
        (COMPLETIONS, {"top_k": 10**6}, "for this model"),
        (COMPLETIONS, {"prompt": ["a"] * 70, "n": 16}, "at most"),
        *((COMPLETIONS, {"prompt": [[5, 2048]], **more}, "2047") for more in ({}, ECHO)),
        (COMPLETIONS, {"prompt": [5] * 1024}, "shorten the prompt to 1023"),
        (COMPLETIONS, {"max_tokens": 0}, "at least 1"),
        # While they are written, no other client is served; the echo of all prompts is one piece.
        (COMPLETIONS, MANY | {"max_tokens": 900}, f"{3 * 900 * 21} log-prob"),
        *((COMPLETIONS, MANY | ECHO | {"stream": more}, "log-prob") for more in (False, True)),
        (CHATS, MANY | {"top_logprobs": 20, "logprobs": True, "n": 3}, "log-prob"),
        (CHATS, {"functions": [{"name": "look"}]}, "send 'tools'"),
        (CHATS, {"tools": [{"type": {}}]}, ""),  # CVE-2025-48944
        (CHATS, {"response_format": {"type": "xml"}}, "json_object"),
        (CHATS, {"tool_choice": "required"}, "one of the 'tools'"),
        (CHATS, {"modalities": ["text", "audio"]}, "reads and writes text"),
        (CHATS, {"top_logprobs": 2}, "needs 'logprobs'"),
        *((CHATS, {"messages": value}, "") for value in ([], "hello", [{"content": "a"}])),
        (CHATS, {"messages": [USER | {"content": [IMAGE]}]}, "'text'"),  # CVE-2026-22773
        (CHATS, {"messages": [USER | {"content": "a " * 2000}]}, "shorten the prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_error_names_its_field_in_plain_words(server, path, fields, words):
    """The first of `fields` is wrong: in itself, in combination with others, or for the engine."""
    body: dict[str, Any] = {"messages": CHAT} if path == CHATS else {"prompt": "a"}
    answer = server.post(path, json=body | fields)
    assert answer.status_code == 400 and len(answer.content) < 700, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields)) and words in error["message"], error

"""Log-probabilities and the echo of prompts: those of stage 01 for the same tokens, in the form of
each endpoint. Nearly all tokens are parts of characters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest import approx

from shared.checkpoint import load
from shared.tokenizer import Tokenizer
from stage01_forward.model import load_model
from stage01_forward.tests.rows import prompt_logprobs

from .tools import OTHER, PROMPT, TOKENIZER, complete, counts, events

EOS = 256
PROMPTS = [[*"né 😀".encode()[:-1], EOS, 0xFF], [7, 8, *"日本".encode()[1:]]]  # cut characters
DRAWN = {"temperature": 1, "seed": 4}
CLOSE: Any = {"rel": 0, "abs": 1e-4}


class Expected:
    """A server whose tokens are bytes, or <300>, and its answers in the words of stage 01."""

    def __init__(self, server: Any, folder: Any) -> None:
        self.server, self.tokenizer = server, Tokenizer.from_folder(folder)
        self.model = load_model(load(str(folder)), dtype=torch.float64)

    def bytes_of(self, id: int) -> bytes:
        return self.tokenizer.decode_bytes([id])

    def name(self, id: int) -> str:
        """The text of a token, or its bytes if it is a part of a character."""
        data = self.bytes_of(id)
        text = data.decode(errors="replace")
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{one:02x}" for one in data)

    def offsets(self, *parts: list[bytes]) -> list[int | None]:
        """Where each token's character begins, for tokens with text. No character spans two
        parts."""
        offsets: list[int | None] = []
        start = 0
        for part in parts:
            whole = b""
            for data in part:
                place = start + len((whole + data[:1]).decode(errors="replace")) - 1
                offsets.append(place if data else None)
                whole += data
            start += len(whole.decode(errors="replace"))
        return offsets


@pytest.fixture(scope="module")
def expected(bytes_server, tiny_folder):
    return Expected(bytes_server, tiny_folder)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_of_completions(expected, top, more):
    """A prompt's first token has none. Sampling options change none."""
    body = {
        "prompt": PROMPTS,
        "max_tokens": 40,
        "n": 2,
        "logprobs": top,
        "ignore_eos": True,
        **more,
    }
    body |= {**DRAWN, "return_token_ids": True, "logit_bias": {str(0xF0): 3, str(EOS): 3}}
    whole = expected.server.post(json=body).json()
    n, echo = body["n"], bool(more)
    for number, choice in enumerate(whole["choices"]):
        prompt, answer = PROMPTS[number // n], choice.get("token_ids", [])
        assert choice["finish_reason"] == "length" and len(answer) == body["max_tokens"]
        begin, ids = 0 if echo else len(prompt), prompt + answer
        table, scores = choice["logprobs"], prompt_logprobs(expected.model, ids, top)[begin:]
        assert table["tokens"] == [expected.name(id) for id in ids[begin:]]
        spelled = [expected.bytes_of(id) for id in prompt]  # end-of-text in an answer has no text
        parts = [[b"" if id == EOS else expected.bytes_of(id) for id in answer]]
        places = zip(table["text_offset"], expected.offsets(*[spelled] * echo, *parts), strict=True)
        assert all(place in (mine, None) for mine, place in places)
        rows = zip(ids[begin:], scores, table["token_logprobs"], table["top_logprobs"], strict=True)
        for id, score, logprob, others in rows:
            if score is None:
                assert logprob is others is None
                continue
            tops = {expected.name(other): value for other, value in score.top}
            assert logprob == approx(score.token, **CLOSE)
            assert others == approx({expected.name(id): score.token} | tops, **CLOSE)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(expected.server.post(json=body | stream).text)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    prompts = sum(map(len, PROMPTS))
    assert whole["usage"]["prompt_tokens"] == prompts
    for choice in whole["choices"]:
        mine = [
            one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]
        ]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "text_offset"):  # the scores differ in their last digits
            parts = [one["logprobs"][name] for one in mine if one["logprobs"]]
            assert sum(parts, []) == choice["logprobs"][name]


@pytest.mark.parametrize("top", [None, 20])
def test_logprobs_of_a_chat_are_those_of_the_completion(expected, top):
    def asked(path, **fields):
        return expected.server.post(
            path, json=DRAWN | {"max_tokens": 40, "ignore_eos": True} | fields
        )

    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "é"}], "logprobs": True}
    chat |= {} if top is None else {"top_logprobs": top}
    prompt = asked("/tokenize", messages=chat["messages"]).json()["tokens"]
    choice = asked("/v1/chat/completions", **chat).json()["choices"][0]
    content = choice["logprobs"]["content"]
    table = asked("/v1/completions", prompt=prompt, logprobs=top or 0).json()["choices"][0][
        "logprobs"
    ]
    assert [one["token"] for one in content] == table["tokens"] and len(content) == 40
    assert [one["logprob"] for one in content] == approx(table["token_logprobs"], **CLOSE)
    for one, others in zip(content, table["top_logprobs"], strict=True):
        found = {each["token"]: each["logprob"] for each in one["top_logprobs"]}
        assert len(found) == (top or 0) and others == approx(others | found, **CLOSE)
    data = b"".join(bytes(one["bytes"]) for one in content if one["token"] != expected.name(EOS))
    assert data.decode(errors="replace") == choice["message"]["content"]
    chunks = [
        part["choices"][0]
        for part in events(asked("/v1/chat/completions", **chat, stream=True).text)
    ]
    tokens = [one["token"] for chunk in chunks for one in chunk["logprobs"]["content"]]
    assert tokens == table["tokens"]


def test_the_echo_of_one_token_has_no_score(client):
    """Nothing was computed for it, and its end was taken for a failure of the engine."""
    for length in (0, 2):
        (choice,) = complete(client, [[7]], echo=True, logprobs=1, max_tokens=length).choices
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == 1 + length


def test_an_echo_needs_no_logprobs_and_one_body_has_a_bounded_number(client):
    """More of them get an error, but a stream may have them."""
    two = complete(client, [PROMPT, OTHER], echo=True, max_tokens=0).choices
    assert [(each.text, each.logprobs) for each in two] == [(PROMPT, None), (OTHER, None)]
    many: dict[str, Any] = {"prompt": [PROMPT] * 3, "logprobs": 20}
    many["logit_bias"] = {str(TOKENIZER.eos_id): 100}
    assert len(list(complete(client, **many, max_tokens=900, stream=True))) == 3
    assert counts(complete(client, **many, max_tokens=700))[1] == 3

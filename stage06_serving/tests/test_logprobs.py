"""Log-probabilities and the echo of prompts: those of stage 01 for the same tokens, in the form of
each endpoint. Nearly all tokens are parts of characters."""

from __future__ import annotations

from types import SimpleNamespace
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
DRAWN = {"temperature": 1, "seed": 4, "max_tokens": 40, "ignore_eos": True}
CLOSE: Any = {"rel": 0, "abs": 1e-4}


@pytest.fixture(scope="module")
def byte_tokens(tiny_folder):
    """Its model in the words of stage 01, and the name of each token."""
    tokenizer = Tokenizer.from_folder(tiny_folder)

    def name(id: int) -> str:
        """The text of a token, or its bytes if it is a part of a character."""
        data = tokenizer.decode_bytes([id])
        text = data.decode(errors="replace")
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{one:02x}" for one in data)

    model = load_model(load(str(tiny_folder)), dtype=torch.float64)
    return SimpleNamespace(model=model, name=name)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_of_completions(bytes_server, byte_tokens, top, more):
    """A prompt's first token has none. Sampling options change none. A stream has the same text and
    tokens."""
    body = DRAWN | {"prompt": PROMPTS, "n": 2, "logprobs": top, "return_token_ids": True, **more}
    body |= {"logit_bias": {str(0xF0): 3, str(EOS): 3}}
    whole = bytes_server.post(json=body).json()
    name, echo = byte_tokens.name, bool(more)
    for number, choice in enumerate(whole["choices"]):
        prompt, answer = PROMPTS[number // 2], choice["token_ids"]
        assert choice["finish_reason"] == "length" and len(answer) == body["max_tokens"]
        begin, ids = 0 if echo else len(prompt), prompt + answer
        table, scores = choice["logprobs"], prompt_logprobs(byte_tokens.model, ids, top)[begin:]
        assert table["tokens"] == [name(id) for id in ids[begin:]]
        rows = zip(ids[begin:], scores, table["token_logprobs"], table["top_logprobs"], strict=True)
        for id, score, logprob, others in rows:
            if score is None:
                assert logprob is others is None
                continue
            tops = {name(other): value for other, value in score.top}
            assert logprob == approx(score.token, **CLOSE)
            assert others == approx({name(id): score.token} | tops, **CLOSE)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(bytes_server.post(json=body | stream).text)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert whole["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    streamed = [part for chunk in chunks for part in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        tokens = [part["logprobs"]["tokens"] for part in mine]  # scores differ in their last digits
        assert sum(tokens, []) == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("top", [None, 20])
def test_logprobs_of_a_chat_are_those_of_the_completion(bytes_server, byte_tokens, top):
    def asked(path, **fields):
        return bytes_server.post(path, json=DRAWN | fields)

    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "é"}], "logprobs": True}
    chat |= {} if top is None else {"top_logprobs": top}
    (choice,) = asked("/v1/chat/completions", **chat).json()["choices"]
    same = {"prompt": "User: é\nAssistant:", "logprobs": top or 0}
    (other,) = asked("/v1/completions", **same).json()["choices"]
    content, table = choice["logprobs"]["content"], other["logprobs"]
    assert [one["token"] for one in content] == table["tokens"] and len(content) == 40
    assert [one["logprob"] for one in content] == approx(table["token_logprobs"], **CLOSE)
    for one, others in zip(content, table["top_logprobs"], strict=True):
        found = {each["token"]: each["logprob"] for each in one["top_logprobs"]}
        assert len(found) == (top or 0) and others == approx(others | found, **CLOSE)
    shown = [one["bytes"] for one in content if one["token"] != byte_tokens.name(EOS)]
    assert bytes(sum(shown, [])).decode(errors="replace") == choice["message"]["content"]
    chunks = events(asked("/v1/chat/completions", **chat, stream=True).text)
    lists = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [one["token"] for one in sum(lists, [])] == table["tokens"]


def test_an_echo_needs_no_logprobs_and_one_body_has_a_bounded_number(client):
    """More of them get an error, but a stream may have them. The echo of one token has no score:
    its end was once taken for a failure of the engine."""
    for length in (0, 2):
        (choice,) = complete(client, [[7]], echo=True, logprobs=1, max_tokens=length).choices
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == 1 + length
    two = complete(client, [PROMPT, OTHER], echo=True, max_tokens=0).choices
    assert [(each.text, each.logprobs) for each in two] == [(PROMPT, None), (OTHER, None)]
    many: dict[str, Any] = {"prompt": [PROMPT] * 3, "logprobs": 20}
    many["logit_bias"] = {str(TOKENIZER.eos_id): 100}
    assert len(list(complete(client, **many, max_tokens=900, stream=True))) == 3
    assert counts(complete(client, **many, max_tokens=700))[1] == 3

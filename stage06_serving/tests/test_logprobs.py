"""Log-probabilities and the echo of prompts, through OpenAI's own client."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.tokenizer import Tokenizer

from .asking import OTHER, PROMPT, TOKENIZER, TOKENS, chat, complete, counts, first, joined, post


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_of_a_completion(client, count):
    choice = first(client, logprobs=count, temperature=1, seed=3)
    table, offset = choice.logprobs, 0
    assert "".join(table.tokens) == choice.text and len(table.tokens) == TOKENS
    for token, logprob, top, at in zip(
        table.tokens, table.token_logprobs, table.top_logprobs, table.text_offset, strict=True
    ):
        assert logprob <= 0 and top[token] == logprob and max(count, 1) <= len(top) <= count + 1
        assert sum(math.exp(value) for value in top.values()) < 1 + 1e-6
        assert at == offset and choice.text[at : at + len(token)] == token
        offset += len(token)
    greedy = first(client, logprobs=count).logprobs
    assert greedy.token_logprobs == [max(top.values()) for top in greedy.top_logprobs]


def test_no_sampling_option_changes_a_logprob(client):
    top = first(client, max_tokens=1, logprobs=20).logprobs.top_logprobs[0]
    token = list(top)[7]
    bias = {str(TOKENIZER.encode(token)[0]): 100}
    forced = first(client, max_tokens=1, logprobs=0, logit_bias=bias).logprobs
    assert forced.tokens == [token]
    assert forced.token_logprobs[0] == pytest.approx(top[token], abs=1e-3)


def test_echo_without_tokens_scores_the_prompt_alone(client):
    answered = first(client, logprobs=3)
    scores = answered.logprobs.token_logprobs
    ids = TOKENIZER.encode(PROMPT)
    ids += [TOKENIZER.encode(token)[0] for token in answered.logprobs.tokens]
    alone: dict[str, Any] = {"echo": True, "max_tokens": 0}
    answer = complete(client, ids, logprobs=3, **alone)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT + answered.text, "length")
    assert counts(answer) == (4 + TOKENS, 0, 4 + TOKENS)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[4:] == pytest.approx(scores, abs=1e-3)
    two = complete(client, [PROMPT, OTHER], **alone).choices
    texts = [(each.index, each.text, each.logprobs) for each in two]
    assert texts == [(0, PROMPT, None), (1, OTHER, None)]
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(complete(client, **alone, **usage))
    assert joined(chunks) == PROMPT and chunks[0].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and counts(chunks[-1]) == (4, 0, 4)


def test_samples_have_the_echo_of_their_prompt_and_its_scores(client):
    prompts = (PROMPT, PROMPT, OTHER, OTHER)
    fields = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1, "seed": 3}
    choices = complete(client, [PROMPT, OTHER], **fields).choices
    for choice, prompt in zip(choices, prompts, strict=True):
        alone = first(client, prompt, echo=True, max_tokens=0, logprobs=1).logprobs
        table, count = choice.logprobs, len(alone.tokens)
        assert choice.text.startswith(prompt) and table.tokens[:count] == alone.tokens
        scores = alone.token_logprobs[1:]
        assert table.token_logprobs[1:count] == pytest.approx(scores, abs=1e-3)
        assert table.token_logprobs[0] is table.top_logprobs[0] is None
        assert "".join(table.tokens) == choice.text
        offsets = [len("".join(table.tokens[:i])) for i in range(count + TOKENS)]
        assert table.text_offset == offsets
    assert choices[0].text != choices[1].text


def test_one_body_has_a_bounded_number_of_logprobs(client):
    """More of them are an error, and a stream may have them."""
    many: dict[str, Any] = {"prompt": [PROMPT] * 3, "logprobs": 20}
    many["logit_bias"] = {str(TOKENIZER.eos_id): 100}
    assert len(list(complete(client, **many, max_tokens=900, stream=True))) == 3
    assert counts(complete(client, **many, max_tokens=700))[1] == 3


@pytest.fixture(scope="module")
def bytewise(house, tiny_folder):
    """A server whose tokens are bytes, or <300>: nearly no answer is UTF-8."""
    return house("--model", str(tiny_folder), "--kv-memory", "256KiB")


def test_tokens_that_are_parts_of_a_character(bytewise, tiny_folder):
    """Each has a name of its own, and the offset of its character."""
    prompt = [*"né 😀".encode()[:-1], 256, 0xFF]  # the last character is cut
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 1, "seed": 4, "ignore_eos": True}
    body |= {"logprobs": 20, "return_token_ids": True, "echo": True}
    choice = post(bytewise, json=body).json()["choices"][0]
    table, answer = choice["logprobs"], choice["token_ids"]
    spelled = Tokenizer.from_folder(tiny_folder).decode_bytes
    offsets, start = [], 0
    for part in (
        map(spelled, ([token] for token in prompt)),
        (b"" if token == 256 else spelled([token]) for token in answer),
    ):
        whole = b""
        for data in part:  # in an answer, end-of-text has no text
            offsets.append(start + len((whole + data[:1]).decode(errors="replace")) - bool(data))
            whole += data
        start += len(whole.decode(errors="replace"))
    assert table["text_offset"] == offsets and start == len(choice["text"])
    names: dict[str, int] = {}
    for token, name in zip([*prompt, *answer], table["tokens"], strict=True):
        text = spelled([token]).decode(errors="replace")
        assert name == (text if "\ufffd" not in text else f"bytes:\\x{token:02x}")
        assert names.setdefault(name, token) == token
    assert any(name.startswith("bytes:") for name in names)
    assert all(20 <= len(top) <= 21 for top in table["top_logprobs"][1:])


def test_a_chat_has_the_bytes_of_parts_of_a_character(bytewise):
    body = {"messages": [{"role": "user", "content": "é"}], "temperature": 1, "seed": 4}
    body |= {"max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    choice = post(bytewise, "/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    parts = [each for each in content if each["token"].startswith("bytes:")]
    for each in parts:
        assert each["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in each["bytes"])
    assert parts and all(
        len({top["token"] for top in each["top_logprobs"]}) == 20 for each in content
    )
    ends = [*b"<|endoftext|>"]
    data = b"".join(bytes(each["bytes"]) for each in content if each["bytes"] != ends)
    assert data.decode(errors="replace") == choice["message"]["content"]


@pytest.mark.parametrize("count", [None, 0, 20])
def test_logprobs_of_a_chat(client, count):
    fields = {"logprobs": True} | ({} if count is None else {"top_logprobs": count})
    choice = chat(client, **fields).choices[0]
    text, content = choice.message.content, choice.logprobs.content
    assert "".join(each.token for each in content) == text and len(content) == TOKENS
    assert b"".join(bytes(each.bytes) for each in content).decode() == text
    for each in content:
        tops = [(top.token, top.logprob) for top in each.top_logprobs]
        assert len(tops) == (count or 0) and each.logprob <= 0
        assert tops == sorted(tops, key=lambda top: -top[1])
        assert not tops or tops[0] == (each.token, each.logprob)
    chunks = chat(client, stream=True, **fields)
    streamed = [each for chunk in chunks for each in chunk.choices[0].logprobs.content]
    assert [(each.token, each.bytes, len(each.top_logprobs)) for each in streamed] == [
        (each.token, each.bytes, len(each.top_logprobs)) for each in content
    ]
    logprobs = [each.logprob for each in content]
    assert [each.logprob for each in streamed] == pytest.approx(logprobs, abs=1e-3)
    assert chat(client, logprobs=False).choices[0].logprobs is None

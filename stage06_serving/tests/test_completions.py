"""/v1/completions through OpenAI's own client: prompts, sampling, stops, and streams."""

from __future__ import annotations

import time
from typing import Any

import pytest

from . import asking
from .asking import OTHER, PROMPT, TOKENIZER, TOKENS, complete, counts, first

# ---- prompts ------------------------------------------------------------------------------------


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
    assert counts(both)[:2] == (len(other) + len(ids), 2 * TOKENS)


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


def test_sixteen_tokens_by_default_and_what_the_context_allows(client):
    """Issue 10380 of llama.cpp: a prompt that was too long ended the process."""
    long = (TOKENIZER.encode(PROMPT) * 256)[:1023]
    for prompt, fields, tokens in (
        (PROMPT, {}, 16),
        (PROMPT, {"max_tokens": None}, 16),
        (long, {}, 1),
    ):
        options = {"model": "stories", "prompt": prompt, "extra_body": asking.IGNORE | fields}
        answer = client.completions.create(**options)
        assert counts(answer)[1] == tokens and answer.choices[0].finish_reason == "length"


# ---- ends ---------------------------------------------------------------------------------------


def test_end_of_text_ends_the_text_unless_ignored(client):
    """The end-of-text token has no text, and it counts."""

    def ended(**body: Any) -> tuple[Any, ...]:
        answer = complete(client, logit_bias={str(TOKENIZER.eos_id): 100}, extra_body=body)
        choice = answer.choices[0]
        assert "stop_reason" not in choice.model_dump()
        return bool(choice.text), choice.finish_reason, counts(answer)[1]

    assert ended() == (False, "stop", 1)
    assert ended(ignore_eos=True) == (False, "length", TOKENS)
    assert ended(min_tokens=3) == (True, "stop", 4)


def test_a_stop_string_ends_the_text_before_it(client):
    """Unless `include_stop_str_in_output` is set; test_text.py shows what `min_tokens` means."""
    choice = first(client, max_tokens=16, logprobs=0)
    whole, tokens = choice.text, choice.logprobs.tokens
    stop = whole[9:13]
    before = whole[: whole.index(stop)]
    for stops in (stop, ["never seen", stop, whole[14:17]]):
        choice = first(client, max_tokens=16, stop=stops)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    keep = {"include_stop_str_in_output": True}
    kept = complete(client, max_tokens=16, stop=stop, extra_body=keep)
    assert kept.choices[0].text == before + stop and counts(kept)[1] < 16
    choice = first(client, max_tokens=16, stop="never seen")
    assert (choice.text, choice.finish_reason) == (whole, "length")
    for least in (1, 2):
        text = first(client, stop=tokens[0], extra_body={"min_tokens": least}).text
        assert text.startswith(tokens[0]) == (least == 2)


def test_a_stop_token_ends_the_text(client):
    ids = TOKENIZER.encode(first(client).text)
    choice = first(client, extra_body={"stop_token_ids": [ids[5]]})
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[5])
    assert choice.text == TOKENIZER.decode(ids[: ids.index(ids[5]) + 1])


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [complete, asking.chat])
def test_usage_comes_last_and_only_on_request_or_with_every_chunk(client, ask):
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        *chunks, last = ask(client, stream=True, stream_options=options)
        wanted = bool(options and options.get("include_usage"))
        assert not any(chunk.usage for chunk in chunks) and bool(last.usage) == wanted
        if wanted:
            assert last.choices == [] and last.id == chunks[0].id
            assert chunks[-1].choices[0].finish_reason and counts(last)[1] == TOKENS
    every = {"include_usage": True, "continuous_usage_stats": True}  # GuideLLM sends these
    fields = {"stream": True, "stream_options": every, "stop": None}
    chunks = list(ask(client, extra_body=asking.IGNORE | {"stop": None}, **fields))
    usages = [counts(chunk) for chunk in chunks]
    tokens = [completion for _, completion, _ in usages]
    assert tokens == sorted(tokens) and tokens[-1] == TOKENS and len(set(tokens)) > 3
    assert all(total == prompt + tokens for prompt, tokens, total in usages)
    assert chunks[-1].choices == []

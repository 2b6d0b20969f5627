"""The contract with OpenAI's own client: what it sends, what it must get back, and which of its exceptions an error becomes."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from shared.checkpoint import STORIES
from shared.tokenizer import Tokenizer
from stage06_serving.protocol import REFUSED
from stage06_serving.tests.conftest import House, Running
from stage06_serving.tests.faulty_server import VARIABLE, Fault, until

PROMPT = "Once upon a time"
OTHER = "The old fox looked at the river"
CHAT = [{"role": "user", "content": "Tell me a story."}]
TOKENIZER = Tokenizer.from_folder(STORIES)
GREEDY: dict[str, Any] = {"model": "stories", "temperature": 0}
TOKENS = 8  # of an answer, where a test does not say: after every step the sanitizer looks at all of the memory


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": TOKENS, **fields})


def chat(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    return client.chat.completions.create(
        messages=messages, **{**GREEDY, "max_completion_tokens": TOKENS, **fields}
    )


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(
        (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
        for choice in choices
    )


def post(server: Running, path: str, **options: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, trust_env=False, verify=False, timeout=60, **options)


# ---- completions: prompts and answers -------------------------------------------------------------------------------


def test_a_completion_has_the_fields_that_the_client_reads(client):
    before = int(time.time())
    answer = complete(client)
    assert (
        answer.id.startswith("cmpl-")
        and answer.object == "text_completion"
        and answer.model == "stories"
    )
    assert before <= answer.created <= time.time()
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text and PROMPT not in choice.text
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        4,
        TOKENS,
        4 + TOKENS,
    )
    assert complete(client).id != answer.id


def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(client):
    ids = TOKENIZER.encode(PROMPT)
    texts = [
        [choice.text for choice in complete(client, prompt).choices]
        for prompt in (PROMPT, ids, [PROMPT], [ids])
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3] and len(texts[0]) == 1
    mixed = complete(client, [TOKENIZER.encode(OTHER), ids])
    assert [choice.text for choice in mixed.choices] == [
        complete(client, OTHER).choices[0].text,
        texts[0][0],
    ]
    assert (
        mixed.usage.prompt_tokens == len(TOKENIZER.encode(OTHER)) + len(ids)
        and mixed.usage.completion_tokens == 2 * TOKENS
    )


def test_choices_are_prompt_major(client):
    """LangChain slices them as choices[i * n : (i + 1) * n]."""
    fields = {"n": 3, "temperature": 2, "seed": 5}
    together = complete(client, [PROMPT, OTHER], **fields)
    assert [choice.index for choice in together.choices] == list(range(6))
    apart = [
        choice.text
        for prompt in (PROMPT, OTHER)
        for choice in complete(client, prompt, **fields).choices
    ]
    assert [choice.text for choice in together.choices] == apart and len(set(apart)) == 6
    assert together.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT)) + len(
        TOKENIZER.encode(OTHER)
    )  # once a prompt
    assert together.usage.completion_tokens == 6 * TOKENS


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_sixteen_tokens_if_nobody_says_how_many(client, fields):
    answer = client.completions.create(
        model="stories", prompt=PROMPT, extra_body={"ignore_eos": True, **fields}
    )
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_the_context_is_a_limit_and_not_an_error(client):
    """Issue 10380 of llama.cpp: a prompt that was too long ended the process."""
    ids = (TOKENIZER.encode(PROMPT) * 256)[:1023]
    answer = complete(client, ids, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 1024 tokens"
    ) as refusal:
        complete(client, ids + ids[:1])
    assert refusal.value.param == "prompt"
    with pytest.raises(
        openai.BadRequestError, match="characters"
    ) as refusal:  # known without cutting it into tokens
        complete(client, "a" * 200_000)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        " \n ",
        [],
        [[]],
        [""],
        [PROMPT, ""],
        [PROMPT, 5],
        [[5], PROMPT],
        [-1],
        [2048],
        [[5, 2048]],
    ],
)
def test_no_prompt_no_answer(client, prompt):
    """CVE-2024-8768: an empty prompt ended the engine."""
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt)


# ---- completions: sampling ------------------------------------------------------------------------------------------

# Two dozen draws from eight words.
DRAWS: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 2,
    "seed": 1,
    "logit_bias": {str(id): 100 for id in range(300, 308)},
}


@pytest.fixture(scope="module")
def drawn(client: openai.OpenAI) -> str:
    """What is said without further options."""
    return complete(client, **DRAWS).choices[0].text


def test_a_seed_repeats_an_answer_and_its_samples_differ(client):
    def texts(**fields: Any) -> list[str]:
        bias = {
            str(each): 100 for each in range(300, 400)
        }  # of so many words no two answers are the same by chance
        answer = complete(client, **{"temperature": 2, "n": 3, "logit_bias": bias, **fields})
        return [choice.text for choice in answer.choices]

    assert texts(seed=5) == texts(seed=5) != texts(seed=6)
    assert len(set(texts(seed=5))) == 3
    assert texts(seed=2**62) == texts(seed=2**62) and texts(seed=-7) == texts(seed=-7)
    assert texts() != texts() and texts(seed=-1) != texts(seed=-1)
    assert not set(texts(seed=-1)) & set(texts(seed=-1))  # none of the samples has a seed then


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 3.0}},
        {"logit_bias": {"11": 100}},
        {"temperature": 0.1},
        {"temperature": 0},
        {"top_p": 0.3},
        {"extra_body": {"top_k": 2}},
        {"extra_body": {"min_p": 0.9}},
        {"seed": 2},
    ],
    ids=lambda fields: str(fields),
)
def test_every_sampling_field_reaches_the_engine(client, drawn, fields):
    """Each option leads to other draws. That they are the right ones, test_parity.py shows."""
    assert complete(client, **DRAWS | fields).choices[0].text != drawn


def test_logit_bias_decides_alone(client):
    (wanted,) = TOKENIZER.encode(" fox")
    assert complete(client, logit_bias={str(wanted): 100}).choices[0].text == " fox" * TOKENS
    first = TOKENIZER.encode(complete(client, max_tokens=1).choices[0].text)[0]
    other = complete(client, max_tokens=1, logit_bias={str(first): -100}).choices[0].text
    assert TOKENIZER.encode(other)[0] != first


def test_a_text_ends_at_its_end_unless_told_otherwise(client):
    """The end-of-text token is no text, and it is counted."""
    bias = {str(TOKENIZER.eos_id): 100}
    answer = complete(client, logit_bias=bias)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        "",
        "stop",
    ) and answer.usage.completion_tokens == 1
    assert "stop_reason" not in answer.choices[0].model_dump()
    answer = complete(client, logit_bias=bias, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == TOKENS
    answer = complete(client, logit_bias=bias, extra_body={"min_tokens": 3})
    assert (
        answer.choices[0].finish_reason == "stop"
        and answer.usage.completion_tokens == 4
        and answer.choices[0].text
    )


def test_a_stop_string_ends_the_text_before_it(client):
    whole = complete(client, max_tokens=16).choices[0].text
    stop = whole[9:13]
    for given in (stop, [stop], ["never seen", stop, whole[14:17]]):
        choice = complete(client, max_tokens=16, stop=given).choices[0]
        assert choice.text == whole[: whole.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    kept = complete(
        client, max_tokens=16, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]
    assert kept.usage.completion_tokens < 16
    assert complete(client, max_tokens=16, stop=None).choices[0].text == whole
    assert complete(client, max_tokens=16, stop=[]).choices[0].text == whole
    assert complete(client, max_tokens=16, stop="never seen").choices[0].finish_reason == "length"


def test_a_stop_string_waits_for_min_tokens(client):
    """Until then nothing ends the text, as with end-of-text; and what is said until then begins no stop string."""
    whole = complete(client, max_tokens=16, logprobs=0).choices[0]
    tokens = whole.logprobs.tokens
    for early, late in ((0, 5), (3, 9)):
        stop = tokens[early]
        choice = complete(
            client, max_tokens=16, stop=stop, extra_body={"min_tokens": late}
        ).choices[0]
        before = "".join(tokens[: late - 1])
        rest = whole.text[len(before) :]
        assert stop in before and choice.text == before + rest.partition(stop)[0]
        assert choice.finish_reason == ("stop" if stop in rest else "length")
        chunks = list(
            complete(client, max_tokens=16, stop=stop, stream=True, extra_body={"min_tokens": late})
        )
        assert joined(chunks) == choice.text
        assert (
            complete(client, max_tokens=16, stop=stop).choices[0].text
            == whole.text.partition(stop)[0]
        )  # without it
    exact = complete(
        client,
        max_tokens=16,
        stop=tokens[7],
        extra_body={"min_tokens": tokens.index(tokens[7]) + 1},
    )
    assert (
        exact.choices[0].finish_reason == "stop"
        and exact.usage.completion_tokens == tokens.index(tokens[7]) + 1
    )


def test_a_stop_token_ends_the_text(client):
    ids = TOKENIZER.encode(complete(client).choices[0].text)
    choice = complete(client, extra_body={"stop_token_ids": [ids[5]]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[5])
    assert choice.text == TOKENIZER.decode(ids[: ids.index(ids[5]) + 1])


# ---- completions: log-probabilities and echo ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_of_a_completion(client, count):
    choice = complete(client, logprobs=count, temperature=1, seed=3).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and len(found.tokens) == TOKENS
    offset = 0
    for token, logprob, top, at in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert logprob <= 0 and top[token] == logprob and max(count, 1) <= len(top) <= count + 1
        assert sum(math.exp(value) for value in top.values()) < 1 + 1e-6
        assert at == offset and choice.text[at : at + len(token)] == token
        offset += len(token)
    greedy = complete(client, logprobs=count).choices[0].logprobs
    assert all(
        logprob == max(top.values())
        for logprob, top in zip(greedy.token_logprobs, greedy.top_logprobs, strict=True)
    )


def test_a_logprob_is_what_the_model_said_and_no_option_changes_it(client):
    first = complete(client, max_tokens=1, logprobs=20).choices[0].logprobs.top_logprobs[0]
    token = list(first)[7]
    (wanted,) = TOKENIZER.encode(token)
    forced = (
        complete(client, max_tokens=1, logprobs=0, logit_bias={str(wanted): 100})
        .choices[0]
        .logprobs
    )
    assert forced.tokens == [token] and forced.token_logprobs[0] == pytest.approx(
        first[token], abs=1e-3
    )


def test_echo_puts_the_prompt_first(client):
    text = complete(client).choices[0].text
    for prompt in (PROMPT, TOKENIZER.encode(PROMPT), [PROMPT]):
        assert complete(client, prompt, echo=True).choices[0].text == PROMPT + text
    answer = complete(client, [PROMPT, OTHER], echo=True, n=2, temperature=1)
    starts = [PROMPT, PROMPT, OTHER, OTHER]
    assert all(
        choice.text.startswith(start) for choice, start in zip(answer.choices, starts, strict=True)
    )
    odd = "né 😀 日本 \t\n"
    assert complete(client, odd, echo=True).choices[0].text.startswith(odd)


def test_echo_with_logprobs_scores_the_prompt_too(client):
    answer = complete(client, echo=True, logprobs=2)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert "".join(found.tokens) == choice.text and len(found.tokens) == 4 + TOKENS
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(4 + TOKENS)]
    assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])
    assert (
        found.token_logprobs[4:] == complete(client, logprobs=2).choices[0].logprobs.token_logprobs
    )


def test_echo_and_no_tokens_scores_the_prompt_alone(client):
    said = complete(client, logprobs=3).choices[0]
    ids = TOKENIZER.encode(PROMPT) + [TOKENIZER.encode(token)[0] for token in said.logprobs.tokens]
    answer = complete(client, ids, echo=True, max_tokens=0, logprobs=3)
    (choice,) = answer.choices
    assert choice.text == PROMPT + said.text and choice.finish_reason == "length"
    assert (
        answer.usage.completion_tokens == 0
        and answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + TOKENS
    )
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[4:] == pytest.approx(
        said.logprobs.token_logprobs, abs=1e-3
    )
    two = complete(client, [PROMPT, OTHER], echo=True, max_tokens=0)
    assert [(each.index, each.text, each.logprobs) for each in two.choices] == [
        (0, PROMPT, None),
        (1, OTHER, None),
    ]
    with pytest.raises(openai.BadRequestError, match="all samples are the same"):
        complete(client, echo=True, max_tokens=0, n=2, temperature=1)
    chunks = list(
        complete(
            client, echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert joined(chunks) == PROMPT and chunks[0].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 4
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        complete(client, max_tokens=0)


def test_the_samples_of_a_prompt_have_the_same_echo(client):
    fields = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1, "seed": 3}
    choices = complete(client, [PROMPT, OTHER], **fields).choices
    for choice, prompt in zip(choices, (PROMPT, PROMPT, OTHER, OTHER), strict=True):
        (alone,) = complete(client, prompt, echo=True, max_tokens=0, logprobs=1).choices
        count = len(alone.logprobs.tokens)
        assert (
            choice.text.startswith(prompt)
            and choice.logprobs.tokens[:count] == alone.logprobs.tokens
        )
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            alone.logprobs.token_logprobs[1:], abs=1e-3
        )
        assert choice.logprobs.text_offset == [
            len("".join(choice.logprobs.tokens[:i])) for i in range(count + TOKENS)
        ]
    assert choices[0].text != choices[1].text


def test_one_body_has_not_too_many_logprobs(client):
    """While it is written nobody else is served. What may be too much is refused before it is computed; a stream may have it."""
    many: dict[str, Any] = {"prompt": [PROMPT] * 3, "max_tokens": 900, "logprobs": 20}
    with pytest.raises(
        openai.BadRequestError, match=f"{3 * 900 * 21} log-probabilities.*at most 50000"
    ) as refusal:
        complete(client, **many)
    assert refusal.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError, match="log-probabilities"):
        chat(client, n=3, temperature=1, max_completion_tokens=900, logprobs=True, top_logprobs=20)
    ids = (TOKENIZER.encode(PROMPT) * 256)[:800]
    for stream in (False, True):  # the echo of all prompts is one piece
        with pytest.raises(openai.BadRequestError, match="log-probabilities"):
            complete(client, [ids] * 3, echo=True, max_tokens=0, logprobs=20, stream=stream)
    ends = {str(TOKENIZER.eos_id): 100}
    assert len(list(complete(client, **many, logit_bias=ends, stream=True))) == 3
    assert (
        complete(client, **many | {"max_tokens": 700}, logit_bias=ends).usage.completion_tokens == 3
    )


def test_token_ids_are_returned_where_they_are_asked_for(client):
    answer = complete(client, logprobs=0, extra_body={"return_token_ids": True}).choices[0]
    assert [TOKENIZER.decode([each]) for each in answer.token_ids] == answer.logprobs.tokens
    chunks = complete(client, stream=True, extra_body={"return_token_ids": True})
    assert [each for chunk in chunks for each in chunk.choices[0].token_ids] == answer.token_ids
    assert "token_ids" not in complete(client).choices[0].model_dump()


# ---- completions: streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": [" was", "zzz"]}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}],
)
def test_a_stream_says_what_the_whole_answer_says(client, fields):
    whole = complete(client, max_tokens=20, **fields)
    chunks = list(complete(client, max_tokens=20, stream=True, **fields))
    assert joined(chunks) == whole.choices[0].text
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "stories", "text_completion")
    }
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len(chunks) > 5 and all(chunk.usage is None for chunk in chunks)
    if "logprobs" in fields:
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [
                getattr(chunk.choices[0].logprobs, name)
                for chunk in chunks
                if chunk.choices[0].logprobs
            ]
            assert [each for part in parts for each in part] == getattr(
                whole.choices[0].logprobs, name
            )
    if "stop" in fields:
        assert chunks[-1].choices[0].stop_reason == whole.choices[0].stop_reason == " was"


def test_the_choices_of_a_stream_are_told_apart(client):
    fields = {"n": 2, "temperature": 1, "seed": 8, "max_tokens": 15}
    whole = complete(client, [PROMPT, OTHER], **fields)
    chunks = list(
        complete(
            client, [PROMPT, OTHER], stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    assert [joined(chunks, index) for index in range(4)] == [
        choice.text for choice in whole.choices
    ]
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_last_and_only_where_it_is_wanted(client, options):
    chunks = list(complete(client, stream=True, stream_options=options))
    wanted = bool(options and options.get("include_usage"))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [wanted]
    if wanted:
        assert (
            chunks[-1].choices == []
            and chunks[-1].id == chunks[0].id
            and chunks[-2].choices[0].finish_reason
        )
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, TOKENS)


def test_usage_may_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunks in (
        list(complete(client, stream=True, stream_options=options)),
        list(chat(client, stream=True, stream_options=options)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == TOKENS and len(set(counts)) > 3
        assert all(
            chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            for chunk in chunks
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_stream_as_curl_sees_it(server, path):
    """Pitfall 22: `stream: false` ignored. Pitfall 26: a stream that is cut without [DONE]."""
    body = {"prompt": PROMPT, "messages": CHAT, "max_tokens": 8, "temperature": 0, "stream": True}
    answer = post(server, path, json=body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    )
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(
        each.startswith("data: {") for each in events[:-2]
    )
    for stream in ({"stream": False}, {"stream": None}, {}):
        whole = post(
            server,
            path,
            json={name: value for name, value in body.items() if name != "stream"} | stream,
        )
        assert (
            whole.headers["content-type"] == "application/json"
            and "data:" not in whole.text
            and whole.json()
        )


# ---- chat -----------------------------------------------------------------------------------------------------------


def test_a_chat_completion_has_the_fields_that_the_client_reads(client):
    answer = chat(client)
    assert (
        answer.id.startswith("chatcmpl-")
        and answer.object == "chat.completion"
        and answer.model == "stories"
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.logprobs is None
    assert (choice.index, choice.finish_reason) == (0, "length")
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (TOKENS, usage.prompt_tokens + TOKENS)


def test_a_chat_is_the_completion_of_what_the_template_makes_of_it(client):
    messages = [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}],
        },
        {"role": "assistant", "content": None},
        {"role": "narrator", "content": "It rains.", "name": "Mira"},
    ]
    prompt = (
        "System: Be kind.\nUser: Tell me\na story.\nAssistant: \nNarrator: It rains.\nAssistant:"
    )
    answer = chat(client, messages)
    assert answer.choices[0].message.content == complete(client, prompt).choices[0].text
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt))


def test_max_completion_tokens_wins_and_the_rest_of_the_context_is_the_default(client):
    assert chat(client, max_tokens=3).usage.completion_tokens == TOKENS
    assert chat(client, max_tokens=3, max_completion_tokens=None).usage.completion_tokens == 3
    long = [
        {
            "role": "user",
            "content": TOKENIZER.decode(TOKENIZER.encode("once upon a time " * 300)[:960]),
        }
    ]
    answer = chat(client, long, max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 1024 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_logprobs_of_a_chat(client, count):
    given = {} if count is None else {"top_logprobs": count}
    choice = chat(client, logprobs=True, **given).choices[0]
    content = choice.logprobs.content
    assert (
        "".join(each.token for each in content) == choice.message.content and len(content) == TOKENS
    )
    assert b"".join(bytes(each.bytes) for each in content).decode() == choice.message.content
    for each in content:
        assert len(each.top_logprobs) == (count or 0) and each.logprob <= 0
        assert [top.logprob for top in each.top_logprobs] == sorted(
            (top.logprob for top in each.top_logprobs), reverse=True
        )
        assert not count or (each.top_logprobs[0].token, each.top_logprobs[0].logprob) == (
            each.token,
            each.logprob,
        )
    streamed = [
        each
        for chunk in chat(client, logprobs=True, stream=True, **given)
        for each in chunk.choices[0].logprobs.content
    ]
    assert [(each.token, each.bytes) for each in streamed] == [
        (each.token, each.bytes) for each in content
    ]
    assert [each.logprob for each in streamed] == pytest.approx(
        [each.logprob for each in content], abs=1e-3
    )
    tops = [
        [[top.token for top in each.top_logprobs] for each in found]
        for found in (streamed, content)
    ]
    assert tops[0] == tops[1] or count == 20  # of so many, two may change places
    assert chat(client, logprobs=False).choices[0].logprobs is None


def test_the_first_chunk_of_each_choice_says_who_speaks(client):
    fields = {"n": 2, "temperature": 1, "seed": 4}
    whole = chat(client, **fields)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "chat.completion.chunk")
    }
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert (mine[0].delta.role, mine[0].delta.content, mine[0].finish_reason) == (
            "assistant",
            "",
            None,
        )
        assert all(choice.delta.role is None for choice in mine[1:])
        assert (
            [choice.finish_reason for choice in mine if choice.finish_reason]
            == ["length"]
            == [mine[-1].finish_reason]
        )
        assert joined(chunks, index) == whole.choices[index].message.content
    assert chunks[0].id.startswith("chatcmpl-")


def test_the_clients_own_stream_helper_puts_a_chat_together(client):
    whole = chat(client).choices[0].message.content
    stop = whole[-6:-2]  # an answer that is too long is an error to this helper
    with client.chat.completions.stream(
        messages=CHAT, stop=stop, **GREEDY, max_completion_tokens=TOKENS
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert (
        final.choices[0].message.content == whole[: whole.index(stop)]
        and final.choices[0].finish_reason == "stop"
    )
    assert events.count("content.delta") > 3 and events[-1] == "content.done"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"content": "hello"}],
        [{"role": "", "content": "hello"}],
        [{"role": "user", "content": 5}],
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}],
            }
        ],
        [{"role": "user", "content": [{"type": "text"}]}],
        ["hello"],
    ],
)
def test_what_is_no_chat_is_refused(client, messages):
    """An image is a URL that the server would fetch (CVE-2026-22773)."""
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, messages)
    assert refusal.value.param == "messages"


# ---- unknown, refused and wrong fields ------------------------------------------------------------------------------


def test_fields_that_nobody_here_knows_are_ignored(client):
    plain = complete(client).choices[0].text
    extra = {
        "mirostat": 2,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "response_format": {"type": "text"},
    }
    assert complete(client, user="somebody", extra_body=extra).choices[0].text == plain
    assert complete(client, best_of=1, n=1).choices[0].text == plain
    assert (
        complete(client, extra_body={"tools": [], "suffix": "", "chat_template": None})
        .choices[0]
        .text
        == plain
    )
    assert (
        complete(client, logprobs=None, n=None, seed=None, top_p=None, logit_bias=None, echo=None)
        .choices[0]
        .text
        == plain
    )


def test_what_guidellm_always_sends(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {
        "stream": True,
        "stream_options": options,
        "stop": None,
        "extra_body": {"ignore_eos": True, "stop": None},
    }
    for chunks in (list(complete(client, **fields)), list(chat(client, **fields))):
        assert chunks[-1].usage.completion_tokens == TOKENS and chunks[-1].choices == []


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_change_the_answer_are_refused(client, name):
    """CVE-2025-61620, 62426: templates of clients; 48942 to 48944: schemas and regular expressions; 62164: tensors."""
    for ask in (complete, chat):
        with pytest.raises(openai.BadRequestError, match=name):
            ask(client, extra_body={name: "^(a+)+$"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, 2.1, "1", True)],
        *[("top_p", value) for value in (0, 1.1, "1")],
        *[("top_k", value) for value in (-2, 1.5)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("presence_penalty", value) for value in (-2.1, 2.1)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1)],
        *[("repetition_penalty", value) for value in (0, -1, 101)],
        *[("n", value) for value in (0, -1, 17, 10**9, True, 1.0, "1")],  # CVE-2026-34756
        *[("best_of", value) for value in (17, 10**9)],  # CVE-2024-8939
        *[("logprobs", value) for value in (-1, 21, 10**9, "5", 1.5)],
        *[("max_tokens", value) for value in (-1, 10**9, True, "5", 10**30)],
        *[("min_tokens", value) for value in (-1, 10**9)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1")],
        *[("stop", value) for value in ("", [""], list("abcde"), "a" * 65, 5, [5], {"a": 1})],
        *[
            ("logit_bias", value)
            for value in ({"x": 1}, {"-5": 1}, {"5": 101}, {"5": "1"}, {"2048": 1}, [5])
        ],
        ("logit_bias", {str(each): 1 for each in range(301)}),
        *[("stop_token_ids", value) for value in ([-1], [2048], ["5"], list(range(65)))],
        *[("stream", value) for value in ("yes", 1)],
        ("stream_options", {"include_usage": "yes"}),
        ("stream_options", []),
        ("stream_options", {"include_usage": True}),  # without a stream
        *[("echo", value) for value in (1, "true")],
        *[("ignore_eos", value) for value in (1, "true")],
        ("prompt", ["a"] * 33),
        ("prompt", {"a": 1}),
        ("model", 5),
        ("response_format", {"type": "json_object"}),
        ("response_format", "text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bounds_and_types(client, field, value):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, extra_body={field: value})
    assert field in refusal.value.message and len(refusal.value.response.content) < 700


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("logprobs", 1),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", True),
    ],
)
def test_bounds_and_types_of_a_chat(client, field, value):
    with pytest.raises(openai.BadRequestError, match=field):
        chat(client, extra_body={"logprobs": True, field: value})
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(client, top_logprobs=2)


def test_samples_that_would_all_be_the_same_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="temperature 0"):
        complete(client, n=2)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(client, best_of=3)


# ---- models, other endpoints, and errors ----------------------------------------------------------------------------


def test_models(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("stories", "model", "staircase")
    assert isinstance(model.created, int) and model.max_model_len == 1024
    assert client.models.retrieve("stories") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("folder/name")


def test_another_model_is_not_found(client, server):
    for ask in (complete, chat):
        with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist") as refusal:
            ask(client, model="gpt-5")
        assert (refusal.value.param, refusal.value.type) == ("model", "NotFoundError")
    assert (
        post(server, "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    )  # none is ours
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert post(server, path, json={**body, "model": "gpt-5"}).status_code == 404


def test_text_to_tokens_and_back(server):
    text = "Once, 日本 😀\nthe end <|endoftext|>"
    found = post(server, "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == TOKENIZER.encode(text) and TOKENIZER.eos_id not in found["tokens"]
    assert (
        found["count"] == len(found["tokens"]) == len(found["token_strs"])
        and found["max_model_len"] == 1024
    )
    assert post(server, "/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert "token_strs" not in post(server, "/tokenize", json={"prompt": text}).json()
    assert post(server, "/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert post(server, "/detokenize", json={"tokens": [2048]}).status_code == 400


def test_the_plain_way_in(server, client):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    found = post(server, "/generate", json=body).json()
    assert found["text"] == complete(client).choices[0].text and found["finish_reason"] == "length"
    assert found["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": TOKENS,
        "total_tokens": 4 + TOKENS,
    }
    lines = post(server, "/generate", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(event["text"] for event in events) == found["text"]
    assert events[-1]["finish_reason"] == "length" and events[-1]["usage"] == found["usage"]


def test_health_and_version(server):
    assert httpx2.get(f"{server.url}/health", trust_env=False, timeout=60).json() == {
        "status": "ok"
    }
    assert set(httpx2.get(f"{server.url}/version", trust_env=False, timeout=60).json()) == {
        "version",
        "torch",
    }


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        (
            "POST",
            "/v1/completions",
            {"content": b"{", "headers": {"content-type": "application/json"}},
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {"content": b"", "headers": {"content-type": "application/json"}},
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {"content": b"\xff\xfe", "headers": {"content-type": "application/json"}},
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {
                "content": b'{"n":' + b"1" * 5000 + b"}",
                "headers": {"content-type": "application/json"},
            },
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {"content": b'{"prompt": "a"}', "headers": {"content-type": "text/plain"}},
            400,
        ),
        ("POST", "/v1/completions", {"content": b'{"prompt": "a"}'}, 400),
        ("POST", "/v1/completions", {"json": ["a"]}, 400),
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
    answer = httpx2.request(
        method, server.url + path, trust_env=False, verify=False, timeout=60, **options
    )
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"] and error["type"].endswith("Error")
    assert (
        len(answer.content) <= 700
        and "Traceback" not in answer.text
        and "/work" not in answer.text
        and ".py" not in answer.text
    )
    if status == 405:
        assert answer.headers["allow"]


def test_numbers_that_are_none_are_refused(server):
    """NaN and infinities are no JSON, and Python reads them nevertheless."""
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            body = f'{{"prompt": "a", "{field}": {number}}}'
            answer = post(
                server,
                "/v1/completions",
                content=body,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field, (
                number,
                field,
            )
        body = f'{{"prompt": "a", "logit_bias": {{"5": {number}}}}}'
        assert (
            post(
                server,
                "/v1/completions",
                content=body,
                headers={"content-type": "application/json"},
            ).status_code
            == 400
        )


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"]
)
def test_half_a_surrogate_pair_harms_nobody(server, path):
    """It cannot be cut into tokens or sent back: an echo of it was an error 500. A whole pair is a character."""
    body = (
        r'{"prompt": "a \ud800 b", "echo": true, "max_tokens": 2, "temperature": 0, '
        r'"messages": [{"role": "user", "content": "\udfff"}]}'
    )
    headers = {"content-type": "application/json"}
    answer = post(server, path, content=body, headers=headers)
    assert (
        answer.status_code == 400
        and "half of a surrogate pair" in answer.json()["error"]["message"]
    )
    assert answer.json()["error"]["param"] == ("messages" if "chat" in path else "prompt")
    whole = body.replace(r"\ud800", r"\ud83d\ude00").replace(r"\udfff", r"\ud83d\ude00")
    assert post(server, path, content=whole, headers=headers).status_code == 200


# ---- which exception an error becomes, and what the client does about it --------------------------------------------


@pytest.fixture(scope="module")
def strict(house: House, tiny_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """One answer at a time, nobody in line, and a key. LONG takes longer than there is time for."""
    options = (
        "--max-sequences",
        "1",
        "--max-queue",
        "0",
        "--request-timeout",
        "1",
        "--api-key",
        "right,also right",
    )
    fault = Fault(tmp_path_factory.mktemp("pace") / "fault")
    fault.plant("0.01")  # seconds more for each pass
    return house("--model", str(tiny_folder), *options, env={VARIABLE: str(fault.file)})


@pytest.fixture
def strict_client(strict: Running) -> Iterator[Callable[..., openai.OpenAI]]:
    made: list[openai.OpenAI] = []

    def make(key: str = "right", retries: int = 0) -> openai.OpenAI:
        made.append(openai.OpenAI(base_url=f"{strict.url}/v1", api_key=key, max_retries=retries))
        return made[-1]

    yield make
    for client in made:
        client.close()


LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a",
    "max_tokens": 255,
    "extra_body": {"ignore_eos": True},
}


def test_a_wrong_key_is_an_authentication_error(strict_client):
    with pytest.raises(openai.AuthenticationError, match="API key") as refusal:
        strict_client("wrong").models.list()
    assert refusal.value.code == "401" and refusal.value.type == "AuthenticationError"
    assert strict_client("also right").models.list().data[0].id == "tiny"


def test_a_late_answer_is_not_asked_for_again(strict, strict_client):
    def aborted() -> float:
        answer = httpx2.get(
            f"{strict.url}/metrics",
            headers={"Authorization": "Bearer right"},
            trust_env=False,
            timeout=60,
        )
        (line,) = [
            each
            for each in answer.text.splitlines()
            if 'request_success_total{finished_reason="abort"' in each
        ]
        return float(line.split()[-1])

    before = aborted()
    with pytest.raises(
        openai.InternalServerError, match="longer than the server allows"
    ) as refusal:
        strict_client(retries=2).completions.create(**LONG)
    assert (
        refusal.value.status_code == 504
        and refusal.value.response.headers["x-should-retry"] == "false"
    )
    until(lambda: aborted() == before + 1)


def test_a_late_stream_ends_with_an_error(strict_client):
    """And not just so: the client takes a stream that is cut for a good one."""
    said = []
    with pytest.raises(openai.APIError, match="longer than the server allows"):
        for chunk in strict_client().completions.create(**LONG, stream=True):
            said.append(chunk)
    assert not any(chunk.choices[0].finish_reason for chunk in said)


def test_a_full_server_says_so_and_the_client_comes_back(strict_client):
    busy = strict_client()
    stream = busy.completions.create(**LONG, stream=True)
    next(iter(stream))
    short = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with pytest.raises(openai.InternalServerError) as refusal:
        strict_client().completions.create(**short)
    assert refusal.value.status_code == 503 and refusal.value.response.headers["retry-after"] == "1"
    assert (
        strict_client(retries=2).completions.create(**short).usage.completion_tokens == 1
    )  # a second later
    stream.close()


# ---- the asynchronous client ----------------------------------------------------------------------------------------


def test_the_asynchronous_client(server, client):
    async def talk() -> tuple[Any, ...]:
        other: Any
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as other:
            whole = await other.completions.create(prompt=PROMPT, max_tokens=TOKENS, **GREEDY)
            stream = await other.completions.create(
                prompt=PROMPT, max_tokens=TOKENS, stream=True, **GREEDY
            )
            chunks = [chunk async for chunk in stream]
            spoken = await other.chat.completions.create(
                messages=CHAT, max_completion_tokens=TOKENS, **GREEDY
            )
            stream = await other.chat.completions.create(
                messages=CHAT, max_completion_tokens=TOKENS, stream=True, **GREEDY
            )
            deltas = [chunk async for chunk in stream]
            models = [model.id async for model in other.models.list()]
            with pytest.raises(openai.BadRequestError):
                await other.completions.create(prompt="", **GREEDY)
            with pytest.raises(openai.NotFoundError):
                await other.completions.create(prompt=PROMPT, model="gpt-5")
        return whole, chunks, spoken, deltas, models

    whole, chunks, spoken, deltas, models = asyncio.run(talk())
    assert whole.choices[0].text == joined(chunks) == complete(client).choices[0].text
    assert (
        spoken.choices[0].message.content
        == joined(deltas)
        == chat(client).choices[0].message.content
    )
    assert deltas[0].choices[0].delta.role == "assistant" and models == ["stories"]


def test_many_at_once(server, wait_idle):
    """Twelve streams and twelve whole answers, all of them complete, and nothing is left behind."""

    async def talk() -> list[tuple[int, str]]:
        other: Any
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as other:

            async def one(number: int) -> tuple[int, str]:
                fields: dict[str, Any] = {
                    "prompt": f"{PROMPT} {number}",
                    "max_tokens": 5 + number,
                    "extra_body": {"ignore_eos": True},
                }
                if number % 2:
                    answer = await other.completions.create(**GREEDY, **fields)
                    return answer.usage.completion_tokens, answer.choices[0].finish_reason
                options = {"include_usage": True}
                stream = await other.completions.create(
                    **GREEDY, **fields, stream=True, stream_options=options
                )
                chunks = [chunk async for chunk in stream]
                return chunks[-1].usage.completion_tokens, chunks[-2].choices[0].finish_reason

            return await asyncio.gather(*(one(number) for number in range(24)))

    assert asyncio.run(talk()) == [(5 + number, "length") for number in range(24)]
    wait_idle(server.url)


def test_a_client_that_leaves_a_stream_leaves_nothing_behind(client, server, wait_idle):
    """Pitfall 23: the client has gone, and its request still decodes."""
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    before = wait_idle(server.url)[aborted]
    stream = complete(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert wait_idle(server.url)[aborted] == before + 1

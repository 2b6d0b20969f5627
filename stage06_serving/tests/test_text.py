"""Text that is given out piece by piece: whole characters, nothing of a stop string, and the same as all at once."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checkpoint import STORIES
from shared.tokenizer import AnyTokenizer, Tokenizer
from stage06_serving.service import Service
from stage06_serving.text import TextStream, overlap

REAL = Tokenizer.from_folder(STORIES)
# Tokens of one, two and three letters, so that stop strings begin and end anywhere in them.
WORDS = ["a", "b", "c", "é", "ab", "ba", "aa", "abc", "cab", "bcé", "\n", "a\n"]
LETTERS = Tokenizer(
    {word.encode(): number for number, word in enumerate(WORDS)} | {b"\xc3": 12, b"\xa9": 13},
    {"<end>": 14},
    14,
)
TOGETHER = 30  # prompts in one body
PIECES = [
    "Once upon a time",
    " fox",
    "日本語",
    "中文，",
    "한국어",
    "😀",
    "👩‍👩‍👧",
    "🇸🇪",
    "é",
    "ñandú",
    "\n",
    "…",
    "\u2028",
    "𝒳",
    "ไทย",
    " ",
]


def mixed_texts(count: int) -> list[str]:
    rng = random.Random("texts")
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12))) for _ in range(count)]


def pieces_of(
    tokenizer: AnyTokenizer, ids: Sequence[int], **options: Any
) -> tuple[list[str], TextStream]:
    """What a stream gives out for each token, and at the end."""
    stream = TextStream(tokenizer, () if tokenizer.eos_id is None else (tokenizer.eos_id,), **options)
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stop is not None:
            return pieces, stream
    return [*pieces, stream.flush()], stream


def stopped(text: str, stops: Sequence[str], keep: bool = False) -> tuple[str, str | None]:
    """The same by the rule alone, letter by letter: the stop string that is complete first, and of several the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if keep else end - len(stop)], stop
    return text, None


# ---- whole characters -----------------------------------------------------------------------------------------------


def test_a_text_comes_out_as_it_is():
    """Pitfall 21: to decode token by token makes U+FFFD of every character that is spread over several."""
    spread = 0
    for text in mixed_texts(300):
        ids = REAL.encode(text)
        pieces, stream = pieces_of(REAL, ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        spread += "".join(REAL.decode([each]) for each in ids) != text
    assert spread > 200  # so many of the texts would show it


@pytest.mark.parametrize("size", [256, REAL.vocab_size, REAL.vocab_size + 50])
def test_tokens_that_are_no_text_decode_as_they_do_at_once(size):
    """Random tokens, as a model with random weights says them; the last size has ids without a token."""
    rng = random.Random(size)
    for _ in range(300):
        ids = [
            each
            for each in (rng.randrange(size) for _ in range(rng.randint(1, 30)))
            if each != REAL.eos_id
        ]
        pieces, stream = pieces_of(REAL, ids)
        whole = REAL.decode(ids)
        assert "".join(pieces) == whole
        given_out = ""
        for piece in pieces:
            given_out += piece
            assert whole.startswith(given_out)  # nothing that was shown is taken back


def test_the_end_of_text_is_no_text():
    ids, end = REAL.encode("the end"), REAL.eos_id
    assert end is not None and "".join(pieces_of(REAL, [*ids, end, *ids])[0]) == "the endthe end"
    pieces, stream = pieces_of(REAL, [end])
    assert pieces == ["", ""]


def test_what_is_left_of_a_character_shows_at_the_end():
    first, *rest = REAL.encode("😀")
    assert rest
    assert "".join(pieces_of(REAL, [first])[0]) == "\ufffd" == REAL.decode([first])
    assert pieces_of(REAL, [first], stops=["\ufffd"])[1].stop == "\ufffd"


# ---- stop strings ---------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 13), max_size=24),
    st.lists(st.text("abcé\n", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_stop_strings_end_the_text_wherever_the_tokens_are_cut(ids, stops, keep):
    text, stop = stopped(LETTERS.decode(ids), stops, keep)
    pieces, stream = pieces_of(LETTERS, ids, stops=stops, keep_stop=keep)
    assert ("".join(pieces), stream.stop) == (text, stop)
    bytewise = (
        [each for token in ids for each in LETTERS.encode(WORDS[token])]
        if max(ids, default=0) < 12
        else ids
    )
    assert (
        "".join(pieces_of(LETTERS, bytewise, stops=stops, keep_stop=keep)[0])
    ) == text  # however it is cut


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 11), max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_nothing_of_a_stop_string_leaks_and_no_more_is_held_back_than_must_be(ids, stops):
    final, stop = stopped(LETTERS.decode(ids), stops)
    stream = TextStream(LETTERS, (), stops)
    shown, seen = "", ""
    for token_id in ids:
        shown += stream.push(token_id)
        seen += WORDS[token_id]
        assert final.startswith(shown)
        if stream.stop is not None:
            break
        held = seen.removeprefix(shown)
        assert not held or any(each.startswith(held) for each in stops)
    assert stream.stop == stop


def test_a_stop_string_across_many_tokens():
    text = "The cat. THE END of it"
    ids = [REAL.encode(letter)[0] for letter in text]
    pieces, stream = pieces_of(REAL, ids, stops=["THE END"])
    assert "".join(pieces) == "The cat. " and stream.stop == "THE END"
    assert len(pieces) == len("The cat. THE END")  # not one token more was looked at


def test_a_beginning_that_comes_to_nothing_is_given_out():
    pieces, stream = pieces_of(LETTERS, [0, 1, 0, 0, 1], stops=["abc"])
    assert pieces == ["", "", "ab", "a", "", "ab"] and stream.stop is None


def test_the_first_to_be_complete_wins_and_of_two_the_longer():
    assert pieces_of(REAL, REAL.encode("one two three"), stops=["three", "two"])[1].stop == "two"
    pieces, stream = pieces_of(LETTERS, [2, 0, 1], stops=["b", "ab", "cab"])
    assert ("".join(pieces), stream.stop) == ("", "cab")
    pieces, stream = pieces_of(
        LETTERS, [8, 7], stops=["abab", "a"]
    )  # "cab" and "abc": a is complete long before
    assert ("".join(pieces), stream.stop) == ("c", "a")


def test_the_stop_string_stays_where_it_is_wanted():
    for stops in (["two"], ["two", "three"]):
        pieces, stream = pieces_of(REAL, REAL.encode("one two three"), stops=stops, keep_stop=True)
        assert ("".join(pieces), stream.stop) == ("one two", "two")


@settings(deadline=None, derandomize=True)
@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_overlap(text, stop):
    lengths = [length for length in range(len(stop)) if text.endswith(stop[:length])]
    assert overlap(text, stop) == max(lengths)


# ---- min_tokens -----------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 11), max_size=24),
    st.lists(st.text("abcé\n", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.integers(0, 12),
)
def test_stop_strings_wait_for_min_tokens(ids, stops, keep, least):
    """What the tokens before that many say is shown at once, and no stop string ends or begins there."""
    early = max(0, least - 1)
    before = "".join(WORDS[each] for each in ids[:early])
    after, stop = stopped("".join(WORDS[each] for each in ids[early:]), stops, keep)
    pieces, stream = pieces_of(LETTERS, ids, stops=stops, keep_stop=keep, min_tokens=least)
    assert ("".join(pieces), stream.stop) == (before + after, stop)
    assert pieces[:early] == [WORDS[each] for each in ids[:early]] + [""] * (early > len(ids))
    assert stop is None or len(pieces) >= least  # so many tokens there are at least


def test_long_texts_are_cut_and_put_together_off_the_loop(monkeypatch):
    """A megabyte into tokens, and each of these into text again, took the event loop two seconds."""
    threads: list[str] = []

    class Watched(Tokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread().name)
            return super().encode(text)

        def decode(self, ids: Iterable[int]) -> str:
            threads.append(threading.current_thread().name)
            return super().decode(ids)

    unused: Any = None
    loaded: Any = SimpleNamespace(tokenizer=Watched.from_folder(STORIES))
    service = Service(unused, loaded, "", None, 1.0)
    monkeypatch.setattr("stage06_serving.service.LONG_TEXT", 20)

    def seen(text: str) -> tuple[bool, bool]:
        """Whether the loop's own thread has done the cutting, and the putting together."""
        threads.clear()
        ids = asyncio.run(service.encode(text))
        cutting, *_ = threads
        assert asyncio.run(service.token_texts(ids)) == [
            REAL.decode([each]) for each in ids
        ] and ids == REAL.encode(text)
        return cutting == threading.current_thread().name, set(threads[1:]) == {
            threading.current_thread().name
        }

    assert seen("once") == (True, True)
    assert seen("once upon a time " * 2) == (False, True)
    assert seen("once upon a time " * 20) == (False, False)


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def test_streams_say_what_whole_answers_say(house, tiny_folder):
    """300 prompts with emoji and CJK, each answered at once and as a stream, a third of them with a stop string cut out of the
    answer. The model has random weights and bytes for tokens, and is pushed to say parts of emoji and CJK characters.

    Whole answers without a stop string come thirty in one body, and their streams are read as they are sent: it is quicker."""
    tokenizer = Tokenizer.from_folder(tiny_folder)
    prompts = [f"Say {text}" for text in mixed_texts(300)]
    bias = {str(each): 5.0 for each in {*"😀日é中 ok\n".encode()}}

    fields: dict[str, Any] = {
        "model": "tiny", "max_tokens": 9, "temperature": 1, "logit_bias": bias, "return_token_ids": True,
    }  # fmt: skip

    async def talk(url: str) -> list[tuple[Any, Any, list[Any]]]:
        async with httpx2.AsyncClient(base_url=f"{url}/v1", timeout=60, trust_env=False) as client:
            gate = asyncio.Semaphore(24)

            async def ask(prompt: str | list[str], **more: Any) -> list[Any]:
                answer = await client.post(
                    "/completions", json={**fields, "prompt": prompt, **more}
                )
                return answer.json()["choices"]

            async def one(number: int, plain: Any) -> tuple[Any, Any, list[Any]]:
                whole, body = (
                    plain,
                    {
                        **fields,
                        "prompt": prompts[number],
                        "seed": number // TOGETHER,
                        "stream": True,
                    },
                )
                async with gate:
                    if number % 3 == 0 and len(plain["text"]) > 4:
                        body["stop"] = [plain["text"][3:5], "never"]
                        (whole,) = await ask(prompts[number], seed=body["seed"], stop=body["stop"])
                    async with client.stream("POST", "/completions", json=body) as stream:
                        *events, done = [
                            line.removeprefix("data: ")
                            async for line in stream.aiter_lines()
                            if line
                        ]
                assert done == "[DONE]"
                return plain, whole, [json.loads(each)["choices"][0] for each in events]

            plain: list[Any] = []
            for start in range(0, len(prompts), TOGETHER):
                plain += await ask(prompts[start : start + TOGETHER], seed=start // TOGETHER)
            return await asyncio.gather(*(one(*each) for each in enumerate(plain)))

    options = (
        "--dtype",
        "float64",
        "--kv-memory",
        "1MiB",
        "--no-sanitize",
    )  # memory is not what is tested here
    found = asyncio.run(talk(house("--model", str(tiny_folder), *options).url))
    broken = multibyte = 0
    assert len(found) == 300
    for plain, whole, choices in found:
        decoded = tokenizer.decode(each for each in plain["token_ids"] if each != 256)
        assert plain["text"] == decoded  # so a U+FFFD in it is one of the full decode
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [each for choice in choices for each in choice["token_ids"]] == whole["token_ids"]
        *before, last = [choice["finish_reason"] for choice in choices]
        assert last == whole["finish_reason"] and not any(before)
        if whole is not plain:
            stop = plain["text"][3:5]
            assert whole["text"] == plain["text"][: plain["text"].index(stop)]
            assert (
                whole["finish_reason"] == "stop"
                and whole["stop_reason"] == choices[-1]["stop_reason"] == stop
            )
        broken += "\ufffd" in decoded
        multibyte += any(ord(letter) > 127 and letter != "\ufffd" for letter in decoded)
    assert broken > 100 and multibyte > 20  # there was something to get wrong

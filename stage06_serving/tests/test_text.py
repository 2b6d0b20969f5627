"""Text that is sent in pieces: whole characters, nothing of a stop string, equal to the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.catalog import STORIES
from shared.tokenizer import Tokenizer
from stage06_serving.text import TextStream, overlap

REAL = Tokenizer.from_folder(STORIES)
# Tokens of one, two and three letters, so that stop strings begin and end anywhere in them.
WORDS = ["a", "b", "c", "é", "ab", "ba", "aa", "abc", "cab", "bcé", "\n", "a\n"]
CODES = {word.encode(): number for number, word in enumerate(WORDS)} | {b"\xc3": 12, b"\xa9": 13}
LETTERS = Tokenizer(CODES | {b"a\xc3": 14}, {"<end>": 15}, 15)
PIECES = ["Once upon a time", " fox", "中文，", "한국어", "ñandú", "👩‍👩‍👧", "🇸🇪"]
PIECES += "日é…\u2028𝒳ไ😀\n "

some_ids = st.lists(st.integers(0, 11), max_size=24)
some_stops = st.lists(st.text("abcé\n", min_size=1, max_size=5), max_size=4)


def pieces_of(tokenizer, ids, **options):
    """The output of a stream for each token and at the end, and its stop string."""
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    stream, pieces = TextStream(tokenizer, ends, **options), []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stop is not None:
            assert stream.flush() == ""  # nothing follows
            return pieces, stream.stop
    pieces.append(stream.flush())
    return pieces, stream.stop


def stopped(text, stops):
    """The rule, letter by letter: the stop string completed first wins; of several at once, the
    longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def test_a_text_is_sent_unchanged():
    """Pitfall 21: decoding token by token turns characters of several tokens into U+FFFD."""
    spread, rng = 0, random.Random("texts")
    for _ in range(300):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        ids = REAL.encode(text)
        pieces, _ = pieces_of(REAL, ids)
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        spread += "".join(REAL.decode([id]) for id in ids) != text
    assert spread > 200  # texts that would reveal it


def test_end_of_text_is_not_shown_and_an_unfinished_character_is():
    ids, end = REAL.encode("the end"), REAL.eos_id
    assert end is not None and "".join(pieces_of(REAL, [*ids, end, *ids])[0]) == "the endthe end"
    first, *rest = REAL.encode("😀")
    assert rest and "".join(pieces_of(REAL, [first])[0]) == "\ufffd" == REAL.decode([first])
    assert pieces_of(REAL, [first], stops=["\ufffd"])[1] == "\ufffd"


@given(st.lists(st.integers(0, 13), max_size=24), some_stops)
def test_stop_strings_end_the_text_wherever_the_tokens_are_cut(ids, stops):
    text, stop = stopped(LETTERS.decode(ids), stops)
    pieces, found = pieces_of(LETTERS, ids, stops=stops)
    assert ("".join(pieces), found) == (text, stop)
    if max(ids, default=0) < 12:
        ids = [id for token in ids for id in LETTERS.encode(WORDS[token])]
    assert "".join(pieces_of(LETTERS, ids, stops=stops)[0]) == text


@given(some_ids, st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_of_a_stop_string_leaks_and_no_more_is_held_back_than_needed(ids, stops):
    final, stop = stopped(LETTERS.decode(ids), stops)
    stream = TextStream(LETTERS, (), stops)
    sent, seen = "", ""
    for token_id in ids:
        sent += stream.push(token_id)
        seen += WORDS[token_id]
        assert final.startswith(sent)
        if stream.stop is not None:
            break
        held = seen.removeprefix(sent)
        assert not held or any(one.startswith(held) for one in stops)
    assert stream.stop == stop


@pytest.mark.parametrize(
    ("ids", "stops", "shown", "stop"),
    [
        # The beginning of a stop string that does not continue is sent.
        ([0, 1, 2, 0], ["bc"], ["a", "", ""], "bc"),
        ([0, 1, 0, 0, 1], ["abc"], ["", "", "ab", "a", "", "ab"], None),
        # The first one completed wins; of two at once, the longer.
        ([2, 0, 1], ["b", "ab", "cab"], ["", "", ""], "cab"),
        ([8, 7], ["abab", "a"], ["c"], "a"),
        ([0, 14], ["aa"], ["", ""], "aa"),  # and a part of a character
    ],
)
def test_stop_strings_by_hand(ids, stops, shown, stop):
    assert pieces_of(LETTERS, ids, stops=stops) == (shown, stop)


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_overlap(text, stop):
    lengths = [length for length in range(len(stop)) if text.endswith(stop[:length])]
    assert overlap(text, stop) == max(lengths)


@given(some_ids, some_stops, st.integers(0, 12))
def test_stop_strings_wait_for_min_tokens(ids, stops, least):
    """Tokens before that are sent at once, and no stop string begins or ends in them."""
    early = max(0, least - 1)
    first = [WORDS[id] for id in ids[:early]]
    after, stop = stopped("".join(WORDS[id] for id in ids[early:]), stops)
    pieces, found = pieces_of(LETTERS, ids, stops=stops, min_tokens=least)
    assert ("".join(pieces), found) == ("".join(first) + after, stop)
    assert pieces[:early] == first + [""] * (early > len(ids))
    assert stop is None or len(pieces) >= least

"""The tokenizer against that of transformers, the incremental decoder, and invalid files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.catalog import STORIES
from shared.errors import UserError
from shared.tokenizer import (
    ALPHABET,
    END_OF_TEXT,
    ByteTokenizer,
    IncrementalDecoder,
    Tokenizer,
    load_tokenizer,
)

SAMPLE = (
    "The fox didn't know what the crow knew. 'We'll see,' she said, and they've seen it since "
    "1905. ### déjà vu, naïve, größer, Привет мир, "
    "世界你好, こんにちは, 😀😀 👩‍👩‍👧 ## # def f(x):\n    return x  "
    "# twice\n\n\tEND\r\n"
)
AWKWARD = [
    *("", " ", "  ", "   a", "a   ", "\n\n\n", " \n x", "\t\tx\r\n", "#", "# #", "it's IT'S we'll"),
    *("12345 1.5e-3", "...!?!", "\x00\x1c\x85", "\u00a0\u2003\u3000x", "e\u0301", "\ufeffx"),
    *("👩\u200d👩\u200d👧", "𝔘𝔫𝔦", "\u200b", "ﷺ", "½Ⅷ²", "'ll '", "a" * 3000, " " * 3000 + "x"),
]


def edit(folder: Path, change: Callable[[dict[str, int]], object]) -> None:
    path = folder / "vocab.json"
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    change(vocabulary)
    path.write_text(json.dumps(vocabulary), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a vocabulary in GPT-2's format, which a test may change."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(STORIES / name, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_folder(STORIES)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return theirs_of(STORIES)


def theirs_of(folder: Path) -> Any:
    from transformers import GPT2Tokenizer  # here: it takes seconds to load

    return GPT2Tokenizer.from_pretrained(folder)


def test_awkward_texts_have_the_ids_of_transformers(folder, ours, theirs):
    def same(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
        assert (ours.vocab_size, ours.eos_id) == (len(theirs), theirs.eos_token_id)
        for text in texts:
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.decode(ids) == text and ours.decode_bytes(ids) == text.encode()

    same(ours, theirs, [SAMPLE, *AWKWARD])
    # Some vocabularies put the special tokens first, so that no byte has its own number.
    edit(folder, lambda v: v.update({token: v[token] + 1 for token in v} | {END_OF_TEXT: 0}))
    shifted = Tokenizer.from_folder(folder)
    assert shifted.eos_id == 0
    same(shifted, theirs_of(folder), [SAMPLE])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=150)
@given(TEXTS | st.text("ab 's\n\t.,1é世\u3000", max_size=40), st.data())
def test_any_text_and_any_ids_are_those_of_transformers(ours, theirs, text, data):
    assert ours.encode(text) == theirs.encode(text)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 2)))
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_special_tokens_in_a_text_are_text_and_unknown_ids_are_numbers(ours):
    ids = ours.encode(f"one{END_OF_TEXT}two")
    assert ours.eos_id is not None and ours.eos_id not in ids
    assert ours.decode(ids) == f"one{END_OF_TEXT}two" and ours.decode([ours.eos_id]) == END_OF_TEXT
    assert ours.decode([*ours.encode("a"), 50_000, *ours.encode("b")]) == "a<50000>b"


def test_lone_surrogates_are_replaced_and_pairs_joined(ours):
    given, valid = "a\ud83d b \ude00\ud83d \ud83d\ude00", "a\ufffd b \ufffd\ufffd 😀"
    for tokenizer in (ours, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(given)) == valid


def test_bytes_where_there_are_no_files():
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.decode([110, 195, 169, 255, 256, 50256]) == "né\ufffd<256><50256>"


@settings(max_examples=100)
@given(st.data())
def test_pieces_together_are_the_whole(ours, data):
    """For any ids, invalid UTF-8 and ids without a token included; twice with one decoder."""
    parts = st.sampled_from([0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0xED, 0xA0, 0x80])
    decoder = IncrementalDecoder(tokenizer := data.draw(st.sampled_from([ours, ByteTokenizer()])))
    for _ in range(2):
        ids = data.draw(st.lists(st.integers(0, 500) | parts))
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids)


def test_a_first_merge_of_two_hashes_is_not_a_version_line(folder):
    (folder / "merges.txt").write_text("# #\n", encoding="utf-8")
    vocabulary = {token: token_id for token_id, token in enumerate([*ALPHABET, "##"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("##"), tokenizer.eos_id) == ([256], None)


@pytest.mark.parametrize("entry", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_the_end_of_text_that_the_folder_names(folder, entry):
    edit(folder, lambda v: v.update({"<stop>": len(v)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<stop>"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("vocab.json", None, "vocab.json is missing"),
        ("merges.txt", None, "merges.txt is missing"),
        ("vocab.json", lambda text: text.replace('"a":', '"<a>":'), "are not a byte-level BPE"),
        ("vocab.json", lambda text: text.replace("{", '{"fox": 2048, ', 1), "are not a byte-level"),
        ("merges.txt", lambda text: "\n".join(text.split("\n")[::-1]), "are not a byte-level BPE"),
    ],
)
def test_each_fault_of_the_files_is_one_sentence(folder, name, change, words):
    if change is None:
        (folder / name).unlink()
    else:
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(change(text), encoding="utf-8")
    with pytest.raises(UserError, match=words):
        load_tokenizer(folder)

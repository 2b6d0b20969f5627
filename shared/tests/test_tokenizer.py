"""Every kind of tokenizer against transformers': ids, texts, streams, control tokens; and invalid
files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, trainers
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers as norms
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

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
PIECES = [*"abc 's\n\t.,1é世\u3000😀<|>", "e\u0301", "the ", "▁", "  ", "<0x41>", "<tool_call>"]
PIECES += ["<|im_end|>", END_OF_TEXT, "<s>", "</s>", "we'LL", "123", "\r\n", "\ufeff"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=30)
PARTS = st.sampled_from([0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0xED, 0xA0, 0x80])  # of characters
# Qwen's cut: contractions in any case, single digits, line ends with the signs before them.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train(tokenizer: Encoder, **options: Any) -> None:
    trainer = trainers.BpeTrainer(show_progress=False, **options)
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)


def begins_with(token: str, token_id: int) -> post.PostProcessor:
    special = [(token, token_id)]
    return post.TemplateProcessing(f"{token} $A", f"{token} $A {token} $B", special)


def qwen() -> Encoder:
    tokenizer = Encoder(models.BPE())
    tokenizer.normalizer = norms.NFC()
    level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([pre.Split(Regex(CUT), "isolated"), level])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, vocab_size=400, initial_alphabet=pre.ByteLevel.alphabet())
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def llama3() -> Encoder:
    tokenizer = qwen()
    tokenizer.post_processor = begins_with(CONTROL[0], tokenizer.token_to_id(CONTROL[0]) or 0)
    return tokenizer


def sentencepiece(legacy: bool) -> Encoder:
    """With byte fallback, and a space before the text: put there by the normalizer in older files,
    by the pre-tokenizer in newer ones."""
    tokenizer = Encoder(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if legacy:
        tokenizer.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre.Metaspace("▁", "first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    train(tokenizer, vocab_size=500, special_tokens=special)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = Encoder.from_str(json.dumps(fields))
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = begins_with("<s>", 1)
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Encoder], str]] = {
    "qwen": (qwen, "<|im_end|>"),
    "llama3": (llama3, "<|im_end|>"),
    "sentencepiece": (lambda: sentencepiece(True), "</s>"),
    "sentencepiece, newer": (lambda: sentencepiece(False), "</s>"),
}


def theirs_of(folder: Path) -> Any:
    from transformers import GPT2Tokenizer  # here: it takes seconds to load

    return GPT2Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["gpt2", *KINDS])
def pair(request, tmp_path_factory):
    """Ours and transformers'."""
    from transformers import PreTrainedTokenizerFast

    if request.param == "gpt2":
        return load_tokenizer(STORIES), theirs_of(STORIES)
    build, end = KINDS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    build().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    file = str(folder / "tokenizer.json")
    return load_tokenizer(folder), PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end)


def check(ours: Any, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, split_special_tokens=True)
    # Theirs takes sentencepiece's space before the first word away: ours stays in a stream.
    plain = theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) in (plain, f" {plain}")


def streamed(tokenizer: Any, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join([*map(decoder.push, ids), decoder.flush()])


def test_known_texts_have_the_ids_of_transformers(pair):
    """Control tokens in a text are text, ids without a token are numbers, surrogates, which UTF-8
    lacks, are joined or replaced."""
    ours, theirs = pair
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    end = ours.decode([ours.eos_id])
    for text in [*AWKWARD, SAMPLE, f"one{end}two"]:
        check(ours, theirs, text)
        assert ours.eos_id not in ours.encode(text)
    assert ours.decode([*ours.encode("a"), 50_000]).endswith("a<50000>")
    given, valid = "a\ud83d b \ude00\ud83d \ud83d\ude00", "a\ufffd b \ufffd\ufffd 😀"
    for tokenizer in (ours, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(given)).endswith(valid)


@settings(max_examples=300)
@given(TEXTS, st.lists(st.integers(0, 500) | PARTS))
def test_any_text_is_encoded_as_transformers_does_and_any_ids_are_streamed_whole(pair, text, ids):
    ours, theirs = pair
    check(ours, theirs, "".join(text))
    for tokenizer in (ours, ByteTokenizer()):
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_control_tokens_are_tokens_in_a_chat_alone_which_is_cut_as_one_text(pair):
    ours, theirs = pair
    end = ours.decode([ours.eos_id])
    assert end in ours.control and "<tool_call>" not in ours.control  # templates may look for those
    ids = ours.encode_chat([f"a{end}b{end[:1]}", end[1:]])
    assert ids.count(ours.eos_id) == 1
    whole = f"{end}[INST] the end [/INST]{end} two\nthe {end}."
    for text in (f"a{end}", whole):
        assert ours.encode_chat([text]) == theirs.encode(text, add_special_tokens=False)
    assert ours.unused(ours.vocab_size + 2) == [ours.vocab_size, ours.vocab_size + 1]


def test_bytes_where_there_are_no_files():
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.decode([110, 195, 169, 255, 256, 50256]) == "né\ufffd<256><50256>"


# ---- the files -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a vocabulary in GPT-2's format, which a test may change."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(STORIES / name, tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, int]], object]) -> None:
    path = folder / "vocab.json"
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    change(vocabulary)
    path.write_text(json.dumps(vocabulary), encoding="utf-8")


def test_special_tokens_may_come_first_so_that_no_byte_has_its_own_number(folder):
    edit(folder, lambda v: v.update({token: v[token] + 1 for token in v} | {END_OF_TEXT: 0}))
    ours = Tokenizer.from_folder(folder)
    assert ours.eos_id == 0
    check(ours, theirs_of(folder), SAMPLE)


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


def test_more_white_space_than_tiktoken_cuts_is_one_sentence():
    with pytest.raises(UserError, match="shorten its longest run of white space"):
        load_tokenizer(STORIES).encode(" " * 1_000_000 + "a")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("vocab.json", None, "vocab.json is missing"),
        ("merges.txt", None, "merges.txt is missing"),
        ("tokenizer.json", lambda text: '{"version": "1.0"}', "tokenizer.json is not a tokenizer"),
        ("vocab.json", lambda text: text.replace('"a":', '"<a>":'), "are not a byte-level BPE"),
        ("vocab.json", lambda text: text.replace("{", '{"fox": 2048, ', 1), "are not a byte-level"),
        ("vocab.json", lambda text: text.replace(": 300,", ": null,"), "are not a byte-level BPE"),
        ("merges.txt", lambda text: text.replace("Ġ t\nh e", "h e\nĠ t"), "are not a byte-level"),
    ],
)
def test_each_fault_of_the_files_is_one_sentence(folder, name, change, words):
    if change is None:
        (folder / name).unlink()
    else:
        text = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else ""
        (folder / name).write_text(change(text), encoding="utf-8")
    with pytest.raises(UserError, match=words):
        load_tokenizer(folder)

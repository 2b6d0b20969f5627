"""Every kind of tokenizer.json against transformers: ids, text, streams, control tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers import normalizers as norms
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

from shared.errors import UserError
from shared.tests.test_tokenizer import AWKWARD, SAMPLE
from shared.tokenizer import IncrementalDecoder, load_tokenizer

# Qwen's cut: contractions in any case, single digits, line ends with the signs before them.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train(tokenizer: Tokenizer, **options: Any) -> None:
    trainer = trainers.BpeTrainer(show_progress=False, **options)
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)


def begins_with(token: str, token_id: int) -> post.PostProcessor:
    special = [(token, token_id)]
    return post.TemplateProcessing(f"{token} $A", f"{token} $A {token} $B", special)


def qwen() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = norms.NFC()
    level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([pre.Split(Regex(CUT), "isolated"), level])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, vocab_size=400, initial_alphabet=pre.ByteLevel.alphabet())
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = qwen()
    tokenizer.post_processor = begins_with(CONTROL[0], tokenizer.token_to_id(CONTROL[0]) or 0)
    return tokenizer


def sentencepiece(legacy: bool) -> Tokenizer:
    """With byte fallback, and a space before the text: put there by the normalizer in older files,
    by the pre-tokenizer in newer ones."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if legacy:
        tokenizer.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre.Metaspace("▁", "first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    train(tokenizer, vocab_size=500, special_tokens=special)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = begins_with("<s>", 1)
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "qwen": (qwen, "<|im_end|>"),
    "llama3": (llama3, "<|im_end|>"),
    "sentencepiece": (lambda: sentencepiece(True), "</s>"),
    "sentencepiece, newer": (lambda: sentencepiece(False), "</s>"),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """Ours and transformers'."""
    from transformers import PreTrainedTokenizerFast  # here: it takes seconds to load

    build, end = KINDS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    build().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    file = str(folder / "tokenizer.json")
    return load_tokenizer(folder), PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end)


def texts(count: int) -> list[str]:
    rng = random.Random(0)
    pieces = [*"abc 's\n\t.,1é世\u3000😀<|>", "e\u0301", "the ", "▁", "  ", "<0x41>", "<tool_call>"]
    pieces += [*CONTROL, "<s>", "</s>", "we'LL", "123", "\r\n", "\ufeff"]

    def letter() -> str:
        return rng.choice(pieces) if rng.random() < 0.9 else chr(rng.randint(1, 0xD7FF))

    return ["".join(letter() for _ in range(rng.randint(0, 30))) for _ in range(count)]


def test_ids_and_streams_are_those_of_transformers(pair):
    ours, theirs = pair
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    # Rows of the model without a token.
    assert ours.unused(ours.vocab_size + 3) == [ours.vocab_size + i for i in range(3)]
    assert ours.decode([ours.vocab_size + 1]) == f"<{ours.vocab_size + 1}>"
    for text in [*AWKWARD, SAMPLE, *texts(2000)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, split_special_tokens=True)
        decoder = IncrementalDecoder(ours)
        whole = ours.decode(ids)
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == whole
        # Theirs takes sentencepiece's space before the first word away: ours stays in a stream.
        plain = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert whole in (plain, f" {plain}")


def test_control_tokens_are_tokens_in_a_chat_alone_which_is_cut_as_one_text(pair):
    ours, theirs = pair
    end = ours.decode([ours.eos_id])
    assert ours.eos_id not in ours.encode(f"a{end}b")
    assert end in ours.control and "<tool_call>" not in ours.control  # templates may look for those
    ids = ours.encode_chat([f"a{end}b{end[:1]}", end[1:]])
    assert ids.count(ours.eos_id) == 1
    whole = f"{end}[INST] the end [/INST]{end} two\nthe {end}."
    for text in (f"a{end}", whole):
        assert ours.encode_chat([text]) == theirs.encode(text, add_special_tokens=False)


def test_a_file_that_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match="tokenizer.json is not a tokenizer"):
        load_tokenizer(tmp_path)

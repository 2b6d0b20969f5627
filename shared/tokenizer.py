"""Text to token ids and back: GPT-2's byte-level BPE, run by tiktoken, from a folder's two files,
and the format of today's models, tokenizer.json, run by `tokenizers`.

Both encode; decoding is ours. Each token is mapped to its bytes once, so that a stream never shows
half a character. Two choices differ from `transformers`. A special token in the user's text is
plain text, so that typing <|endoftext|> does not end a document; only `encode_chat` reads control
tokens such as <|im_end|>. And an id without a token decodes to its number, because models'
vocabularies are padded.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer as Encoder

from .errors import UserError
from .files import read_json, read_text

# Where GPT-2 cuts a text before BPE: contractions, words, numbers, signs (each with the space
# before it), and white space up to the last one before a word, which belongs to the word.
CUT = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
FILES = ("vocab.json", "merges.txt", FILE)
SPACE = "\u2581"  # sentencepiece's
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Character -> byte, as in GPT-2's vocab.json: printable bytes are themselves, the other 68 begin at
# U+0100.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = {chr(byte): byte for byte in PRINTABLE}
ALPHABET |= {chr(256 + number): byte for number, byte in enumerate(OTHERS)}
SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # what a token that no merge makes must look like


class AnyTokenizer:
    """What every tokenizer offers. `eos_id`: the token that ends a text, or None."""

    def __init__(self, tokens: dict[int, bytes], eos_id: int | None) -> None:
        self._tokens, self.vocab_size, self.eos_id = tokens, max(tokens) + 1, eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; special tokens in it are plain text."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes; a token may be part of a character."""
        known = self._tokens
        return b"".join([known[id] if id in known else f"<{id}>".encode() for id in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class Tokenizer(AnyTokenizer):
    """GPT-2's tokenizer with the vocabulary of one checkpoint."""

    def __init__(
        self, ranks: dict[bytes, int], special: dict[str, int], eos_id: int | None
    ) -> None:
        """ranks: bytes -> id of the ordinary tokens, in the order of the merges. special: text ->
        id of the others."""
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=CUT, mergeable_ranks=ranks, special_tokens=special
        )
        tokens = {token_id: token for token, token_id in ranks.items()}
        super().__init__(tokens | {id: token.encode() for token, id in special.items()}, eos_id)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Build from vocab.json and merges.txt.

        tiktoken has no merges: it joins the pair whose result has the lowest id. That is BPE
        exactly if each merge makes a token of its own and the ids rise in the order of the merges.

        Raises UserError if a file is missing or unreadable, or if they disagree: then some texts
        would silently get other ids than the model was trained on.
        """
        folder = Path(folder)
        vocabulary = read_json(folder / "vocab.json")
        lines = read_text(folder / "merges.txt").split("\n")
        # Some copies lack the version line; "# #" is a merge, so a bare "#" does not mark it.
        lines = lines[1:] if lines[0].startswith("#version") else lines
        merged = [line.replace(" ", "") for line in lines if line.strip()]
        ordinary = dict.fromkeys([*ALPHABET, *merged])
        special = {token: id for token, id in vocabulary.items() if token not in ordinary}
        ids = [vocabulary.get(token, -1) for token in merged]
        complete = ordinary.keys() <= vocabulary.keys() and all(map(SPECIAL.fullmatch, special))
        whole = {*map(type, vocabulary.values())} == {int}
        if not (complete and whole) or ids != sorted(set(ids)):
            raise UserError(
                f"vocab.json and merges.txt in {folder} are not a byte-level BPE of one "
                "checkpoint: copy both from where the weights come from."
            )
        ranks = {bytes(ALPHABET[c] for c in token): vocabulary[token] for token in ordinary}
        eos = special_tokens(folder).get("eos_token", END_OF_TEXT)
        return cls(ranks, special, special.get(eos))

    def encode(self, text: str) -> list[int]:
        """Raises UserError if a run of white space is too long for tiktoken: about a million."""
        try:
            return self._encoding.encode(well_formed(text), disallowed_special=())
        except ValueError:
            raise UserError(
                "The text cannot be cut into tokens: shorten its longest run of white space."
            ) from None


class JsonTokenizer(AnyTokenizer):
    """The tokenizer of a folder with tokenizer.json. control: its control tokens.

    Two kinds of file are known: byte-level (Llama 3, Qwen, SmolLM2) and those derived from
    sentencepiece (Llama 2, Mistral, TinyLlama), where a space is U+2581 and bytes are <0xNN>. Added
    words that are not special, such as Qwen's <think>, are tokens everywhere.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a file that is unreadable."""
        path = Path(folder) / FILE
        decoder = read_json(path).get("decoder")
        try:
            self._encoder = encoder = Encoder.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise UserError(
                f"{path} is not a tokenizer ({error}): copy or download it again."
            ) from None
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True  # control tokens in a text are text
        to_bytes = _byte_level if "ByteLevel" in str(decoder) else _sentencepiece
        added = encoder.get_added_tokens_decoder()
        self.control = frozenset(token.content for token in added.values() if token.special)
        tokens = {id: to_bytes(token) for token, id in encoder.get_vocab().items()}
        tokens |= {id: token.content.encode() for id, token in added.items()}
        eos = special_tokens(Path(folder)).get("eos_token", "")
        super().__init__(tokens, encoder.token_to_id(eos))

    @cached_property
    def _chat_encoder(self) -> Encoder:
        """The same encoder, but it reads control tokens in a text as tokens."""
        encoder = Encoder.from_str(self._encoder.to_str())
        encoder.encode_special_tokens = False
        return encoder

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with those that the model expects around it, such as a BOS."""
        return _ids(self._encoder, text)

    def encode_chat(self, pieces: Iterable[str]) -> list[int]:
        """Token ids of a rendered chat, with the template's control tokens. A user's are cut in two
        by the borders of the pieces, and so stay text. Nothing is added around the chat."""
        encoded = (_ids(self._chat_encoder, one, add_special_tokens=False) for one in pieces)
        return list(chain.from_iterable(encoded))

    def unused(self, rows: int) -> list[int]:
        """The ids below `rows`, the model's count of ids, that have no token."""
        return [token_id for token_id in range(rows) if token_id not in self._tokens]


class ByteTokenizer(AnyTokenizer):
    """For random weights without a tokenizer: ids 0 to 255 are bytes, others show as numbers."""

    def __init__(self) -> None:
        super().__init__({byte: bytes([byte]) for byte in range(256)}, None)

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(well_formed(text).encode())


class IncrementalDecoder:
    """Decodes a stream of ids, without those that are `hidden`. The bytes of a character are held
    back until it is complete.

    The results of `push`, and of `flush` at the end, add up to `decode` of all the ids.
    """

    def __init__(self, tokenizer: AnyTokenizer, hidden: Collection[int] = ()) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """The rest of an unfinished character, as U+FFFD. The decoder can then start again."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: str | Path | None) -> AnyTokenizer:
    """The tokenizer of `Checkpoint.folder`; bytes if that is None (random weights of a preset).
    A tokenizer.json decides if there is one, because the two other files do not say how text is
    cut."""
    if folder is None:
        return ByteTokenizer()
    known = (Path(folder) / FILE).exists()
    return JsonTokenizer(folder) if known else Tokenizer.from_folder(folder)


# ---- files ----


def well_formed(text: str) -> str:
    """The text without surrogates, which UTF-8 lacks: pairs are joined, all others replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and others, where tokenizer_config.json names them."""
    path = folder / "tokenizer_config.json"
    tokens = {}
    for name, value in (read_json(path) if path.exists() else {}).items():
        text = value.get("content") if isinstance(value, dict) else value  # older files: a dict
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _ids(encoder: Encoder, text: str, **options: bool) -> list[int]:
    """The ids of a text. Other threads may run meanwhile: `Encoder.encode` keeps Python's lock, and
    a megabyte stopped a server for half a second."""
    (encoding,) = encoder.encode_batch_fast([well_formed(text)], **options)
    return encoding.ids


def _byte_level(token: str) -> bytes:
    """The bytes of a token as the vocabulary spells it. One outside the alphabet was added to the
    vocabulary as plain text."""
    known = ALPHABET.keys() >= set(token)
    return bytes(ALPHABET[letter] for letter in token) if known else token.encode()


def _sentencepiece(token: str) -> bytes:
    match = BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()

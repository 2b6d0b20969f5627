"""Tokenizers in the format of today's models, tokenizer.json, run by `tokenizers`.

`tokenizers` encodes; decoding is ours. Each token is mapped to its bytes once, so that
`decode_bytes` and `IncrementalDecoder` work as they do for GPT-2, and a stream never shows half a
character. Two kinds of file are known: byte-level (Llama 3, Qwen, SmolLM2) and those derived from
sentencepiece (Llama 2, Mistral, TinyLlama), where a space is U+2581 and bytes are <0xNN>.

Control tokens such as <|im_end|> in a text are text. Only `encode_chat` reads them as tokens. Added
words that are not special, such as Qwen's <think>, are tokens everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer as Encoder

from .errors import UserError
from .files import read_json
from .tokenizer import AnyTokenizer, byte_alphabet, end_of_text, well_formed

FILE = "tokenizer.json"
SPACE = "\u2581"  # sentencepiece's
LONG = 2_000  # characters
ALPHABET = byte_alphabet()
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer(AnyTokenizer):
    """The tokenizer of a folder with tokenizer.json. control: its control tokens."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a file that is unreadable or of an unknown kind."""
        path = Path(folder) / FILE
        decoder = read_json(path).get("decoder") or {}
        try:
            self._encoder = encoder = Encoder.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise UserError(
                f"{path} is not a tokenizer ({error}): copy or download it again."
            ) from None
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True  # control tokens in a text are text
        kinds = {step.get("type", "none") for step in decoder.get("decoders", [decoder])}
        if not kinds & {"ByteLevel", "ByteFallback"}:
            raise UserError(
                f"{path} has an unknown kind of decoder ({', '.join(sorted(kinds))}): choose a "
                "model with a byte-level or sentencepiece tokenizer."
            )
        to_bytes = _byte_level if "ByteLevel" in kinds else _sentencepiece
        added = encoder.get_added_tokens_decoder()
        self.control = frozenset(token.content for token in added.values() if token.special)
        tokens = {id: to_bytes(token) for token, id in encoder.get_vocab().items()}
        tokens |= {id: token.content.encode() for id, token in added.items()}
        eos = end_of_text(Path(folder))
        super().__init__(tokens, None if eos is None else encoder.token_to_id(eos))
        # Sentencepiece puts a space before a text, which its decoder takes away.
        self._strips = "Strip" in kinds
        self._before = self.encode("")  # what `encode` puts before a text

    @cached_property
    def _chat_encoder(self) -> Encoder:
        """The same encoder, but it reads control tokens in a text as tokens."""
        encoder = Encoder.from_str(self._encoder.to_str())
        encoder.encode_special_tokens = False
        return encoder

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with those that the model expects around it, such as a BOS."""
        return _ids(self._encoder, text)

    def encode_chat(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Token ids of a rendered chat: pieces of text, each with whether it is the template's.
        Only in those are control tokens read as tokens. Nothing is added around the chat.

        The chat is cut as one text, as models were trained: sentencepiece would put a space before
        each piece. Only where a message has words of control tokens is each piece cut alone."""
        parts = list(parts)
        whole = "".join(text for text, _ in parts)
        if not any(word in text for text, own in parts if not own for word in self.control):
            return _ids(self._chat_encoder, whole, add_special_tokens=False)
        encoders = (self._encoder, self._chat_encoder)
        pieces = (_ids(encoders[own], text, add_special_tokens=False) for text, own in parts)
        return list(chain.from_iterable(pieces))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        first = len(self._before) if ids[: len(self._before)] == self._before else 0
        parts = self.decode_bytes(ids[:first]), self.decode_bytes(ids[first:])
        before, text = (part.decode("utf-8", "replace") for part in parts)
        return before + (text.removeprefix(" ") if self._strips else text)

    def unused(self, rows: int) -> list[int]:
        """The ids below `rows`, the model's count of ids, that have no token."""
        return [token_id for token_id in range(rows) if token_id not in self._tokens]


def _ids(encoder: Encoder, text: str, **options: bool) -> list[int]:
    """The ids of a text. During a long one, other threads may run: `Encoder.encode` keeps Python's
    lock, and a megabyte stopped a server for half a second."""
    text = well_formed(text)
    if len(text) > LONG:
        (encoding,) = encoder.encode_batch_fast([text], **options)
    else:
        encoding = encoder.encode(text, **options)
    return encoding.ids


def _byte_level(token: str) -> bytes:
    """The bytes of a token as the vocabulary spells it. One outside the alphabet was added to the
    vocabulary as plain text."""
    known = ALPHABET.keys() >= set(token)
    return bytes(ALPHABET[letter] for letter in token) if known else token.encode()


def _sentencepiece(token: str) -> bytes:
    match = BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()

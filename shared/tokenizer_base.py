"""What both kinds of tokenizer share: what they offer, and how their files spell bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .files import read_json


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


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2's vocab.json: printable bytes are themselves, the other 68
    begin at U+0100."""
    ranges = [range(ord(first), ord(last) + 1) for first, last in ("!~", "¡¬", "®ÿ")]
    printable = [byte for part in ranges for byte in part]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


def well_formed(text: str) -> str:
    """The text without surrogates, which UTF-8 lacks: pairs are joined, all others replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def end_of_text(folder: Path) -> str | None:
    """The end-of-text token that tokenizer_config.json names, if it names one."""
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.exists() else None
    if isinstance(token, dict):  # older files write {"content": "<|endoftext|>", ...}
        token = token.get("content")
    return token if isinstance(token, str) else None

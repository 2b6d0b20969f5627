"""How tokenizer files spell bytes and ends of text, and how malformed text is repaired."""

from __future__ import annotations

from pathlib import Path

from .files import read_json


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


def number_of(token_id: int) -> bytes:
    """The text of an id without a token."""
    return f"<{token_id}>".encode()


def end_of_text(folder: Path) -> str | None:
    """The end-of-text token that tokenizer_config.json names, if it names one."""
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.exists() else None
    if isinstance(token, dict):  # older files write {"content": "<|endoftext|>", ...}
        token = token.get("content")
    return token if isinstance(token, str) else None

"""Text to token ids and back: GPT-2's byte-level BPE, run by tiktoken, from a folder's two files.

Two choices differ from `transformers`. A special token in the user's text is plain text, so that
typing <|endoftext|> does not end a document. And an id without a token decodes to its number,
because models' vocabularies are padded.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

import tiktoken

from . import registry
from .errors import UserError
from .files import read_json, read_text

# Where GPT-2 cuts a text before BPE: contractions, words, numbers, signs (each with the space
# before it), and white space up to the last one before a word, which belongs to the word.
CUT = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
FILES = ("vocab.json", "merges.txt", "tokenizer.json")
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
        self, ranks: dict[bytes, int], special: dict[str, int], eos_id: int | None, name: str = ""
    ) -> None:
        """ranks: bytes -> id of the ordinary tokens, in the order of the merges. special: text ->
        id of the others."""
        self._encoding = tiktoken.Encoding(
            name, pat_str=CUT, mergeable_ranks=ranks, special_tokens=special
        )
        tokens = {token_id: token for token, token_id in ranks.items()}
        super().__init__(tokens | {id: token.encode() for token, id in special.items()}, eos_id)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Build from vocab.json and merges.txt.

        Raises UserError if one is missing or unreadable, or if they disagree: then some texts would
        silently get other ids than the model was trained on.
        """
        folder = Path(folder)
        vocabulary = read_json(folder / "vocab.json")
        try:
            lines = read_text(folder / "merges.txt").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder / 'merges.txt'} cannot be read ({error}): copy it from where vocab.json "
                "comes from."
            ) from None
        # Some copies lack the version line; "# #" is a merge, so a bare "#" does not mark it.
        lines = lines[1:] if lines[0].startswith("#version") else lines
        merged = [line.replace(" ", "") for line in lines if line.strip()]
        ranks, special = _ranks(vocabulary, merged, folder)
        return cls(ranks, special, special.get(end_of_text(folder) or END_OF_TEXT), folder.name)

    def encode(self, text: str) -> list[int]:
        """Raises UserError if a run of white space is too long for tiktoken: about a million."""
        try:
            return self._encoding.encode(well_formed(text), disallowed_special=())
        except ValueError as error:
            raise UserError(
                f"The text cannot be cut into tokens ({error}): shorten its longest run of white "
                "space."
            ) from None


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


def has_tokenizer(folder: Path | None) -> bool:
    """Whether the folder has a file of a tokenizer."""
    return folder is not None and any((folder / name).exists() for name in FILES)


def load_tokenizer(folder: str | Path | None) -> AnyTokenizer:
    """The tokenizer of `Checkpoint.folder`; bytes if that is None (random weights of a preset).
    A tokenizer.json decides if there is one, because the two other files do not say how text is
    cut."""
    if folder is None:
        return ByteTokenizer()
    for name, entry in registry.TOKENIZERS.items():
        if (Path(folder) / name).exists():
            tokenizer: AnyTokenizer = registry.load(entry)(folder)
            return tokenizer
    return Tokenizer.from_folder(folder)


# ---- files ----


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
    # Older files write {"content": "<|endoftext|>", ...}.
    return token.get("content") if isinstance(token, dict) else token


def _ranks(
    vocabulary: dict[str, int], merged: list[str], folder: Path
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Token bytes -> id, and the special tokens -> id. merged: the tokens that the merges make.

    tiktoken has no merges: it joins the pair whose result has the lowest id. That is BPE exactly if
    each merge makes a token of its own and the ids rise in the order of the merges.
    """
    alphabet = byte_alphabet()
    ordinary = dict.fromkeys([*alphabet, *merged])
    special = {token: token_id for token, token_id in vocabulary.items() if token not in ordinary}
    wrong = [token for token in ordinary if token not in vocabulary]
    wrong += [token for token in special if not SPECIAL.fullmatch(token)]
    if not wrong:
        wrong = [after for one, after in pairwise(merged) if vocabulary[one] >= vocabulary[after]]
    if wrong:
        raise UserError(
            f"vocab.json and merges.txt in {folder} are not a byte-level BPE of one checkpoint "
            f"({len(wrong)} tokens differ, such as {wrong[0]!r}): copy both from where the weights "
            "come from."
        )
    return {bytes(alphabet[c] for c in token): vocabulary[token] for token in ordinary}, special

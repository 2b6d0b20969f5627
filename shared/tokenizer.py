"""Text to token ids and back: GPT-2's byte-level BPE, run by tiktoken, from a folder's two files.

Two choices differ from `transformers`. A special token in the user's text is plain text, so that
typing <|endoftext|> does not end a document. And an id without a token decodes to its number,
because models' vocabularies are padded.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import tiktoken

from .errors import UserError
from .files import read_json, read_text
from .tokenizer_base import AnyTokenizer, byte_alphabet, end_of_text, well_formed

# Where GPT-2 cuts a text before BPE: contractions, words, numbers, signs (each with the space
# before it), and white space up to the last one before a word, which belongs to the word.
CUT = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
FILES = ("vocab.json", "merges.txt", "tokenizer.json")
SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # what a token that no merge makes must look like


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
    """Decodes a stream of ids. The bytes of a character are held back until it is complete.

    The results of `push`, and of `flush` at the end, add up to `decode` of all the ids.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
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
    if (Path(folder) / "tokenizer.json").exists():
        from .json_tokenizer import JsonTokenizer  # GPT-2's folders need no `tokenizers`

        return JsonTokenizer.from_folder(folder)
    return Tokenizer.from_folder(folder)


def _ranks(
    vocabulary: dict[str, int], merged: Sequence[str], folder: Path
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Token bytes -> id, and the special tokens -> id. merged: the tokens that the merges make.

    tiktoken has no merges: it joins the pair whose result has the lowest id. That is BPE exactly if
    each merge makes a token of its own and the ids rise in the order of the merges.
    """
    alphabet = byte_alphabet()
    ordinary = dict.fromkeys([*alphabet, *merged])
    special = {token: token_id for token, token_id in vocabulary.items() if token not in ordinary}
    ids = dict.fromkeys(ordinary, -1) | vocabulary
    faults = {
        "have no id": [token for token in ordinary if ids[token] < 0],
        "are made by no merge": [token for token in special if not SPECIAL.fullmatch(token)],
        "do not rise in the order of the merges": [
            token for before, token in pairwise(merged) if ids[before] >= ids[token]
        ],
    }
    for fault, tokens in faults.items():
        if tokens:
            raise UserError(
                f"vocab.json and merges.txt in {folder} are not a byte-level BPE of one checkpoint "
                f"({len(tokens)} tokens {fault}, such as {tokens[0]!r}): copy both from where the "
                "weights come from."
            )
    return {bytes(alphabet[c] for c in token): vocabulary[token] for token in ordinary}, special

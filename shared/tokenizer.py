"""Text to token ids and back: GPT-2's byte-level BPE, run by tiktoken from the checkpoint folder's
own two files.

Two choices differ from `transformers`: a special token written out in the user's text is plain
text, so that nobody can end a document by typing <|endoftext|>; and an id without a token decodes
to its number, because models are padded.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tiktoken

from .errors import UserError
from .files import read_json

# Where GPT-2 cuts a text before BPE: contractions, words, numbers, signs (each with the space
# before it), and white space up to the last one before a word, which belongs to the word.
CUT = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"
FILES = ("vocab.json", "merges.txt")
SPECIAL = re.compile(
    r"<.+>|\[.+\]", re.DOTALL
)  # a token that no merge makes must at least look like a special one


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as GPT-2 writes bytes in vocab.json: printable ones as themselves, the
    other 68 from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }


def _well_formed(text: str) -> str:
    """Halves of surrogate pairs (from broken JSON or file names) cannot be UTF-8: joined where two
    meet, else replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _stand_in(token_id: int) -> bytes:
    """What an id shows that has no token."""
    return f"<{token_id}>".encode()


class Tokenizer:
    """GPT-2's tokenizer with the vocabulary of one checkpoint."""

    def __init__(
        self, ranks: dict[bytes, int], special: dict[str, int], eos_id: int | None, name: str = ""
    ) -> None:
        """`ranks` maps the bytes of each ordinary token to its id, in the order of the merges;
        `special` the others' text."""
        self._encoding = tiktoken.Encoding(
            name, pat_str=CUT, mergeable_ranks=ranks, special_tokens=special
        )
        self._tokens = {token_id: token for token, token_id in ranks.items()}
        self._tokens |= {token_id: token.encode() for token, token_id in special.items()}
        self.vocab_size = max(self._tokens) + 1
        self.eos_id = eos_id

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Build from vocab.json and merges.txt.

        Raises UserError if one is missing or unreadable, or if they do not belong together: then
        some texts would get other ids than the model was trained on, and nothing else would show
        it.
        """
        folder = Path(folder)
        vocabulary = _read_vocabulary(folder)
        ranks, special = _ranks(vocabulary, _read_merges(folder), folder)
        return cls(ranks, special, special.get(_eos_token(folder)), folder.name)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; special tokens in it are plain text.

        UserError if a run of white space is longer (about a million) than tiktoken's regular
        expressions can follow.
        """
        try:
            return self._encoding.encode(_well_formed(text), disallowed_special=())
        except ValueError as error:
            raise UserError(
                f"The text cannot be cut into tokens ({error}): shorten its longest run of white "
                f"space."
            ) from None

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes; a token may be part of a character."""
        return b"".join(self._tokens.get(token_id) or _stand_in(token_id) for token_id in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class ByteTokenizer:
    """For models that have no tokenizer (random weights): ids 0 to 255 are bytes, higher ids show
    as their number."""

    vocab_size = 256
    eos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(_well_formed(text).encode())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(
            bytes([token_id]) if 0 <= token_id < 256 else _stand_in(token_id) for token_id in ids
        )

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


class IdTokenizer:
    """Reads prompts as token ids: "1,2,3". Answers are text, or ids where `inner` is None."""

    def __init__(self, inner: Tokenizer | ByteTokenizer | None) -> None:
        self._inner = inner
        self.vocab_size = 0 if inner is None else inner.vocab_size
        self.eos_id = None if inner is None else inner.eos_id

    @staticmethod
    def join(ids: Iterable[int]) -> str:
        """The text that `encode` reads."""
        return ",".join(map(str, ids))

    def encode(self, text: str) -> list[int]:
        """Raises UserError if the text is not a list of whole numbers from 0 on."""
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            shown = text if len(text) <= 40 else text[:40] + "..."
            raise UserError(f"'{shown}' is no list of token ids: write numbers, such as 1,2,3.")
        return [int(part) for part in parts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        if self._inner is not None:
            return self._inner.decode_bytes(ids)
        return b"".join(b"%d " % token_id for token_id in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


AnyTokenizer = Tokenizer | ByteTokenizer | IdTokenizer


class IncrementalDecoder:
    """Decodes a stream of ids, holding back the bytes of a character until all of them have come.

    What `push` returned, with `flush` at the end, is exactly `decode` of all the ids.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the decoder is then as new."""
        return self._utf8.decode(b"", final=True)


def has_tokenizer(folder: Path | None) -> bool:
    """Whether the folder has a file of a tokenizer."""
    return folder is not None and any((folder / name).exists() for name in FILES)


def load_tokenizer(folder: str | Path | None) -> AnyTokenizer:
    """The tokenizer of `Checkpoint.folder`; bytes where there is no folder (random weights of a
    preset)."""
    return ByteTokenizer() if folder is None else Tokenizer.from_folder(folder)


# ---- the two files ----------------------------------------------------------------------------------------------


def _missing(path: Path) -> UserError:
    remedy = "copy it from where the weights come from."
    if (path.parent / "tokenizer.json").exists():
        remedy = "write both from tokenizer.json with the tokenizers package, Tokenizer.from_file(FILE).model.save(FOLDER)."
    return UserError(
        f"{path} is missing, and the tokenizer needs vocab.json and merges.txt: {remedy}"
    )


def _read_vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "vocab.json"
    if not path.exists():
        raise _missing(path)
    vocabulary = read_json(path)
    ids = list(vocabulary.values())
    if (
        not ids
        or any(type(token_id) is not int or token_id < 0 for token_id in ids)
        or len(set(ids)) != len(ids)
    ):
        raise UserError(
            f"{path} must map each token to an id of its own, a whole number from 0 on: copy or "
            f"download it again."
        )
    return vocabulary


def _read_merges(folder: Path) -> list[str]:
    """The tokens that the merges make, in the order of the merges."""
    path = folder / "merges.txt"
    if not path.exists():
        raise _missing(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as text ({error}): copy or download it again."
        ) from None
    # Some copies lack the version line; "# #" is a merge, so a bare "#" does not mark it.
    lines = lines[1:] if lines[0].startswith("#version") else lines
    pairs = [line.split(" ") for line in lines if line.strip()]
    if bad := [" ".join(pair) for pair in pairs if len(pair) != 2 or not all(pair)]:
        raise UserError(
            f"{path} has the line {bad[0]!r} where two tokens should be: copy or download it again."
        )
    return ["".join(pair) for pair in pairs]


def _ranks(
    vocabulary: dict[str, int], made: Sequence[str], folder: Path
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Token bytes -> id, and the special tokens -> id.

    tiktoken knows no merges: it joins the pair whose result has the lowest id. That is BPE exactly
    if each merge makes a token of its own and their ids rise in the order of the merges, so this is
    checked.
    """

    def disagree(what: str) -> UserError:
        return UserError(
            f"The files vocab.json and merges.txt in {folder} disagree: {what}; copy both from the "
            f"same checkpoint."
        )

    alphabet = byte_alphabet()
    if lacking := [letter for letter in alphabet if letter not in vocabulary]:
        lacks = f"lacks {len(lacking)} of the 256 bytes, such as {lacking[0]!r}"
        raise UserError(
            f"{folder / 'vocab.json'} {lacks}: choose a checkpoint whose tokenizer is in GPT-2's "
            f"format."
        )
    if unknown := [token for token in made if token not in vocabulary]:
        raise disagree(f"{len(unknown)} merges make tokens without an id, such as {unknown[0]!r}")
    ids = [vocabulary[token] for token in made]
    if any(first >= second for first, second in zip(ids, ids[1:], strict=False)):
        raise disagree("the ids do not rise in the order of the merges")
    ordinary = set(made) | alphabet.keys()
    special = {token: token_id for token, token_id in vocabulary.items() if token not in ordinary}
    if orphans := [token for token in special if not SPECIAL.fullmatch(token)]:
        raise disagree(f"no merge makes {len(orphans)} of the tokens, such as {orphans[0]!r}")
    if odd := [token for token in made if not alphabet.keys() >= set(token)]:
        raise disagree(f"the token {odd[0]!r} is not written in GPT-2's byte alphabet")
    return {
        bytes(alphabet[letter] for letter in token): vocabulary[token] for token in ordinary
    }, special


def _eos_token(folder: Path) -> str:
    """The end-of-text token that tokenizer_config.json names, GPT-2's own where the file or the
    entry is absent."""
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.exists() else None
    if isinstance(token, dict):  # older files write {"content": "<|endoftext|>", ...}
        token = token.get("content")
    return token if isinstance(token, str) else END_OF_TEXT

"""The tokenizer in a GGUF file, as the files of a checkpoint folder.

GGUF has the vocabulary, the merges, the control tokens and the chat template, and of the rest only
a name: `tokenizer.ggml.pre` is how text is cut before the merges. llama.cpp has those rules in its
source, and they are here for the models that this project runs. tokenizer.json and
tokenizer_config.json are written into a folder that this process removes at its end.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from shared.errors import UserError

TEMPORARY: list[Any] = []  # folders of this process
CONTROL, USERS, UNUSED = 3, 4, 5  # types of tokens; ordinary ones are 1
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"


def _byte_level(cuts: bool) -> pre_tokenizers.PreTokenizer:
    """Bytes as characters. cuts: as GPT-2's expression does."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts)


def _split(numbers: str) -> list[pre_tokenizers.PreTokenizer]:
    pattern = Regex(f"{CONTRACTIONS}|{WORDS}|{numbers}|{SIGNS}")
    return [pre_tokenizers.Split(pattern, "isolated"), _byte_level(False)]


CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {  # by tokenizer.ggml.pre
    "gpt-2": [_byte_level(True)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _byte_level(True)],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
NORMALIZERS = {"qwen2": normalizers.NFC()}
LLAMA3 = "llama-bpe"  # a word of the vocabulary is a token, whatever the merges make of it

Error = Callable[[str], UserError]


def tokenizer_folder(metadata: Mapping[str, Any], error: Error) -> Path | None:
    """A new folder with the tokenizer's files; None if the file has no tokenizer. error: of the
    file. Raises UserError for a tokenizer that is not known here."""
    kind, cuts = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind in (None, "none", "no_vocab"):
        return None
    if kind != "gpt2":
        raise error(f"its tokenizer is of the kind {str(kind)[:40]!r}, not gpt2")
    if cuts not in CUTS:
        known = ", ".join(CUTS)
        raise error(f"its tokenizer cuts text by the rules {str(cuts)[:40]!r}, not {known}")
    texts = {
        "tokenizer.json": _tokenizer(metadata, cuts, error).to_str(),
        "tokenizer_config.json": json.dumps(_settings(metadata, error)),
    }
    folder = tempfile.TemporaryDirectory(prefix="staircase-")
    TEMPORARY.append(folder)
    for name, text in texts.items():
        (Path(folder.name) / name).write_text(text, encoding="utf-8")
    return Path(folder.name)


def _tokenizer(metadata: Mapping[str, Any], cuts: str, error: Error) -> Tokenizer:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise error("its tokenizer has no type for each token")
    rows = {token: row for row, token in enumerate(tokens) if kinds[row] != UNUSED}
    merges: Any = [tuple(str(m).split(" ")) for m in metadata.get("tokenizer.ggml.merges", ())]
    if any(len(merge) != 2 for merge in merges):
        raise error("its tokenizer has a merge that is not of two tokens")
    try:
        tokenizer = Tokenizer(models.BPE(rows, merges, ignore_merges=cuts == LLAMA3))
    except Exception as why:  # `tokenizers` raises bare Exceptions
        raise error(f"its tokenizer is invalid ({why})") from None
    tokenizer.normalizer = NORMALIZERS.get(cuts)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[cuts])
    tokenizer.decoder = decoders.ByteLevel()
    added: dict[int, list[AddedToken]] = {CONTROL: [], USERS: []}
    for token, row in rows.items():
        if kinds[row] in added:
            added[kinds[row]].append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(added[CONTROL])
    tokenizer.add_tokens(added[USERS])
    if metadata.get("tokenizer.ggml.add_bos_token", cuts == LLAMA3):
        token = _named("bos", metadata, error)
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{token} $A", f"{token} $A $B", [(token, rows[token])]
        )
    return tokenizer


def _settings(metadata: Mapping[str, Any], error: Error) -> dict[str, Any]:
    """tokenizer_config.json."""
    fields = {
        f"{kind}_token": _named(kind, metadata, error)
        for kind in ("bos", "eos")
        if f"tokenizer.ggml.{kind}_token_id" in metadata
    }
    template = metadata.get("tokenizer.chat_template")
    return fields | ({"chat_template": template} if isinstance(template, str) else {})


def _named(kind: str, metadata: Mapping[str, Any], error: Error) -> str:
    """The token that begins or ends a text: "bos" or "eos"."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    row = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if type(row) is not int or not 0 <= row < len(tokens):
        raise error(f"its tokenizer.ggml.{kind}_token_id is {row!r}, which is no token")
    return str(tokens[row])

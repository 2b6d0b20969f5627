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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shared.errors import UserError

TEMPORARY: list[Any] = []  # folders of this process
CONTROL, USERS, UNUSED = 3, 4, 5  # types of tokens; ordinary ones are 1
CUT = (  # a word, with the sign before it; then numbers; signs; white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(numbers: str) -> list[PreTokenizer]:
    cut = Split(Regex(CUT.replace("NUMBERS", numbers)), "isolated")
    return [cut, ByteLevel(add_prefix_space=False, use_regex=False)]


CUTS = {  # by tokenizer.ggml.pre; a ByteLevel by itself cuts as GPT-2 does
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
LLAMA3 = "llama-bpe"  # a word of the vocabulary is a token, whatever the merges make of it


def tokenizer_folder(metadata: Mapping[str, Any], error: Callable[[str], UserError]) -> Path | None:
    """A new folder with the tokenizer's files; None if the file has no tokenizer. error: of the
    file. Raises UserError for a tokenizer that is not known here."""
    prefix = "tokenizer.ggml."
    fields = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    kind, cuts = fields.get("model"), fields.get("pre")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind != "gpt2" or cuts not in CUTS:
        raise error(
            f"its tokenizer is of the kind {str(kind)[:40]!r} and cuts text by the rules "
            f"{str(cuts)[:40]!r}, not gpt2 by {', '.join(CUTS)}"
        )
    try:
        tokenizer, named = _tokenizer(fields)
    except Exception as why:  # whatever a wrong list leads to; `tokenizers` raises bare Exceptions
        raise error(f"its tokenizer is invalid ({why!r:.99})") from None
    template = metadata.get("tokenizer.chat_template")
    settings = named | ({"chat_template": template} if template else {})
    folder = tempfile.TemporaryDirectory(prefix="staircase-")
    TEMPORARY.append(folder)
    tokenizer.save(f"{folder.name}/tokenizer.json")
    (Path(folder.name) / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return Path(folder.name)


def _tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the tokens that begin and end a text, as tokenizer_config.json has
    them."""
    tokens, cuts = fields["tokens"], fields["pre"]
    kinds = fields.get("token_type", [1] * len(tokens))
    rows = {token: row for row, token in enumerate(tokens) if kinds[row] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(rows, merges, ignore_merges=cuts == LLAMA3))
    tokenizer.normalizer = normalizers.NFC() if cuts == "qwen2" else None
    tokenizer.pre_tokenizer = Sequence(CUTS[cuts])
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USERS, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False)
                for token, row in rows.items()
                if kinds[row] == kind
            ]
        )
    ids = {f"{name}_token": fields.get(f"{name}_token_id") for name in ("bos", "eos")}
    named = {name: tokens[row] for name, row in ids.items() if row is not None}
    if fields.get("add_bos_token", cuts == LLAMA3):
        token = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{token} $A", f"{token} $A $B", [(token, rows[token])]
        )
    return tokenizer, named

"""The tokenizer in a GGUF file, as the files of a checkpoint folder.

GGUF has the vocabulary, the merges, the control tokens and the chat template, and of the rest only
a name: `tokenizer.ggml.pre` is how text is cut before the merges. llama.cpp has those rules in its
source, and those of GPT-2 and of SmolLM are here. tokenizer.json and tokenizer_config.json are
written into a folder that this process removes at its end.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from . import Unfit

TEMPORARY: list[Any] = []  # folders of this process
CONTROL, USERS, UNUSED = 3, 4, 5  # types of tokens; ordinary ones are 1
CUTS: dict[str, list[PreTokenizer]] = {  # by tokenizer.ggml.pre; ByteLevel cuts as GPT-2 does
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
}


def tokenizer_folder(metadata: Mapping[str, Any]) -> Path:
    """A new folder with the tokenizer's files. Raises Unfit for a file without a tokenizer, or with
    one that is not known here."""
    prefix = "tokenizer.ggml."
    fields = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    kind, cut = fields.get("model"), fields.get("pre")
    if kind != "gpt2" or cut not in CUTS:
        raise Unfit(
            f"its tokenizer is of the kind {str(kind)[:40]!r} and cuts text by the rules "
            f"{str(cut)[:40]!r}, and only gpt2 by {' or '.join(CUTS)} is read"
        )
    if fields.get("add_bos_token"):
        raise Unfit("its texts begin with a token of their own (add_bos_token), which is not read")
    tokens = fields["tokens"]
    types = fields.get("token_type", [1] * len(tokens))
    rows = {token: row for row, token in enumerate(tokens) if types[row] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(rows, merges))
    tokenizer.pre_tokenizer = Sequence(CUTS[cut])
    tokenizer.decoder = decoders.ByteLevel()
    for number, add in ((CONTROL, tokenizer.add_special_tokens), (USERS, tokenizer.add_tokens)):
        kept = [token for token, row in rows.items() if types[row] == number]
        add([AddedToken(token, normalized=False) for token in kept])
    ids = {f"{name}_token": fields.get(f"{name}_token_id") for name in ("bos", "eos")}
    settings = {name: tokens[row] for name, row in ids.items() if row is not None}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    folder = tempfile.TemporaryDirectory(prefix="staircase-")
    TEMPORARY.append(folder)
    tokenizer.save(f"{folder.name}/tokenizer.json")
    (Path(folder.name) / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return Path(folder.name)

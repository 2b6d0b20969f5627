"""The tokenizer in a GGUF file, as the files of a checkpoint folder.

GGUF has the vocabulary, the merges, the control tokens and the chat template, and of the rest only
a name: `tokenizer.ggml.pre` is how text is cut before the merges. llama.cpp has those rules in its
source, and they are here for the models that this project runs. They are written once for each
tokenizer into this user's cache folder, as tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.measure import cache_folder

KEPT: list[Any] = []  # temporary folders of this process
CONTROL, USERS, UNUSED = 3, 4, 5  # types of tokens; ordinary ones are 1
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"


def _byte_level(cuts: bool) -> dict[str, Any]:
    """Bytes as characters. cuts: as GPT-2's expression does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cuts}


def _split(numbers: str) -> list[dict[str, Any]]:
    pattern = {"Regex": f"{CONTRACTIONS}|{WORDS}|{numbers}|{SIGNS}"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


CUTS: dict[str, list[dict[str, Any]]] = {  # by tokenizer.ggml.pre
    "gpt-2": [_byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
NORMALIZERS = {"qwen2": {"type": "NFC"}}
WHOLE_WORDS = ("llama-bpe",)  # a word of the vocabulary is a token, whatever the merges make of it
BEGINS = ("llama-bpe",)  # a text begins with a control token, unless the file has its own rule


Error = Callable[[str], UserError]


def tokenizer_folder(metadata: Mapping[str, Any], error: Error) -> Path | None:
    """The folder with the tokenizer's files, made if it is not there; None if the file has no
    tokenizer. error: of the file. Raises UserError for a tokenizer that is not known here."""
    if "tokenizer.ggml.model" not in metadata:
        return None
    contents = {"tokenizer.json": _tokenizer, "tokenizer_config.json": _config}
    texts = {name: json.dumps(make(metadata, error)) for name, make in contents.items()}
    folder = cache_folder() / "gguf" / hashlib.sha256(str(texts).encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        written = tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True)
    except OSError:  # nowhere to write but here, for this process
        written = tempfile.TemporaryDirectory(prefix="staircase-")
        KEPT.append(written)
        folder = Path(written.name)
    for name, text in texts.items():
        (Path(written.name) / name).write_text(text, encoding="utf-8")
    if written not in KEPT:
        with contextlib.suppress(OSError):  # another process was faster
            Path(written.name).rename(folder)
        written.cleanup()
    return folder


def _tokens(metadata: Mapping[str, Any], error: Error) -> tuple[list[str], list[int]]:
    """The vocabulary, and the type of each token."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens or ()) if types is None else [int(kind) for kind in types]
    if not isinstance(tokens, list) or len(kinds) != len(tokens):
        raise error("its tokenizer has no type for each token")
    return tokens, kinds


def _tokenizer(metadata: Mapping[str, Any], error: Error) -> dict[str, Any]:
    """tokenizer.json."""
    kind, cuts = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise error(f"its tokenizer is of the kind {str(kind)[:40]!r}, not gpt2")
    if cuts not in CUTS:
        known = ", ".join(CUTS)
        raise error(f"its tokenizer cuts text by the rules {str(cuts)[:40]!r}, not {known}")
    tokens, kinds = _tokens(metadata, error)
    vocabulary = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED
    }
    added = [
        {
            "id": place,
            "content": tokens[place],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for place, kind in enumerate(kinds)
        if kind in (CONTROL, USERS)
    ]
    merges = [str(merge).split(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    if any(len(merge) != 2 for merge in merges):
        raise error("its tokenizer has a merge that is not of two tokens")
    begin = None
    if metadata.get("tokenizer.ggml.add_bos_token", cuts in BEGINS):
        token = _named("bos", metadata, error)
        single = [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        begin = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": NORMALIZERS.get(cuts),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": CUTS[cuts]},
        "post_processor": begin,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cuts in WHOLE_WORDS,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _config(metadata: Mapping[str, Any], error: Error) -> dict[str, Any]:
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
    tokens, place = _tokens(metadata, error)[0], metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if type(place) is not int or not 0 <= place < len(tokens):
        raise error(f"its tokenizer.ggml.{kind}_token_id is {place!r}, which is no token")
    return tokens[place]

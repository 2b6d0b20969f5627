"""The tokenizer of a checkpoint folder as the metadata of a GGUF file: byte-level BPE alone.

GGUF has the tokens, their types and the merges. Of how text is cut before the merges it has only a
name, behind which llama.cpp has the rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shared.config import Config
from shared.errors import UserError
from shared.files import read_json
from shared.tokenizer import end_of_text

PLAIN, CONTROL, USERS, UNUSED = 1, 3, 4, 5  # types of tokens
SPLITS = {r"|\p{N}{1,3}|": "llama-bpe", r"|\p{N}|": "qwen2"}  # how the numbers are cut


def tokenizer_metadata(folder: str | Path, config: Config) -> dict[str, Any]:
    """Keys and values for `write_gguf`. Rows of the model without a token get a name. Raises
    UserError for a tokenizer of another kind."""
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        fields = read_json(folder / "tokenizer.json")
        vocabulary, merges = _model(fields, folder)
        cuts = _cuts(fields.get("pre_tokenizer") or {}, folder)
        added = fields.get("added_tokens") or []
    else:
        vocabulary, cuts = read_json(folder / "vocab.json"), "gpt-2"
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        merges = [line for line in lines if line and not line.startswith("#version")]
        joined = {merge.replace(" ", "") for merge in merges}
        # What no merge makes is a byte or a control token.
        words = (token for token in vocabulary if token not in joined and len(token) > 1)
        added = [{"id": vocabulary[word], "content": word, "special": True} for word in words]
    tokens = [f"[unused{row}]" for row in range(config.vocab_size)]
    types = np.full(len(tokens), UNUSED, np.int32)
    for token, row in vocabulary.items():
        tokens[row], types[row] = token, PLAIN
    for entry in added:
        row = entry["id"]
        tokens[row], types[row] = entry["content"], CONTROL if entry["special"] else USERS
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cuts,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": cuts == "llama-bpe",
    }
    settings = folder / "tokenizer_config.json"
    options = read_json(settings) if settings.exists() else {}
    if (end := end_of_text(folder)) in tokens:
        metadata["tokenizer.ggml.eos_token_id"] = tokens.index(end)
    begin = options.get("bos_token")
    begin = begin.get("content") if isinstance(begin, dict) else begin
    if begin in tokens:
        metadata["tokenizer.ggml.bos_token_id"] = tokens.index(begin)
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.exists() else options.get("chat_template")
    return metadata | ({"tokenizer.chat_template": text} if isinstance(text, str) else {})


def _refused(folder: Path, reason: str) -> UserError:
    return UserError(
        f"The tokenizer in {folder} cannot be written as GGUF: {reason}; write a folder instead."
    )


def _model(fields: dict[str, Any], folder: Path) -> tuple[dict[str, int], list[str]]:
    """The vocabulary and the merges of a tokenizer.json."""
    model = fields.get("model") or {}
    decoder = (fields.get("decoder") or {}).get("type")
    if model.get("type") != "BPE" or decoder != "ByteLevel":
        raise _refused(folder, f"it is {model.get('type')} over {decoder}, not byte-level BPE")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    return model["vocab"], merges


def _cuts(cutter: dict[str, Any], folder: Path) -> str:
    """llama.cpp's name for how text is cut."""
    steps = cutter.get("pretokenizers", [cutter])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    regex = str(steps[0].get("pattern", {}).get("Regex")) if kinds == ["Split", "ByteLevel"] else ""
    for numbers, name in SPLITS.items():
        if numbers in regex:
            return name
    raise _refused(folder, "it cuts text by rules that have no name here")

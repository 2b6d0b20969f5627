"""A small Llama with random weights, a tokenizer and a chat template, in a folder."""

from __future__ import annotations

import json

import pytest

from shared.tests.test_chat_template import CHATML
from shared.tests.test_json_tokenizer import qwen
from stage08_llama.tests.folders import save

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    """Its embedding is its head, and one row of its vocabulary is no token."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "chatty", qwen()
    rows = max(tokenizer.get_vocab().values()) + 2
    ends = [tokenizer.token_to_id("<|im_end|>")]
    options = {"vocab_size": rows, "eos_token_id": ends, "tie_word_embeddings": True} | SIZES
    save(folder, "llama", **options)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder

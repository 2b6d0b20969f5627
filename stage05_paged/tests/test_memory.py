"""Memory: amounts as users write them, and how many blocks they are."""

from __future__ import annotations

import psutil
import pytest
import torch

from shared.checkpoint import PRESETS
from shared.errors import UserError
from stage05_paged import memory

GPT2 = PRESETS["gpt2"]
FREE = 64 * 2**30
AMOUNTS = {"1000000": 10**6, "0": 0, "512B": 512, "3KB": 3000, "512MB": 512 * 10**6}
AMOUNTS |= {"2GB": 2 * 10**9, "3KiB": 3 * 2**10, "512MiB": 512 * 2**20, "2gib": 2 * 2**30}
AMOUNTS |= {"1.5GiB": 3 * 2**29, " 12 MiB ": 12 * 2**20, "25%": FREE // 4, "12.5 %": FREE // 8}
AMOUNTS |= {"100%": FREE, str(FREE): FREE}
MUCH = ["65GiB", "100.1%", "999999999999"]
NONE = ["", " ", "much", "GB", "-1GB", "1e9", "1,5GB", "12 parsecs", "5TB5", ".5GB", "%", "nan"]


def test_amounts_of_memory():
    assert {text: memory.parse_memory(text, FREE) for text in AMOUNTS} == AMOUNTS
    refused = dict.fromkeys(NONE, "write 512MiB, 2GB, or 25% for a share")
    refused |= {text: rf"{text}.* 64 GiB" for text in MUCH}
    for text, words in refused.items():
        with pytest.raises(UserError, match=words):
            memory.parse_memory(text, FREE)
    sizes = map(memory.size, (512, 2**19, 2**20, 12.4 * 2**20, 3.5 * 2**30, 2**36))
    assert [*sizes] == ["512 bytes", "512.0 KiB", "1.0 MiB", "12 MiB", "3.5 GiB", "64 GiB"]
    assert 0 < memory.free_memory() <= psutil.virtual_memory().total


def test_a_block_of_the_124m_shape():
    """12 layers, a key and a value of 768 numbers each: 72 KiB a token in float32."""
    assert memory.block_bytes(GPT2, torch.float32, 16) == 16 * 72 * 2**10
    assert memory.make_pool(2**30, GPT2, torch.float32).count == 2**30 // (16 * 72 * 2**10) == 910
    with pytest.raises(UserError, match="16 tokens of gpt2 takes 1.1 MiB, but .* has 1.0 MiB"):
        memory.make_pool(2**20, GPT2, torch.float32)


def test_the_default_is_whole_contexts_but_at_most_half_of_what_is_free():
    contexts = 8 * 1024 * 72 * 2**10
    assert memory.default_memory(GPT2, torch.float32, 8, FREE) == contexts
    assert memory.default_memory(GPT2, torch.float32, 8, 2 * contexts) == contexts
    assert memory.default_memory(GPT2, torch.float32, 8, 2 * contexts - 2) == contexts - 1
    assert memory.default_memory(GPT2, torch.bfloat16, 8, FREE) == contexts // 2
    for block_size in (1, 100, 1024, 5000):
        nbytes = memory.default_memory(GPT2, torch.float32, 8, 10 * FREE, block_size)
        pool = memory.make_pool(nbytes, GPT2, torch.float32, block_size)
        assert pool.count // pool.blocks_for(1024) == 8

"""Memory: amounts as people write them, how many blocks they are, and which way of preemption is cheaper."""

from __future__ import annotations

import psutil
import pytest
import torch

from shared.checkpoint import PRESETS
from shared.errors import UserError
from shared.roofline import forward_cost
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedCache
from stage05_paged.memory import (
    Cost,
    block_bytes,
    default_memory,
    free_memory,
    make_pool,
    most_sequences,
    parse_memory,
    size,
)

TINY, GPT2 = PRESETS["tiny"], PRESETS["gpt2"]
FREE = 64 * 2**30


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("1000000", 10**6),
        ("0", 0),
        ("512B", 512),
        ("3KB", 3000),
        ("512MB", 512 * 10**6),
        ("2GB", 2 * 10**9),
        ("3KiB", 3 * 2**10),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5 GB", 5 * 10**8),
        (" 12 MiB ", 12 * 2**20),
        ("25%", FREE // 4),
        ("12.5 %", FREE // 8),
        ("0%", 0),
    ],
)
def test_amounts_of_memory(text, nbytes):
    assert parse_memory(text, FREE) == nbytes


@pytest.mark.parametrize("free", [0, 1, 7, 10**9, 10**9 + 5, FREE + 1])
def test_all_that_is_free_is_not_more_than_is_free(free):
    assert parse_memory("100%", free) == free
    assert parse_memory(str(free), free) == free


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "much",
        "GB",
        "-1GB",
        "1e9",
        "1,5GB",
        "12 parsecs",
        "5TB5",
        "1.GB",
        ".5GB",
        "0x10",
        "%",
        "nan",
    ],
)
def test_what_is_no_amount(text):
    with pytest.raises(
        UserError,
        match="is not a valid size: write 512MiB, 2GB, or 25% for a share of the free memory",
    ):
        parse_memory(text, FREE)


@pytest.mark.parametrize("text", ["65GiB", "100.1%", "200%", "999999999999"])
def test_more_than_is_free_is_refused_with_the_number(text):
    with pytest.raises(UserError, match=f"^{text} of memory is more than the 64 GiB that are free"):
        parse_memory(text, FREE)


def test_sizes_as_people_read_them():
    sizes = [
        size(nbytes) for nbytes in (0, 512, 2**19, 2**20, 12.4 * 2**20, 3.5 * 2**30, 64 * 2**30)
    ]
    assert sizes == ["0.0 KiB", "0.5 KiB", "512.0 KiB", "1.0 MiB", "12 MiB", "3.5 GiB", "64 GiB"]


def test_what_is_free_is_a_part_of_the_whole():
    assert 0 < free_memory() <= psutil.virtual_memory().total


# ---- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pool_has_the_blocks_that_fit(dtype, block_size):
    each = block_bytes(TINY, dtype, block_size)
    for blocks in (1, 5):
        for memory in (blocks * each, (blocks + 1) * each - 1):
            pool = make_pool(memory, TINY, dtype, block_size)
            assert (pool.count, pool.block_size) == (blocks, block_size)
            assert (
                PagedCache(TINY, pool.count, block_size, dtype=dtype).bytes
                == blocks * each
                <= memory
            )


def test_a_block_of_the_124m_shape():
    """12 layers, a key and a value of 768 numbers each: 72 KiB a token in float32."""
    assert block_bytes(GPT2, torch.float32, 16) == 16 * 72 * 2**10
    assert make_pool(2**30, GPT2, torch.float32).count == 2**30 // (16 * 72 * 2**10) == 910


def test_a_pool_of_less_than_a_block_is_refused_with_the_numbers():
    with pytest.raises(
        UserError,
        match="A block of 16 tokens of gpt2 takes 1.1 MiB, and the cache has 1.0 MiB: give it more",
    ):
        make_pool(2**20, GPT2, torch.float32)
    with pytest.raises(
        UserError,
        match="A block of 16 tokens of tiny takes 9.0 KiB, and the cache has 0.0 KiB",
    ):
        make_pool(0, TINY, torch.float32)


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_pool_of_blocks_without_tokens_is_refused(block_size):
    with pytest.raises(UserError, match=f"holds at least 1 token, not {block_size}"):
        make_pool(2**20, TINY, torch.float32, block_size)


def test_the_default_is_whole_contexts_but_at_most_half_of_what_is_free():
    contexts = 8 * 1024 * 72 * 2**10
    assert default_memory(GPT2, torch.float32, 8, FREE) == contexts
    assert default_memory(GPT2, torch.float32, 8, 2 * contexts) == contexts
    assert default_memory(GPT2, torch.float32, 8, 2 * contexts - 2) == contexts - 1
    assert default_memory(GPT2, torch.bfloat16, 8, FREE) == contexts // 2


@pytest.mark.parametrize("block_size", [1, 16, 100, 1024, 5000])
def test_the_default_holds_whole_contexts_whatever_the_block_size(block_size):
    pool = make_pool(
        default_memory(GPT2, torch.float32, 8, 10 * FREE, block_size),
        GPT2,
        torch.float32,
        block_size,
    )
    assert most_sequences(pool, 1024) == 8


@pytest.mark.parametrize(
    "tokens, most", [(1, 10), (16, 10), (17, 5), (48, 3), (64, 2), (160, 1), (161, 0)]
)
def test_the_most_sequences_that_memory_allows(tokens, most):
    assert most_sequences(BlockPool(10, 16), tokens) == most


def test_the_most_sequences_do_fit_and_one_more_does_not():
    for tokens in range(1, 50):
        pool = BlockPool(23, 3)
        most = most_sequences(pool, tokens)
        taken = [pool.take() for _ in range(most * pool.blocks_for(tokens))]
        assert len(taken) <= 23 and pool.available < pool.blocks_for(tokens)


# ---- what preemption costs ------------------------------------------------------------------------------------------


def test_cost_is_operations_over_their_rate_and_bytes_over_theirs():
    cost = Cost(GPT2, torch.float32, flops=1e11, bandwidth=1e10, overhead=1e-3)
    assert cost.recompute(100) == forward_cost(GPT2, torch.float32, 100, sampled=0).flops / 1e11
    assert cost.swap(100) == pytest.approx(2 * (1e-3 + 100 * 73_728 / 1e10))
    assert cost.swap(0) == 2e-3


def test_the_cheaper_way_changes_where_the_costs_cross():
    """A short sequence is computed again before the copies have begun, a long one is copied sooner."""
    cost = Cost(GPT2, torch.float32, flops=1e11, bandwidth=1e10, overhead=5e-3)
    crossing = next(
        tokens for tokens in range(1, 1025) if cost.swap(tokens) < cost.recompute(tokens)
    )
    assert 1 < crossing < 1024
    assert [cost.cheaper(tokens) for tokens in (1, crossing - 1)] == ["recompute"] * 2
    assert [cost.cheaper(tokens) for tokens in (crossing, 1024)] == ["swap"] * 2
    assert all(
        (cost.cheaper(tokens) == "swap") == (tokens >= crossing) for tokens in range(1, 1025)
    )


def test_a_slow_copy_is_never_the_cheaper_way_and_a_free_one_always():
    for tokens in (1, 64, 1024):
        assert Cost(GPT2, torch.float32, flops=1e11, bandwidth=1e6).cheaper(tokens) == "recompute"
        assert Cost(GPT2, torch.float32, flops=1e11, bandwidth=1e15).cheaper(tokens) == "swap"

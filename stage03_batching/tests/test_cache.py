"""The padded cache: a row in a batch is the row alone; one test for each pitfall of padding."""

from __future__ import annotations

import math

import pytest
import torch

from shared.config import Config
from shared.parity import random_prompt
from stage01_forward.attention import Recompute
from stage03_batching import cache as cache_module
from stage03_batching.cache import PaddedCache

LENGTHS = [5, 1, 12, 8, 12, 3]  # of the prompts: the second is nearly all padding, two have none
STEPS = 7  # decode passes after the prompts
WIDTH, COLUMNS = max(LENGTHS), max(LENGTHS) + STEPS
ONE_BY_ONE = [WIDTH] + [1] * STEPS
# (B, COLUMNS): the columns with a token; an argument in other libraries, the attention mask.
REAL = torch.tensor([[False] * (WIDTH - length) + [True] * (length + STEPS) for length in LENGTHS])


@pytest.fixture
def rows(tiny_model):
    """The real tokens of each row: its prompt and what it is given afterwards."""
    return [random_prompt(length + STEPS, tiny_model.config, i) for i, length in enumerate(LENGTHS)]


@pytest.fixture
def cache(tiny_model):
    return PaddedCache(tiny_model.config, LENGTHS, COLUMNS, dtype=torch.float64)


@pytest.fixture
def alone(tiny_model, rows):
    """Hidden states (tokens, C) of each row alone, in one pass, without cache and padding."""
    attend = Recompute().attend
    with torch.inference_mode():
        return [tiny_model(torch.tensor(row), torch.arange(len(row)), attend) for row in rows]


def rectangle(rows):
    """(B, COLUMNS): every row with its padding on the left. Token 0 stands for padding."""
    return torch.tensor([[0] * (COLUMNS - len(row)) + row for row in rows])


def through_cache(model, cache, tokens, cuts=ONE_BY_ONE):
    """Hidden states (B, columns, C) of `tokens` (B, columns), in passes of `cuts` columns."""
    parts = []
    for part in tokens.split(cuts, dim=1):
        attention = cache.extend(part.shape[1])
        parts.append(model(part, attention.positions, attention.attend))
    return torch.cat(parts, dim=1)


def assert_each_as_alone(hidden, alone):
    for row, (batched, single) in enumerate(zip(hidden, alone, strict=True)):
        own = batched[len(batched) - len(single) :]
        assert torch.allclose(own, single, rtol=0, atol=1e-12), f"row {row}"


@pytest.mark.parametrize("cuts", [ONE_BY_ONE, [COLUMNS], [1] * COLUMNS, [4, 9, 6], [11, 1, 7]])
@torch.inference_mode()
def test_each_row_is_what_it_is_alone(cuts, tiny_model, cache, rows, alone):
    """Catches positions that count padding, and a mask that decode steps forget. Also cuts inside
    the padding, and passes of several columns behind it."""
    assert_each_as_alone(through_cache(tiny_model, cache, rectangle(rows), cuts), alone)


@torch.inference_mode()
def test_positions_are_the_cumulative_mask_minus_one(cache):
    """Pitfall: positions 0, 1, 2, ... from the left edge of the rectangle."""
    expected = REAL.cumsum(1) - 1
    got = torch.cat([cache.extend(count).positions for count in ONE_BY_ONE], dim=1)
    assert torch.equal(got[REAL], expected[REAL])
    assert got[1].tolist() == [0] * 11 + list(range(1 + STEPS))  # padding has a valid one


@torch.inference_mode()
def test_every_pass_hides_the_padding(cache):
    """Pitfall: a mask at prefill, and none on the decode steps."""
    for count in ONE_BY_ONE:
        attention = cache.extend(count)
        start, end = cache.length - count, cache.length
        assert attention.mask.shape == (len(LENGTHS), 1, count, end)
        for b, t in REAL[:, start:end].nonzero().tolist():  # the real queries
            visible = [column for column in range(end) if REAL[b, column] and column <= start + t]
            assert attention.mask[b, 0, t].nonzero()[:, 0].tolist() == visible


@torch.inference_mode()
def test_a_plain_softmax_makes_no_nan_of_padding(tiny_model, cache, rows, alone, monkeypatch):
    """For every kernel. PyTorch's fused one makes zeros of a fully masked row, a plain
    softmax makes NaN, which the next layer caches; a weight of zero times NaN is NaN."""

    def plain(q, keys, values, mask):
        scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ values

    monkeypatch.setattr(cache_module, "attention", plain)
    hidden = through_cache(tiny_model, cache, rectangle(rows))
    assert hidden.isfinite().all()
    assert cache.kv.isfinite().all()
    assert_each_as_alone(hidden, alone)


@torch.inference_mode()
def test_a_row_at_the_end_of_the_context_keeps_a_valid_position(tiny_model):
    """One of 60 tokens beside one of 2, in a context of 64."""
    cache = PaddedCache(tiny_model.config, [60, 2], 121, dtype=torch.float64)
    last = [cache.extend(count).positions[:, -1].tolist() for count in [60] + [1] * 61]
    assert last[:5] == [[59, 1], [60, 2], [61, 3], [62, 4], [63, 5]]
    assert last[5:] == [[63, position] for position in range(6, 63)]


@torch.inference_mode()
def test_attention_reads_the_cache_in_place(tiny_model, cache):
    """Views, not copies: what a pass reads and writes is the cache's own memory."""
    cache.extend(WIDTH)
    attention = cache.extend(1)
    assert attention.seen.data_ptr() == cache.kv.data_ptr()
    assert attention.new.untyped_storage().data_ptr() == cache.kv.untyped_storage().data_ptr()
    token = tiny_model.config.kv_bytes_per_token(torch.float64)
    assert cache.kv.nbytes == len(LENGTHS) * COLUMNS * token


def test_the_cache_refuses_more_than_it_holds(cache):
    cache.extend(WIDTH)
    with pytest.raises(ValueError):
        cache.extend(STEPS + 1)
    with pytest.raises(ValueError):
        cache.extend(0)
    assert cache.length == WIDTH  # nothing was taken
    assert cache.extend(STEPS).new.shape[-2] == STEPS
    grouped = PaddedCache(Config(5, 9, 8, 1, n_head=4, n_kv_head=2), [2, 1, 1], 7)
    assert grouped.kv.shape == (1, 2, 3, 2, 7, 2)
    assert grouped.padding.tolist() == [0, 1, 1] and grouped.length == 0

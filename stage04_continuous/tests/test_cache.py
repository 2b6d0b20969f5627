"""Slots: which sequences attend together, attention whatever the packing, reads in place, wipes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import Config
from stage01_forward.attention import explicit_attention
from stage04_continuous import cache as module
from stage04_continuous.cache import CALL, SlotCache, neighbours


def config_of(group: int = 1) -> Config:
    """3 heads of keys and values, each for `group` heads of queries."""
    return Config(11, 256, 12 * group, 2, 3 * group, n_kv_head=3, name="small")


CONFIG = config_of()


def test_memory_is_as_computed():
    for config in (CONFIG, config_of(group=2)):
        size = 5 * 10 * config.kv_bytes_per_token(torch.float32)
        assert SlotCache(config, 5, 10).kv.nbytes == size


RUNS = [  # (start, count) of each share, and how many go together
    ([(5, 1)], [1]),
    ([(5, 1), (5, 1), (5, 1)], [3]),
    ([(5, 1), (5, 2)], [1, 1]),  # not as many new tokens
    ([(5, 2), (5, 1), (5, 2)], [1, 1, 1]),  # only neighbours
    ([(0, 4), (0, 4), (0, 3)], [2, 1]),
    ([(9, 1), (9 + CALL, 1)], [2]),  # one of them reads CALL keys too many,
    ([(9, 1), (10 + CALL, 1)], [1, 1]),  # which is as many as a call is worth
    ([(9 + CALL, 1), (9, 1)], [2]),
    ([(1, 1), (1, 1), (2 + CALL // 2, 1)], [2, 1]),  # two of them read CALL / 2 too many
    ([(1 + CALL, 1), (1, 1), (1, 1)], [3]),  # each joins on its own account
    ([(1, 4), (1 + CALL // 4, 4)], [2]),  # each of 4 queries reads them
    ([(1, 4), (2 + CALL // 4, 4)], [1, 1]),
]


@pytest.mark.parametrize(
    "shares, sizes",
    [([(slot, *share) for slot, share in enumerate(shares)], sizes) for shares, sizes in RUNS]
    + [
        ([(0, 5, 1), (2, 5, 1)], [1, 1]),  # not next to each other in memory
        ([(1, 5, 1), (0, 5, 1)], [1, 1]),  # nor in this order
        ([(0, 5, 1), (0, 6, 1)], [1, 1]),
    ],
    ids=str,
)
def test_grouping_rules(shares, sizes):
    runs = neighbours(shares)
    assert [len(run) for run in runs] == sizes
    assert [share for run in runs for share in run] == shares


def test_groups_of_a_pass():
    """Shares come in any order. `order` brings those together that can attend together."""
    shares = [(6, 2, 3), (3, 7, 1), (4, 0, 5), (1, 4, 1), (0, 7, 1)]
    attention = SlotCache(CONFIG, 8, 100).extend(shares)
    groups = [
        (group.rows, group.slots, group.end, group.new, group.causal) for group in attention.groups
    ]
    assert groups == [
        (slice(0, 2), slice(0, 2), 8, 1, False),
        (slice(2, 3), slice(3, 4), 8, 1, False),
        (slice(3, 6), slice(6, 7), 5, 3, False),
        (slice(6, 11), slice(4, 5), 5, 5, True),
    ]
    masks = [
        None if group.mask is None else group.mask.squeeze().int().tolist()
        for group in attention.groups
    ]
    ones = [[1] * 8, [1] * 5 + [0] * 3]
    assert masks == [ones, None, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], None]
    assert attention.order.tolist() == [10, 9, 3, 0, 1, 2, 4, 5, 6, 7, 8]
    assert attention.positions.tolist() == [7, 4, 7, 2, 3, 4, 0, 1, 2, 3, 4]
    assert attention.slots.tolist() == [0, 1, 3, 6, 6, 6, 4, 4, 4, 4, 4]


class Packed:
    """Sequences of random keys and values in one cache, each in a slot full of other numbers. Each
    head of keys and values serves `group` heads of queries. The cache's dtype need not be that of
    the model."""

    def __init__(self, count, seed=0, group=1, dtype=torch.float64):
        self.config, self.generator = config_of(group), torch.Generator().manual_seed(seed)
        # q, k, v of each sequence as (3, H, T, D), k and v repeated for all heads of q
        self.past = [torch.empty(3, 3 * group, 0, 4, dtype=torch.float64) for _ in range(count)]
        self.cache = self.make(count, dtype)

    def make(self, count, dtype):
        cache = SlotCache(self.config, count, 200, dtype)
        cache.kv.normal_(0, 1e3, generator=self.generator)
        return cache

    def length(self, sequence):
        return self.past[sequence].shape[2]

    def share(self, sequence, count):
        """What `extend` needs."""
        return sequence, self.length(sequence), count

    def compute(self, *parts, atol=1e-12):
        """One pass over `parts`, each (sequence, count), compared with explicit attention of each
        sequence alone."""
        shares = [self.share(*part) for part in parts]
        attention, heads = self.cache.extend(shares), self.config.n_head
        tokens, order = sum(count for _, count in parts), attention.order
        assert sorted(order.tolist()) == list(range(tokens))
        queries = torch.randn(tokens, heads, 4, dtype=torch.float64, generator=self.generator)
        fresh = torch.randn(2, tokens, 3, 4, dtype=torch.float64, generator=self.generator)
        got = torch.empty_like(queries).repeat(2, 1, 1, 1)  # (layers, N, heads, D)
        for layer in range(2):
            q, k, v = (x[order] * (1 + layer) for x in (queries, *fresh))
            got[layer, order] = attention.attend(layer, q, k, v)
        repeated = torch.stack([queries, *fresh.repeat_interleave(heads // 3, 2)])  # (3, N, ., D)
        row = 0
        for (sequence, count), (_, start, _) in zip(parts, shares, strict=True):
            mine = slice(row, row := row + count)
            newest = repeated[:, mine].transpose(1, 2)
            self.past[sequence] = torch.cat([self.past[sequence], newest], dim=2)
            for layer in range(2):
                want = explicit_attention(*(self.past[sequence] * (1 + layer)))[:, start:]
                assert torch.allclose(got[layer, mine], want.transpose(0, 1), rtol=0, atol=atol)


def random_passes(data, kind):
    """Up to 5 passes of up to 5 sequences, in any order, as `data` draws them."""
    count = data.draw(st.integers(1, 5))
    sequences = kind(count, data.draw(st.integers(0, 999)))
    for _ in range(data.draw(st.integers(1, 5))):
        order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
        counts = [data.draw(st.sampled_from([1, 1, 1, 2, 3, 7, 40])) for _ in order]
        sequences.compute(
            *((i, min(n, 200 - sequences.length(i))) for i, n in zip(order, counts, strict=True))
        )


@settings(max_examples=100)
@given(st.data())
def test_any_packing_is_explicit_attention_of_each_sequence(data):
    random_passes(data, Packed)


def other_dtypes(kind, group=1):
    """Queries are float64, and so is what comes out."""
    for dtype, atol in (torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.15):
        sequences = kind(3, 0, group, dtype)
        for parts in (((0, 9), (1, 4), (2, 9)), ((2, 1), (0, 1), (1, 1)), ((0, 3), (1, 3))):
            sequences.compute(*parts, atol=atol)


def test_the_cache_has_a_dtype_of_its_own():
    other_dtypes(Packed)


def test_keys_and_values_are_read_in_place(monkeypatch):
    """Views, not copies: where `attention` is called, it gets the cache's own memory."""
    kernel, seen = module.attention, []

    def spy(q, keys, values, mask, causal=False):
        seen.append((keys, values))
        return kernel(q, keys, values, mask, causal)

    monkeypatch.setattr(module, "attention", spy)
    cache = SlotCache(CONFIG, 6, 20)
    attention = cache.extend([(0, 3, 1), (1, 5, 1), (3, 5, 1), (4, 0, 4), (5, 2, 4)])
    attention.attend(1, *torch.randn(3, len(attention.positions), 3, 4))
    slots = [group.slots for group in attention.groups]
    assert slots == [slice(0, 2), slice(3, 4), slice(4, 6)]
    memory = cache.kv.untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == memory for pair in seen for part in pair)

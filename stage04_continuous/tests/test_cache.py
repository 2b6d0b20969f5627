"""Slots: which sequences attend together, attention whatever the packing, reads in place, wipes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import UserError
from stage01_forward.attention import explicit_attention
from stage03_batching.attention import masked_attention
from stage04_continuous import cache as module
from stage04_continuous.cache import CALL, SlotCache, neighbours
from stage04_continuous.plan import Wipe

CONFIG = Config(vocab_size=11, n_positions=256, n_embd=8, n_layer=2, n_head=2, name="small")
IDS = [7, 3, 99, 14, 14, 56, 2, 81, 33, 60, 5, 21]


def test_memory_is_as_computed_and_a_slot_is_checked(tiny_model):
    config = tiny_model.config
    assert SlotCache(config, 5, 10).bytes == 5 * 10 * config.kv_bytes_per_token(torch.float32)
    assert SlotCache(config, 5).slot_tokens == 64
    for wrong in (1, 0, -1, 65):
        with pytest.raises(UserError, match="2 to 64 tokens"):
            SlotCache(config, 5, wrong)


def test_a_share_outside_the_slots_is_refused():
    wrong = [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (1, 0, 11), (0, 10, 1), (0, 7, 4)]
    for share in wrong:
        with pytest.raises(ValueError, match="no place for"):
            SlotCache(CONFIG, 2, 10).extend([(0, 0, 1), share])


@pytest.mark.parametrize(
    "shares, sizes",
    [
        ([(0, 5, 1)], [1]),
        ([(0, 5, 1), (1, 5, 1), (2, 5, 1)], [3]),
        ([(0, 5, 1), (2, 5, 1)], [1, 1]),  # not next to each other in memory
        ([(1, 5, 1), (0, 5, 1)], [1, 1]),  # nor in this order
        ([(0, 5, 1), (0, 6, 1)], [1, 1]),
        ([(0, 5, 1), (1, 5, 2)], [1, 1]),  # not as many new tokens
        ([(0, 0, 4), (1, 0, 4), (2, 0, 3)], [2, 1]),
        ([(0, 9, 1), (1, 9 + CALL, 1)], [2]),  # one of them reads CALL keys too many,
        ([(0, 9, 1), (1, 10 + CALL, 1)], [1, 1]),  # which is as many as a call is worth
        ([(0, 9 + CALL, 1), (1, 9, 1)], [2]),
        ([(0, 10 + CALL, 1), (1, 9, 1)], [1, 1]),
        ([(0, 0, 1), (1, 0, 1), (2, CALL // 2, 1)], [3]),  # two of them read CALL / 2 too many
        ([(0, 0, 1), (1, 0, 1), (2, CALL // 2 + 1, 1)], [2, 1]),
        ([(0, CALL, 1), (1, 0, 1), (2, 0, 1)], [3]),  # each joins on its own account
        ([(0, 0, 4), (1, CALL // 4, 4)], [2]),  # each of 4 queries reads them
        ([(0, 0, 4), (1, CALL // 4 + 1, 4)], [1, 1]),
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_packing_is_explicit_attention_of_each_sequence(data):
    """Passes of random shares, in any order, of sequences in slots full of other numbers."""
    slots = data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    cache = SlotCache(CONFIG, slots, 200, torch.float64)
    cache.kv.copy_(1e3 * torch.randn(cache.kv.shape, dtype=torch.float64, generator=generator))
    past = [torch.empty(3, 2, 0, 4, dtype=torch.float64) for _ in range(slots)]  # (3, H, T, D)
    for _ in range(data.draw(st.integers(1, 5))):
        shares = []
        for slot in data.draw(st.permutations(range(slots)))[: data.draw(st.integers(1, slots))]:
            start, count = past[slot].shape[2], data.draw(st.sampled_from([1, 1, 1, 2, 3, 7, 40]))
            shares.append((slot, start, min(count, 200 - start)))  # at most 5 passes of 40 tokens
        attention = cache.extend(shares)
        tokens = sum(count for *_, count in shares)
        assert sorted(attention.order.tolist()) == list(range(tokens))
        fresh = torch.randn(3, tokens, 2, 4, dtype=torch.float64, generator=generator)
        got = torch.empty(2, tokens, 2, 4, dtype=torch.float64)  # (layers, N, H, D)
        for layer in range(2):
            q, k, v = fresh[:, attention.order] * (1 + layer)
            got[layer, attention.order] = attention.attend(layer, q, k, v)
        row = 0
        for slot, start, count in shares:
            rows = slice(row, row := row + count)
            past[slot] = torch.cat([past[slot], fresh[:, rows].transpose(1, 2)], dim=2)
            for layer in range(2):
                want = explicit_attention(*(past[slot] * (1 + layer)))[:, start:]  # (H, T, D)
                assert torch.allclose(got[layer, rows], want.transpose(0, 1), rtol=0, atol=1e-12)


def test_keys_and_values_are_read_in_place(monkeypatch):
    """Views, not copies: attention gets the cache's own memory, from the group's first slot on."""
    seen = []

    def spy(q, keys, values, mask, causal=False):
        seen.append((keys, values))
        return masked_attention(q, keys, values, mask, causal)

    monkeypatch.setattr(module, "masked_attention", spy)
    cache = SlotCache(CONFIG, 6, 20)
    attention = cache.extend([(0, 3, 1), (1, 5, 1), (3, 5, 1), (4, 0, 4), (5, 2, 4)])
    attention.attend(1, *torch.randn(3, len(attention.positions), 2, 4))
    slots = [group.slots for group in attention.groups]
    assert slots == [slice(0, 2), slice(3, 4), slice(4, 6)]
    for group, pair in zip(slots, seen, strict=True):
        for which, part in enumerate(pair):
            assert part.data_ptr() == cache.kv[1, which, group.start].data_ptr()
            assert part.stride() == cache.kv[1, which].stride()


def test_a_wipe_clears_one_slot_up_to_what_was_used():
    cache = SlotCache(CONFIG, 3, 20)
    cache.kv[:] = torch.nan
    cache.move([Wipe(1, 12), Wipe(0, 0), Wipe(2, 5)])
    assert bool((cache.kv[:, :, 2, :, :5] == 0).all())
    cache.kv[:, :, 2] = torch.nan
    assert bool((cache.kv[:, :, 1, :, :12] == 0).all())
    assert bool(cache.kv[:, :, 1, :, 12:].isnan().all())
    assert bool(cache.kv[:, :, [0, 2]].isnan().all())

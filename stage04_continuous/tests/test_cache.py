"""Slots: who attends together, that it is attention whatever the packing, and that nothing is copied or left behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checkpoint import Config
from shared.errors import UserError
from stage01_forward.attention import Recompute, explicit_attention
from stage03_batching.attention import masked_attention
from stage04_continuous import cache as module
from stage04_continuous.cache import CALL, SlotCache, neighbours

CONFIG = Config(vocab_size=11, n_positions=256, n_embd=8, n_layer=2, n_head=2, name="small")
IDS = [7, 3, 99, 14, 14, 56, 2, 81, 33, 60, 5, 21]


def test_memory_is_as_computed_and_a_slot_is_checked(tiny_model):
    config = tiny_model.config
    assert SlotCache(config, 5, 10).bytes == 5 * 10 * config.kv_bytes_per_token(torch.float32)
    assert SlotCache(config, 5).slot_tokens == 64
    for wrong in (1, 0, -1, 65):
        with pytest.raises(UserError, match="2 to 64 tokens"):
            SlotCache(config, 5, wrong)


@pytest.mark.parametrize(
    "share",
    [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (1, 0, 11), (0, 10, 1), (0, 7, 4)],
    ids=lambda share: str(share),
)
def test_a_share_outside_the_slots_is_refused(share):
    with pytest.raises(ValueError, match="no place for"):
        SlotCache(CONFIG, 2, 10).extend([(0, 0, 1), share])


# ---- who attends together -------------------------------------------------------------------------------------------


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


def test_a_group_says_what_it_reads():
    attention = SlotCache(CONFIG, 8, 100).extend(
        [(0, 7, 1), (1, 4, 1), (3, 7, 1), (4, 0, 5), (6, 2, 3)]
    )
    two, one, whole, chunk = attention.groups
    assert (two.rows, two.slots, two.end, two.new, two.causal) == (
        slice(0, 2),
        slice(0, 2),
        8,
        1,
        False,
    )
    assert two.mask is not None and chunk.mask is not None
    assert two.mask.squeeze().int().tolist() == [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert (one.rows, one.slots, one.end, one.mask, one.causal) == (
        slice(2, 3),
        slice(3, 4),
        8,
        None,
        False,
    )
    assert (whole.rows, whole.slots, whole.end, whole.mask, whole.causal) == (
        slice(3, 8),
        slice(4, 5),
        5,
        None,
        True,
    )
    assert (chunk.rows, chunk.slots, chunk.end, chunk.causal) == (
        slice(8, 11),
        slice(6, 7),
        5,
        False,
    )
    assert chunk.mask.squeeze().int().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert attention.positions.tolist() == [7, 4, 7, 0, 1, 2, 3, 4, 2, 3, 4]
    assert attention.slots.tolist() == [0, 1, 3, 4, 4, 4, 4, 4, 6, 6, 6]


# ---- attention, whatever the packing --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_packing_is_explicit_attention_of_each_sequence(data):
    """Passes of random shares, in any order, of sequences that lie in slots full of somebody else's numbers."""
    slots, generator = (
        data.draw(st.integers(1, 5)),
        torch.Generator().manual_seed(data.draw(st.integers(0, 999))),
    )
    cache = SlotCache(CONFIG, slots, 200, torch.float64)
    cache.kv.copy_(1e3 * torch.randn(cache.kv.shape, dtype=torch.float64, generator=generator))
    past = {
        slot: torch.empty(3, 2, 0, 4, dtype=torch.float64) for slot in range(slots)
    }  # q, k, v as (3, H, T, D)
    for _ in range(data.draw(st.integers(1, 5))):
        order = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(1, slots))]
        if data.draw(st.booleans()):
            order = sorted(order)
        counts = [data.draw(st.sampled_from([1, 1, 1, 2, 3, 7, 40])) for _ in order]
        shares = [
            (slot, past[slot].shape[2], min(count, 200 - past[slot].shape[2]))
            for slot, count in zip(order, counts, strict=True)
        ]
        shares = [share for share in shares if share[2]]
        if not shares:
            return
        attention = cache.extend(shares)
        assert attention.positions.tolist() == [
            start + i for _, start, count in shares for i in range(count)
        ]
        fresh = torch.randn(
            3, len(attention.positions), 2, 4, dtype=torch.float64, generator=generator
        )  # (3, N, H, D)
        got = [
            attention.attend(layer, *(fresh * (1 + layer))) for layer in range(2)
        ]  # (N, H, D) each
        row = 0
        for slot, start, count in shares:
            mine = slice(row, row + count)
            row += count
            past[slot] = torch.cat([past[slot], fresh[:, mine].transpose(1, 2)], dim=2)
            for layer in range(2):
                whole = explicit_attention(*(past[slot] * (1 + layer)))  # (H, T, D)
                assert torch.allclose(
                    got[layer][mine], whole[:, start:].transpose(0, 1), rtol=0, atol=1e-12
                )


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 7], [5, 1, 6], [11, 1]], ids=str)
@torch.inference_mode()
def test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass(cuts, tiny_model):
    """Two sequences, one a token behind the other: so their positions differ in every pass."""
    whole = tiny_model(torch.tensor(IDS), torch.arange(12), Recompute().attend)
    cache = SlotCache(tiny_model.config, 3, dtype=torch.float64)

    def compute(shares):
        attention = cache.extend(shares)
        ids = [id for _, start, count in shares for id in IDS[start : start + count]]
        return tiny_model(torch.tensor(ids), attention.positions, attention.attend)

    done, parts = 0, []
    for cut in cuts:
        behind = [(1, max(0, done - 1), min(cut, done + cut - 1))] if done + cut > 1 else []
        hidden = compute([*behind, (2, done, cut)])
        parts.append(hidden[len(hidden) - cut :])
        for _, start, count in behind:
            assert torch.allclose(hidden[:count], whole[start : start + count], rtol=0, atol=1e-12)
        done += cut
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)


# ---- in place, and wiped --------------------------------------------------------------------------------------------


def test_keys_and_values_are_read_in_place(monkeypatch):
    """Views, not copies: what attention is given is the cache's own memory, at the place of the group's first slot."""
    given_to_attention = []

    def spy(q, keys, values, mask, causal=False):
        given_to_attention.append((keys, values))
        return masked_attention(q, keys, values, mask, causal)

    monkeypatch.setattr(module, "masked_attention", spy)
    cache = SlotCache(CONFIG, 6, 20)
    attention = cache.extend([(0, 3, 1), (1, 5, 1), (3, 5, 1), (4, 0, 4), (5, 2, 4)])
    fresh = torch.randn(3, len(attention.positions), 2, 4)
    attention.attend(1, *fresh)
    groups = [group.slots for group in attention.groups]
    assert groups == [slice(0, 2), slice(3, 4), slice(4, 6)]
    for slots, pair in zip(groups, given_to_attention, strict=True):
        for which, seen in enumerate(pair):
            assert seen.untyped_storage().data_ptr() == cache.kv.untyped_storage().data_ptr()
            assert seen.data_ptr() == cache.kv[1, which, slots.start].data_ptr()
            assert seen.stride() == cache.kv[1, which].stride()


def test_a_pass_writes_its_own_tokens_and_nothing_else():
    cache = SlotCache(CONFIG, 4, 20)
    attention = cache.extend([(2, 6, 3), (0, 1, 1)])
    q, k, v = torch.randn(3, 4, 2, 4)
    attention.attend(1, q, k, v)
    want = torch.zeros_like(cache.kv)
    for which, fresh in enumerate((k, v)):
        want[1, which, 2, :, 6:9] = fresh[:3].transpose(0, 1)
        want[1, which, 0, :, 1] = fresh[3]
    assert torch.equal(cache.kv, want)


def test_reset_wipes_one_slot_up_to_what_was_used():
    cache = SlotCache(CONFIG, 3, 20)
    cache.kv[:] = torch.nan
    cache.reset(1, 12)
    assert bool((cache.kv[:, :, 1, :, :12] == 0).all())
    assert bool(cache.kv[:, :, 1, :, 12:].isnan().all())
    assert bool(cache.kv[:, :, [0, 2]].isnan().all())

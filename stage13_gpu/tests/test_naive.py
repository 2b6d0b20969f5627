"""What a program of a kernel does, in PyTorch, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from stage13_gpu.naive import PIECE, State, attend, merge, online

BLOCKS = 90


def blocks_of(tokens, block, width):
    """A table, and keys and values (slots, D) with NaN wherever the sequence has no token."""
    count = -(-tokens // block)
    table = torch.randperm(BLOCKS)[:count].tolist()
    lines = torch.randn(2, tokens, width, dtype=torch.float64)
    memory = torch.full((2, BLOCKS * block, width), torch.nan, dtype=torch.float64)
    for position in range(tokens):
        slot = table[position // block] * block + position % block
        memory[:, slot] = lines[:, position]
    return table, memory, lines


def expected(q, own, lines):
    """Attention of queries (M, D) at the positions `own`, from the formula."""
    positions = torch.arange(lines.shape[1])
    seen = positions <= own[:, None]
    scores = (q @ lines[0].t() / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(1) @ lines[1]


@pytest.mark.parametrize("factor", [1, 1000])
def test_tiles_of_any_size_give_one_softmax(factor):
    """Also where scores overflow without the maximum, and where a query sees no key of a tile."""
    torch.manual_seed(0)
    q, key, value = torch.randn(3, 3, 8), torch.randn(20, 8), torch.randn(20, 8)
    q = factor * q[0].double()
    key, value, seen = key.double(), value.double(), torch.rand(3, 20) < 0.6
    seen[0, :7] = False  # the whole of the first tile
    seen[:, 19] = True
    scores = (q @ key.t() / 8**0.5).masked_fill(~seen, -torch.inf)
    for cut in ([20], [7, 13], [7, 1, 5, 7]):
        state = State.of(q)
        parts = (key.split(cut), value.split(cut), seen.split(cut, 1))
        for tile in zip(*parts, strict=True):
            state = online(q, *tile, state)
        assert state.total.isfinite().all()
        torch.testing.assert_close(state.mixed / state.total[:, None], scores.softmax(1) @ value)


def test_pieces_of_a_softmax_add_up():
    torch.manual_seed(1)
    q, key, value = torch.randn(3, 2, 64, 8, dtype=torch.float64)[:, 0]
    q, everything = 30 * q[:4], torch.ones(4, 64, dtype=torch.bool)
    states = [
        online(q, key[part], value[part], everything[:, part], State.of(q))
        for part in (slice(0, 9), slice(9, 40), slice(40, 64))
    ]
    want = (q @ key.t() / 8**0.5).softmax(1) @ value
    torch.testing.assert_close(merge(states), want)
    one, value = torch.ones(1), torch.randn(1, 8)
    near, far = State(4000 * one, one, value), State(-4000 * one, one, -value)
    assert torch.equal(merge([near, far]), value) and torch.equal(merge([far, near]), value)


@pytest.mark.parametrize("length", [1, 16, 255, 256, 257, 700])
def test_a_new_token_sees_its_blocks_and_nothing_else(length):
    torch.manual_seed(length)
    table, memory, lines = blocks_of(length, 16, 8)
    q, query_at = torch.randn(3, 8, dtype=torch.float64), torch.full((3,), length - 1)
    states = [
        attend(q, query_at, memory[0], memory[1], table, 16, first, min(length, first + PIECE))
        for first in range(0, length, PIECE)
    ]
    torch.testing.assert_close(merge(states), expected(q, query_at, lines))


def test_new_tokens_see_those_before_them():
    table, memory, lines = blocks_of(131, 5, 8)
    q, query_at = torch.randn(31, 8, dtype=torch.float64), torch.arange(100, 131)
    state = attend(q, query_at, memory[0], memory[1], table, 5, 0, 131)
    torch.testing.assert_close(merge([state]), expected(q, query_at, lines))

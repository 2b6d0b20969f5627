"""The paged cache: grouping, attention whatever the tables, and what is read, written and moved."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import Config
from stage04_continuous.tests import test_cache as slots
from stage05_paged import cache as module
from stage05_paged.blocks import Move
from stage05_paged.cache import PagedCache, addresses, padded, runs

SIZES = (1, 3, 16, 128)  # of blocks
KINDS = ("wipe", "copy", "out", "in")  # of moves
TILES = (1, 2000, 12_000, 2**23)  # bytes: a head at a time; some heads; some sequences; all


class Sequences(slots.Packed):
    """The blocks of each are in no order, among blocks full of NaN; what is not yet written of its
    own holds large numbers."""

    size = 4

    def make(self, count, dtype):
        cache = PagedCache(self.config, count * -(-200 // self.size) + 3, self.size, dtype=dtype)
        cache.kv.fill_(torch.nan)
        self.free = torch.randperm(cache.blocks, generator=self.generator).tolist()
        self.tables: list[list[int]] = [[] for _ in range(count)]
        return cache

    def share(self, sequence, count):
        """What `extend` needs: (blocks, start, count), with new blocks as they are needed."""
        table = self.tables[sequence]
        while len(table) * self.size < self.length(sequence) + count:
            table.append(self.free.pop())
            self.cache.kv[:, :, :, table[-1]] = 1e3
        return table, self.length(sequence), count


RUNS = [([(0, 4), (4, 4)], [1, 1]), ([(0, 1), (1, 1)], [1, 1])]  # a whole prompt gathers nothing


@pytest.mark.parametrize("starts_and_counts, sizes", [*slots.RUNS, *RUNS], ids=str)
def test_grouping_rules(starts_and_counts, sizes):
    shares = [([index], *each) for index, each in enumerate(starts_and_counts)]
    found = runs(shares)
    assert [len(run) for run in found] == sizes
    assert [share for run in found for share in run] == shares


def test_addresses_go_through_the_tables():
    """Worked out by hand, in blocks of 4."""
    shares = [([7], 2, 2), ([6, 5, 1], 7, 3), ([3, 0], 4, 1)]
    tables = padded(shares)
    assert tables.tolist() == [[7, 7, 7], [6, 5, 1], [3, 0, 0]]
    slots, positions = addresses(tables, shares, 4)
    assert slots.tolist() == [30, 31, 23, 4, 5, 0]
    assert positions.tolist() == [2, 3, 7, 8, 9, 4]


def test_a_whole_prompt_gathers_nothing_and_a_chunk_only_what_it_sees():
    """Shares come in any order; `order` brings those together that attend together. Gathered are
    the blocks of the longest of a run; a shorter table is padded with its own last block."""
    cache = PagedCache(slots.CONFIG, 20, 4)
    attention = cache.extend(
        [([7, 3], 0, 6), ([5, 11, 1, 8], 6, 2), ([4, 0, 6], 10, 1), ([9, 2], 0, 6), ([13], 2, 1)]
    )
    assert attention.order.tolist() == [15, 8, 6, 7, 0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]
    assert attention.positions.tolist() == [2, 10, 6, 7, *range(6), *range(6)]
    assert attention.prompts == [(slice(4, 16), 6)]
    decodes, chunk = attention.tiles
    assert (decodes.rows, decodes.heads, decodes.new) == (slice(0, 2), slice(0, 3), 1)
    assert (chunk.rows, chunk.heads, chunk.new) == (slice(2, 4), slice(0, 3), 2)
    for tile, tables in ((chunk, [[5, 11]]), (decodes, [[13, 13, 13], [4, 0, 6]])):
        places = itertools.product((0, 1), tables, range(3))
        lines = [(which * 3 + head) * 20 + b for which, table, head in places for b in table]
        assert tile.lines.tolist() == lines
        assert tile.keys.shape == tile.values.shape == (len(tables), 3, 4 * len(tables[0]), 4)
    assert decodes.mask is not None and chunk.mask is not None
    assert decodes.mask.squeeze().int().tolist() == [[1] * 3 + [0] * 9, [1] * 11 + [0]]
    assert chunk.mask.squeeze().int().tolist() == [[1] * 7 + [0], [1] * 8]
    full = cache.extend([([4, 0], 7, 1), ([13, 1], 7, 1)])
    assert full.tiles[0].mask is None  # all is visible


@pytest.mark.parametrize(
    "tile_bytes, shapes",
    [
        (1, [(1, 1)] * 15),  # not even a head fits: then one of one sequence
        (1535, [(1, 1)] * 15),  # 768 bytes a head: 2 (k, v) * 3 blocks * 4 tokens * 4 * 8 bytes
        (1536, [(1, 2), (1, 1)] * 5),
        (2304, [(1, 3)] * 5),
        (4608, [(2, 3), (2, 3), (1, 3)]),
        (2**23, [(5, 3)]),
    ],
    ids=str,
)
def test_a_gather_goes_in_tiles_of_so_many_bytes(tile_bytes, shapes, monkeypatch):
    """All into one buffer, no larger than a tile or a head."""
    monkeypatch.setattr(module, "TILE", tile_bytes)
    cache = PagedCache(slots.CONFIG, 20, 4, dtype=torch.float64)
    attention = cache.extend([([3 * i, 3 * i + 1, 3 * i + 2], 8 + i % 4, 1) for i in range(5)])
    assert [tuple(tile.keys.shape[:2]) for tile in attention.tiles] == shapes
    assert attention.buffer.nbytes == max(tile_bytes // 8 * 8, 768)
    memory = {attention.buffer.untyped_storage().data_ptr()}
    for tile in attention.tiles:
        assert {x.untyped_storage().data_ptr() for x in (tile.keys, tile.values)} == memory
        assert tile.target.nbytes <= max(tile_bytes, 768)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=40)
@given(data=st.data())
def test_any_packing_is_explicit_attention_of_each_sequence(size, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", data.draw(st.sampled_from(TILES)))
        patch.setattr(Sequences, "size", size)
        slots.random_passes(data, Sequences)


@pytest.mark.parametrize("tile", TILES)
def test_the_cache_has_a_dtype_of_its_own(tile, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    slots.other_dtypes(Sequences)


@pytest.mark.parametrize("tile", TILES)
def test_query_heads_read_the_head_of_keys_that_they_share(tile, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    cache = PagedCache(Config(101, 64, 24, 1, n_head=4, n_kv_head=2, head_dim=10), 6, 4)
    q, k, v = torch.randn(7, 4, 10), *torch.randn(2, 7, 2, 10)
    cache.extend([([5, 2], 0, 6)]).attend(0, q[:6], k[:6], v[:6])
    output = cache.extend([([5, 2], 6, 1)]).attend(0, q[6:], k[6:], v[6:])
    for head in range(4):
        weights = (k[:, head // 2] @ q[6, head] / 10**0.5).softmax(0)
        torch.testing.assert_close(output[0, head], weights @ v[:, head // 2])


def test_a_share_outside_its_blocks_is_refused():
    cache = PagedCache(slots.CONFIG, 5, 4)
    for blocks, start, count in ((0, 0, 1), (1, -1, 1), (1, 0, 0), (2, 0, 9), (2, 8, 1), (2, 5, 4)):
        message = f"no place for {count} tokens at {start} in {blocks} blocks of 4"
        with pytest.raises(ValueError, match=message):
            cache.extend([([2], 0, 1), (list(range(blocks)), start, count)])


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)), max_size=12)
)
def test_moves_are_done_one_after_the_other(draws):
    """As assignments to a copy of both memories."""
    cache, generator = PagedCache(slots.CONFIG, 6, 2, 4), torch.Generator().manual_seed(0)
    kv, swapped = (
        memory.normal_(generator=generator).clone() for memory in (cache.kv, cache.swapped)
    )
    moves = []
    for kind, source, target in draws:
        here, there = (swapped if kind == "in" else kv), (swapped if kind == "out" else kv)
        moves.append(Move(kind, source % here.shape[3], target % there.shape[3]))
        content = 0 if kind == "wipe" else here[:, :, :, moves[-1].source]
        there[:, :, :, moves[-1].target] = content
    cache.move(moves)
    assert torch.equal(cache.kv, kv) and torch.equal(cache.swapped, swapped)

"""Blocks: taken, shared, counted and given back; found by what they hold, while they hold it."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from stage05_paged.blocks import BlockPool, BlockTable, chain


def cache_blocks(pool, *names):
    """Take a block for each name, publish it, and give it back: the first is the oldest."""
    blocks = [pool.take() for _ in names]
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
        pool.give_back(block)
    return blocks


def state(pool):
    """(free, cached, owned, shared)"""
    shared = sum(count > 1 for count in pool.references)
    return len(pool.free), len(pool.cached), pool.owned, shared


def test_what_cannot_be():
    for count in (0, -3):
        with pytest.raises(UserError, match=f"at least 1 block, not {count}"):
            BlockPool(count)
    with pytest.raises(UserError, match="must hold at least 1 token, not 0"):
        BlockPool(4, 0)
    pool = BlockPool(2, 4)
    one, other = BlockTable(pool), BlockTable(pool)
    other.adopt(one.grow(7))
    with pytest.raises(RuntimeError):  # before anything is given back
        other.replace(0)
    assert (other.blocks, pool.references) == (one.blocks, [2, 2])


def test_all_blocks_are_given_once_and_come_back():
    pool = BlockPool(5, 4)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == list(range(5))
    assert (state(pool), pool.available) == ((0, 0, 5, 0), 0)
    with pytest.raises(RuntimeError):
        pool.take()
    for block in taken[1:]:
        pool.give_back(block)
    assert (state(pool), pool.available) == ((4, 0, 1, 0), 4)
    assert [pool.take() for _ in range(4)] == taken[:0:-1]  # the last one freed is taken first
    assert pool.references == [1] * 5


class Quick(list):
    """The free blocks: a list without whatever takes time that grows with its length."""

    __contains__ = __iter__ = index = count = None  # type: ignore[assignment]
    remove = insert = sort = reverse = None  # type: ignore[assignment]

    def pop(self):  # type: ignore[override]
        return super().pop()


def test_an_unowned_block_is_not_given_back_and_a_free_one_not_shared():
    pool = BlockPool(3)
    (cached,) = cache_blocks(pool, b"a")
    for block in (cached, pool.free[0]):
        with pytest.raises(RuntimeError):
            pool.give_back(block)
    with pytest.raises(RuntimeError):
        pool.share(pool.free[0])
    assert state(pool) == (2, 1, 0, 0)


def test_a_published_block_is_kept_when_no_table_holds_it_and_can_be_shared_again():
    pool = BlockPool(4)
    (block,) = cache_blocks(pool, b"a")
    assert (state(pool), pool.available, pool.match([b"a"])) == ((3, 1, 0, 0), 4, [block])
    pool.share(block)
    assert (state(pool), pool.references[block]) == ((3, 0, 1, 0), 1)
    for _ in range(2):
        pool.share(block)
        assert state(pool) == (3, 0, 1, 1)  # a block is shared once, however many tables hold it
    for shared in (1, 0):
        pool.give_back(block)
        assert state(pool) == (3, 0, 1, shared)
    pool.give_back(block)
    assert (state(pool), pool.match([b"a"])) == ((3, 1, 0, 0), [block])


def test_the_least_recently_used_block_is_evicted_first_and_after_the_free_ones():
    pool = BlockPool(5)
    a, b, c, d = cache_blocks(pool, b"a", b"b", b"c", b"d")
    pool.share(b)  # used again
    pool.give_back(b)
    pool.match([b"a"])  # a look alone is no use
    assert pool.take() not in (a, b, c, d) and pool.evictions == 0
    assert [pool.take() for _ in range(4)] == [a, c, d, b]
    assert (pool.evictions, pool.by_digest) == (4, {})


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    table = BlockTable(pool := BlockPool(3, 1))
    blocks, names = table.grow(3), [b"a", b"b", b"c"]
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    table.release()
    for left in (2, 1, 0):
        pool.take()
        assert pool.match(names) == blocks[:left]


def test_a_digest_stands_for_the_parent_the_tokens_and_their_order():
    root = hashlib.sha256(b"").digest()
    assert chain(root, [1, 2]) == hashlib.sha256(root + array("q", [1, 2]).tobytes()).digest()
    digests = {chain(root, tokens) for tokens in ([1, 2], [2, 1], [12])}
    for beginning in ([1, 2], [2, 1]):  # equal tokens behind another beginning
        digests.add(chain(chain(root, beginning), [1, 2]))
    for bits in (8, 15, 16):  # whole numbers, not their ends
        digests.add(chain(root, [50256 % 2**bits]))
    assert len(digests) == 8 and {len(digest) for digest in digests} == {32}


def test_digests_are_worked_out_once_a_full_block_and_whatever_the_pieces():
    tokens = list(range(11))
    first = chain(hashlib.sha256(b"").digest(), tokens[:4])
    whole = [first, chain(first, tokens[4:8])]
    assert BlockTable(BlockPool(10, 4)).digest(tokens) == whole
    pieces, cuts = BlockTable(BlockPool(10, 4)), ((0, 3), (0, 4), (4, 9), (8, 11), (8, 8))
    for (start, end), known in zip(cuts, (0, 1, 2, 2, 2), strict=True):
        assert pieces.digest(tokens[start:end]) == whole[:known]


def test_other_salts_find_nothing():
    pool, tokens = BlockPool(9, 2), list(range(6))
    table = BlockTable(pool, b"tenant 1")
    for block, digest in zip(table.grow(6), table.digest(tokens), strict=True):
        pool.publish(block, digest)
    for salt, found in ((b"tenant 1", table.blocks), (b"tenant 2", []), (b"", [])):
        assert pool.match(BlockTable(pool, salt).digest(tokens)) == found


def test_the_first_of_two_equal_blocks_is_found_and_only_behind_its_beginning():
    """A block has one name and a name one block."""
    pool = BlockPool(4)
    first, twin, last = (pool.take() for _ in range(3))
    for block, name in ((first, b"a"), (twin, b"a"), (first, b"b"), (last, b"c")):
        pool.publish(block, name)
    assert (pool.by_digest, pool.digests) == ({b"a": first, b"c": last}, [b"a", None, b"c", None])
    for names, found in (
        ([b"a", b"c"], [first, last]),
        ([b"a", b"b", b"c"], [first]),
        ([b"b"], []),
    ):
        assert pool.match(names) == found


CALLS = ["begin", "grow", "grow", "grow", "adopt", "replace", "release", "lose"]


@settings(max_examples=80)
@given(st.data())
def test_no_block_is_lost_or_counted_wrong_whatever_is_called(data):
    """Tables grow, share, copy and end. The holders of a block are counted from the tables
    alone, and what it holds is kept beside it."""
    size = data.draw(st.integers(1, 3))
    pool = BlockPool(data.draw(st.integers(1, 8)), size)
    pool.free = Quick(pool.free)
    alive: list[tuple[BlockTable, list[int]]] = []  # with the tokens
    written: dict[int, list[int]] = {}  # block -> the tokens up to its end, as last written
    meant: dict[bytes, list[int]] = {}  # digest -> the same
    for _ in range(40):
        what = data.draw(st.sampled_from(CALLS))
        if what == "begin" or not alive:
            alive.append((BlockTable(pool), []))
            continue
        table, tokens = alive[data.draw(st.integers(0, len(alive) - 1))]
        if what == "grow" and table.missing(len(tokens) + 1) <= pool.available:
            tokens.append(data.draw(st.integers(0, 1)))
            table.grow(len(tokens))
            written[table.blocks[-1]] = list(tokens)
            if len(tokens) % size == 0:
                digest = table.digest(tokens[-size:])[-1]
                meant[digest] = list(tokens)
                pool.publish(table.blocks[-1], digest)
        elif what == "adopt" and not tokens:
            wanted = data.draw(st.lists(st.integers(0, 1), max_size=8))
            hits = pool.match(BlockTable(pool).digest(wanted))
            table.adopt(hits)
            tokens += wanted[: len(hits) * size]
            table.digest(tokens)
        elif what == "replace" and tokens and pool.available:
            if pool.references[table.blocks[-1]] < 2:
                continue
            old, new = table.replace(len(tokens) - 1)
            assert (old != new, pool.references[new], table.blocks[-1]) == (True, 1, new)
            written[new] = written[old]
        elif what in ("release", "lose"):
            table.release(trusted=what == "release")
            alive = [pair for pair in alive if pair[0] is not table]

        held = Counter(block for table, _ in alive for block in table.blocks)
        assert pool.references == [held[block] for block in range(pool.count)]
        free = list.copy(pool.free)
        assert sorted([*free, *pool.cached, *held]) == list(range(pool.count))
        assert (pool.owned, pool.available) == (len(held), pool.count - len(held))
        names = {digest: block for block, digest in enumerate(pool.digests) if digest is not None}
        assert names == pool.by_digest
        assert all(pool.digests[block] is None for block in free)
        assert all(written[block] == meant[digest] for digest, block in pool.by_digest.items())
        for table, tokens in alive:
            assert len(table.blocks) == pool.blocks_for(len(tokens))
            for index, block in enumerate(table.blocks):
                assert written[block] == tokens[: (index + 1) * size]

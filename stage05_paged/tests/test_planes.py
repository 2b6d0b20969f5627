"""A cache of two planes, which the scheduler, the engine and the sanitizer move, compare and poison
without an edit: numbers over a power of two, and that power's exponents in a plane of int8."""

from __future__ import annotations

import pytest
import torch

from stage03_batching.attention import masked_attention
from stage04_continuous.tests.lives import live
from stage04_continuous.tests.oracle import ask, finish, the_model
from stage05_paged.blocks import Move
from stage05_paged.memory import block_bytes
from stage05_paged.planes import Planes
from stage05_paged.sanitizer import SanitizerError

from .engines import engine_of
from .test_contract import PagedLife


class ScaledCache:
    """Planes are (blocks, layers, 2, block_size, H, D) float64, and (..., H, 1) int8."""

    def __init__(self, config, blocks, block_size, swap_blocks, dtype, device):
        def planes(count):
            shape = count, config.n_layer, 2, block_size, config.n_kv_head
            numbers = torch.zeros(*shape, config.head_dim, dtype=dtype)
            return numbers, torch.zeros(*shape, 1, dtype=torch.int8)

        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.memory = Planes(planes(blocks), planes(swap_blocks))
        self.move = self.memory.move

    def extend(self, shares):
        return ScaledAttention(self.memory.planes, shares, self.block_size)


class ScaledAttention:
    def __init__(self, planes, shares, size):
        self.planes, self.shares, self.size = planes, shares, size
        starts = [torch.arange(start, start + count) for _, start, count in shares]
        self.positions = torch.cat(starts)
        self.order = torch.arange(len(self.positions))

    def attend(self, layer, q, k, v):
        numbers, exponents = (plane[:, layer] for plane in self.planes)
        outputs, row = [], 0
        for table, start, count in self.shares:
            rows, end = slice(row, row := row + count), start + count
            positions, blocks = self.positions[rows], torch.tensor(table)
            places = blocks[positions // self.size], positions % self.size
            for which, new in enumerate((k[rows], v[rows])):
                exponent = torch.frexp(new.abs().amax(-1, keepdim=True)).exponent.clamp(-99, 99)
                numbers[places[0], which, places[1]] = torch.ldexp(new, -exponent)
                exponents[places[0], which, places[1]] = exponent.to(torch.int8)
            whole = torch.ldexp(numbers[blocks], exponents[blocks])  # (W, 2, size, H, D)
            keys, values = whole.transpose(0, 1).flatten(1, 2)[:, :end].transpose(1, 2)
            mask = torch.arange(end) <= positions[:, None]
            queries = q[rows].transpose(0, 1)[None]
            mixed = masked_attention(queries, keys[None], values[None], mask[None, None])
            outputs.append(mixed[0].transpose(0, 1))
        return torch.cat(outputs)


class ScaledLife(PagedLife):
    def make(self, sequences, token_budget, **options):
        return super().make(sequences, token_budget, make_cache=ScaledCache, **options)


def test_lives_with_two_planes():
    """Swaps, copies, hits and evictions, watched by the sanitizer."""
    seen = live(ScaledLife, 10)
    assert all(seen[event] for event in ("copies", "evicted", "hit_tokens", "swapped_in"))


@pytest.mark.parametrize("plane", [0, 1])
def test_the_sanitizer_sees_every_plane(plane):
    """What is written to a free block, and what changes in one that can be found."""
    for free, message in ((True, "written while it is free"), (False, "changed since")):
        engine = engine_of(make_cache=ScaledCache)
        ask(engine, 9, 1)
        finish(engine)
        pool, memory = engine.scheduler.pool, engine.runner.cache.memory
        block = pool.free[0] if free else next(iter(pool.cached))
        memory.planes[plane][block, 0, 0, 0, 0, 0] = 77
        ask(engine, 1, 1)
        with pytest.raises(SanitizerError, match=message):
            engine.step()


def test_bytes_of_a_block_are_those_of_all_planes():
    config = the_model().config
    cache = ScaledCache(config, 5, 4, 0, torch.float64, "cpu")
    heads = 4 * config.n_layer * 2 * config.n_kv_head  # of a block, in all layers
    assert cache.memory.bytes_per_block == block_bytes(config, torch.float64, 4) + heads


def test_blocks_move_in_all_planes():
    memory = ScaledCache(the_model().config, 5, 4, 2, torch.float64, "cpu").memory
    for plane in (*memory.planes, *memory.swapped):
        plane.copy_(torch.arange(len(plane)).view(-1, 1, 1, 1, 1, 1).expand(plane.shape))
    moves = Move("copy", 3, 1), Move("out", 3, 0), Move("wipe", 3, 3), Move("in", 0, 2)
    memory.move(moves)
    for plane, swapped in zip(memory.planes, memory.swapped, strict=True):
        for number in (0, -1):
            assert plane.flatten(1)[:, number].tolist() == [0, 3, 3, 0, 4]
            assert swapped.flatten(1)[:, number].tolist() == [3, 1]

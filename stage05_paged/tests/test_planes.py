"""Caches of two planes, which the scheduler, the engine and the sanitizer move, compare and poison
without an edit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stage04_continuous.tests.lives import live
from stage04_continuous.tests.oracle import ask, finish
from stage05_paged.blocks import Move
from stage05_paged.cache import PagedCache
from stage05_paged.planes import POISON, Planes
from stage05_paged.sanitizer import SanitizerError

from .engines import engine_of
from .test_contract import PagedLife


def mixed(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and their exponents: each has its block's number."""
    block = torch.arange(count)[:, None]
    return block.double().repeat(1, 12).view(-1, 3, 4), block.to(torch.int8).repeat(1, 3)


def test_planes_of_unlike_numbers_have_their_bytes_and_move_alike():
    memory = Planes(mixed(5), mixed(2))
    assert memory.bytes_per_block == 12 * 8 + 3
    memory.move([Move("copy", 3, 1), Move("out", 3, 0), Move("wipe", 3, 3), Move("in", 0, 2)])
    for plane, swapped in zip(memory.planes, memory.swapped, strict=True):
        for number in (0, -1):
            assert plane.flatten(1)[:, number].tolist() == [0, 3, 3, 0, 4]
            assert swapped.flatten(1)[:, number].tolist() == [3, 1]
    memory.poison([4])
    assert memory.read([4]).tolist() == [[POISON] * memory.bytes_per_block]
    assert memory.read([1]).tolist() == memory.read([2]).tolist()


class SplitCache(PagedCache):
    """Its keys are a plane, and its values another one."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        memories = self.kv, self.swapped
        self.memory = Planes(*([x[:, which].movedim(2, 0) for which in (0, 1)] for x in memories))


class SplitLife(PagedLife):
    def make(self, sequences, token_budget, **options):
        return super().make(sequences, token_budget, make_cache=SplitCache, **options)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_lives_with_two_planes(examples):
    """Swaps, copies, hits and evictions, watched by the sanitizer."""
    seen = live(SplitLife, examples)
    assert all(seen[event] for event in ("copies", "evicted", "hit_tokens", "swapped_in"))


@pytest.mark.parametrize("plane", [0, 1])
def test_the_sanitizer_sees_every_plane(plane):
    """What is written to a free block, and what changes in one that can be found."""
    for free, message in ((True, "written while it is free"), (False, "changed since")):
        engine = engine_of(make_cache=SplitCache)
        ask(engine, 9, 1)
        finish(engine)
        pool, memory = engine.scheduler.pool, engine.runner.cache.memory
        block = pool.free[0] if free else next(iter(pool.cached))
        memory.planes[plane][block, 0, 0, 0, 0] = 77
        ask(engine, 1, 1)
        with pytest.raises(SanitizerError, match=message):
            engine.step()

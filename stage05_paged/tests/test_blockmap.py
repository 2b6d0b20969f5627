"""The map shows the tables: every block, after every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stage01_forward.params import SamplingParams
from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage05_paged.blockmap import CACHED, FREE, SHARED, blockmap
from stage05_paged.fork import add_samples
from stage05_paged.tests.engines import engine_of

BLOCKS = 24


def run(model: Any) -> Iterator[Engine]:
    """The engine after each step: a shared beginning, samples, a short pool, and an abort."""
    engine = engine_of(6, 24, model, BLOCKS, 4, swap_blocks=BLOCKS, eos_ids=())
    for n in range(8):
        params = SamplingParams(max_tokens=5 + 7 * n % 30)
        engine.add(Request([*range(1, 10), n], params, priority=n % 2))
    samples = [SamplingParams(max_tokens=12, temperature=1, seed=n) for n in range(3)]
    add_samples(engine, [50, 51, 52, 53, 54], samples)
    while engine.requests:
        engine.step()
        if len(engine.steps) == 9:
            engine.abort(engine.scheduler.running[-1].id)
        yield engine


def test_every_block_is_in_the_state_of_tables_and_pool(tiny_model):
    seen: set[int] = set()
    owners: dict[int, Request] = {}
    for engine in run(tiny_model):
        scheduler, states = engine.scheduler, blockmap(engine.scheduler)
        assert len(states) == BLOCKS
        for block, state in enumerate(states):
            holders = [owner for owner, table in scheduler.tables.items() if block in table.blocks]
            if state >= 0:  # one number, one request, from beginning to end
                assert [owners.setdefault(state, holders[0])] == holders
            else:
                pool = scheduler.pool
                is_state = len(holders) > 1, block in pool.cached, block in pool.free
                assert is_state == (state == SHARED, state == CACHED, state == FREE)
            seen.add(min(state, 0))
    assert seen == {0, FREE, CACHED, SHARED} and engine.scheduler.counts.preemptions > 0
    assert len(owners) == len(set(owners.values()))
    assert "abort" in {request.output.finish_reason for request in owners.values()}

"""The proof: however memory is cut, found again and taken away, answers are the naive engine's.

Prefixes and preemption storms, for blocks of many sizes; every engine is watched by the sanitizer.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shared.parity import prove, scenarios
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import assert_answered, finish, greedy, oracle_of, prompt_of

from .engines import assert_idle, blocks_for, engine_of

WHOLE = 64  # a block for the whole context, which never fills


def check(engine):
    """What every record must say, and that nothing is held when all requests have ended."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    for record in engine.steps:
        assert 1 <= record.rows == len(record.sequences) <= scheduler.max_sequences
        assert record.prefill_tokens + record.decode_tokens <= scheduler.token_budget
        most = max(row.blocks for row in record.sequences)
        assert most <= record.owned_blocks <= pool.count - record.cached_blocks
        assert record.shared_blocks <= record.owned_blocks
        assert Counter(move.kind for move in record.moves)["copy"] <= record.rows
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("size", [1, 3, 16, WHOLE])
def test_all_scenarios(size, prefix_caching, tiny_model):
    """With the prefix cache each of them twice: the second time, answers are found again."""
    engine = engine_of(
        48, 256, tiny_model, 3 * blocks_for(64, size), size, prefix_caching=prefix_caching
    )
    for scenario in scenarios(tiny_model.config):
        for _ in range(1 + prefix_caching):
            parity = prove(engine, oracle_of(tiny_model), SamplingParams, [scenario.name])
            assert parity.sequences == len(scenario.prompts) and not parity.near_ties
    check(engine)
    hits = engine.scheduler.counts.hit_tokens
    assert (hits > 0) == (prefix_caching and size < WHOLE)


@pytest.mark.parametrize("size", [1, 3, 16, WHOLE])
def test_all_scenarios_in_memory_for_one(size, tiny_model):
    """The pool holds one context, so that neighbours preempt each other."""
    engine = engine_of(48, 256, tiny_model, blocks_for(64, size), size)
    assert prove(engine, oracle_of(tiny_model), SamplingParams).near_ties == []
    check(engine)
    assert (engine.scheduler.counts.preemptions > 0) == (size < WHOLE)


# ---- memory runs out ----


def storm(size, policy="fcfs"):
    """64 requests that need a block more on their way, and how many blocks they need together."""
    rng = random.Random(f"storm {size}")
    lengths = [1 + i * 7 % 30 for i in range(64)]
    ranks = [rng.randint(-3, 3) if policy == "priority" else 0 for _ in lengths]
    requests = [
        Request(prompt_of(length), greedy(14), str(i), rank)
        for i, (length, rank) in enumerate(zip(lengths, ranks, strict=True))
    ]
    return requests, sum(blocks_for(length + 13, size) for length in lengths)


@pytest.mark.parametrize(
    "size, room, prefix_caching, policy",
    [
        (1, 0, True, "fcfs"),
        (1, 1, False, "priority"),
        (3, 0, False, "priority"),
        (3, 1, True, "fcfs"),
        (3, 0.02, True, "fcfs"),
        (16, 0.02, True, "priority"),
        (16, 0, False, "fcfs"),
        (16, 1, True, "fcfs"),
    ],
)
def test_storm_of_64_requests_on_a_tenth_of_their_blocks(size, room, prefix_caching, policy):
    """`room` is the size of the swap pool: none, hardly any, plenty. Every request ends, and the
    most senior is never preempted: each of its tokens is computed once."""
    requests, needed = storm(size, policy)
    engine = engine_of(
        64,
        256,
        blocks=needed // 10,
        size=size,
        swap_blocks=max(2, int(room * needed)) if room else 0,
        prefix_caching=prefix_caching,
        policy=policy,
        patience=8,
    )
    for request in requests[:48]:
        engine.add(request)
    for _ in range(20):
        engine.step()
    for request in requests[48:]:
        engine.add(request)
    finish(engine)
    check(engine)
    assert_answered(*requests)
    assert len(engine.steps) <= 20 * 14  # with all blocks, it would take hardly more than 14
    counts = engine.scheduler.counts
    assert sum(record.preempted for record in engine.steps) == counts.preemptions > 10
    assert (counts.recomputed > 0, counts.swapped_out > 0) == (room < 1, room > 0)
    assert counts.swapped_in == counts.swapped_out
    first = min(requests, key=lambda request: (request.priority, request.arrival))
    rows = [row for record in engine.steps for row in record.sequences]
    mine = [row.prefill_tokens + row.decode_tokens for row in rows if row.request_id == first.id]
    assert sum(mine) == first.token_count - 1

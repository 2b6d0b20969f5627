"""The proof: however memory is cut, found again and taken away, answers are the naive engine's.

Prefixes and preemption storms, for blocks of many sizes; every engine is watched by the sanitizer.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from shared.parity import prove, scenarios
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request, State
from stage04_continuous.tests.oracle import DRAWN, ask, assert_answered, finish, greedy, prompt_of

from .engines import assert_idle, blocks_for, engine_of, evict, preempt

SIZES = (1, 3, 16)
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


def run(engine, *requests):
    for request in requests:
        engine.add(request)
    finish(engine)
    check(engine)


def request_of(length, sampling=None, **options):
    return Request(prompt_of(length), greedy(12) if sampling is None else sampling, **options)


# ---- parity ----


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("size", [1, 3, 16, WHOLE])
def test_all_scenarios(size, prefix_caching, tiny_model):
    """With the prefix cache each of them twice: the second time, answers are found again."""
    engine = engine_of(
        48, 256, tiny_model, 3 * blocks_for(64, size), size, prefix_caching=prefix_caching
    )
    for scenario in scenarios(tiny_model.config):
        for _ in range(1 + prefix_caching):
            parity = prove(engine, Naive(tiny_model), SamplingParams, [scenario.name])
            assert parity.sequences == len(scenario.prompts) and not parity.near_ties
    check(engine)
    hits = engine.scheduler.counts.hit_tokens
    assert (hits > 0) == (prefix_caching and size < WHOLE)


@pytest.mark.parametrize("size", [1, 3, 16, WHOLE])
def test_all_scenarios_in_memory_for_one(size, tiny_model):
    """The pool holds one context, so that neighbours preempt each other."""
    engine = engine_of(48, 256, tiny_model, blocks_for(64, size), size)
    assert prove(engine, Naive(tiny_model), SamplingParams).near_ties == []
    check(engine)
    assert (engine.scheduler.counts.preemptions > 0) == (size < WHOLE)


@pytest.mark.parametrize("size", [*SIZES, WHOLE])
def test_alone_in_the_smallest_pool_that_it_fits(size):
    """The last token of an answer is never computed, so it needs no place."""
    for length in {size, size + 1, 2 * size - 1} if size < WHOLE else {50}:
        count = min(size, 13) + 1
        engine = engine_of(blocks=blocks_for(length + count - 1, size), size=size)
        run(engine, request := request_of(length, greedy(count)))
        assert_answered(request)
        assert max(record.owned_blocks for record in engine.steps) == engine.scheduler.pool.count
        assert engine.scheduler.counts.preemptions == 0


# ---- prefixes ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("running", [False, True], ids=["kept when free", "shared while in use"])
def test_any_common_beginning_is_found_in_whole_blocks(running, size):
    """Prompts that have their first 0 to all tokens in common with one that was there before."""
    first = prompt_of(35)
    for common in sorted({size - 1, size, size + 1, 2 * size, 33, 35}):
        engine = engine_of(blocks=blocks_for(150, size), size=size)
        sibling = engine.add(Request(first, greedy(12)))
        engine.step()
        if not running:
            finish(engine)
        request = Request(first[:common] + prompt_of(35, "another")[common:], DRAWN)
        before = len(engine.steps)
        run(engine, request)
        assert_answered(request, sibling)
        found = min(common, 34) // size * size
        assert engine.scheduler.counts.hit_tokens == found
        assert engine.steps[before].prefill_tokens == 35 - found
        assert engine.steps[before].shared_blocks == (found // size if running else 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_prefix_with_an_evicted_end_is_found_as_far_as_it_is_there(size):
    computed = 36 + 12 - 1
    for gone in range(0, computed // size, 1 + 8 // size):
        engine = engine_of(blocks=blocks_for(150, size), size=size)
        run(engine, request_of(36))
        evict(engine, gone)
        run(engine, request := request_of(36, DRAWN))
        assert_answered(request)
        kept = computed // size - gone
        assert engine.scheduler.counts.hit_tokens == max(0, min(kept, 35 // size) * size)


@pytest.mark.parametrize("size", SIZES)
def test_what_an_aborted_request_had_computed_is_found(size):
    """Aborted before each of its steps: in the middle of its prompt, and of its answer."""
    for steps in (0, 1, 2, 4, 6, 9):
        engine = engine_of(blocks=blocks_for(120, size), size=size, max_chunk=5)
        victim = ask(engine, 26)
        for _ in range(steps):
            engine.step()
        computed = victim.computed
        engine.abort(victim.id)
        run(engine, request := request_of(26, DRAWN))
        assert_answered(victim, aborted=True)
        assert_answered(request)
        assert engine.scheduler.counts.hit_tokens == min(computed, 25) // size * size


@pytest.mark.parametrize("size", SIZES)
def test_a_cache_smaller_than_what_it_could_keep(size):
    """Requests with a few beginnings in common go through a pool that evicts all the time."""
    rng, requests = random.Random(f"evictions {size}"), []
    engine = engine_of(blocks=blocks_for(80, size), size=size)
    for _ in range(25):
        sampling = replace(rng.choice([greedy(10), DRAWN]), max_tokens=10)
        requests.append(engine.add(request_of(rng.choice((7, 16, 20, 33, 48)), sampling)))
        if rng.random() < 0.5:
            for _ in range(rng.randrange(8)):
                engine.step()
        else:
            finish(engine)
    run(engine)
    assert_answered(*requests)
    assert engine.scheduler.counts.hit_tokens > 0 and engine.scheduler.pool.evictions > 10


# ---- memory runs out ----


def storm(size, policy="fcfs"):
    """64 requests that need a block more on their way, and how many blocks they need together."""
    rng = random.Random(f"storm {size}")
    requests = [
        request_of(
            1 + i * 7 % 30,
            greedy(14),
            id=str(i),
            priority=rng.randint(-3, 3) if policy == "priority" else 0,
        )
        for i in range(64)
    ]
    return requests, sum(blocks_for(1 + i * 7 % 30 + 13, size) for i in range(64))


def computed_tokens(engine, request):
    rows = [row for record in engine.steps for row in record.sequences]
    mine = [row for row in rows if row.request_id == request.id]
    return sum(row.prefill_tokens + row.decode_tokens for row in mine)


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
    run(engine, *requests[48:])
    assert_answered(*requests)
    assert len(engine.steps) <= 20 * 14  # with all blocks, it would take hardly more than 14
    counts = engine.scheduler.counts
    assert sum(record.preempted for record in engine.steps) == counts.preemptions > 10
    assert (counts.recomputed > 0, counts.swapped_out > 0) == (room < 1, room > 0)
    assert counts.swapped_in == counts.swapped_out
    first = min(requests, key=lambda request: (request.priority, request.arrival))
    assert computed_tokens(engine, first) == first.token_count - 1


def test_storm_with_aborts():
    """A third leaves at random moments, some of them while their blocks are swapped out."""
    requests, needed = storm(3)
    rng = random.Random("aborts")
    engine = engine_of(64, 256, blocks=needed // 10, size=3, swap_blocks=needed // 5)
    for request in requests:
        engine.add(request)
    aborts = {str(number): rng.randrange(1, 100) for number in range(0, 64, 3)}
    for step in range(100):
        for id, when in aborts.items():
            if when == step and id in engine.requests:
                engine.abort(id)
        engine.step()
    run(engine)
    assert_answered(*requests, aborted=True)
    counts = engine.scheduler.counts
    assert counts.swapped_in < counts.swapped_out
    assert sum(request.output.finish_reason == "abort" for request in requests) > 10


@pytest.mark.parametrize("size, max_chunk", [(1, 7), (3, None), (16, 7)])
@pytest.mark.parametrize("room", [0, 28, 90])
def test_preempted_again_and_again(size, max_chunk, room):
    """Catches: a request that has an answer taken for a decode, although its prompt must be computed
    again, and one that draws differently the second time."""
    for moment in (1, 5):
        engine = engine_of(
            blocks=blocks_for(150, size),
            size=size,
            swap_blocks=blocks_for(room, size),
            max_chunk=max_chunk,
        )
        neighbour, first = ask(engine, 30), ask(engine, 7)
        drawn = engine.add(request_of(26, replace(DRAWN, max_tokens=18)))
        for _ in range(3):
            for _ in range(moment):
                engine.step()
            for request in (first, drawn):
                if request.state is State.RUNNING:
                    preempt(engine, request)
                    assert not engine.scheduler.tables[request].blocks
        run(engine)
        assert_answered(neighbour, first, drawn)
        assert engine.scheduler.counts.preemptions >= 2

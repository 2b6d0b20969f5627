"""The engine on blocks: records of memory; what is found, shared, copied and taken away.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import (
    CONFIG,
    DRAWN,
    answer,
    ask,
    assert_answered,
    finish,
    greedy,
    prompt_of,
    the_model,
)
from stage05_paged import engine as module
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage05_paged.fork import add_samples, fork
from stage05_paged.memory import measure_cost

from .engines import assert_idle, engine_of


def drawn(count, seed):
    return replace(DRAWN, max_tokens=count, seed=seed, logprobs=0)


def memory(engine):
    """(owned, shared, cached, used tokens) of each record."""
    return [
        (record.owned_blocks, record.shared_blocks, record.cached_blocks, record.used_tokens)
        for record in engine.steps
    ]


def test_the_whole_memory_of_a_small_crowd():
    """Seven blocks of 3 tokens, a budget of 8, and every pass of it worked out by hand."""
    engine = engine_of(2, 8, blocks=7, size=3, prefix_caching=False)
    for id, length, count in (("a", 5, 2), ("b", 6, 3), ("c", 3, 2), ("d", 1, 1)):
        ask(engine, length, count, id)
    finish(engine)
    # b has the blocks of all its prompt from the start; no block is for a token that is to come.
    owned_and_used = [(4, 8), (4, 12), (4, 10), (5, 12), (1, 1)]
    assert memory(engine) == [(owned, 0, 0, used) for owned, used in owned_and_used]
    blocks = [[(row.request_id, row.blocks) for row in step.sequences] for step in engine.steps]
    assert [sorted(rows) for rows in blocks] == [
        [("a", 2), ("b", 1)],
        [("a", 2), ("b", 2)],
        [("b", 3), ("c", 1)],
        [("b", 3), ("c", 2)],
        [("d", 1)],
    ]
    assert [[move.kind for move in step.moves] for step in engine.steps] == [
        ["wipe"] * count for count in (4, 0, 2, 1, 1)
    ]
    assert [record.preempted for record in engine.steps] == [0] * 5


def test_what_is_found_is_shared_and_kept_until_its_memory_is_needed():
    engine = engine_of(blocks=12)
    for prompt, count in ((prompt_of(17), 1), (prompt_of(17), 2), (prompt_of(40, "other"), 1)):
        for _ in range(count):
            engine.add(Request(prompt, greedy(2)))
        finish(engine)
    assert memory(engine) == [
        *[(5, 0, 0, 17), (5, 0, 0, 18)],
        *[(6, 4, 0, 34), (6, 4, 0, 36)],  # 4 blocks for both, and one each
        *[(10, 0, 2, 40), (11, 0, 1, 41)],
    ]
    assert engine.scheduler.pool.evictions == 3
    ask(engine, 17, 2)
    finish(engine)
    assert engine.scheduler.counts.hit_tokens == 32 + 4  # the end of the chain was evicted first


def test_salts_keep_tenants_apart():
    """The same prompt, but no tenant can measure what another one has asked."""
    engine, requests = engine_of(), []
    for salt, hit in ((b"", 0), (b"one", 0), (b"two", 0), (b"one", 20), (b"", 20)):
        hits = engine.scheduler.counts.hit_tokens
        requests.append(ask(engine, 21, 3, salt=salt))
        finish(engine)
        assert engine.scheduler.counts.hit_tokens - hits == hit
    samples = add_samples(engine, prompt_of(21), [greedy(3)] * 2, b"one")
    assert fork(engine, samples[1].id).salt == b"one"
    finish(engine)
    assert_answered(*requests, *samples)


def test_samples_and_forks_that_cannot_be_leave_no_trace():
    """Samples are taken all or none."""
    engine, two = engine_of(blocks=8), [greedy(3)] * 2
    parent = ask(engine, 9, 6, "parent", priority=2)
    for _ in range(3):
        engine.step()
    for call, *given, message in (
        (add_samples, [], two, "prompt is empty"),
        (add_samples, [1] * 9, [], "no samples to generate"),
        (add_samples, [1] * 9, [greedy(3), greedy(30)], "takes 10 blocks of 4 tokens, and there"),
        (add_samples, [1] * 9, two, b"", ("new", "parent"), "request 'parent' in the engine al"),
        (add_samples, [1] * 9, two, b"", ("new", "new"), "Two samples have the id 'new'"),
        (fork, "none", "no request 'none' in the engine"),
        (fork, "parent", greedy(3), "'parent' has 3 tokens already: give its fork a larger max_t"),
        (fork, "parent", greedy(40), "takes 12 blocks of 4 tokens, and there are 8"),
        (fork, "parent", None, "parent", "request 'parent' in the engine already"),
        (fork, "parent", SamplingParams(stop_token_ids=(101,)), "stop_token_ids"),
    ):
        with pytest.raises(UserError, match=message):
            call(engine, *given)
        assert list(engine.requests) == ["parent"] and engine.scheduler.unfinished == 1
    twin = fork(engine, "parent")
    assert (twin.sampling, twin.priority) == (parent.sampling, 2)
    finish(engine)
    named = add_samples(engine, prompt_of(9), two, ids=("x", "y"))
    finish(engine)
    assert_answered(parent, twin, *named)
    assert [request.id for request in named] == ["x", "y"]


@pytest.mark.parametrize(
    "size, room, prefix_caching, policy",
    [
        (1, 0, True, "fcfs"),
        (1, 1, False, "priority"),
        (3, 0, False, "priority"),
        (3, 0.02, True, "fcfs"),
        (16, 0.02, True, "priority"),
        (16, 1, True, "fcfs"),
    ],
)
def test_storm_of_64_requests_on_a_tenth_of_their_blocks(size, room, prefix_caching, policy):
    """`room` is the size of the swap pool: none, hardly any, plenty. Every request ends, and the
    most senior is never preempted: each of its tokens is computed once."""
    rng, lengths = random.Random(f"storm {size}"), [1 + i * 7 % 30 for i in range(64)]
    ranks = [rng.randint(-3, 3) if policy == "priority" else 0 for _ in lengths]
    needed = sum(-(-(length + 13) // size) for length in lengths)
    swap_blocks = max(2, int(room * needed)) if room else 0
    options = {"prefix_caching": prefix_caching, "policy": policy, "patience": 8}
    engine = engine_of(64, 256, None, needed // 10, size, swap_blocks, **options)
    requests = []
    for i, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        requests.append(ask(engine, length, 14, str(i), priority=rank))
        if i >= 47:  # the last ones come one a step
            engine.step()
    finish(engine)
    assert_answered(*requests)
    assert_idle(engine)
    assert len(engine.steps) <= 20 * 14  # with all blocks, it would take hardly more than 14
    counts = engine.scheduler.counts
    for record in engine.steps:
        most = max(row.blocks for row in record.sequences)
        assert most <= record.owned_blocks <= needed // 10 - record.cached_blocks
        assert record.shared_blocks <= record.owned_blocks and record.swapped <= record.waiting
    assert sum(record.preempted for record in engine.steps) == counts.preemptions > 10
    assert (counts.recomputed > 0, counts.swapped_out > 0) == (room < 1, room > 0)
    assert counts.swapped_in == counts.swapped_out
    assert any(record.swapped for record in engine.steps) == (room > 0)
    first = min(requests, key=lambda request: (request.priority, request.arrival))
    rows = [row for record in engine.steps for row in record.sequences]
    mine = [row.prefill_tokens + row.decode_tokens for row in rows if row.request_id == first.id]
    assert sum(mine) == first.token_count - 1


def test_only_auto_is_measured_and_only_where_there_is_a_choice(monkeypatch):
    measured = []

    def spy(*given):
        measured.append(given)
        return measure_cost(*given)

    monkeypatch.setattr(module, "measure_cost", spy)
    engine = engine_of(blocks=9, swap_blocks=9, preemption="auto")
    assert len(measured) == 1 and engine.scheduler.cheaper(5) in ("swap", "recompute")
    for swap_blocks, preemption in ((9, "swap"), (9, "recompute"), (0, "auto")):
        engine_of(blocks=9, swap_blocks=swap_blocks, preemption=preemption)
    engine_of(blocks=9, swap_blocks=9, preemption="auto", cheaper=lambda tokens: "swap")
    assert len(measured) == 1


def test_the_default_pool_holds_eight_whole_contexts_in_half_of_free_memory(monkeypatch):
    engine: Any = make(the_model(), sanitize=True)
    pool = engine.scheduler.pool
    assert (pool.block_size, pool.count, engine.scheduler.max_sequences) == (16, 8 * 64 // 16, 8)
    assert engine.runner.cache.bytes == 8 * 64 * CONFIG.kv_bytes_per_token(torch.float64)
    assert engine.generate([prompt_of(5)], greedy(6))[0].token_ids == answer(5, 6)
    block = 16 * CONFIG.kv_bytes_per_token(torch.float64)
    monkeypatch.setattr(module, "free_memory", lambda device: 20 * block)
    assert make(the_model()).scheduler.pool.count == 10
    assert make(the_model(), 3).scheduler.pool.count == 3 * 4
    half: Any = make(the_model(), 3, dtype=torch.bfloat16)
    assert half.runner.cache.bytes == 12 * block // 4
    assert make(the_model(), pool=BlockPool(7, 2)).scheduler.pool.block_size == 2


def test_a_parent_that_was_never_queued_is_not_waited_for():
    engine = engine_of()
    child = ask(engine, 9, 6, parent=Request(prompt_of(9), greedy(6)))
    finish(engine)
    assert_answered(child)

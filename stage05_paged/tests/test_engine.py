"""The engine on blocks: records of memory; what is found, shared, copied and taken away.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import itertools
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


@pytest.mark.parametrize("length, size", [(1, 4), (8, 4), (9, 4), (10, 4), (10, 1), (17, 16)])
def test_samples_share_the_prompt_and_nothing_else(length, size):
    """The prompt is computed once but for its last token, of which each sample has its own."""
    engine = engine_of(blocks=200 // size, size=size, max_chunk=6)
    samples = add_samples(
        engine, prompt_of(length), [drawn(6, seed) for seed in range(1, 5)] + [greedy(6)]
    )
    finish(engine)
    assert_answered(*samples)
    assert sum(record.prefill_tokens for record in engine.steps) == length + 4
    full = (length - 1) // size
    assert max(record.shared_blocks for record in engine.steps) == full
    assert engine.scheduler.counts.copies == (4 if (length - 1) % size else 0)
    assert len({tuple(request.output.token_ids) for request in samples}) > 3
    assert_idle(engine)


@pytest.mark.parametrize("first", ["parent", "child", "grandchild"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_fork_of_a_fork(size, first):
    """Three generations over one partly filled block, and `first` leaves first. Catches: a fork
    that writes into its sibling's past."""
    for steps in (1, 2, 4, 7):
        engine = engine_of(blocks=140 // size + 1, size=size)
        parent = ask(engine, 10, 12, "parent")
        for _ in range(steps):
            engine.step()
        given = len(parent.output.token_ids)
        child = fork(engine, "parent", drawn(12, 1), "child")
        both = fork(engine, "child", drawn(12, 2), "grandchild")
        if steps % 2:
            engine.step()
        engine.abort(first)
        finish(engine)
        for request, begins in ((parent, 0), (child, given), (both, given)):
            assert_answered(request, given=begins, aborted=request.id == first)
        assert_idle(engine)


def test_samples_are_taken_all_or_none():
    engine, two = engine_of(blocks=8), [greedy(3)] * 2
    taken = ask(engine, 9, 3, "taken")
    for prompt, sampling, ids, message in (
        ([], two, (), "prompt is empty"),
        ([1] * 9, [], (), "no samples to generate"),
        ([1] * 9, [greedy(3), greedy(30)], (), "takes 10 blocks of 4 tokens, and there are 8"),
        ([1] * 9, two, ("new", "taken"), "request 'taken' in the engine already"),
        ([1] * 9, two, ("new", "new"), "Two samples have the id 'new'"),
    ):
        with pytest.raises(UserError, match=message):
            add_samples(engine, prompt, sampling, ids=ids)
        assert list(engine.requests) == ["taken"] and engine.scheduler.unfinished == 1
    named = add_samples(engine, prompt_of(9), [greedy(3)] * 2, ids=("x", "y"))
    finish(engine)
    assert_answered(taken, *named)
    assert [request.id for request in named] == ["x", "y"]


def test_forks_that_cannot_be():
    engine = engine_of(blocks=8)
    parent = ask(engine, 9, 6, "parent", priority=2)
    for _ in range(3):
        engine.step()
    for id, sampling, fork_id, message in (
        ("none", None, "", "no request 'none' in the engine"),
        ("parent", greedy(3), "", "'parent' has 3 tokens already: give its fork a larger max_t"),
        ("parent", greedy(40), "", "takes 12 blocks of 4 tokens, and there are 8"),
        ("parent", None, "parent", "request 'parent' in the engine already"),
        ("parent", SamplingParams(stop_token_ids=(101,)), "", "stop_token_ids"),
    ):
        with pytest.raises(UserError, match=message):
            fork(engine, id, sampling, fork_id)
        assert list(engine.requests) == ["parent"] and engine.scheduler.unfinished == 1
    twin = fork(engine, "parent")
    assert (twin.sampling, twin.priority) == (parent.sampling, 2)
    finish(engine)
    assert_answered(parent, twin)


@pytest.mark.parametrize("swap_blocks", [0, 2, 20], ids=["recompute", "mixed", "swap"])
def test_preemption_never_repeats_or_loses_a_streamed_token(swap_blocks):
    """Five streams in memory for two, some of them read late."""
    engine = engine_of(blocks=9, swap_blocks=swap_blocks, watermark=0)
    asked = [(5, 16), (12, 10), (2, 20), (14, 8), (7, 13)]
    streams = [engine.stream(prompt_of(length), greedy(count)) for length, count in asked]
    tokens: list[list[Any]] = [[next(stream)] for stream in streams]
    for number in range(200):
        for late, (stream, sent) in enumerate(zip(streams, tokens, strict=True)):
            if number % (late + 1) == 0:
                sent += itertools.islice(stream, 1)
        engine.step()
    for (length, count), stream, sent in zip(asked, streams, tokens, strict=True):
        sent += stream
        assert [token.id for token in sent] == answer(length, count)
        assert [token.finish_reason for token in sent] == [None] * (count - 1) + ["length"]
    counts = engine.scheduler.counts
    assert counts.preemptions > 2 and (counts.swapped_out > 0) == (swap_blocks > 0)
    assert (counts.recomputed > 0) == (swap_blocks < 3)
    assert any(record.swapped for record in engine.steps) == (swap_blocks > 0)
    assert all(record.swapped <= record.waiting for record in engine.steps)
    assert_idle(engine)


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

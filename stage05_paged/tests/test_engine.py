"""The engine on blocks: records of memory; what is found, shared, copied and taken away.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.tests.oracle import (
    CONFIG,
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

from .engines import engine_of


def test_the_whole_memory_of_a_small_crowd():
    """Seven blocks of 3 tokens, a budget of 8, and every pass of it worked out by hand."""
    engine = engine_of(2, 8, blocks=7, size=3, prefix_caching=False)
    for id, length, count in (("a", 5, 2), ("b", 6, 3), ("c", 3, 2), ("d", 1, 1)):
        ask(engine, length, count, id)
    finish(engine)
    # b has the blocks of all its prompt from the start; no block is for a token that is to come.
    assert [step.memory for step in engine.steps] == [4, 4, 4, 5, 1]
    ran = ["".join(share.request_id for share in step.shares) for step in engine.steps]
    assert ran == ["ab", "ab", "bc", "bc", "d"]


def test_salts_keep_tenants_apart():
    """The same prompt, but no tenant can measure what another one has asked."""
    engine, requests = engine_of(), []
    for salt, hit in ((b"", 0), (b"one", 0), (b"two", 0), (b"one", 20), (b"", 20)):
        hits = engine.scheduler.counts.hit_tokens
        requests.append(ask(engine, 21, 3))
        engine.scheduler.tables[requests[-1]].salt = salt
        finish(engine)
        assert engine.scheduler.counts.hit_tokens - hits == hit
    requests.append(ask(engine, 21, 3))
    engine.scheduler.tables[requests[-1]].salt = b"one"
    twin = fork(engine, requests[-1].id)
    assert engine.scheduler.tables[twin].salt == b"one"
    finish(engine)
    assert_answered(*requests, twin)


def test_samples_and_forks_that_cannot_be_leave_no_trace():
    """Samples are taken all or none."""
    engine, two = engine_of(blocks=8), [greedy(3)] * 2
    parent = ask(engine, 9, 6, "parent", priority=2)
    for _ in range(3):
        engine.step()
    wrong: list[tuple[Any, ...]] = [
        (add_samples, [], two, "prompt is empty"),
        (add_samples, [1] * 9, [], "no samples to generate"),
        (add_samples, [1] * 9, [greedy(3), greedy(30)], "takes 10 blocks of 4 tokens, but there"),
        (add_samples, [1] * 9, two, ("new", "parent"), "An id is taken"),
        (add_samples, [1] * 9, two, ("new", "new"), "An id is taken"),
        (fork, "parent", greedy(3), "'parent' has 3 tokens already: give its fork a larger max_t"),
        (fork, "parent", greedy(40), "takes 12 blocks of 4 tokens, but there are 8"),
        (fork, "parent", SamplingParams(stop_token_ids=(101,)), "stop_token_ids"),
    ]
    for call, *given, message in wrong:
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


def test_the_default_pool_holds_eight_whole_contexts_in_half_of_free_memory(monkeypatch):
    engine: Any = make(the_model(), sanitize=True)
    pool = engine.scheduler.pool
    assert (pool.block_size, pool.count, engine.scheduler.max_sequences) == (16, 8 * 64 // 16, 8)
    assert engine.runner.cache.kv.nbytes == 8 * 64 * CONFIG.kv_bytes_per_token(torch.float64)
    assert engine.generate([prompt_of(5)], greedy(6))[0].token_ids == answer(5, 6)
    block = 16 * CONFIG.kv_bytes_per_token(torch.float64)
    monkeypatch.setattr(module, "free_memory", lambda device: 20 * block)
    assert make(the_model()).scheduler.pool.count == 10
    assert make(the_model(), 3).scheduler.pool.count == 3 * 4
    half: Any = make(the_model(), 3, dtype=torch.bfloat16)
    assert half.runner.cache.kv.nbytes == 12 * block // 4
    assert make(the_model(), pool=BlockPool(7, 2)).scheduler.pool.block_size == 2

"""Sliding windows in blocks: what no query sees any more is given back, while addresses hold.

That forks behind a window change no answer is shown by the lives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stage02_kv_cache import make as stage02
from stage03_batching import make as stage03
from stage04_continuous import make as stage04
from stage04_continuous.request import Request
from stage04_continuous.tests import oracle
from stage04_continuous.tests.contract import Again
from stage04_continuous.tests.lives import live
from stage04_continuous.tests.oracle import ask, assert_answered, finish
from stage05_paged import make as stage05
from stage05_paged.blockmap import blockmap
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import assert_idle, engine_of, evict, preempt
from stage08_llama.config import ALL

from .test_contract import GROUPED

WINDOW, SIZE = 9, 4
MOST = (WINDOW - 2) // SIZE + 2  # blocks that WINDOW tokens in a row may touch


SHAPE = replace(GROUPED, windows=(WINDOW, WINDOW - 4))


@pytest.fixture(scope="module", autouse=True)
def windowed():
    with oracle.shape(SHAPE):
        yield


class TestPaged(Again, paged.TestPaged):
    pass


@pytest.mark.parametrize("examples", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_lives_of_fifty_calls(examples):
    seen = live(paged.PagedLife, examples)
    assert not [event for event in paged.EVENTS if not seen[event]]


def test_memory_of_a_long_answer_is_that_of_its_window():
    """With a pool for hardly more than one context, neighbours use what is given back."""
    engine = engine_of(blocks=18, size=SIZE, max_chunk=5)
    requests = [ask(engine, 20, 44), ask(engine, 3, 60)]
    while requests[0].output.token_ids == []:
        engine.step()
    while engine.requests:
        engine.step()
        tables, unread = engine.scheduler.tables.values(), engine.scheduler.unread
        held = [len(set(table.blocks) - {unread}) for table in tables]
        assert max(held, default=0) <= MOST and engine.steps[-1].owned_blocks <= 2 * MOST + 1
        assert sum(state >= 0 for state in blockmap(engine.scheduler)) <= sum(held) + 1
    assert_answered(*requests)
    assert_idle(engine)


@torch.inference_mode()
@pytest.mark.parametrize("windows", [(WINDOW, 5), (ALL, 6)], ids=str)
def test_stages_without_windows_have_the_context_of_the_smallest(windows, caplog):
    """They say so once, and are exact to its last token."""
    config = replace(GROUPED, windows=windows, name=f"a window {windows}")
    with oracle.shape(config):
        model, context = oracle.the_model(), min(windows)
        prompts, ends = [oracle.prompt_of(3), oracle.prompt_of(context - 2)], oracle.greedy(60)
        want = [oracle.naive(prompt, ends).token_ids for prompt in prompts]
    for make in (stage02.make, stage03.make, stage04.make):
        engine = make(model)
        assert engine.config.n_positions == context
        outputs = engine.generate(prompts, ends)
        for output, prompt, tokens in zip(outputs, prompts, want, strict=True):
            assert output.token_ids == tokens[: context - len(prompt)]
            assert output.finish_reason == "length"
    assert [record.getMessage() for record in caplog.records] == [
        f"{config.name} has a sliding window of {context} tokens, which stages 02 to 04 do not "
        f"implement: there its context is {context} tokens, not 64. Later stages serve all of it."
    ]
    assert stage05.make(model).config.n_positions == 64


def test_mixed_layers_give_nothing_back():
    with oracle.shape(replace(GROUPED, windows=(ALL, WINDOW))):
        engine = engine_of(size=SIZE, max_chunk=5)
        request = ask(engine, 20, 30)
        while len(request.output.token_ids) < 29:
            engine.step()
        table = engine.scheduler.tables[request]
        assert len(set(table.blocks)) == len(table.blocks) == 12
        finish(engine)
        assert_answered(request)


def test_a_hit_keeps_the_window_alone_and_needs_the_chain_to_be_found():
    engine = engine_of(size=SIZE)
    first = ask(engine, 30, 12)
    finish(engine)
    for hit in (28, 16):
        again = ask(engine, 30, 12)
        before = engine.scheduler.counts.hit_tokens
        engine.step()
        assert engine.scheduler.counts.hit_tokens - before == hit
        assert len({*engine.scheduler.tables[again].blocks}) - 1 == MOST  # and the unread block
        fifth = engine.scheduler.tables[again].digests[4]
        finish(engine)
        assert_answered(first, again)
        while fifth in engine.scheduler.pool.by_digest:  # it is behind the window of the sixth
            evict(engine, 1)
    assert_idle(engine)


@pytest.mark.parametrize("swap_blocks", [0, 8])
def test_preemption_behind_the_window(swap_blocks):
    """Swapped blocks come back to their addresses, and those behind the window are given back."""
    engine = engine_of(size=SIZE, swap_blocks=swap_blocks, prefix_caching=False)
    request = ask(engine, 20, 30)
    for _ in range(12):
        engine.step()
    preempt(engine, request)
    assert len(engine.scheduler.swapped.get(request, [])) == swap_blocks
    engine.step()
    assert (engine.steps[-1].prefill_tokens == 0) == bool(swap_blocks)
    finish(engine)
    assert_answered(request)
    assert_idle(engine)


def test_a_sample_inherits_nothing_that_its_parent_gave_back_before_a_swap():
    """What the parent gave back comes from the swap pool as a block of its own, without its
    tokens. The sample sees further back than the parent does by now."""
    engine = engine_of(size=2, swap_blocks=64, prefix_caching=False)
    parent = ask(engine, 10, 12)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.out_of_window(parent.computed) == 2
    sample = engine.add(Request(parent.prompt_ids, oracle.greedy(4), parent=parent))
    preempt(engine, parent)
    finish(engine)
    assert engine.scheduler.counts.swapped_in == 1
    assert_answered(parent, sample)
    assert_idle(engine)

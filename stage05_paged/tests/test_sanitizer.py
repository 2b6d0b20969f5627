"""The sanitizer: each of its rules is broken once, in the middle of a running engine, and the error
must name the rule, the block and the sequences."""

from __future__ import annotations

from typing import Any

import pytest

from shared.parity import random_prompt
from stage04_continuous.request import Request, State
from stage04_continuous.tests.oracle import greedy
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage05_paged.sanitizer import Sanitizer, SanitizerError

from .engines import engine_of, preempt


def ask(engine, length, count, id):
    return engine.add(Request(random_prompt(length, engine.config, id), greedy(count), id=id))


@pytest.fixture
def engine(tiny_model):
    """In the middle of its work: "a" and "b" run, 4 blocks each, "c" is swapped out, and 4 blocks
    are cached."""
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    ask(engine, 4, 1, "gone")
    for id in "abc":
        ask(engine, 10, 20, id)
    for _ in range(4):
        engine.step()
    scheduler = engine.scheduler
    preempt(engine, engine.requests["c"])
    scheduler.max_sequences = 2  # it does not come back at once
    engine.step()
    assert [request.id for request in scheduler.running] == ["a", "b"]
    assert [len(table.blocks) for table in scheduler.tables.values()] == [4, 4, 0]
    assert (len(scheduler.swapped), len(scheduler.pool.cached)) == (1, 4)
    return engine


def table(engine, id):
    return engine.scheduler.tables[engine.requests[id]]


class Before:
    """What can go wrong between two passes, found before the next: (what, block, sequences)."""

    def two_requests_write_to_one_block(engine: Any):
        block = table(engine, "b").blocks[-1] = table(engine, "a").blocks[-1]
        return "it has two writers", block, "a, b"

    def a_shared_block_is_written(engine: Any):
        block = table(engine, "a").blocks[-1]
        table(engine, "b").adopt([block])
        return "written while 2 tables hold it", block, "a, b"

    def a_table_is_too_short(engine: Any):
        table(engine, "a").blocks.pop()
        return "positions 14 to 14 are beyond the table's 12", None, "a"

    def a_published_block_is_written(engine: Any):
        block = table(engine, "a").blocks[-1]
        engine.scheduler.pool.publish(block, b"as if it were full")
        return "written while its old content can be found", block, "a"


class After:
    """What can go wrong during the step, found at its end."""

    def a_block_leaks(engine: Any):
        return "1 references, but 0 tables hold it", engine.scheduler.pool.take(), "none"

    def a_block_is_in_no_list(engine: Any):
        block = engine.scheduler.pool.free.pop()
        return "in 0 of the lists of free, cached and owned blocks", block, "none"

    def a_block_is_freed_twice(engine: Any):
        pool = engine.scheduler.pool
        pool.free.append(pool.free[0])
        return "in 2 of the lists of free, cached and owned blocks", pool.free[0], "none"

    def a_block_in_use_is_given_back(engine: Any):
        block = table(engine, "a").blocks[0]
        engine.scheduler.pool.give_back(block)
        return "0 references, but 1 tables hold it", block, "a"

    def a_holder_is_not_counted(engine: Any):
        block = table(engine, "a").blocks[0]
        table(engine, "b").blocks.append(block)
        return "1 references, but 2 tables hold it", block, "a, b"

    def shared_blocks_are_miscounted(engine: Any):
        engine.scheduler.pool.shared += 1
        return "1 blocks are counted as shared", None, "none"

    def a_digest_leads_nowhere(engine: Any):
        pool = engine.scheduler.pool
        pool.found[b"stale"] = pool.free[0]
        return "the blocks' digests and the blocks by digest differ", None, "none"

    def a_cached_block_has_no_digest(engine: Any):
        pool = engine.scheduler.pool
        pool.forget(block := next(iter(pool.cached)))
        return "a cached block that cannot be found", block, "none"

    def a_digest_is_stale(engine: Any):
        pool, block = engine.scheduler.pool, table(engine, "a").blocks[1]
        pool.forget(block)
        pool.publish(block, b"what it held before")
        return "found under tokens that it does not hold", block, "a"

    def a_published_block_changes(engine: Any):
        block = table(engine, "b").blocks[1]
        engine.runner.cache.kv[1, 0, 1, block, 2, 3] += 1e-9
        return "changed since it was published", block, "b"

    def a_free_block_is_written(engine: Any):
        block = engine.scheduler.pool.free[0]
        engine.runner.cache.kv[2, 1, 1, block, 3, 5] = 0
        return "written while it is free", block, "none"

    def a_request_that_waits_keeps_its_table(engine: Any):
        scheduler, request = engine.scheduler, engine.requests["b"]
        scheduler.running.remove(request)
        scheduler.waiting.append(request)
        request.move(State.WAITING)
        return "held by a request that does not run", table(engine, "b").blocks[0], "b"

    def more_is_computed_than_there_is_room_for(engine: Any):
        engine.requests["a"].computed += 2
        return "17 tokens in 4 blocks", None, "a"

    def a_swap_block_leaks(engine: Any):
        block = engine.scheduler.swap_pool.take()
        return "1 references, but 0 swap tables hold it", block, "none"

    def a_request_that_runs_keeps_its_swap_blocks(engine: Any):
        engine.scheduler.swapped[engine.requests["a"]] = [engine.scheduler.swap_pool.take()]
        return "swapped out, but not waiting", None, "a"


def assert_named(engine, monkeypatch, moment, wrong):
    """A step in which `wrong` happens at a moment, right after a call of `schedule` or of `run`, is
    stopped with an error that names it."""
    owner = engine.scheduler if moment == "schedule" else engine.runner
    right, found = getattr(owner, moment), []

    def and_then(*given):
        result = right(*given)
        found.append(wrong(engine))
        return result

    monkeypatch.setattr(owner, moment, and_then)
    with pytest.raises(SanitizerError) as error:
        engine.step()
    what, block, sequences = found[0]
    where = "" if block is None else f", block {block}"
    message = f"step {engine.scheduler.step}{where}: {what}; sequences: {sequences}"
    assert str(error.value) == message


@pytest.mark.parametrize(
    "moment, wrong",
    [
        pytest.param(moment, wrong, id=name)
        for moment, rules in (("schedule", Before), ("run", After))
        for name, wrong in vars(rules).items()
        if not name.startswith("_")
    ],
)
def test_every_rule_when_broken_is_named(moment, wrong, engine, monkeypatch):
    """In the step that breaks it."""
    assert_named(engine, monkeypatch, moment, wrong)


def test_what_is_still_in_use_at_idle_is_named(tiny_model, monkeypatch):
    """No request is left, and a swap block is taken: its request is forgotten."""
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    gone = Request([1], greedy(1), id="gone")
    gone.move(State.WAITING)

    def forget(engine: Any):
        engine.scheduler.swapped[gone] = [engine.scheduler.swap_pool.take()]
        return "1 blocks are owned, and there is no request", None, "none"

    assert_named(engine, monkeypatch, "schedule", forget)


def test_a_wrong_digest_is_seen_even_if_its_request_ends_in_that_step(tiny_model, monkeypatch):
    """Then no table is left that holds the block, and yet any request can find it."""
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    ask(engine, 5, 1, "last")

    def misname(engine: Any):
        mine = table(engine, "last")
        mine.digests[0] = b"what another one holds"
        return "found under tokens that it does not hold", mine.blocks[0], "last"

    assert_named(engine, monkeypatch, "run", misname)


def test_without_a_sanitizer_memory_is_left_alone(tiny_model):
    engine: Any = make(tiny_model, pool=BlockPool(4, 4))
    ask(engine, 9, 1, "a")
    engine.step()
    assert not any(isinstance(observer, Sanitizer) for observer in engine.observers)
    assert not engine.runner.cache.kv.isnan().any()

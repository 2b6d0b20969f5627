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


BEFORE = {  # what can go wrong between two passes, found before the next: the error, sequences
    "it has two writers": "a, b",
    "written while 2 tables hold it": "a, b",
    "positions 14 to 14 are beyond the table's 12": "a",
    "written while its old content can be found": "a",
}
AFTER = {  # what can go wrong during the step, found at its end
    "1 references, but 0 tables hold it": "none",
    "in 0 of the lists of free, cached and owned blocks": "none",
    "in 2 of the lists of free, cached and owned blocks": "none",
    "0 references, but 1 tables hold it": "a",
    "1 references, but 2 tables hold it": "a, b",
    "1 blocks are counted as shared": "none",
    "the blocks' digests and the blocks by digest differ": "none",
    "a cached block that cannot be found": "none",
    "found under tokens that it does not hold": "a",
    "changed since it was published": "b",
    "written while it is free": "none",
    "held by a request that does not run": "b",
    "17 tokens in 4 blocks": "a",
    "1 references, but 0 swap tables hold it": "none",
    "swapped out, but not waiting": "a",
}


def violate(engine: Any, rule: str) -> int | None:
    """Do what the rule's error describes; returns the block that it names."""
    scheduler, pool, kv = engine.scheduler, engine.scheduler.pool, engine.runner.cache.kv
    a, b, block = table(engine, "a"), table(engine, "b"), None
    match rule:
        case "it has two writers":
            block = b.blocks[-1] = a.blocks[-1]
        case "written while 2 tables hold it":
            b.adopt([block := a.blocks[-1]])
        case "positions 14 to 14 are beyond the table's 12":
            a.blocks.pop()
        case "written while its old content can be found":
            pool.publish(block := a.blocks[-1], b"as if it were full")
        case "1 references, but 0 tables hold it":
            block = pool.take()
        case "in 0 of the lists of free, cached and owned blocks":
            block = pool.free.pop()
        case "in 2 of the lists of free, cached and owned blocks":
            pool.free.append(block := pool.free[0])
        case "0 references, but 1 tables hold it":
            pool.give_back(block := a.blocks[0])
        case "1 references, but 2 tables hold it":
            b.blocks.append(block := a.blocks[0])
        case "1 blocks are counted as shared":
            pool.shared += 1
        case "the blocks' digests and the blocks by digest differ":
            pool.found[b"stale"] = pool.free[0]
        case "a cached block that cannot be found":
            pool.forget(block := next(iter(pool.cached)))
        case "found under tokens that it does not hold":
            pool.forget(block := a.blocks[1])
            pool.publish(block, b"what it held before")
        case "changed since it was published":
            kv[1, 0, 1, (block := b.blocks[1]), 2, 3] += 1e-9
        case "written while it is free":
            kv[2, 1, 1, (block := pool.free[0]), 3, 5] = 0
        case "held by a request that does not run":
            block, request = b.blocks[0], engine.requests["b"]
            scheduler.running.remove(request)
            scheduler.waiting.append(request)
            request.move(State.WAITING)
        case "17 tokens in 4 blocks":
            engine.requests["a"].computed += 2
        case "1 references, but 0 swap tables hold it":
            block = scheduler.swap_pool.take()
        case "swapped out, but not waiting":
            scheduler.swapped[engine.requests["a"]] = [scheduler.swap_pool.take()]
    return block


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


@pytest.mark.parametrize("rule", [*BEFORE, *AFTER])
def test_every_rule_when_broken_is_named(rule, engine, monkeypatch):
    """In the step that breaks it."""
    moment, sequences = ("schedule" if rule in BEFORE else "run"), (BEFORE | AFTER)[rule]
    wrong = lambda engine: (rule, violate(engine, rule), sequences)  # noqa: E731
    assert_named(engine, monkeypatch, moment, wrong)


def test_what_is_wrong_when_a_request_has_ended_is_named(tiny_model, monkeypatch):
    """A swap block is in use at idle, its request forgotten; or a digest is wrong, and no table is
    left that holds the block, and yet any request can find it."""
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    gone = Request([1], greedy(1), id="gone")
    gone.move(State.WAITING)

    def forget(engine: Any):
        engine.scheduler.swapped[gone] = [engine.scheduler.swap_pool.take()]
        return "1 blocks are owned, and there is no request", None, "none"

    def misname(engine: Any):
        mine = table(engine, "last")
        mine.digests[0] = b"what another one holds"
        return "found under tokens that it does not hold", mine.blocks[0], "last"

    assert_named(engine, monkeypatch, "schedule", forget)
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    ask(engine, 5, 1, "last")
    assert_named(engine, monkeypatch, "run", misname)


def test_without_a_sanitizer_memory_is_left_alone(tiny_model):
    engine: Any = make(tiny_model, pool=BlockPool(4, 4))
    ask(engine, 9, 1, "a")
    engine.step()
    assert not any(isinstance(observer, Sanitizer) for observer in engine.observers)
    assert not engine.runner.cache.kv.isnan().any()

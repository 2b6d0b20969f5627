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


# What can go wrong: the error, the sequences it names, and how it comes about; `block` is named too
# if it is set. First between two passes, found before the next.
BEFORE = {
    "it has two writers": ("a, b", "block = b.blocks[-1] = a.blocks[-1]"),
    "written while 2 tables hold it": ("a, b", "block = a.blocks[-1]; b.adopt([block])"),
    "positions 14 to 14 are beyond the table's 12": ("a", "a.blocks.pop()"),
    "written while its old content can be found": (
        *("a", "block = a.blocks[-1]; pool.publish(block, b'as if it were full')"),
    ),
}
AFTER = {  # during the pass, found at its end
    "1 references, but 0 tables hold it": ("none", "block = pool.take()"),
    "in 0 of the lists of free, cached and owned blocks": ("none", "block = pool.free.pop()"),
    "in 2 of the lists of free, cached and owned blocks": (
        *("none", "block = pool.free[0]; pool.free.append(block)"),
    ),
    "0 references, but 1 tables hold it": ("a", "block = a.blocks[0]; pool.give_back(block)"),
    "1 references, but 2 tables hold it": ("a, b", "block = a.blocks[0]; b.blocks.append(block)"),
    "the blocks' digests and the blocks by digest differ": (
        *("none", "pool.by_digest[b'stale'] = pool.free[0]"),
    ),
    "a cached block that cannot be found": (
        *("none", "block = next(iter(pool.cached)); pool.unpublish(block)"),
    ),
    "found under tokens that it does not hold": (
        *("a", "block = a.blocks[1]; pool.unpublish(block); pool.publish(block, b'another')"),
    ),
    "changed since it was published": (
        "b",
        "block = b.blocks[1]; kv[1, 0, 1, block, 2, 3] += 1e-9",
    ),
    "written while it is free": ("none", "block = pool.free[0]; kv[2, 1, 1, block, 3, 5] = 0"),
    "held by a request that does not run": (
        "b",
        "block, request = b.blocks[0], requests['b']; scheduler.running.remove(request); "
        "scheduler.waiting.append(request); request.move(State.WAITING)",
    ),
    "17 tokens in 4 blocks": ("a", "requests['a'].computed += 2"),
    "1 references, but 0 swap tables hold it": ("none", "block = swap_pool.take()"),
    "swapped out, but not waiting": ("a", "scheduler.swapped[requests['a']] = [swap_pool.take()]"),
}


def assert_named(engine, monkeypatch, moment, what, sequences, wrong):
    """A step in which the code `wrong` runs at a moment, right after a call of `schedule` or of
    `run`, is stopped with an error that names it."""
    scheduler, names = engine.scheduler, dict[str, Any](block=None, State=State)
    names |= {"scheduler": scheduler, "pool": scheduler.pool, "swap_pool": scheduler.swap_pool}
    names |= {"kv": engine.runner.cache.kv, "requests": engine.requests}
    names |= {request.id: table for request, table in scheduler.tables.items()}
    owner = scheduler if moment == "schedule" else engine.runner
    right = getattr(owner, moment)

    def and_then(*given):
        result = right(*given)
        exec(wrong, names)
        return result

    monkeypatch.setattr(owner, moment, and_then)
    with pytest.raises(SanitizerError) as error:
        engine.step()
    where = "" if names["block"] is None else f", block {names['block']}"
    assert str(error.value) == f"step {scheduler.step}{where}: {what}; sequences: {sequences}"


@pytest.mark.parametrize("rule", [*BEFORE, *AFTER])
def test_every_rule_when_broken_is_named(rule, engine, monkeypatch):
    """In the step that breaks it."""
    moment = "schedule" if rule in BEFORE else "run"
    assert_named(engine, monkeypatch, moment, rule, *(BEFORE | AFTER)[rule])


def test_what_is_wrong_when_a_request_has_ended_is_named(tiny_model, monkeypatch):
    """A swap block is in use at idle, its request forgotten; or a digest is wrong, and no table is
    left that holds the block, and yet any request can find it."""
    engine, gone = engine_of(8, 256, tiny_model, 16, 4, 6), Request([1], greedy(1), id="gone")
    gone.move(State.WAITING)
    engine.scheduler.swapped[gone] = [engine.scheduler.swap_pool.take()]
    words = "1 blocks are owned, but there is no request"
    assert_named(engine, monkeypatch, "schedule", words, "none", "")
    engine = engine_of(8, 256, tiny_model, 16, 4, 6)
    ask(engine, 5, 1, "last")
    wrong = "last.digests[0] = b'what another one holds'; block = last.blocks[0]"
    words = "found under tokens that it does not hold"
    assert_named(engine, monkeypatch, "run", words, "last", wrong)


def test_without_a_sanitizer_memory_is_left_alone(tiny_model):
    engine: Any = make(tiny_model, pool=BlockPool(4, 4))
    ask(engine, 9, 1, "a")
    engine.step()
    assert not any(isinstance(observer, Sanitizer) for observer in engine.observers)
    assert not engine.runner.cache.kv.isnan().any()

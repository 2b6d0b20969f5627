"""The sanitizer: each of its rules is broken once, in the middle of a running engine, and it must say which, where and whose."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.parity import random_prompt
from stage01_forward.sampling import SamplingParams
from stage04_continuous.request import Request, State
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.sanitizer import SanitizerError
from stage05_paged.scheduler import Scheduler


def words(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def ask(engine, length, count, id):
    return engine.add(Request(random_prompt(length, engine.model.config, id), words(count), id=id))


def engine_of(model, **options):
    scheduler = Scheduler(BlockPool(16, 4), preemption="swap", swap_pool=BlockPool(6, 4), **options)
    return Engine(model, scheduler=scheduler, sanitize=True)


@pytest.fixture
def engine(tiny_model):
    """In the middle of its work: "a" and "b" run, 4 blocks each, "c" is swapped out, and a block of "gone" is cached."""
    engine = engine_of(tiny_model)
    ask(engine, 4, 1, "gone")
    for id in "abc":
        ask(engine, 10, 20, id)
    for _ in range(4):
        engine.step()
    scheduler = engine.scheduler
    scheduler.preempt(engine.requests["c"])
    scheduler.max_sequences = 2  # it does not come back at once
    engine.step()
    assert [request.id for request in scheduler.running] == ["a", "b"]
    assert [len(table.blocks) for table in scheduler.tables.values()] == [4, 4, 0]
    assert (len(scheduler.swapped), len(scheduler.pool.cached)) == (1, 4)
    return engine


def table(engine, id):
    return engine.scheduler.tables[engine.requests[id]]


@dataclass
class Found:
    """What the sanitizer should say."""

    what: str
    block: int | None = None
    sequences: tuple[str, ...] = ()


# ---- what can go wrong between two passes, found before the next ----------------------------------------------------


def two_requests_write_to_one_block(engine):
    a, b = table(engine, "a"), table(engine, "b")
    b.blocks[-1] = a.blocks[-1]
    return Found("it has two writers", a.blocks[-1], ("a", "b"))


def a_shared_block_is_written(engine):
    block = table(engine, "a").blocks[-1]
    table(engine, "b").adopt([block])
    return Found("it is written and 2 tables hold it", block, ("a", "b"))


def a_published_block_is_written(engine):
    block = table(engine, "a").blocks[-1]
    engine.scheduler.pool.publish(block, b"as if it were full")
    return Found("it is written and can be found under what it held before", block, ("a",))


def a_free_block_is_written_through_a_table(engine):
    block = table(engine, "a").blocks[-1]
    engine.scheduler.pool.give_back(block)
    return Found("it is written and 0 tables hold it", block, ("a",))


def a_block_is_missing(engine):
    table(engine, "a").blocks.pop()
    return Found("positions 14 to 14 are beyond the table's 12", None, ("a",))


# ---- what can go wrong during the step, found at its end ------------------------------------------------------------


def a_block_leaks(engine):
    return Found("1 references are counted and 0 tables hold it", engine.scheduler.pool.take())


def a_block_is_in_no_list(engine):
    return Found(
        "it is in 0 of the lists of free, cached and owned blocks", engine.scheduler.pool.free.pop()
    )


def a_block_is_freed_twice(engine):
    block = engine.scheduler.pool.free[0]
    engine.scheduler.pool.free.append(block)
    return Found("it is in 2 of the lists of free, cached and owned blocks", block)


def a_block_in_use_is_freed(engine):
    block = table(engine, "b").blocks[1]
    engine.scheduler.pool.free.append(block)
    return Found("it is in 2 of the lists of free, cached and owned blocks", block, ("b",))


def a_block_in_use_is_given_back(engine):
    block = table(engine, "a").blocks[0]
    engine.scheduler.pool.give_back(block)
    return Found("0 references are counted and 1 tables hold it", block, ("a",))


def a_reference_too_many(engine):
    block = table(engine, "b").blocks[0]
    engine.scheduler.pool.references[block] += 1
    return Found("2 references are counted and 1 tables hold it", block, ("b",))


def a_holder_is_not_counted(engine):
    block = table(engine, "a").blocks[0]
    table(engine, "b").blocks.append(block)
    return Found("1 references are counted and 2 tables hold it", block, ("a", "b"))


def shared_blocks_are_miscounted(engine):
    engine.scheduler.pool.shared += 1
    return Found("1 blocks are counted as shared")


def a_name_leads_nowhere(engine):
    pool = engine.scheduler.pool
    pool.found[b"stale"] = pool.free[0]
    return Found("the names of the blocks and the blocks by name differ")


def a_name_is_lost(engine):
    pool, block = engine.scheduler.pool, table(engine, "a").blocks[0]
    del pool.found[pool.digests[block]]
    return Found("the names of the blocks and the blocks by name differ")


def a_cached_block_has_no_name(engine):
    pool = engine.scheduler.pool
    block = next(iter(pool.cached))
    pool.forget(block)
    return Found("it is a cached block and cannot be found", block)


def a_name_is_stale(engine):
    pool, block = engine.scheduler.pool, table(engine, "a").blocks[1]
    pool.forget(block)
    pool.publish(block, b"what it held before")
    return Found("it is found under other tokens than those it holds", block, ("a",))


def names_are_exchanged(engine):
    pool, (block, other) = engine.scheduler.pool, table(engine, "b").blocks[:2]
    names = pool.digests[block], pool.digests[other]
    pool.forget(block)
    pool.forget(other)
    pool.publish(other, names[0])
    pool.publish(block, names[1])
    return Found("it is found under other tokens than those it holds", block, ("b",))


def a_published_block_changes(engine):
    block = table(engine, "b").blocks[1]
    engine.cache.kv[1, 0, 1, block, 2, 3] += 1e-9
    return Found("its content has changed since it was published", block, ("b",))


def a_cached_block_changes(engine):
    block = next(iter(engine.scheduler.pool.cached))
    engine.cache.kv[0, 1, 0, block, 0, 0] = 0
    return Found("its content has changed since it was published", block)


def a_free_block_is_written(engine):
    block = engine.scheduler.pool.free[0]
    engine.cache.kv[2, 1, 1, block, 3, 5] = 0
    return Found("it is free, and somebody has written to it", block)


def a_request_that_waits_keeps_its_table(engine):
    scheduler, request = engine.scheduler, engine.requests["b"]
    scheduler.running.remove(request)
    scheduler.waiting.append(request)
    request.move(State.WAITING)
    return Found("a request that does not run holds it", table(engine, "b").blocks[0], ("b",))


def more_is_said_to_be_computed_than_there_is_room_for(engine):
    engine.requests["a"].computed += 10
    return Found("25 tokens are said to be in 4 blocks", None, ("a",))


def a_swap_block_leaks(engine):
    return Found(
        "1 references are counted and 0 swap tables hold it", engine.scheduler.swap_pool.take()
    )


def a_swap_block_in_use_is_given_back(engine):
    block = engine.scheduler.swapped[engine.requests["c"]][1]
    engine.scheduler.swap_pool.give_back(block)
    return Found("0 references are counted and 1 swap tables hold it", block, ("c",))


def a_swap_block_is_freed_twice(engine):
    block = engine.scheduler.swap_pool.free[0]
    engine.scheduler.swap_pool.free.append(block)
    return Found("it is in 2 of the lists of free, cached and owned swap blocks", block)


def a_request_that_runs_keeps_its_swap_blocks(engine):
    engine.scheduler.swapped[engine.requests["a"]] = [engine.scheduler.swap_pool.take()]
    return Found("it is swapped out, and does not wait", None, ("a",))


BEFORE = [
    two_requests_write_to_one_block,
    a_shared_block_is_written,
    a_published_block_is_written,
    a_free_block_is_written_through_a_table,
    a_block_is_missing,
]
AFTER = [
    a_block_leaks,
    a_block_is_in_no_list,
    a_block_is_freed_twice,
    a_block_in_use_is_freed,
    a_block_in_use_is_given_back,
    a_reference_too_many,
    a_holder_is_not_counted,
    shared_blocks_are_miscounted,
    a_name_leads_nowhere,
    a_name_is_lost,
    a_cached_block_has_no_name,
    a_name_is_stale,
    names_are_exchanged,
    a_published_block_changes,
    a_cached_block_changes,
    a_free_block_is_written,
    a_request_that_waits_keeps_its_table,
    more_is_said_to_be_computed_than_there_is_room_for,
    a_swap_block_leaks,
    a_swap_block_in_use_is_given_back,
    a_swap_block_is_freed_twice,
    a_request_that_runs_keeps_its_swap_blocks,
]


def step_that_breaks(engine, monkeypatch, moment, wrong):
    """A step of `engine` in which `wrong` happens after its `moment`, "schedule" or "forward"; what should be found."""
    owner, name = (engine.scheduler, "schedule") if moment == "schedule" else (engine, "_forward")
    right, found = getattr(owner, name), []

    def and_then(*given):
        result = right(*given)
        found.append(wrong(engine))
        return result

    monkeypatch.setattr(owner, name, and_then)
    with pytest.raises(SanitizerError) as error:
        engine.step()
    return str(error.value), found[0]


def message(engine, found):
    where = "" if found.block is None else f", block {found.block}"
    names = ", ".join(found.sequences) or "nobody"
    return f"step {engine.scheduler.step}{where}: {found.what}; sequences: {names}"


@pytest.mark.parametrize(
    "moment, wrong",
    [("schedule", wrong) for wrong in BEFORE] + [("forward", wrong) for wrong in AFTER],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_rule_when_broken_is_named(moment, wrong, engine, monkeypatch):
    """In the step that breaks it, with the block and the sequences that hold it."""
    said, found = step_that_breaks(engine, monkeypatch, moment, wrong)
    assert said == message(engine, found)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_is_still_in_use_at_idle_is_named(aborted, tiny_model, monkeypatch):
    """Nobody is left, and a swap block is taken: its request is forgotten, and so no table is wrong."""
    engine = engine_of(tiny_model)
    ask(engine, 5, 2, "last")
    engine.step()
    gone = Request([1], words(1), id="gone")
    gone.move(State.WAITING)

    def forget(engine):
        engine.scheduler.swapped[gone] = [engine.scheduler.swap_pool.take()]
        return Found("1 blocks are owned, and there is no request")

    if aborted:
        engine.abort("last")
    said, found = step_that_breaks(
        engine, monkeypatch, "schedule" if aborted else "forward", forget
    )
    assert engine.scheduler.unfinished == 0
    assert said == message(engine, found)


def test_a_wrong_name_is_seen_even_if_its_request_ends_in_that_step(tiny_model, monkeypatch):
    """Then no table is left that holds the block, and yet everybody can find it from now on."""
    engine = engine_of(tiny_model)
    ask(engine, 5, 1, "last")

    def misname(engine):
        table(engine, "last").digests[0] = b"what somebody else holds"
        return Found(
            "it is found under other tokens than those it holds",
            table(engine, "last").blocks[0],
            ("last",),
        )

    said, found = step_that_breaks(engine, monkeypatch, "forward", misname)
    assert engine.scheduler.unfinished == 0
    assert said == message(engine, found)


# ---- freed blocks show, and a healthy engine is left alone ----------------------------------------------------------


def test_a_freed_block_is_filled_with_nan_and_whoever_reads_it_shows(tiny_model):
    engine = engine_of(tiny_model, prefix_caching=False)
    assert bool(engine.cache.kv.isnan().all())  # nothing is anybody's yet
    ask(engine, 9, 2, "short")
    ask(engine, 5, 9, "long")
    engine.step()
    (short, long) = (list(table(engine, id).blocks) for id in ("short", "long"))
    assert not engine.cache.kv[:, :, :, short + long].isnan().any()
    engine.step()
    assert bool(engine.cache.kv[:, :, :, short].isnan().all())
    assert not engine.cache.kv[:, :, :, long].isnan().any()
    fresh = torch.randn(3, 1, 2, 12, dtype=torch.float64)
    assert bool(engine.cache.extend([(short, 9, 1)]).attend(0, *fresh).isnan().all())
    assert not engine.cache.extend([(long, 7, 1)]).attend(0, *fresh).isnan().any()


def test_a_cached_block_is_not_filled_until_it_is_free(tiny_model):
    engine = engine_of(tiny_model)
    ask(engine, 9, 1, "a")
    engine.step()
    pool = engine.scheduler.pool
    cached = list(pool.cached)
    assert len(cached) == 2 and not engine.cache.kv[:, :, :, cached].isnan().any()
    assert bool(engine.cache.kv[:, :, :, pool.free].isnan().all())
    assert engine.sanitizer.poisoned == set(pool.free)


def test_a_step_without_a_sanitizer_leaves_memory_alone(tiny_model):
    engine = Engine(tiny_model, scheduler=Scheduler(BlockPool(4, 4)))
    ask(engine, 9, 1, "a")
    engine.step()
    assert engine.sanitizer is None
    assert not engine.cache.kv.isnan().any()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nothing_is_found_where_nothing_is_wrong(preemption, tiny_model):
    """Shared prefixes, samples, forks, aborts and preemptions on few blocks: the rules hold, and the tokens are those without."""
    heard = []
    for sanitize in (True, False):
        scheduler = Scheduler(
            BlockPool(14, 3), 6, 32, preemption=preemption, swap_pool=BlockPool(8, 3)
        )
        engine = Engine(tiny_model, scheduler=scheduler, sanitize=sanitize)
        prefix = random_prompt(7, tiny_model.config, "prefix")
        requests = [engine.add(Request(prefix + [i], words(9 + i), id=str(i))) for i in range(5)]
        requests += engine.add_samples(prefix, [words(6), words(7), words(8)])
        for _ in range(4):
            engine.step()
        requests.append(engine.fork("1", words(20)))
        engine.step()
        engine.abort("0")
        for _ in engine.run():
            pass
        heard.append([request.output.token_ids for request in requests])
        assert (
            scheduler.counts.preemptions > 2
            and scheduler.counts.copies > 0
            and scheduler.counts.hit_tokens > 0
        )
        assert scheduler.pool.evictions > 0
    assert heard[0] == heard[1]

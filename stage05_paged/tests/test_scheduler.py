"""The scheduler's memory decisions one by one, without a model; budget rules are stage 04's.

Random lives of it, in an engine, are in test_contract.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.errors import UserError
from stage04_continuous.request import State
from stage04_continuous.tests.test_scheduler import ORDERS, TRACES, WRONG
from stage04_continuous.tests.traces import WORD, Trace
from stage05_paged.blocks import BlockPool, Move
from stage05_paged.scheduler import Scheduler

STAGE_04 = TRACES | ORDERS
PROMPT = list(range(100, 130))


def scheduler_of(blocks, size=4, swap_blocks=0, watermark=0.0, **options):
    swap_pool = BlockPool(swap_blocks, size) if swap_blocks else None
    return Scheduler(BlockPool(blocks, size), watermark=watermark, swap_pool=swap_pool, **options)


def begin(*lines, blocks, answer=8, **options):
    """A trace, after its first `lines`."""
    trace = Trace(scheduler_of(blocks, **options), answer)
    trace.play(*lines)
    return trace


def ids(requests):
    return "".join(request.id for request in requests)


def counts(scheduler, *names):
    return tuple(getattr(scheduler.counts, name) for name in names)


@pytest.mark.parametrize(
    "options, message",
    [
        *WRONG,
        ({"watermark": -0.1}, "from 0 to below 1, not -0.1"),
        ({"watermark": 1}, "from 0 to below 1, not 1"),
        ({"swap_pool": BlockPool(4, 8)}, "swap pool hold 8 tokens, but the others 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(BlockPool(20), **options)


def test_it_needs_no_tensors():
    """Neither the scheduler nor what it imports, seen in a process of its own."""
    code = "import sys, stage05_paged.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", STAGE_04)
def test_the_budget_is_shared_as_in_stage_04(name):
    options, *lines = STAGE_04[name]
    begin(*lines, blocks=60, **options)


def test_a_request_that_does_not_fit_waits_and_none_overtakes():
    begin("a12 b13 c1 > a0-12! | bc", "-a > b0-13! c0-1!", blocks=6)


@pytest.mark.parametrize(
    "watermark, admitted", [(0.0, "abc"), (0.01, "ab"), (0.33, "ab"), (0.34, "a"), (0.9, "a")]
)
def test_the_watermark_stays_free_beside_others(watermark, admitted):
    """Of 6 blocks, each request takes 2; the share is rounded up. One alone may have all blocks."""
    trace = begin("a7 b7 c7 > ...", blocks=6, watermark=watermark)
    assert ids(trace.scheduler.running) == admitted
    begin("a24 > a0-24!", blocks=6, watermark=watermark, answer=1)


@pytest.mark.parametrize(
    "prompt, answer, longest, message",
    [
        *[(1, 40, 99, ""), (40, 1, 99, "")],
        (1, 41, 99, "takes 11 blocks of 4 tokens, but there are 10: ask for at most 40 tokens"),
        (41, 1, 99, "takes 11 blocks of 4 tokens, but there are 10: shorten the prompt, or give"),
        (10, 10_000, 41, ""),  # a server's default: the model ends the answer at its context
        (10, 10_000, 42, "takes 11 blocks"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt, answer, longest, message):
    """10 blocks of 4 tokens; the last token of an answer is never computed."""
    trace = Trace(scheduler := scheduler_of(10, longest=longest))
    if message:
        with pytest.raises(UserError, match=message):
            scheduler.check(prompt, answer)
        return
    scheduler.check(prompt, answer)
    trace.ask("a", prompt, answer=answer)
    for _ in range(min(answer, longest - prompt)):
        assert trace.step()
    assert (scheduler.counts.preemptions, scheduler.pool.owned) == (0, 10)


def test_blocks_of_a_request_that_ended_with_an_error_are_not_found():
    trace = begin("a9 > a0-9!", blocks=10)
    trace.requests["a"].output.fail(UserError("the logits are not numbers"))
    trace.scheduler.finish(trace.requests["a"])
    pool = trace.scheduler.pool
    assert (len(pool.free), len(pool.by_digest), trace.scheduler.tables) == (10, 0, {})


def run_one(scheduler, prompt, answer=1):
    """A request by itself, from beginning to end; its first step."""
    trace = Trace(scheduler)
    request = trace.ask("a", prompt, answer=answer)
    first, *_ = [trace.step() for _ in range(answer)]
    scheduler.finish(request)
    return first


@pytest.mark.parametrize(
    "first, answer, second, hit",
    [
        *[(12, 1, 13, 12), (12, 1, 12, 8), (13, 1, 12, 8), (11, 1, 30, 8), (4, 1, 5, 4)],
        *[(4, 1, 4, 0), (3, 1, 30, 0), (30, 1, 4, 0), (30, 1, 9, 8)],
        (6, 7, [*PROMPT[:6], *[WORD.id] * 7, 5], 12),  # the next turn begins with the answer
        (12, 1, [1, *PROMPT[1:12]], 0),
        (12, 1, PROMPT[4:12], 0),
        (12, 1, [*PROMPT[:8], 1, 2, 3, 4], 8),
    ],
    ids=str,
)
def test_a_common_beginning_is_found(first, answer, second, hit):
    """Full blocks only, and never the last token: it is computed and gives the next one."""
    scheduler, prompt = scheduler_of(20), PROMPT[:second] if isinstance(second, int) else second
    run_one(scheduler, PROMPT[:first], answer)
    assert run_one(scheduler, prompt) == f"a{hit}-{len(prompt)}!"
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (first + len(prompt), hit)
    assert scheduler.counts.hit_rate == hit / (first + len(prompt))


def test_without_prefix_caching_nothing_is_found_or_kept():
    scheduler = scheduler_of(20, prefix_caching=False)
    run_one(scheduler, PROMPT[:12])
    assert (len(scheduler.pool.free), run_one(scheduler, PROMPT[:12])) == (20, "a0-12!")
    assert scheduler.counts.hit_rate == 0.0


def test_found_blocks_without_an_owner_are_not_counted_as_free_room_too():
    """3 of 4 blocks are cached and found. The rest of the prompt takes two, and one is free."""
    run_one(scheduler := scheduler_of(5), PROMPT[:12])
    trace = Trace(scheduler, answer=2)
    trace.play("h4 > h0-4!")
    waits = trace.ask("a", PROMPT[:17])
    trace.play("h4-5! | a")
    assert len(scheduler.pool.match(scheduler.tables[waits].digests)) == 3
    trace.play("-h > a12-17!")


# ---- when memory runs out: which request gives way, what is swapped and shared


def three_that_fill_the_pool(asked="a8 b8 c8", **options):
    """8 tokens computed in 2 blocks each, all 6 blocks owned, and a third block needed by all."""
    trace = begin(f"{asked} > ...", blocks=6, prefix_caching=False, **options)
    assert trace.scheduler.pool.available == 0 and len(trace.scheduler.running) == 3
    return trace


@pytest.mark.parametrize(
    "policy, asked, victim",
    [
        ("fcfs", "a8 b8 c8", "c"),
        ("fcfs", "a8:5 b8 c8", "c"),  # priorities do not count
        ("priority", "a8 b8 c8", "c"),
        ("priority", "a8:1 b8 c8", "a"),
        ("priority", "a8:1 b8:2 c8:1", "b"),
        ("priority", "a8:2 b8:2 c8:1", "b"),
        ("priority", "a8:-1 b8:-2 c8:-3", "a"),
    ],
)
def test_the_most_junior_gives_its_memory_back(policy, asked, victim):
    """The lowest priority, then the latest arrival. Two blocks suffice for the other two."""
    trace = three_that_fill_the_pool(asked, policy=policy)
    others = [id for id in "abc" if id != victim]
    assert sorted(trace.step().split()) == [f"{id}8-9!" for id in others]
    (request,) = trace.scheduler.waiting
    assert (request.id, request.state, request.computed) == (victim, State.WAITING, 0)
    assert trace.scheduler.counts.recomputed == 1
    assert request.output.token_ids == [WORD.id]  # the answer so far stays
    for id, request in trace.requests.items():
        assert len(trace.scheduler.tables[request].blocks) == 3 * (id in others)


def test_the_senior_is_served_first_even_if_it_was_admitted_later():
    """One block is left and both need one: the junior does not take it, to be preempted at once."""
    lines = "j7:1 > j0-7!", "s8 > j7-8! s0-8!"
    trace = begin(*lines, blocks=5, policy="priority", prefix_caching=False)
    assert (ids(trace.scheduler.running), trace.scheduler.pool.available) == ("js", 1)
    plan = trace.scheduler.schedule()
    (work,) = plan.work
    assert (work.request.id, ids(trace.scheduler.waiting)) == ("s", "j")
    assert plan.moves == [Move("wipe", work.table[2], work.table[2])]


def test_a_step_that_preempts_admits_no_request():
    """A block is left over, and yet u waits, or c and u could swap places forever."""
    options = {"blocks": 7, "policy": "priority", "prefix_caching": False}
    begin(
        "a8 b8 c8 > a0-8! b0-8! c0-8!",
        "u1:-1 > a8-9! b8-9! | cu",
        "a9-10! b9-10! u0-1! | c",
        **options,
    )


def test_a_preempted_request_keeps_its_place_in_line_and_computes_all_it_has_again():
    """Prompt and answer so far in one go: then comes its next token, and none twice."""
    trace = three_that_fill_the_pool()
    trace.play("d1 > a8-9! b8-9! | cd", "-a > b9-10! c0-9! | d", "b10-11! c9-10! | d")


def test_a_preempted_request_finds_its_own_blocks_which_does_not_flatter_the_rate():
    trace = begin("a8 b8 c8 > ...", "a8-9! b8-9! | c", "-a -b > c4-9!", blocks=7)
    assert counts(trace.scheduler, "lookup_tokens", "hit_tokens") == (24, 0)


def test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was():
    trace = three_that_fill_the_pool(swap_blocks=5)
    scheduler, c = trace.scheduler, trace.requests["c"]
    blocks = list(scheduler.tables[c].blocks)
    plan = scheduler.schedule()
    targets = scheduler.swapped[c]
    outs = [Move("out", *pair) for pair in zip(blocks, targets, strict=True)]
    assert plan.moves[:2] == outs  # before any wipe
    assert (c.state, c.computed, scheduler.tables[c].blocks) == (State.WAITING, 8, [])
    assert scheduler.swap_pool.owned == 2
    trace.compute(plan)
    scheduler.finish(trace.requests["a"])
    plan = scheduler.schedule()
    mine = scheduler.tables[c].blocks
    assert [move for move in plan.moves if move.target in mine] == [
        *[Move("wipe", block, block) for block in mine],
        *[Move("in", source, block) for source, block in zip(targets, mine, strict=False)],
    ]
    assert (len(mine), scheduler.swapped, scheduler.swap_pool.owned) == (3, {}, 0)
    assert trace.compute(plan) == "b9-10! c8-9!"
    # What it brought itself was not found.
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (24, 0)
    counted = counts(scheduler, "swapped_out", "swapped_in", "recomputed", "preemptions")
    assert counted == (1, 1, 0, 1)


def test_only_computed_blocks_are_swapped_and_without_one_the_request_recomputes():
    trace = Trace(scheduler := scheduler_of(10, swap_blocks=5, token_budget=6, max_sequences=1))
    request = trace.ask("a", 20)
    scheduler.schedule()
    trace.play("^a > a0-6")
    assert counts(scheduler, "recomputed", "swapped_out") == (1, 0)
    trace.play("^a > a6-12")
    assert counts(scheduler, "recomputed", "swapped_out") == (1, 1) and request.computed == 12


def test_what_can_still_be_found_is_shared_and_not_copied_back():
    trace = Trace(scheduler := scheduler_of(12, swap_blocks=5))
    one, two = trace.ask("a", PROMPT[:14]), trace.ask("b", PROMPT[:9])
    trace.play("...", "...")
    trace.preempt("b")
    partial = scheduler.swapped[two][2]
    assert (two.computed, len(scheduler.swapped[two])) == (10, 3)
    plan = scheduler.schedule()
    mine = scheduler.tables[two].blocks
    assert mine[:2] == scheduler.tables[one].blocks[:2]
    assert [move for move in plan.moves if move.kind == "in"] == [Move("in", partial, mine[2])]
    assert trace.compute(plan) == "a15-16! b10-11!"
    assert scheduler.swap_pool.owned == 0


@pytest.mark.parametrize("room", [1, 5])
def test_swap_blocks_are_taken_if_there_is_room_and_given_back_after_an_abort(room):
    trace = three_that_fill_the_pool(swap_blocks=room)
    scheduler, c = trace.scheduler, trace.requests["c"]
    trace.step()
    assert counts(scheduler, "recomputed", "swapped_out") == ((1, 0) if room == 1 else (0, 1))
    assert (scheduler.swap_pool.owned, c.computed) == ((0, 0) if room == 1 else (2, 8))
    scheduler.finish(c)
    assert (scheduler.swap_pool.owned, scheduler.swapped, c in scheduler.tables) == (0, {}, False)


@pytest.mark.parametrize("length, size", [(10, 4), (8, 4), (9, 4), (10, 1), (17, 16)])
def test_samples_of_a_prompt_compute_it_once_and_share_its_full_blocks(length, size):
    """All but the last token, which gives each sample its own first token."""
    trace = begin(
        f"s{length} t<s u<s > s0-{length}!",
        f"s{length}-{length + 1}! t{length - 1}-{length}! u{length - 1}-{length}!",
        **{"blocks": 80 // size, "size": size, "max_sequences": 4},
    )
    full, pool, tables = (length - 1) // size, trace.scheduler.pool, trace.scheduler.tables
    own = pool.blocks_for(length + 1) + 2 * pool.blocks_for(length) - 3 * full
    assert (pool.owned, sum(n > 1 for n in pool.references)) == (full + own, full)
    assert len({table.blocks[full] for table in tables.values()}) == 3
    trace.play(*["..."] * 5)
    copies = 2 if (length - 1) % size else 0
    assert trace.scheduler.counts.copies == copies  # and nothing else is ever copied


@pytest.mark.parametrize("blocks, waiting", [(10, ""), (3, "t")])
def test_a_copy_comes_from_the_parents_last_block_and_waits_for_one_of_its_own(blocks, waiting):
    trace = begin("s10 t<s > s0-10!", blocks=blocks, max_sequences=3, answer=3)
    plan, tables = trace.scheduler.schedule(), trace.scheduler.tables
    source, mine = (tables[trace.requests[id]].blocks for id in "st")
    copies = [] if waiting else [Move("copy", source[2], mine[2])]
    assert [move for move in plan.moves if move.kind == "copy"] == copies
    assert ids(trace.scheduler.waiting) == waiting


def test_a_sample_that_was_admitted_needs_its_parent_no_more():
    """Both lose their memory: it does not wait until the parent has computed all of it again."""
    trace = begin("s10 t<s > s0-10!", "s10-11! t9-10!", blocks=20, prefix_caching=False)
    trace.play("^s ^t > s0-12! t0-11!")


def test_when_the_first_sample_is_aborted_the_next_one_leads():
    trace = begin("s10 t<s u<s > s0-6", blocks=20, max_sequences=4, token_budget=6)
    trace.play("-s > t4-10!", "t10-11! u9-10!")  # the first block can still be found

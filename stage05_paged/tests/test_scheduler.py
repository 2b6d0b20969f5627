"""The scheduler's memory decisions one by one, without a model; budget rules are stage 04's.

Random lives of it, in an engine, are in test_contract.py.
"""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock

import pytest

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request, State
from stage04_continuous.tests.test_scheduler import WRONG
from stage05_paged.blocks import BlockPool, Move
from stage05_paged.scheduler import Scheduler

WORD = Token(1, None, None)
PROMPT = list(range(100, 130))


def scheduler_of(blocks, size=4, swap_blocks=0, watermark=0.0, **options):
    swap_pool = BlockPool(swap_blocks, size) if swap_blocks else None
    options.setdefault("preemption", "swap" if swap_pool else "recompute")
    return Scheduler(BlockPool(blocks, size), watermark=watermark, swap_pool=swap_pool, **options)


def make(prompt, id="", priority=0, answer=16, salt=b"", parent=None):
    """A request for `prompt`, or for that many tokens that no id with another first letter has."""
    tokens = [ord(id[:1] or "-")] * prompt if isinstance(prompt, int) else prompt
    return Request(tokens, SamplingParams(max_tokens=answer, seed=0), id, priority, salt, parent)


def ask(scheduler, prompt, id="", *options, **more):
    request = make(prompt, id, *options, **more)
    scheduler.add(request)
    return request


def fork(scheduler, parent, id, answer=16):
    child = make(parent.output.prompt_ids, id, answer=answer, salt=parent.salt, parent=parent)
    child.output.token_ids += parent.output.token_ids
    scheduler.add(child)
    return child


def ask_samples(scheduler, prompt, *names, answer=8):
    first = ask(scheduler, prompt, names[0], answer=answer)
    return [first, *(fork(scheduler, first, name, answer) for name in names[1:])]


def queue(line, blocks, answer=8, **options):
    """A scheduler and its requests: "a8 b9" are "a" with a prompt of 8 tokens, and "b" with 9."""
    scheduler, words = scheduler_of(blocks, **options), line.split()
    return scheduler, [ask(scheduler, int(word[1:]), word[0], answer=answer) for word in words]


def compute(scheduler, plan):
    """What an engine does with a plan; (id, start, count, samples) of each share."""
    scheduler.advance(plan)
    for work in plan.work:
        if work.rows:
            work.request.output.append(WORD)
    return [(work.request.id, work.start, work.count, work.rows == 1) for work in plan.work]


def step(scheduler):
    return compute(scheduler, scheduler.schedule())


def preempt(scheduler, request):
    scheduler._preempt(Plan(), request)


def ids(requests):
    return [request.id for request in requests]


def counts(scheduler, *names):
    return tuple(getattr(scheduler.counts, name) for name in names)


@pytest.mark.parametrize(
    "options, message",
    [
        *WRONG,
        ({"watermark": -0.1}, "from 0 to below 1, not -0.1"),
        ({"watermark": 1}, "from 0 to below 1, not 1"),
        ({"preemption": "drop"}, "Unknown preemption 'drop': choose one of auto, recompute, swap"),
        ({"preemption": "swap"}, "no memory to swap to"),
        ({"swap_pool": BlockPool(4, 8)}, "swap pool hold 8 tokens, and the others 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(BlockPool(20), **options)


def test_never_more_sequences_than_blocks():
    scheduler, _ = queue("a1 b1 c1 d1", 3, size=16, max_sequences=100, token_budget=3)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "c"]


def test_it_needs_no_tensors():
    """Neither the scheduler nor what it imports, seen in a process of its own."""
    code = "import sys, stage05_paged.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_request_that_does_not_fit_waits_and_none_overtakes():
    scheduler, (first, _, _) = queue("f12 b13 s1", 6, answer=1)
    assert step(scheduler) == [("f", 0, 12, True)]
    assert (ids(scheduler.waiting), scheduler.pool.available) == (["b", "s"], 3)
    scheduler.finish(first)
    assert [id for id, *_ in step(scheduler)] == ["b", "s"]


@pytest.mark.parametrize(
    "watermark, admitted", [(0.0, "abc"), (0.01, "ab"), (0.33, "ab"), (0.34, "a"), (0.9, "a")]
)
def test_the_watermark_stays_free_beside_others(watermark, admitted):
    """Of 6 blocks, each request takes 2; the share is rounded up. One alone may have all blocks."""
    scheduler, _ = queue("a7 b7 c7", 6, watermark=watermark)
    assert "".join(id for id, *_ in step(scheduler)) == admitted
    scheduler = scheduler_of(6, watermark=watermark)
    ask(scheduler, 24, "a", answer=1)
    assert step(scheduler) == [("a", 0, 24, True)] and scheduler.pool.available == 0


@pytest.mark.parametrize(
    "prompt, answer, longest, message",
    [
        *[(1, 40, 99, ""), (40, 1, 99, ""), (25, 16, 99, "")],
        (1, 41, 99, "takes 11 blocks of 4 tokens, and there are 10: ask for at most 40 tokens"),
        (40, 2, 99, "ask for at most 1 tokens"),
        (41, 1, 99, "takes 11 blocks of 4 tokens, and there are 10: shorten the prompt, or give"),
        (25, 30, 99, "has 25 tokens and its answer up to 30: that takes 14 blocks of 4 tokens"),
        (10, 10_000, 41, ""),  # a server's default: the model ends the answer at its context
        (10, 10_000, 42, "takes 11 blocks"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt, answer, longest, message):
    """10 blocks of 4 tokens; the last token of an answer is never computed."""
    scheduler, request = scheduler_of(10, longest=longest), make(prompt, "a", answer=answer)
    if message:
        with pytest.raises(UserError, match=message):
            scheduler.add(request)
        assert (request.state, scheduler.unfinished) == (State.NEW, 0)
        return
    scheduler.add(request)
    for _ in range(min(answer, longest - prompt)):
        assert [id for id, *_ in step(scheduler)] == ["a"]
    assert (scheduler.counts.preemptions, scheduler.pool.owned) == (0, 10)


def test_without_chunks_a_prompt_over_the_budget_is_refused():
    options = {"max_sequences": 2, "token_budget": 10, "chunked": False}
    scheduler, (first, _, _) = queue("a6 b10 c1", 40, **options)
    with pytest.raises(UserError, match="has 11 tokens and a step has room for 10: allow chunks"):
        ask(scheduler, 11)
    assert scheduler.unfinished == 3
    # b is computed whole or not at all, and c, which would fit, does not overtake it.
    assert [id for id, *_ in step(scheduler)] == ["a"]
    scheduler.finish(first)
    assert step(scheduler) == [("b", 0, 10, True)]


def test_blocks_of_a_request_that_ended_with_an_error_are_not_found():
    scheduler = scheduler_of(10)
    request = ask(scheduler, 9, "a")
    step(scheduler)
    request.output.fail(UserError("the logits are not numbers"))
    scheduler.finish(request)
    pool = scheduler.pool
    assert (len(pool.free), len(pool.found), scheduler.tables) == (10, 0, {})


def run_one(scheduler, prompt, answer=1):
    """A request by itself, from beginning to end; its first share of a pass, as (start, count)."""
    request = ask(scheduler, prompt, answer=answer)
    (_, start, count, _), *_ = step(scheduler)
    for _ in range(answer - 1):
        step(scheduler)
    scheduler.finish(request)
    return start, count


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
    run_one(scheduler, PROMPT[:first], answer=answer)
    assert run_one(scheduler, prompt) == (hit, len(prompt) - hit)
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (first + len(prompt), hit)
    assert scheduler.counts.hit_rate == hit / (first + len(prompt))


def test_without_prefix_caching_nothing_is_found_or_kept():
    scheduler = scheduler_of(20, prefix_caching=False)
    run_one(scheduler, PROMPT[:12])
    assert (len(scheduler.pool.free), run_one(scheduler, PROMPT[:12])) == (20, (0, 12))
    assert scheduler.counts.hit_rate == 0.0


def test_found_blocks_without_an_owner_are_not_counted_as_free_room_too():
    """3 of 4 blocks are cached and found. The rest of the prompt takes two, and one is free."""
    scheduler = scheduler_of(5)
    run_one(scheduler, PROMPT[:12])
    holder = ask(scheduler, 4, "h", answer=2)
    step(scheduler)
    waits = ask(scheduler, PROMPT[:17], answer=2)
    assert [id for id, *_ in step(scheduler)] == ["h"]
    assert len(scheduler.pool.match(scheduler.tables[waits].digests)) == 3
    scheduler.finish(holder)
    assert step(scheduler) == [("", 12, 5, True)]


# ---- when memory runs out: which request gives way, what is swapped and shared


def three_that_fill_the_pool(policy="fcfs", priorities=(0, 0, 0), **options):
    """ "a", "b" and "c" with 8 tokens computed in 2 blocks each, all 6 blocks owned, and a third
    block needed by all."""
    scheduler = scheduler_of(6, policy=policy, prefix_caching=False, **options)
    requests = [
        ask(scheduler, 8, id, priority) for id, priority in zip("abc", priorities, strict=True)
    ]
    step(scheduler)
    assert scheduler.pool.available == 0 and len(scheduler.running) == 3
    return scheduler, requests


@pytest.mark.parametrize(
    "policy, priorities, victim",
    [
        ("fcfs", (0, 0, 0), "c"),
        ("fcfs", (5, 0, 0), "c"),  # priorities do not count
        ("priority", (0, 0, 0), "c"),
        ("priority", (1, 0, 0), "a"),
        ("priority", (1, 2, 1), "b"),
        ("priority", (2, 2, 1), "b"),
        ("priority", (-1, -2, -3), "a"),
    ],
    ids=str,
)
def test_the_most_junior_gives_its_memory_back(policy, priorities, victim):
    """The lowest priority, then the latest arrival. Two blocks suffice for the other two."""
    scheduler, requests = three_that_fill_the_pool(policy, priorities)
    others = [request.id for request in requests if request.id != victim]
    assert sorted(id for id, *_ in step(scheduler)) == others
    (request,) = scheduler.waiting
    assert (request.id, request.state, request.computed) == (victim, State.WAITING, 0)
    assert scheduler.counts.recomputed == 1
    assert request.output.token_ids == [WORD.id]  # the answer so far stays
    for request in requests:
        assert len(scheduler.tables[request].blocks) == 3 * (request.id in others)


def test_the_senior_is_served_first_even_if_it_was_admitted_later():
    """One block is left and both need one: the junior does not take it, to be preempted at once."""
    scheduler = scheduler_of(5, policy="priority", prefix_caching=False)
    ask(scheduler, 7, "junior", priority=1, answer=8)
    step(scheduler)
    senior = ask(scheduler, 8, "senior", answer=8)
    step(scheduler)
    assert (ids(scheduler.running), scheduler.pool.available) == (["junior", "senior"], 1)
    plan = scheduler.schedule()
    (work,) = plan.work
    assert (work.request, ids(scheduler.waiting)) == (senior, ["junior"])
    assert plan.moves == [Move("wipe", work.table[2], work.table[2])]


def test_a_step_that_preempts_admits_no_request():
    """A block is left over, and yet the urgent one waits, or the two could swap places forever."""
    scheduler, _ = queue("a8 b8 c8", 7, policy="priority", prefix_caching=False)
    step(scheduler)
    ask(scheduler, 1, "urgent", -1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b"]
    assert (ids(scheduler.waiting), scheduler.pool.available) == (["c", "urgent"], 1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "urgent"]


def test_a_preempted_request_keeps_its_place_in_line_and_computes_all_it_has_again():
    """Prompt and answer so far in one go: then comes its next token, and none twice."""
    scheduler, (a, b, c) = three_that_fill_the_pool()
    ask(scheduler, 1, "late", answer=1)
    step(scheduler)
    assert ids(scheduler.waiting) == ["c", "late"]
    scheduler.finish(a)
    assert step(scheduler) == [("b", 9, 1, True), ("c", 0, 9, True)]
    assert c.output.token_ids == [WORD.id] * 2
    assert step(scheduler)[:2] == [("b", 10, 1, True), ("c", 9, 1, True)]


def test_a_preempted_request_finds_its_own_blocks_which_does_not_flatter_the_rate():
    scheduler, requests = queue("a8 b8 c8", 6)
    for _ in range(2):
        step(scheduler)
    assert ids(scheduler.waiting) == ["c"]
    for request in requests[:2]:
        scheduler.finish(request)
    ((id, start, count, _),) = step(scheduler)
    assert (id, start + count, start % 4) == ("c", 9, 0)
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (24, 0)


def test_without_chunks_a_recompute_longer_than_the_budget_still_runs():
    """Only what a preemption has made so long is cut: a prompt never is."""
    options = {"token_budget": 8, "chunked": False, "prefix_caching": False}
    scheduler, (request,) = queue("a8", 20, max_sequences=2, **options)
    for _ in range(5):
        step(scheduler)
    preempt(scheduler, request)
    shares = [step(scheduler)[0] for _ in range(3)]
    assert shares == [("a", 0, 8, False), ("a", 8, 5, True), ("a", 13, 1, True)]


def test_without_chunks_the_rest_of_a_long_recompute_does_not_starve():
    """Newcomers of one token must not take what is left of every budget."""
    options = {"token_budget": 4, "chunked": False, "prefix_caching": False}
    scheduler, (request,) = queue("a4", 60, answer=50, max_sequences=4, **options)
    for _ in range(4):
        step(scheduler)
    preempt(scheduler, request)
    before = len(request.output.token_ids)
    for _ in range(10):
        ask(scheduler, 1, "newcomer", answer=3)
        step(scheduler)
        for other in list(scheduler.running):
            if other.id == "newcomer" and len(other.output.token_ids) == 3:
                scheduler.finish(other)
    assert len(request.output.token_ids) > before


def test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was():
    scheduler, (a, b, c) = three_that_fill_the_pool(swap_blocks=5)
    blocks = list(scheduler.tables[c].blocks)
    plan = scheduler.schedule()
    targets = scheduler.swapped[c]
    outs = [Move("out", *pair) for pair in zip(blocks, targets, strict=True)]
    assert plan.moves[:2] == outs  # before any wipe
    assert (c.state, c.computed, scheduler.tables[c].blocks) == (State.WAITING, 8, [])
    assert scheduler.swap_pool.owned == 2
    compute(scheduler, plan)
    scheduler.finish(a)
    plan = scheduler.schedule()
    mine = scheduler.tables[c].blocks
    assert [move for move in plan.moves if move.target in mine] == [
        *[Move("wipe", block, block) for block in mine],
        *[Move("in", source, block) for source, block in zip(targets, mine, strict=False)],
    ]
    assert (len(mine), scheduler.swapped, scheduler.swap_pool.owned) == (3, {}, 0)
    assert compute(scheduler, plan) == [("b", 9, 1, True), ("c", 8, 1, True)]
    # What it brought itself was not found.
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (24, 0)
    counted = counts(scheduler, "swapped_out", "swapped_in", "recomputed", "preemptions")
    assert counted == (1, 1, 0, 1)


def test_only_computed_blocks_are_swapped_and_without_one_the_request_recomputes():
    scheduler, (request,) = queue("a20", 10, swap_blocks=5, token_budget=6, max_sequences=1)
    scheduler.schedule()
    preempt(scheduler, request)
    assert scheduler.swapped == {} and counts(scheduler, "recomputed", "swapped_out") == (1, 0)
    step(scheduler)
    preempt(scheduler, request)
    assert (len(scheduler.swapped[request]), request.computed) == (2, 6)
    assert step(scheduler) == [("a", 6, 6, False)]


def test_what_can_still_be_found_is_shared_and_not_copied_back():
    scheduler = scheduler_of(12, swap_blocks=5)
    one = ask(scheduler, PROMPT[:14], "one")
    two = ask(scheduler, PROMPT[:9], "two")
    step(scheduler)
    step(scheduler)
    preempt(scheduler, two)
    assert (two.computed, len(scheduler.swapped[two])) == (10, 3)
    partial = scheduler.swapped[two][2]
    plan = scheduler.schedule()
    mine = scheduler.tables[two].blocks
    assert mine[:2] == scheduler.tables[one].blocks[:2]
    assert [move for move in plan.moves if move.kind == "in"] == [Move("in", partial, mine[2])]
    assert compute(scheduler, plan) == [("one", 15, 1, True), ("two", 10, 1, True)]
    assert scheduler.swap_pool.owned == 0


def test_a_hit_beyond_what_was_swapped_is_left_alone():
    """Another request has computed more of the same: still the swapped tokens come back."""
    scheduler = scheduler_of(20, swap_blocks=5, token_budget=6, max_sequences=2)
    two = ask(scheduler, PROMPT[:20], "two")
    step(scheduler)
    preempt(scheduler, two)
    one = ask(scheduler, PROMPT[:19], "one")
    scheduler.waiting.reverse()
    scheduler.max_sequences = 1
    while one.remaining > 1 or not one.output.token_ids:
        step(scheduler)
    scheduler.max_sequences = 2
    assert step(scheduler)[1] == ("two", 6, 5, False)


@pytest.mark.parametrize("room", [1, 5])
def test_swap_blocks_are_taken_if_there_is_room_and_given_back_after_an_abort(room):
    scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=room)
    step(scheduler)
    assert counts(scheduler, "recomputed", "swapped_out") == ((1, 0) if room == 1 else (0, 1))
    assert (scheduler.swap_pool.owned, c.computed) == ((0, 0) if room == 1 else (2, 8))
    scheduler.finish(c)
    assert (scheduler.swap_pool.owned, scheduler.swapped, c in scheduler.tables) == (0, {}, False)


def test_auto_asks_which_is_cheaper():
    """About the computed tokens, and where there is a choice."""
    for preemption, swap_blocks, answer, asked in (
        *(("auto", 5, "swap", [8]), ("auto", 5, "recompute", [8]), ("auto", 0, "swap", [])),
        *(("swap", 5, "recompute", []), ("recompute", 5, "swap", [])),
    ):
        cheaper = Mock(return_value=answer)
        options = {"preemption": preemption, "cheaper": cheaper}
        scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=swap_blocks, **options)
        step(scheduler)
        assert [call.args[0] for call in cheaper.call_args_list] == asked
        assert (c in scheduler.swapped) == ((answer if asked else preemption) == "swap")


@pytest.mark.parametrize("length, size", [(10, 4), (8, 4), (9, 4), (10, 1), (17, 16)])
def test_samples_of_a_prompt_compute_it_once_and_share_its_full_blocks(length, size):
    """All but the last token, which gives each sample its own first token."""
    scheduler = scheduler_of(80 // size, size, max_sequences=4)
    samples = ask_samples(scheduler, length, "s1", "s2", "s3")
    assert step(scheduler) == [("s1", 0, length, True)]
    others = [(id, length - 1, 1, True) for id in ("s2", "s3")]
    assert step(scheduler) == [("s1", length, 1, True), *others]
    full, pool = (length - 1) // size, scheduler.pool
    own = pool.blocks_for(length + 1) + 2 * pool.blocks_for(length) - 3 * full
    assert (pool.owned, pool.shared) == (full + own, full)
    assert len({scheduler.tables[request].blocks[full] for request in samples}) == 3
    for _ in range(5):
        step(scheduler)
    copies = 2 if (length - 1) % size else 0
    assert scheduler.counts.copies == copies  # and nothing else is ever copied


def test_a_copy_comes_from_the_parents_last_block_and_waits_for_one_of_its_own():
    for blocks in (10, 3):
        scheduler = scheduler_of(blocks, max_sequences=3)
        first, second = ask_samples(scheduler, 10, "s1", "s2", answer=3)
        step(scheduler)
        plan = scheduler.schedule()
        mine = scheduler.tables[second].blocks
        copies = [Move("copy", scheduler.tables[first].blocks[2], mine[2])] if mine else []
        assert [move for move in plan.moves if move.kind == "copy"] == copies
        assert ids(scheduler.waiting) == ([] if blocks == 10 else ["s2"])


def test_a_child_with_other_tokens_than_its_parent_shares_nothing():
    scheduler = scheduler_of(20)
    parent = ask(scheduler, PROMPT[:9], "parent")
    step(scheduler)
    ask(scheduler, [1, *PROMPT[1:9]], "child", parent=parent)
    assert step(scheduler)[1] == ("child", 0, 9, True)


def test_a_sample_that_was_admitted_needs_its_parent_no_more():
    """Both lose their memory: it does not wait until the parent has computed all of it again."""
    scheduler = scheduler_of(20, prefix_caching=False)
    samples = ask_samples(scheduler, 10, "s1", "s2")
    for _ in range(2):
        step(scheduler)
    for request in samples:
        preempt(scheduler, request)
    assert step(scheduler) == [("s1", 0, 12, True), ("s2", 0, 11, True)]


def test_when_the_first_sample_is_aborted_the_next_one_leads():
    scheduler = scheduler_of(20, max_sequences=4, token_budget=6)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    assert step(scheduler) == [("s1", 0, 6, False)]
    scheduler.finish(samples[0])
    assert step(scheduler) == [("s2", 4, 6, True)]  # the first block can still be found
    assert step(scheduler) == [("s2", 10, 1, True), ("s3", 9, 1, True)]

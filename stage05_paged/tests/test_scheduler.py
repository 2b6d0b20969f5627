"""The scheduler's memory decisions one by one, without a model; budget rules are stage 04's.

Random lives of it, in an engine, are in test_contract.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request, State
from stage04_continuous.tests.test_scheduler import passes_until_admitted
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
        ({"max_sequences": 0}, "at least 1 sequence at a time, not 0"),
        ({"max_sequences": 8, "token_budget": 7}, "budget of 7 tokens a step is too small for 8"),
        ({"policy": "lifo"}, "Unknown policy 'lifo': choose one of fcfs, priority"),
        ({"max_chunk": 0}, "at least 1 token, not 0"),
        ({"patience": 0}, "at least 1 step, not 0"),
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
    scheduler = scheduler_of(3, max_sequences=100, token_budget=3)
    for id in "abcd":
        ask(scheduler, 1, id, answer=1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "c"]


def test_it_needs_no_tensors():
    """Neither the scheduler nor what it imports, seen in a process of its own."""
    code = "import sys, stage05_paged.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("priority, patience", [(1, 1), (3, 5)])
def test_no_request_starves_under_a_constant_stream_of_urgent_ones(priority, patience):
    """As in stage 04, to the pass."""
    scheduler = scheduler_of(40, max_sequences=1, policy="priority", patience=patience)
    assert passes_until_admitted(scheduler, priority) == priority * patience + (patience == 1)


def test_a_request_is_admitted_with_blocks_for_what_it_has_and_not_for_what_may_come():
    """Five prompts of 8 tokens on 10 blocks of 4, with answers of up to 16."""
    scheduler = scheduler_of(10)
    for id in "abcde":
        ask(scheduler, 8, id)
    plan = scheduler.schedule()
    assert [(work.request.id, len(work.table)) for work in plan.work] == [(id, 2) for id in "abcde"]
    assert all(work.table is scheduler.tables[work.request].blocks for work in plan.work)
    assert plan.moves == [Move("wipe", block, block) for work in plan.work for block in work.table]


def test_a_request_that_does_not_fit_waits_and_none_overtakes():
    scheduler = scheduler_of(6)
    first = ask(scheduler, 12, "first", answer=1)
    ask(scheduler, 13, "big", answer=1)
    ask(scheduler, 1, "small", answer=1)
    assert step(scheduler) == [("first", 0, 12, True)]
    assert (ids(scheduler.waiting), scheduler.pool.available) == (["big", "small"], 3)
    scheduler.finish(first)
    assert [id for id, *_ in step(scheduler)] == ["big", "small"]


@pytest.mark.parametrize(
    "watermark, admitted", [(0.0, "abc"), (0.01, "ab"), (0.33, "ab"), (0.34, "a"), (0.9, "a")]
)
def test_the_watermark_stays_free_beside_others(watermark, admitted):
    """Of 6 blocks, each request takes 2; the share is rounded up. One alone may have all blocks."""
    scheduler = scheduler_of(6, watermark=watermark)
    for id in "abc":
        ask(scheduler, 7, id, answer=2)
    assert "".join(id for id, *_ in step(scheduler)) == admitted
    scheduler = scheduler_of(6, watermark=watermark)
    ask(scheduler, 24, "a", answer=1)
    assert step(scheduler) == [("a", 0, 24, True)] and scheduler.pool.available == 0


@pytest.mark.parametrize(
    "prompt, answer, message",
    [
        (1, 40, ""),
        (1, 41, "takes 11 blocks of 4 tokens, and there are 10: ask for at most 40 tokens"),
        (40, 1, ""),
        (40, 2, "ask for at most 1 tokens"),
        (41, 1, "takes 11 blocks of 4 tokens, and there are 10: shorten the prompt, or give more"),
        (25, 16, ""),
        (25, 30, "has 25 tokens and its answer up to 30: that takes 14 blocks of 4 tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt, answer, message):
    """10 blocks of 4 tokens; the last token of an answer is never computed."""
    scheduler, request = scheduler_of(10), make(prompt, "a", answer=answer)
    if message:
        with pytest.raises(UserError, match=message):
            scheduler.add(request)
        assert (request.state, scheduler.unfinished) == (State.NEW, 0)
        return
    scheduler.add(request)
    for _ in range(answer):
        assert [id for id, *_ in step(scheduler)] == ["a"]
    assert (scheduler.counts.preemptions, scheduler.pool.owned) == (0, 10)


def test_an_answer_is_not_counted_beyond_the_context():
    """A server's answer is "up to 10,000 tokens" by default; the model ends it at its context."""
    ask(scheduler_of(10, longest=41), 10, answer=10_000)
    with pytest.raises(UserError, match="takes 11 blocks"):
        ask(scheduler_of(10, longest=42), 10, answer=10_000)


def test_without_chunks_a_prompt_over_the_budget_is_refused():
    scheduler = scheduler_of(40, max_sequences=2, token_budget=10, chunked=False)
    with pytest.raises(UserError, match="has 11 tokens and a step has room for 10: allow chunks"):
        ask(scheduler, 11)
    assert scheduler.unfinished == 0
    ask(scheduler, 6, "a")
    ask(scheduler, 10, "b")
    ask(scheduler, 1, "c")  # would fit, and does not overtake b
    assert [id for id, *_ in step(scheduler)] == ["a"]  # b is computed whole or not at all
    scheduler.finish(scheduler.running[0])
    assert step(scheduler) == [("b", 0, 10, True)]


@pytest.mark.parametrize("error", [False, True])
def test_full_blocks_can_be_found_after_the_end_unless_it_was_an_error(error):
    scheduler = scheduler_of(10)
    request = ask(scheduler, 9, "a")
    step(scheduler)
    assert scheduler.pool.owned == 3
    if error:
        request.output.fail(UserError("the logits are not numbers"))
    scheduler.finish(request)
    pool, kept = scheduler.pool, 0 if error else 2
    assert (pool.owned, len(pool.cached), len(pool.found)) == (0, kept, kept)
    assert scheduler.tables == {}


def run_one(scheduler, prompt, id="", salt=b"", answer=1):
    """A request by itself, from beginning to end; its first share of a pass, as (start, count)."""
    request = ask(scheduler, prompt, id, answer=answer, salt=salt)
    (_, start, count, _), *_ = step(scheduler)
    for _ in range(answer - 1):
        step(scheduler)
    scheduler.finish(request)
    return start, count


@pytest.mark.parametrize(
    "first, second, hit",
    [(12, 13, 12), (12, 12, 8), (13, 12, 8), (11, 30, 8), (4, 5, 4), (4, 4, 0), (3, 30, 0)]
    + [(30, 4, 0), (30, 9, 8)],
)
def test_a_common_beginning_is_found(first, second, hit):
    """Full blocks only, and never the last token: it is computed and gives the next one."""
    scheduler = scheduler_of(20)
    run_one(scheduler, PROMPT[:first])
    assert run_one(scheduler, PROMPT[:second]) == (hit, second - hit)
    assert counts(scheduler, "lookup_tokens", "hit_tokens") == (first + second, hit)
    assert scheduler.counts.hit_rate == hit / (first + second)


def test_answers_are_found_too():
    """A conversation goes on: the answer is part of the next prompt."""
    scheduler = scheduler_of(20)
    run_one(scheduler, PROMPT[:6], answer=7)
    assert run_one(scheduler, PROMPT[:6] + [WORD.id] * 7 + [5]) == (12, 2)


def test_other_tokens_another_beginning_and_another_salt_find_nothing():
    scheduler = scheduler_of(40)
    run_one(scheduler, PROMPT[:12], salt=b"one")
    assert run_one(scheduler, [1, *PROMPT[1:12]], salt=b"one") == (0, 12)
    assert run_one(scheduler, PROMPT[4:12], salt=b"one") == (0, 8)
    assert run_one(scheduler, PROMPT[:12], salt=b"two") == (0, 12)
    assert run_one(scheduler, PROMPT[:12]) == (0, 12)
    assert run_one(scheduler, [*PROMPT[:8], 1, 2, 3, 4], salt=b"one") == (8, 4)


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


def test_a_draft_is_published_when_it_is_verified_and_not_before():
    """A rejected token must not be found. Catches: blocks published when they are computed."""
    scheduler = scheduler_of(20)
    request = ask(scheduler, PROMPT[:6])
    step(scheduler)
    request.drafts = [7, 8, 9]
    (work,) = scheduler.schedule().work
    assert (work.start, work.count, work.rows, len(work.table)) == (6, 4, 4, 3)
    assert request.tokens(6, 4) == [WORD.id, 7, 8, 9] and request.decoding
    plan = Plan(work=[work])
    scheduler.advance(plan)
    assert (request.computed, len(scheduler.pool.found)) == (10, 1)  # 7 tokens are verified
    request.drafts, request.computed = [], 7  # the first draft is accepted, the others are not
    request.output.append(Token(7, None, None))
    scheduler.tables[request].shrink(request.verified)
    assert (len(scheduler.tables[request].blocks), scheduler.pool.owned) == (2, 2)
    step(scheduler)
    assert len(scheduler.pool.found) == 2
    scheduler.finish(request)
    assert run_one(scheduler, [*PROMPT[:6], WORD.id, 7, 1]) == (8, 1)

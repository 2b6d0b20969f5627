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
from stage04_continuous.tests.test_scheduler import WRONG
from stage05_paged.blocks import BlockPool
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
    scheduler = scheduler_of(3, max_sequences=100, token_budget=3)
    for id in "abcd":
        ask(scheduler, 1, id, answer=1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "c"]


def test_it_needs_no_tensors():
    """Neither the scheduler nor what it imports, seen in a process of its own."""
    code = "import sys, stage05_paged.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
    "prompt, answer, longest, message",
    [
        (1, 40, 99, ""),
        (1, 41, 99, "takes 11 blocks of 4 tokens, and there are 10: ask for at most 40 tokens"),
        (40, 1, 99, ""),
        (40, 2, 99, "ask for at most 1 tokens"),
        (41, 1, 99, "takes 11 blocks of 4 tokens, and there are 10: shorten the prompt, or give"),
        (25, 16, 99, ""),
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

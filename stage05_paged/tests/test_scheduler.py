"""The scheduler: its decisions one by one, without a model, and then hundreds of random lives of it with its promises checked."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.sampling import SamplingParams
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES
from stage05_paged import scheduler as module
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import Move
from stage05_paged.scheduler import PREEMPTIONS, Scheduler, Work

WORD = Token(1, None, None)


def scheduler_of(blocks, size=4, swap_blocks=0, watermark=0.0, **options):
    swap_pool = BlockPool(swap_blocks, size) if swap_blocks else None
    options.setdefault("preemption", "swap" if swap_pool else "recompute")
    return Scheduler(BlockPool(blocks, size), watermark=watermark, swap_pool=swap_pool, **options)


def make(prompt, id="", priority=0, answer=16):
    """A request for `prompt`, or for one of so many tokens that no request with another first letter has."""
    tokens = [ord(id[:1] or "-")] * prompt if isinstance(prompt, int) else prompt
    return Request(tokens, SamplingParams(max_tokens=answer, seed=0), id, priority)


def ask(scheduler, prompt, id="", priority=0, answer=16, salt=b""):
    request = make(prompt, id, priority, answer)
    scheduler.add(request, salt)
    return request


def fork(scheduler, parent, id):
    child = make(parent.output.prompt_ids, id)
    child.output.token_ids += parent.output.token_ids
    scheduler.fork(parent, child)
    return child


def compute(scheduler, work):
    """What an engine does with a pass: the moves, count and publish what was computed, and append what was sampled."""
    scheduler.moves.clear()
    for each in work:
        each.request.computed += each.count
        scheduler.publish(each)
    for each in work:
        if each.samples:
            for request in [each.request, *scheduler.begin_samples(each.request)]:
                request.output.append(WORD)


def step(scheduler):
    """One pass: (id, start, count, samples) of each share, and it counts as computed."""
    work = scheduler.schedule()
    compute(scheduler, work)
    return [(each.request.id, each.start, each.count, each.samples) for each in work]


def ids(requests):
    return [request.id for request in requests]


def blocks_of(scheduler):
    """How many blocks each request's table has, by id."""
    return {request.id: len(table.blocks) for request, table in scheduler.tables.items()}


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_sequences": 0}, "at least 1 sequence at a time, not 0"),
        (
            {"max_sequences": 8, "token_budget": 7},
            "budget of 7 tokens a step is too small for 8 sequences",
        ),
        ({"max_sequences": 1, "token_budget": 0}, "budget of 0 tokens"),
        ({"policy": "lifo"}, "Unknown policy 'lifo': choose one of fcfs, priority"),
        ({"max_chunk": 0}, "at least 1 token, not 0"),
        ({"patience": 0}, "at least 1 step, not 0"),
        ({"watermark": -0.1}, "from 0 to below 1, not -0.1"),
        ({"watermark": 1}, "from 0 to below 1, not 1"),
        ({"preemption": "drop"}, "Unknown preemption 'drop': choose one of auto, recompute, swap"),
        ({"preemption": "swap"}, "no memory to swap to"),
        ({"swap_pool": BlockPool(4, 8)}, "Blocks to swap to hold 8 tokens, and the others 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(BlockPool(20), **options)


def test_never_more_sequences_than_blocks():
    scheduler = scheduler_of(3, max_sequences=100, token_budget=3)
    assert scheduler.max_sequences == 3
    for id in "abcd":
        ask(scheduler, 1, id, answer=1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "c"]


def test_no_tensors_and_no_clock():
    """The type of a move comes from the cache's module, and nothing else that knows tensors."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not names & {"torch", "numpy", "time", "random"}
    (cache,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "cache"
    ]
    assert [alias.name for alias in cache.names] == ["Move"]


def test_nothing_to_do():
    assert scheduler_of(4).schedule() == []


# ---- the budget, as in stage 04 -------------------------------------------------------------------------------------


def test_a_long_prompt_goes_in_chunks_and_samples_after_the_last():
    scheduler = scheduler_of(10, max_sequences=1, token_budget=20, max_chunk=4)
    ask(scheduler, 10, "a")
    assert [step(scheduler) for _ in range(5)] == [
        [("a", 0, 4, False)],
        [("a", 4, 4, False)],
        [("a", 8, 2, True)],
        [("a", 10, 1, True)],
        [("a", 11, 1, True)],
    ]


def test_decodes_go_first_and_prompts_share_the_rest():
    scheduler = scheduler_of(40, max_sequences=4, token_budget=8)
    ask(scheduler, 12, "long")
    ask(scheduler, 2, "b")
    assert step(scheduler) == [("long", 0, 8, False)]
    assert step(scheduler) == [("long", 8, 4, True), ("b", 0, 2, True)]
    ask(scheduler, 9, "c")
    ask(scheduler, 3, "d")
    assert step(scheduler) == [("long", 12, 1, True), ("b", 2, 1, True), ("c", 0, 6, False)]
    assert step(scheduler) == [
        ("long", 13, 1, True),
        ("b", 3, 1, True),
        ("c", 6, 3, True),
        ("d", 0, 3, True),
    ]


def test_a_decode_overtakes_a_prompt_that_was_admitted_before_it():
    scheduler = scheduler_of(40, max_sequences=2, token_budget=4, max_chunk=3)
    ask(scheduler, 9, "long")
    ask(scheduler, 1, "short")
    assert step(scheduler) == [("long", 0, 3, False), ("short", 0, 1, True)]
    assert step(scheduler) == [("short", 1, 1, True), ("long", 3, 3, False)]


def test_without_chunks_a_prompt_runs_whole_and_nobody_overtakes_it():
    scheduler = scheduler_of(40, max_sequences=4, token_budget=10, chunked=False)
    first = ask(scheduler, 6, "a")
    ask(scheduler, 10, "big")
    ask(scheduler, 1, "small")
    assert step(scheduler) == [("a", 0, 6, True)]
    assert step(scheduler) == [
        ("a", 6, 1, True)
    ]  # there is room for "small", but "big" is first in line
    scheduler.finish(first)
    assert step(scheduler) == [("big", 0, 10, True)]
    assert step(scheduler) == [("big", 10, 1, True), ("small", 0, 1, True)]


def order_of_admission(scheduler, passes):
    """The ids in the order in which they are let in, one at a time; each stays for one pass."""
    admitted = []
    for _ in range(passes):
        for each in scheduler.schedule():
            admitted.append(each.request.id)
            scheduler.finish(each.request)
    return admitted


@pytest.mark.parametrize("policy, order", [("fcfs", "abcdef"), ("priority", "ebdcaf")])
def test_the_order_of_admission(policy, order):
    """By arrival, or by priority with ties by arrival."""
    scheduler = scheduler_of(10, max_sequences=1, policy=policy)
    for id, priority in zip("abcdef", (2, 0, 1, 0, -3, 2), strict=True):
        ask(scheduler, 1, id, priority)
    assert order_of_admission(scheduler, 6) == list(order)


@pytest.mark.parametrize("priority, patience", [(1, 1), (3, 5), (10, 4)])
def test_nobody_starves_under_a_constant_stream_of_urgent_requests(priority, patience):
    """One at a time, one urgent arrival a pass: without ageing the modest one would wait for ever."""
    scheduler = scheduler_of(40, max_sequences=1, policy="priority", patience=patience)
    modest = ask(scheduler, 1, "modest", priority)
    for passes in range(priority * patience + 1):
        assert modest.state is State.WAITING or passes == priority * patience
        ask(scheduler, 1, "urgent", 0)
        (work,) = scheduler.schedule()
        scheduler.finish(work.request)
    assert modest.state is State.FINISHED


def test_work_knows_its_prompt_tokens():
    request = make(5)
    for start, count, prefill in [
        (0, 5, 5),
        (0, 3, 3),
        (3, 2, 2),
        (5, 1, 0),
        (3, 4, 2),
        (0, 9, 5),
        (7, 2, 0),
    ]:
        assert Work(request, [0], start, count, True).prefill_tokens == prefill


# ---- admission ------------------------------------------------------------------------------------------------------


def test_a_request_is_let_in_with_blocks_for_what_it_has_and_not_for_what_may_come():
    """Four prompts of 8 tokens on 10 blocks of 4, with answers of up to 16: reserved in full, one would run and not four."""
    scheduler = scheduler_of(10)
    for id in "abcde":
        ask(scheduler, 8, id)
    work = scheduler.schedule()
    assert [each.request.id for each in work] == list("abcde")
    assert blocks_of(scheduler) == dict.fromkeys("abcde", 2)
    assert all(each.blocks is scheduler.tables[each.request].blocks for each in work)
    assert scheduler.moves == [Move("wipe", block, block) for each in work for block in each.blocks]


def test_who_does_not_fit_waits_and_nobody_overtakes():
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
def test_the_watermark_stays_free_when_others_run(watermark, admitted):
    """Of 6 blocks, each takes 2: at least so many are left, rounded up, when somebody comes in beside others."""
    scheduler = scheduler_of(6, watermark=watermark)
    for id in "abc":
        ask(scheduler, 7, id, answer=2)
    assert "".join(id for id, *_ in step(scheduler)) == admitted


def test_who_is_alone_may_have_it_all():
    scheduler = scheduler_of(6, watermark=0.9)
    ask(scheduler, 24, "a", answer=1)
    assert step(scheduler) == [("a", 0, 24, True)]
    assert scheduler.pool.available == 0


@pytest.mark.parametrize(
    "prompt, answer, fits",
    [
        (1, 40, True),
        (1, 41, False),
        (40, 1, True),
        (40, 2, False),
        (41, 1, False),
        (25, 16, True),
        (25, 17, False),
    ],
)
def test_what_can_never_fit_is_refused_and_leaves_no_trace(prompt, answer, fits):
    """10 blocks of 4 tokens; the last token of an answer is never computed."""
    scheduler = scheduler_of(10)
    request = make(prompt, "a", answer=answer)
    if fits:
        scheduler.add(request)
        for _ in range(answer):
            assert [id for id, *_ in step(scheduler)] == ["a"]
        assert (scheduler.counts.preemptions, scheduler.pool.owned) == (0, 10)
        return
    with pytest.raises(UserError):
        scheduler.add(request)
    assert (request.state, scheduler.unfinished, scheduler.waiting) == (State.NEW, 0, [])


def test_a_refusal_says_the_numbers():
    scheduler = scheduler_of(10)
    message = "has 25 tokens and its answer up to 30: that takes 14 blocks of 4 tokens, and there are 10: ask for at most 16 tokens,"
    with pytest.raises(UserError, match=message):
        ask(scheduler, 25, answer=30)
    with pytest.raises(
        UserError,
        match="has 41 tokens .* takes 11 blocks of 4 tokens, and there are 10: shorten the prompt, or",
    ):
        ask(scheduler, 41, answer=1)
    ask(scheduler, 25, answer=16)  # the advice is right, and it is the best


def test_nobody_is_refused_for_tokens_that_the_context_has_no_room_for():
    """A server's answer is "up to 10,000 tokens" by default; the model ends it at its context."""
    scheduler = scheduler_of(10)
    with pytest.raises(UserError, match="takes 2503 blocks"):
        ask(scheduler, 10, answer=10_000)
    scheduler.longest = 41
    ask(scheduler, 10, answer=10_000)
    scheduler.longest = 42
    with pytest.raises(UserError, match="takes 11 blocks"):
        ask(scheduler, 10, answer=10_000)


def test_without_chunks_a_prompt_over_the_budget_is_refused_and_leaves_no_trace():
    scheduler = scheduler_of(40, max_sequences=2, token_budget=10, chunked=False)
    request = make(11)
    with pytest.raises(
        UserError,
        match="has 11 tokens and a step has room for 10: allow chunks, or raise the budget",
    ):
        scheduler.add(request)
    assert (request.state, scheduler.unfinished) == (State.NEW, 0)


# ---- requests come and go -------------------------------------------------------------------------------------------


def test_a_waiting_request_can_leave_the_line():
    scheduler = scheduler_of(4, max_sequences=1)
    ask(scheduler, 1, "a", answer=2)
    waits = ask(scheduler, 1, "b", answer=2)
    step(scheduler)
    scheduler.finish(waits)
    assert (waits.state, scheduler.waiting, scheduler.unfinished) == (State.FINISHED, [], 1)


@pytest.mark.parametrize("state", [State.NEW, State.FINISHED], ids=lambda state: state.value)
def test_only_a_request_that_is_in_can_be_finished(state):
    scheduler = scheduler_of(4)
    request = make(1)
    request.state = state
    with pytest.raises(RuntimeError, match="cannot go from"):
        scheduler.finish(request)


def test_a_request_is_added_once():
    scheduler = scheduler_of(4)
    request = ask(scheduler, 1, answer=2)
    with pytest.raises(RuntimeError, match="from waiting to waiting"):
        scheduler.add(request)
    assert scheduler.unfinished == 1


def test_blocks_come_back_when_a_request_ends_and_full_ones_can_be_found():
    scheduler = scheduler_of(10)
    request = ask(scheduler, 9, "a")
    step(scheduler)
    assert scheduler.pool.owned == 3
    scheduler.finish(request)
    assert (scheduler.pool.owned, len(scheduler.pool.cached), scheduler.tables) == (0, 2, {})


def test_nothing_of_a_request_with_an_error_can_be_found():
    scheduler = scheduler_of(10)
    request = ask(scheduler, 9, "a")
    step(scheduler)
    request.output.fail(UserError("the scores are not numbers"))
    scheduler.finish(request)
    assert (len(scheduler.pool.free), scheduler.pool.found) == (10, {})


# ---- prefix caching -------------------------------------------------------------------------------------------------


def run_one(scheduler, prompt, id="", salt=b"", answer=1):
    """A request by itself, from beginning to end; its first share of a pass, as (start, count)."""
    request = ask(scheduler, prompt, id, answer=answer, salt=salt)
    (_, start, count, _), *_ = step(scheduler)
    for _ in range(answer - 1):
        step(scheduler)
    scheduler.finish(request)
    return start, count


PROMPT = list(range(100, 130))


@pytest.mark.parametrize(
    "first, second, hit",
    [
        (12, 13, 12),
        (12, 12, 8),  # all of it is there, but the last token is computed: it gives the next one
        (13, 12, 8),
        (12, 30, 12),
        (11, 30, 8),  # only full blocks
        (4, 5, 4),
        (4, 4, 0),
        (3, 30, 0),
        (30, 4, 0),
        (30, 9, 8),
    ],
)
def test_what_was_computed_is_found_by_whoever_begins_the_same(first, second, hit):
    scheduler = scheduler_of(20)
    run_one(scheduler, PROMPT[:first])
    assert run_one(scheduler, PROMPT[:second]) == (hit, second - hit)
    assert (scheduler.counts.lookup_tokens, scheduler.counts.hit_tokens) == (first + second, hit)
    assert scheduler.counts.hit_rate == hit / (first + second)


def test_found_blocks_are_not_taken_and_not_wiped():
    scheduler = scheduler_of(20)
    run_one(scheduler, PROMPT[:12])
    request = ask(scheduler, PROMPT[:14])
    (work,) = scheduler.schedule()
    found = scheduler.pool.match(scheduler.tables[request].digests)
    assert (work.start, work.blocks[:3]) == (12, found)
    assert scheduler.moves == [Move("wipe", work.blocks[3], work.blocks[3])]


def test_a_request_shares_with_one_that_still_runs():
    scheduler = scheduler_of(20)
    one = ask(scheduler, PROMPT[:14])
    step(scheduler)
    two = ask(scheduler, PROMPT[:10])
    step(scheduler)
    tables = scheduler.tables
    assert tables[two].blocks[:2] == tables[one].blocks[:2]
    assert tables[two].blocks[2] not in tables[one].blocks
    assert (scheduler.pool.shared, scheduler.pool.owned) == (2, 5)


def test_answers_are_found_too():
    """A conversation goes on: what was said is part of the next prompt."""
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


def test_what_was_evicted_is_computed_again():
    scheduler = scheduler_of(4)
    run_one(scheduler, PROMPT[:12])
    run_one(scheduler, [7] * 8)  # takes the free block, and evicts the end of what is cached
    assert scheduler.pool.evictions == 1
    assert run_one(scheduler, PROMPT[:13]) == (8, 5)


def test_found_blocks_that_nobody_holds_are_not_counted_as_free_room_too():
    """3 of 4 blocks are cached and found. The rest of the prompt takes two more, and only one is there."""
    scheduler = scheduler_of(5)
    run_one(scheduler, PROMPT[:12])
    holder = ask(scheduler, 4, "h", answer=2)
    step(scheduler)
    waits = ask(scheduler, PROMPT[:17], answer=2)
    assert [id for id, *_ in step(scheduler)] == ["h"]
    assert (waits.state, len(scheduler.pool.match(scheduler.tables[waits].digests))) == (
        State.WAITING,
        3,
    )
    scheduler.finish(holder)
    assert step(scheduler) == [("", 12, 5, True)]


def test_a_block_stays_while_anybody_holds_it():
    """Two requests with the same beginning, and a fork: whoever goes first, and in whatever way, the blocks stay."""
    scheduler = scheduler_of(12)
    one = ask(scheduler, PROMPT[:14], "one")
    step(scheduler)
    two = ask(scheduler, PROMPT[:10], "two")
    step(scheduler)
    three = fork(scheduler, two, "three")
    pool, digests, shared = (
        scheduler.pool,
        scheduler.tables[one].digests[:2],
        list(scheduler.tables[one].blocks[:2]),
    )
    assert [pool.references[block] for block in shared] == [3, 3]
    scheduler.finish(one)
    assert [pool.references[block] for block in shared] == [2, 2]
    scheduler.preempt(two)
    assert [pool.references[block] for block in shared] == [1, 1]
    assert scheduler.tables[three].blocks[:2] == shared
    rest = [
        pool.take() for _ in range(pool.available)
    ]  # memory is short, and still they are not given to anybody,
    assert not set(rest) & set(shared)
    assert pool.match(digests) == shared
    scheduler.finish(three)
    assert pool.match(digests) == shared  # nor when only their names hold them,
    assert pool.take() not in shared  # while there is another one
    assert [pool.take(), pool.take()] == shared[::-1]
    assert pool.match(digests) == []


# ---- memory runs out ------------------------------------------------------------------------------------------------


def three_that_fill_the_pool(policy="fcfs", priorities=(0, 0, 0), **options):
    """ "a", "b" and "c" with 8 tokens computed in 2 blocks each, all 6 blocks owned, and a third block needed by all."""
    scheduler = scheduler_of(6, policy=policy, prefix_caching=False, **options)
    requests = [
        ask(scheduler, 8, id, priority) for id, priority in zip("abc", priorities, strict=True)
    ]
    assert [id for id, *_ in step(scheduler)] == ids(
        sorted(requests, key=lambda each: each.priority * (policy == "priority"))
    )
    assert scheduler.pool.available == 0
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
    """The lowest priority, and of these the latest arrival. Two blocks are enough for the two that need one each."""
    scheduler, requests = three_that_fill_the_pool(policy, priorities)
    others = [request for request in requests if request.id != victim]
    assert sorted(id for id, *_ in step(scheduler)) == ids(others)
    (request,) = scheduler.waiting
    assert (request.id, request.state, request.computed, scheduler.counts.recomputed) == (
        victim,
        State.WAITING,
        0,
        1,
    )
    assert request.output.token_ids == [WORD.id]  # what it has said stays said
    assert blocks_of(scheduler) == {each.id: 3 * (each in others) for each in requests}


def test_the_junior_gives_way_even_if_it_is_the_one_that_needs_a_block():
    scheduler = scheduler_of(4, prefix_caching=False)
    ask(scheduler, 9, "a", answer=8)
    ask(scheduler, 4, "b", answer=8)
    step(scheduler)
    assert scheduler.pool.available == 0
    assert [id for id, *_ in step(scheduler)] == ["a"]  # which needs nothing
    assert ids(scheduler.waiting) == ["b"]


def test_the_senior_is_served_first_even_if_it_was_let_in_later():
    """One block is left and both need one: the junior does not take it, to be preempted at once."""
    scheduler = scheduler_of(5, policy="priority", prefix_caching=False)
    ask(scheduler, 7, "junior", priority=1, answer=8)
    step(scheduler)
    senior = ask(scheduler, 8, "senior", answer=8)
    step(scheduler)
    assert (ids(scheduler.running), scheduler.pool.available) == (["junior", "senior"], 1)
    (work,) = scheduler.schedule()
    block = work.blocks[2]
    assert (work.request, scheduler.moves, ids(scheduler.waiting)) == (
        senior,
        [Move("wipe", block, block)],
        ["junior"],
    )


def test_who_finds_nobody_more_junior_gives_way_itself():
    """Of 8 blocks, the two of "d" serve "a" and "b"; for "c" there is nobody left but itself."""
    scheduler = scheduler_of(8, prefix_caching=False)
    for id in "abcd":
        ask(scheduler, 8, id)
    step(scheduler)
    assert [id for id, *_ in step(scheduler)] == ["a", "b"]
    assert (ids(scheduler.waiting), scheduler.counts.preemptions, scheduler.pool.available) == (
        ["c", "d"],
        2,
        2,
    )


def test_nobody_is_let_in_in_a_step_that_preempted():
    """Not even one who would fit, and goes before the victim: whoever has just run needs what is left more."""
    scheduler = scheduler_of(7, policy="priority", prefix_caching=False)
    ask(scheduler, 8, "a")
    ask(scheduler, 8, "b")
    ask(scheduler, 12, "c", priority=1)
    step(scheduler)
    ask(scheduler, 1, "tiny", answer=1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b"]
    assert (ids(scheduler.waiting), scheduler.pool.available) == (["c", "tiny"], 1)
    assert [id for id, *_ in step(scheduler)] == ["a", "b", "tiny"]


def test_a_preempted_request_goes_to_its_place_in_line_and_computes_all_it_has_again():
    """Prompt and answer so far in one go: then it says its next token, and none twice."""
    scheduler, (a, b, c) = three_that_fill_the_pool()
    ask(scheduler, 1, "late", answer=1)
    step(scheduler)
    assert ids(scheduler.waiting) == ["c", "late"]
    scheduler.finish(a)
    assert step(scheduler) == [("b", 9, 1, True), ("c", 0, 9, True)]
    assert c.output.token_ids == [WORD.id] * 2
    assert step(scheduler)[:2] == [("b", 10, 1, True), ("c", 9, 1, True)]


def test_a_preempted_request_finds_its_own_blocks_and_that_does_not_flatter_the_rate():
    scheduler = scheduler_of(6)
    requests = [ask(scheduler, 8, id) for id in "abc"]
    for _ in range(2):
        step(scheduler)
    assert ids(scheduler.waiting) == ["c"]
    scheduler.finish(requests[0])
    scheduler.finish(requests[1])
    ((id, start, count, _),) = step(scheduler)
    assert (id, start + count, start % 4) == ("c", 9, 0)
    assert scheduler.counts.lookup_tokens == 24 and scheduler.counts.hit_tokens == 0


def test_a_recompute_that_resumes_on_a_hit_starts_where_the_hit_ends():
    """Another request has the same beginning and kept it: what is found and what is computed make the whole."""
    scheduler = scheduler_of(20)
    ask(scheduler, PROMPT[:9], "one")
    step(scheduler)
    two = ask(scheduler, PROMPT[:14], "two")
    step(scheduler)
    scheduler.preempt(two)
    assert (two.computed, scheduler.tables[two].blocks, two.token_count) == (0, [], 15)
    scheduler.pool.forget(
        scheduler.pool.found[scheduler.tables[two].digests[2]]
    )  # its own third block is gone
    assert step(scheduler)[1] == ("two", 8, 7, True)
    assert two.computed == 15


def test_without_chunks_a_recompute_longer_than_the_budget_still_runs():
    """Only what a preemption has made so long is cut: a prompt never is."""
    scheduler = scheduler_of(
        20, max_sequences=2, token_budget=8, chunked=False, prefix_caching=False
    )
    request = ask(scheduler, 8, "a")
    for _ in range(5):
        step(scheduler)
    scheduler.preempt(request)
    assert [step(scheduler) for _ in range(3)] == [
        [("a", 0, 8, False)],
        [("a", 8, 5, True)],
        [("a", 13, 1, True)],
    ]


def test_without_chunks_the_rest_of_a_long_recompute_does_not_starve():
    """Two compute it, a request and its fork. Newcomers of one token must not take what is left of every budget."""
    scheduler = scheduler_of(
        60, max_sequences=4, token_budget=4, chunked=False, prefix_caching=False
    )
    request = ask(scheduler, 4, "long", answer=50)
    for _ in range(4):
        step(scheduler)
    scheduler.preempt(request)
    step(scheduler)
    child = fork(scheduler, request, "child")
    said = len(child.output.token_ids)
    for _ in range(10):
        ask(scheduler, 1, "newcomer", answer=3)
        step(scheduler)
        for each in list(scheduler.running):
            if each.id == "newcomer" and len(each.output.token_ids) == 3:
                scheduler.finish(each)
    assert len(child.output.token_ids) > said


# ---- swapping -------------------------------------------------------------------------------------------------------


def test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was():
    scheduler, (a, b, c) = three_that_fill_the_pool(swap_blocks=5)
    blocks = list(scheduler.tables[c].blocks)
    work = scheduler.schedule()
    outs = [move for move in scheduler.moves if move.kind == "out"]
    assert [move.source for move in outs] == blocks
    assert [move.target for move in outs] == scheduler.swapped[c]
    assert scheduler.moves[: len(outs)] == outs  # before anybody wipes them
    assert (c.state, c.computed, scheduler.tables[c].blocks, scheduler.swap_pool.owned) == (
        State.WAITING,
        8,
        [],
        2,
    )
    compute(scheduler, work)
    targets = scheduler.swapped[c]
    scheduler.finish(a)
    work = scheduler.schedule()
    mine = scheduler.tables[c].blocks
    assert [move for move in scheduler.moves if move.target in mine] == [
        *[Move("wipe", block, block) for block in mine],
        *[Move("in", source, block) for source, block in zip(targets, mine, strict=False)],
    ]
    assert (len(mine), scheduler.swapped, scheduler.swap_pool.owned) == (3, {}, 0)
    assert [(each.request.id, each.start, each.count) for each in work] == [
        ("b", 9, 1),
        ("c", 8, 1),
    ]
    counts = scheduler.counts
    assert (counts.swapped_out, counts.swapped_in, counts.recomputed, counts.preemptions) == (
        1,
        1,
        0,
        1,
    )


def test_only_the_computed_blocks_are_swapped():
    scheduler = scheduler_of(10, swap_blocks=5, token_budget=6, max_sequences=1)
    request = ask(scheduler, 20, "a")
    step(scheduler)
    scheduler.preempt(request)
    assert (len(scheduler.swapped[request]), request.computed) == (2, 6)
    assert step(scheduler) == [("a", 6, 6, False)]


def test_who_has_computed_nothing_has_nothing_to_swap():
    """It would be held to what it had computed when it comes back, and could find nothing."""
    scheduler = scheduler_of(10, swap_blocks=5)
    request = ask(scheduler, 9, "a")
    scheduler.schedule()
    scheduler.preempt(request)
    assert (scheduler.swapped, scheduler.counts.recomputed, scheduler.counts.swapped_out) == (
        {},
        1,
        0,
    )


def test_what_can_still_be_found_is_shared_and_not_copied_back():
    scheduler = scheduler_of(12, swap_blocks=5)
    one = ask(scheduler, PROMPT[:14], "one")
    two = ask(scheduler, PROMPT[:9], "two")
    step(scheduler)
    step(scheduler)
    scheduler.preempt(two)
    assert (two.computed, len(scheduler.swapped[two])) == (10, 3)
    scheduler.moves.clear()
    partial = scheduler.swapped[two][2]
    work = scheduler.schedule()
    mine = scheduler.tables[two].blocks
    assert mine[:2] == scheduler.tables[one].blocks[:2]
    assert [move for move in scheduler.moves if move.kind == "in"] == [Move("in", partial, mine[2])]
    assert [(each.request.id, each.start, each.count) for each in work] == [
        ("one", 15, 1),
        ("two", 10, 1),
    ]
    assert scheduler.swap_pool.owned == 0


def test_a_hit_beyond_what_was_swapped_is_left_alone():
    """Somebody else has computed more of the same: still the swapped tokens are what comes back."""
    scheduler = scheduler_of(20, swap_blocks=5, token_budget=6, max_sequences=2)
    two = ask(scheduler, PROMPT[:20], "two")
    step(scheduler)
    scheduler.preempt(two)
    run = ask(scheduler, PROMPT[:19], "one")
    scheduler.waiting.reverse()
    while run.remaining > 1 or not run.output.token_ids:
        scheduler.max_sequences = 1
        step(scheduler)
    scheduler.max_sequences = 2
    assert step(scheduler)[1] == ("two", 6, 5, False)


def test_swap_that_finds_no_room_recomputes():
    scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=1)
    step(scheduler)
    assert (scheduler.counts.recomputed, scheduler.counts.swapped_out, c.computed) == (1, 0, 0)
    assert (scheduler.swap_pool.owned, scheduler.swapped) == (0, {})


def test_a_swapped_request_that_is_aborted_gives_its_swap_blocks_back():
    scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=5)
    step(scheduler)
    assert scheduler.swap_pool.owned == 2
    scheduler.finish(c)
    assert (scheduler.swap_pool.owned, scheduler.swapped, c in scheduler.tables) == (0, {}, False)


@pytest.mark.parametrize("answer", ["swap", "recompute"])
def test_auto_asks_which_is_cheaper(answer):
    scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=5, preemption="auto")
    asked: list[int] = []

    def cheaper(tokens):
        asked.append(tokens)
        return answer

    scheduler.cheaper = cheaper
    step(scheduler)
    assert asked == [8]  # the computed ones
    assert (c in scheduler.swapped, scheduler.counts.swapped_out) == (
        answer == "swap",
        int(answer == "swap"),
    )


@pytest.mark.parametrize("preemption, swap_blocks", [("recompute", 5), ("swap", 5), ("auto", 0)])
def test_only_auto_asks_and_only_where_there_is_a_choice(preemption, swap_blocks):
    scheduler, (_, _, c) = three_that_fill_the_pool(swap_blocks=swap_blocks, preemption=preemption)
    scheduler.cheaper = lambda tokens: pytest.fail("nobody should ask")
    step(scheduler)
    assert (c in scheduler.swapped) == (preemption == "swap")


# ---- samples and forks ----------------------------------------------------------------------------------------------


def ask_samples(scheduler, prompt, *names, answer=8):
    first = ask(scheduler, prompt, names[0], answer=answer)
    others = [make(first.output.prompt_ids, name, answer=answer) for name in names[1:]]
    for request in others:
        scheduler.add_sample(first, request)
    return [first, *others]


def test_samples_of_a_prompt_compute_it_once_and_share_all_blocks():
    scheduler = scheduler_of(10, max_sequences=4)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    assert scheduler.unfinished == 3
    assert step(scheduler) == [("s1", 0, 10, True)]
    assert [request.output.token_ids for request in samples] == [[WORD.id]] * 3
    assert (scheduler.pool.owned, scheduler.pool.shared, ids(scheduler.running)) == (
        3,
        3,
        ["s1", "s2", "s3"],
    )


def test_the_first_write_to_a_shared_block_copies_it_and_the_last_holder_writes_in_place():
    scheduler = scheduler_of(10, max_sequences=4)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    step(scheduler)
    partial = scheduler.tables[samples[0]].blocks[2]
    work = scheduler.schedule()
    ends = [scheduler.tables[request].blocks[2] for request in samples]
    assert scheduler.moves == [Move("copy", partial, ends[0]), Move("copy", partial, ends[1])]
    assert (len(set(ends)), ends[2], scheduler.counts.copies) == (3, partial, 2)
    assert (scheduler.pool.owned, scheduler.pool.shared) == (5, 2)
    compute(scheduler, work)
    for _ in range(6):
        step(scheduler)
    assert scheduler.counts.copies == 2  # and nothing else is ever copied


def test_a_full_block_is_shared_and_never_copied():
    scheduler = scheduler_of(10, max_sequences=4)
    ask_samples(scheduler, 8, "s1", "s2", "s3")
    for _ in range(3):
        step(scheduler)
    assert (scheduler.counts.copies, scheduler.pool.shared, scheduler.pool.owned) == (0, 2, 5)


def test_samples_beyond_the_most_sequences_wait_with_their_first_token_said():
    scheduler = scheduler_of(20, max_sequences=2)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["s1", "s2"], ["s3"])
    assert [len(request.output.token_ids) for request in samples] == [1, 1, 1]
    scheduler.finish(samples[0])
    assert step(scheduler)[1] == ("s3", 8, 3, True)  # it finds what is full


def test_when_the_first_sample_is_aborted_the_next_one_leads():
    scheduler = scheduler_of(20, max_sequences=4, token_budget=6)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    ask(scheduler, 1, "late")
    assert step(scheduler) == [("s1", 0, 6, False)]
    scheduler.finish(samples[0])
    assert (ids(scheduler.waiting), scheduler.unfinished) == (["s2", "late"], 3)  # by arrival
    assert step(scheduler) == [("s2", 4, 6, True)]  # the first block can still be found
    assert [len(request.output.token_ids) for request in samples] == [0, 1, 1]
    assert scheduler.samples == {}


@pytest.mark.parametrize("aborted", [1, 2])
def test_a_sample_that_is_aborted_before_it_begins_leaves_the_others(aborted):
    scheduler = scheduler_of(20, max_sequences=4)
    samples = ask_samples(scheduler, 10, "s1", "s2", "s3")
    scheduler.finish(samples[aborted])
    step(scheduler)
    assert [len(request.output.token_ids) for request in samples] == [
        int(index != aborted) for index in range(3)
    ]
    assert (scheduler.unfinished, scheduler.pool.shared) == (2, 3)


def test_all_samples_can_be_aborted_one_after_the_other():
    scheduler = scheduler_of(20, max_sequences=4)
    for request in ask_samples(scheduler, 10, "s1", "s2", "s3"):
        scheduler.finish(request)
    assert (scheduler.unfinished, scheduler.samples, scheduler.waiting, scheduler.pool.owned) == (
        0,
        {},
        [],
        0,
    )


def test_a_sample_has_the_salt_of_the_first():
    scheduler = scheduler_of(20, max_sequences=1)
    first = ask(scheduler, PROMPT[:9], "s1", salt=b"tenant")
    scheduler.add_sample(first, sample := make(PROMPT[:9], "s2"))
    step(scheduler)
    scheduler.finish(first)
    assert step(scheduler) == [("s2", 8, 2, True)]
    scheduler.finish(sample)
    assert run_one(scheduler, PROMPT[:9]) == (0, 9)


def test_a_fork_goes_on_from_where_its_parent_is():
    scheduler = scheduler_of(20, max_sequences=4)
    parent = ask(scheduler, 6, "parent")
    for _ in range(4):
        step(scheduler)
    child = fork(scheduler, parent, "child")
    assert (child.computed, child.state) == (9, State.RUNNING)
    assert scheduler.tables[child].blocks == scheduler.tables[parent].blocks
    assert step(scheduler) == [("parent", 9, 1, True), ("child", 9, 1, True)]
    first, second = (scheduler.tables[each].blocks for each in (parent, child))
    assert first[:2] == second[:2] and first[2] != second[2]


def test_a_fork_in_the_middle_of_a_prompt_shares_what_is_computed_and_nothing_more():
    scheduler = scheduler_of(20, max_sequences=4, token_budget=6)
    parent = ask(scheduler, 20, "parent")
    step(scheduler)
    child = fork(scheduler, parent, "child")
    assert (
        child.computed,
        len(scheduler.tables[child].blocks),
        len(scheduler.tables[parent].blocks),
    ) == (6, 2, 5)
    assert step(scheduler) == [("parent", 6, 6, False)]
    first, second = (scheduler.tables[each].blocks for each in (parent, child))
    assert (first[0] == second[0], set(first[1:]) & set(second[1:])) == (True, set())


@pytest.mark.parametrize("why", ["no room", "parent waits", "parent was preempted"])
def test_a_fork_that_cannot_run_waits_and_computes_what_it_does_not_find(why):
    scheduler = scheduler_of(20, max_sequences=1 if why == "no room" else 2)
    parent = ask(scheduler, 9, "parent")
    if why != "parent waits":
        step(scheduler)
    if why == "parent was preempted":
        scheduler.preempt(parent)
    child = fork(scheduler, parent, "child")
    assert (child.state, child.computed, ids(scheduler.waiting)[-1]) == (State.WAITING, 0, "child")
    scheduler.finish(parent)
    hit = 0 if why == "parent waits" else 8
    assert step(scheduler) == [("child", hit, child.token_count - 1 - hit, True)]


def test_a_fork_that_can_never_fit_is_refused():
    scheduler = scheduler_of(10)
    parent = ask(scheduler, 20, "parent")
    step(scheduler)
    with pytest.raises(UserError, match="takes 14 blocks"):
        scheduler.fork(parent, child := make(20, answer=37))
    assert (child.state, scheduler.unfinished, scheduler.pool.shared) == (State.NEW, 1, 0)


def test_a_copy_for_which_there_is_no_block_preempts():
    """All 3 blocks are shared by two that both write next: one must go, and then the other is alone and copies nothing."""
    scheduler = scheduler_of(3, max_sequences=3)
    ask_samples(scheduler, 10, "s1", "s2", answer=3)
    step(scheduler)
    assert scheduler.pool.available == 0
    assert step(scheduler) == [("s1", 10, 1, True)]
    assert (ids(scheduler.waiting), scheduler.counts.copies, scheduler.counts.preemptions) == (
        ["s2"],
        0,
        1,
    )


# ---- hundreds of random lives ---------------------------------------------------------------------------------------

SEEN: Counter[str] = Counter()  # over all lives: that what is promised was really put to the test


class Life:
    """One scheduler, and beside it what it owes, worked out from the tables and the requests alone."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        size, blocks, sequences = (
            draw(st.integers(1, 4)),
            draw(st.integers(2, 16)),
            draw(st.integers(1, 5)),
        )
        swap_blocks = draw(st.sampled_from([0, 2, 8]))
        self.budget = sequences + draw(st.integers(0, 9))
        self.scheduler = Scheduler(
            BlockPool(blocks, size),
            sequences,
            self.budget,
            policy=draw(st.sampled_from(POLICIES)),
            max_chunk=draw(st.sampled_from([None, 1, 3])),
            chunked=draw(st.booleans()),
            patience=draw(st.integers(1, 5)),
            prefix_caching=draw(st.booleans()),
            watermark=draw(st.sampled_from([0, 0.01, 0.3])),
            preemption=draw(st.sampled_from(PREEMPTIONS)) if swap_blocks else "recompute",
            swap_pool=BlockPool(swap_blocks, size) if swap_blocks else None,
        )
        self.scheduler.cheaper = lambda tokens: "swap" if tokens % 2 else "recompute"
        self.alive: list[Request] = []
        self.accepted = 0
        self.tokens = 0  # that all accepted requests may have together

    def request(self, prompt, answer):
        return Request(
            prompt,
            SamplingParams(max_tokens=answer, seed=0),
            priority=self.draw(st.integers(-1, 2)),
        )

    def add(self):
        prompt = self.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        answer, copies = self.draw(st.integers(1, 8)), self.draw(st.sampled_from([1, 1, 1, 3]))
        first, *others = [self.request(prompt, answer) for _ in range(copies)]
        try:
            self.scheduler.add(first, self.draw(st.sampled_from([b"", b"salt"])))
        except UserError:
            assert first.state is State.NEW
            SEEN["refused"] += 1
            return
        for each in others:
            self.scheduler.add_sample(first, each)
        self._accept(first, *others)
        SEEN["samples"] += bool(others)

    def _accept(self, *requests):
        self.alive += requests
        self.accepted += len(requests)
        self.tokens += sum(
            len(each.output.prompt_ids) + each.sampling.max_tokens for each in requests
        )

    def fork(self):
        parent = self._any(self.alive)
        if parent is None:
            return
        said = parent.output.token_ids
        child = self.request(parent.output.prompt_ids, len(said) + self.draw(st.integers(1, 5)))
        child.output.token_ids += said
        try:
            self.scheduler.fork(parent, child)
        except UserError:
            return
        self._accept(child)
        SEEN["forked " + parent.state.value] += 1

    def abort(self):
        if request := self._any(list(self.scheduler.swapped)) or self._any(
            self.alive
        ):  # few are swapped out at any time
            SEEN[
                "aborted "
                + ("in the swap pool" if request in self.scheduler.swapped else request.state.value)
            ] += 1
            self._finish(request)

    def preempt(self):
        if self.scheduler.running:
            self.scheduler.preempt(
                self.scheduler.running[self.draw(st.integers(0, 9)) % len(self.scheduler.running)]
            )

    def _any(self, requests):
        return requests[self.draw(st.integers(0, 30)) % len(requests)] if requests else None

    def _finish(self, request):
        self.scheduler.finish(request)
        self.alive.remove(request)

    def step(self):
        scheduler = self.scheduler
        before = {
            request: (request.remaining, list(request.output.token_ids))
            for request in scheduler.running
        }
        said = {request: list(request.output.token_ids) for request in self.alive}
        counts = scheduler.counts.preemptions
        work = scheduler.schedule()
        assert bool(work) == bool(self.alive)  # nobody waits for nothing: somebody always gets on
        assert sum(each.count for each in work) <= self.budget
        assert len({each.request for each in work}) == len(work)
        writes: Counter[int] = Counter()
        for each in work:
            request, table = each.request, scheduler.tables[each.request]
            assert (
                request.state is State.RUNNING
                and 1 <= each.count <= request.remaining <= request.token_count
            )
            assert (each.start, each.samples) == (request.computed, each.count == request.remaining)
            assert len(table.blocks) == scheduler.pool.blocks_for(request.token_count)
            size = scheduler.pool.block_size
            writes.update(
                table.blocks[each.start // size : (each.start + each.count - 1) // size + 1]
            )
        for (
            block,
            writers,
        ) in writes.items():  # one writer a block, and nobody else reads what he writes
            assert (
                writers == scheduler.pool.references[block] == 1
                and scheduler.pool.digests[block] is None
            )

        # Every decode that was not preempted runs; and only the most junior were.
        served = {each.request for each in work}
        stayed = [request for request in before if request.state is State.RUNNING]
        gone = [request for request in before if request.state is not State.RUNNING]
        assert {request for request in stayed if before[request][0] == 1} <= served
        assert len(gone) == scheduler.counts.preemptions - counts
        if gone:
            assert max(map(self._rank, stayed)) < min(map(self._rank, gone))
            assert served <= set(stayed)  # and nobody else was let in
            SEEN["preempted"] += 1
            SEEN["preempted with priorities"] += scheduler.policy == "priority"
        assert len(scheduler.running) <= scheduler.max_sequences
        assert all(
            request.output.token_ids == ids for request, ids in said.items()
        )  # nothing said is lost or repeated
        SEEN["resumed on a hit"] += any(
            each.start
            and each.request.output.token_ids
            and each.request not in before
            and each.count > 1
            for each in work
        )
        compute(scheduler, work)
        for request in list(self.alive):
            if len(request.output.token_ids) == request.sampling.max_tokens:
                self._finish(request)

    def _rank(self, request):
        return (request.priority if self.scheduler.policy == "priority" else 0), request.arrival

    def check(self):
        """Every block is in one place and counted right, and every request is somewhere."""
        scheduler = self.scheduler
        tables = {request: table.blocks for request, table in scheduler.tables.items()}
        pools = [(scheduler.pool, tables)] + (
            [(scheduler.swap_pool, scheduler.swapped)] if scheduler.swap_pool else []
        )
        for pool, holders in pools:
            held = Counter(block for blocks in holders.values() for block in blocks)
            assert pool.references == [held[block] for block in range(pool.count)]
            assert sorted([*pool.free, *pool.cached, *held]) == list(range(pool.count))
            assert pool.shared == sum(count > 1 for count in held.values())
        assert set(scheduler.tables) == set(self.alive)
        hidden = [request for samples in scheduler.samples.values() for request in samples]
        assert Counter(scheduler.waiting + scheduler.running + hidden) == Counter(self.alive)
        assert all(tables[request] == [] for request in scheduler.waiting + hidden)
        assert set(scheduler.swapped) <= set(scheduler.waiting)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda request: request.arrival)

    def end(self):
        """All that is left ends, in no more passes than one token at a time and a restart for each would take."""
        for _ in range((self.accepted + 1) * self.tokens + 1):
            if not self.alive:
                break
            self.step()
            self.check()
        counts = self.scheduler.counts
        assert (self.alive, self.scheduler.unfinished, self.scheduler.schedule()) == ([], 0, [])
        assert (self.scheduler.pool.owned, self.scheduler.samples, self.scheduler.swapped) == (
            0,
            {},
            {},
        )
        for name in ("copies", "recomputed", "swapped_in", "hit_tokens"):
            SEEN[name] += bool(getattr(counts, name))
        SEEN["evicted"] += bool(self.scheduler.pool.evictions)


def test_everybody_ends_and_no_block_is_lost():
    """Catches: a block lost or given twice, a shared one written, a senior who gives way, a request that never ends."""
    SEEN.clear()

    @settings(max_examples=120, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def live(data):
        life = Life(data.draw)
        for _ in range(30):
            call = data.draw(
                st.sampled_from(
                    [
                        life.add,
                        life.add,
                        life.step,
                        life.step,
                        life.step,
                        life.fork,
                        life.abort,
                        life.preempt,
                    ]
                )
            )
            call()
            life.check()
        life.end()

    live()
    for event in (
        "refused",
        "samples",
        "forked running",
        "forked waiting",
        "aborted running",
        "aborted waiting",
        "aborted in the swap pool",
        "preempted",
        "preempted with priorities",
        "resumed on a hit",
        "copies",
        "recomputed",
        "swapped_in",
        "hit_tokens",
        "evicted",
    ):
        assert SEEN[event] >= 3, event

"""The engine on its thread: tokens, ends, and what is left after a failure. No HTTP in here."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pytest import approx

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage01_forward.tests.rows import prompt_logprobs
from stage06_serving.async_engine import BROKEN, CLOSING, DEAD, EngineDead, Overloaded, Ticket

from . import tools
from .tools import HANG, Passes, error_of, is_empty, prompt_of, said, soon, started, submit, words


@pytest.fixture
def expected(tiny_model):
    """expected(prompt, count): the tokens of stage 01."""
    return lambda prompt, count: tools.alone(tiny_model, prompt, words(count))


async def test_samples_of_a_prompt_share_its_blocks(gated, tiny_model):
    """Each token belongs to its ticket."""
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1, "ignore_eos": True}
    sampling = [SamplingParams(seed=seed, **options) for seed in range(3)]
    prompt = prompt_of(10)
    async with gated() as (running, made, gate):
        (group,) = running.submit([prompt], sampling)
        gate.allow()
        for ticket, params in zip(group, sampling, strict=True):
            assert await said(running, ticket) == tools.alone(tiny_model, prompt, params)
    assert sum(step.prefill_tokens for step in made.steps) < 2 * len(prompt)


async def test_a_slow_reader_delays_no_other(engine, expected):
    """Its tokens are kept, at most one answer's worth."""
    slow, quick = prompt_of(5, 1), prompt_of(7, 2)
    async with started(engine()) as running:
        stalled = submit(running, slow, 40)
        for _ in range(3):  # others come and go
            assert await said(running, submit(running, quick, 15)) == expected(quick, 15)
        assert await said(running, stalled) == expected(slow, 40)  # all of it at once


async def test_each_step_is_one_message_with_its_tokens_and_its_ends(gated):
    """Listeners hear of it before the tickets' times change: they measure the gap since the last
    token."""
    steps: list[tuple[list[Ticket], list[Ticket]]] = []
    known: list[bool] = []
    news: list[int] = []

    def heard():
        news.append(len(steps))

    def listen(step, spoke, over):
        steps.append(([*spoke], [*over]))
        known.extend(ticket.last_token is not None for ticket in spoke)

    async with gated() as (running, made, gate):
        running.listeners.append(listen)
        (group,) = running.submit([prompt_of(4)], [words(2), words(3)])  # one command: one step
        for ticket in group:
            ticket.news = heard
        gate.allow(1)
        await soon(lambda: news)
        assert len(running.read(group[0])) == 1  # before the end
        gate.allow()
        await soon(lambda: all(ticket.ended for ticket in group))
        one, two = group  # the second waits for the first's blocks
        assert steps == [([one], []), ([one, two], [one]), ([two], []), ([two], [two])]
        assert known == [False, True, False, True, True] and len(made.steps) == 4
        # Once per step, however many tickets have some, or for several steps.
        await soon(lambda: news[-1] == 4)
        assert news == sorted(set(news))


async def test_an_abort_is_heard_within_two_steps(gated, expected):
    """For a running request, and for a waiting one, which then never runs."""
    prompts = [prompt_of(6 + n, n) for n in range(3)]
    async with gated(max_sequences=2) as (running, made, gate):
        leaves, stays, waits = (submit(running, prompt, 30) for prompt in prompts)
        gate.allow(3)
        await soon(lambda: len(made.steps) >= 3)
        for ticket in (leaves, leaves, waits):  # it may be repeated
            running.abort(ticket)
        gate.allow()
        tokens = await said(running, leaves)
        assert tokens == expected(prompts[0], 30)[: len(tokens)] and leaves.reason == "abort"
        assert await said(running, waits) == [] and waits.reason == "abort"
        assert await said(running, stays) == expected(prompts[1], 30)
    assert tools.ran(made).count(leaves.id) <= 3 + 2 and waits.id not in tools.ran(made)


async def test_the_end_of_the_last_request_is_reported_without_a_step(gated):
    async with gated() as (running, made, gate):
        ticket = submit(running, prompt_of(4), 50)
        gate.allow(2)
        await soon(lambda: len(made.steps) >= 2)
        assert running.awaited == 1
        running.abort(ticket)
        # The engine releases it after its pass, but a server that ends says that it waits for none.
        assert running.in_flight and running.awaited == 0
        gate.allow(1)  # at most one pass had begun
        await asyncio.wait_for(said(running, ticket), 10)
        assert ticket.ended and not running.in_flight
        await running.drain(HANG)  # returns at once


async def test_capacity_is_counted_in_sequences(gated):
    prompt = prompt_of(4)
    two = [SamplingParams(max_tokens=4, temperature=1, seed=seed) for seed in range(2)]
    async with gated(max_sequences=2, max_queue=3) as (running, made, gate):
        groups = running.submit([prompt], two) + running.submit([prompt, prompt], [words(4)])
        with pytest.raises(Overloaded, match="4 of at most 5 sequences in flight"):
            running.submit([prompt], two)
        assert len(running.in_flight) == 4  # all or none
        groups += running.submit([prompt], [words(4)])
        with pytest.raises(Overloaded):
            running.submit([prompt], [words(4)])
        gate.allow()
        for ticket in [ticket for group in groups for ticket in group]:
            assert len(await said(running, ticket)) == 4
        for (ticket,) in running.submit([prompt] * 5, [words(4)]):
            await said(running, ticket)


async def test_a_request_that_can_never_be_answered_takes_no_place(engine):
    made = engine(blocks=6)
    async with started(made) as running:
        for prompts, count, message in (
            ([prompt_of(4), [1] * 64], 4, "shorten the prompt"),
            ([[101]], 4, "not in the vocabulary"),
            ([[1]] * 73, 4, "at most 70"),
            ([prompt_of(20)], 6, "takes 7 blocks of 4 tokens, but there are 6"),
        ):
            with pytest.raises(UserError, match=message):
                running.submit(prompts, [words(count)])
        assert not running.in_flight and await running.call(is_empty)
        assert not made.steps
        assert len(await said(running, submit(running, prompt_of(20), 5))) == 5


async def test_prompts_are_scored_in_chunks_beside_other_requests(engine, tiny_model):
    """A stream gets its token in each of these steps, though blocks are few and requests lose
    theirs."""
    prompts = [prompt_of(58, seed) for seed in range(2)]
    made = engine(blocks=17, token_budget=9)
    async with started(made) as running:
        stream = submit(running, prompt_of(4), 40)
        groups = running.submit(prompts, [words(2)] * 2, score=2)
        for prompt, (first, second) in zip(prompts, groups, strict=True):
            await running.begun(first)
            start, *scores = first.scores
            _, *want = prompt_logprobs(tiny_model, prompt, 2)
            assert start is None and len(scores) == len(want) == 57
            for score, right in zip(scores, want, strict=True):
                assert score and right
                assert score.token == approx(right.token)
                assert sum(score.top, ()) == approx(sum(right.top, ()))
            assert await said(running, first) == await said(running, second)
        assert len(await said(running, stream)) == 40
    steps = list(made.steps)
    assert made.scheduler.counts.preemptions and max(step.rows for step in steps) <= 9
    assert all(step.decode_tokens for step in steps[1:38])


async def test_newcomers_overtake_prompts_that_are_scored(gated):
    async with gated(max_sequences=2, policy="priority") as (running, made, gate):
        groups = running.submit([prompt_of(9)] * 6, [words(1)], score=0)
        late = submit(running, prompt_of(4), 2)
        gate.allow()
        for ticket in (late, *(ticket for (ticket,) in groups)):
            await said(running, ticket)
    begun = list(dict.fromkeys(tools.ran(made)))
    assert begun.index(late.id) < 2 and len(begun) == 7


async def test_a_call_is_made_on_the_thread_between_two_steps(gated, expected):
    prompt, passes = prompt_of(5), []

    def watched(*arguments):
        passes.append("begun")
        try:
            return gate(*arguments)
        finally:
            passes.pop()

    async with gated() as (running, made, gate):
        made.runner.run = watched
        ticket = submit(running, prompt, 30)
        await soon(lambda: gate.count)  # a pass has begun
        with pytest.raises(TimeoutError):  # a caller that leaves disturbs nothing
            await asyncio.wait_for(running.call(lambda _: None), 0.05)
        gate.allow()
        for _ in range(5):
            seen = await running.call(lambda _: (threading.current_thread().name, list(passes)))
            assert seen == ("engine", [])  # no pass is being made
        with pytest.raises(ZeroDivisionError):
            await running.call(lambda _: 1 // 0)
        assert await said(running, ticket) == expected(prompt, 30)  # the thread lives on
        await running.stop()
        await asyncio.sleep(0)
        with pytest.raises(EngineDead):
            await running.call(lambda _: None)


async def test_requests_that_outlast_the_grace_end_with_an_error(gated):
    """Also those whose prompt is scored."""
    ended: list[Ticket] = []
    async with gated(max_sequences=1) as (running, made, gate):
        running.listeners.append(lambda step, spoke, over: ended.extend(over))
        tickets = [submit(running, prompt_of(4), 50) for _ in range(2)]
        tickets += running.submit([prompt_of(9)], [words(1)], score=0)[0]
        gate.allow(2)
        await soon(lambda: len(made.steps) >= 2)
        await running.drain(0.02)
        assert ended == tickets  # as the metrics count them
        assert {ticket.reason for ticket in ended} == {"error"}
        assert [await error_of(running, ticket) for ticket in tickets] == [CLOSING] * 3
        with pytest.raises(EngineDead):
            await running.begun(tickets[-1])
        gate.allow(1)
    assert len(made.steps) <= 3 and len(ended) == 3


async def test_a_failing_step_ends_only_its_requests(engine, expected):
    """Two run when it fails, and two wait. The waiting ones and a later request get their
    tokens."""
    made, prompts = engine(max_sequences=2), [prompt_of(4 + i, i) for i in range(5)]
    Passes(made.runner, {3})
    async with started(made) as running:
        tickets = [submit(running, prompt, 12) for prompt in prompts[:4]]
        assert [await error_of(running, ticket) for ticket in tickets[:2]] == [BROKEN] * 2
        tickets.append(submit(running, prompts[4], 12))
        for ticket, prompt in zip(tickets[2:], prompts[2:], strict=True):
            assert await said(running, ticket) == expected(prompt, 12)
        assert running.alive


async def test_a_failure_outside_of_a_pass_ends_all(gated, expected):
    """Here the preparation of memory fails, for the second pass."""
    async with gated(max_sequences=1) as (running, made, gate):

        def failing(moves):
            made.runner.move = move
            raise RuntimeError("a planted fault")

        tickets = [submit(running, prompt_of(4), 9) for _ in range(3)]
        await soon(lambda: gate.count == 1)
        move, made.runner.move = made.runner.move, failing
        gate.allow()
        assert [await error_of(running, ticket) for ticket in tickets] == [BROKEN] * 3
        assert await said(running, submit(running, prompt_of(4), 9)) == expected(prompt_of(4), 9)


async def test_a_defect_in_adding_ends_all_samples_and_nothing_else(engine, expected):
    """Tickets of requests that the engine does not know end, too, and free their places."""
    made, prompt = engine(), prompt_of(4)
    enqueue, faults = made.enqueue, iter([None, RuntimeError("a planted fault")])

    def broken(request):
        if error := next(faults, None):
            raise error
        enqueue(request)

    made.enqueue = broken
    async with started(made) as running:
        (group,) = running.submit([prompt], [words(50)] * 3)
        assert [await error_of(running, ticket) for ticket in group] == [BROKEN] * 3
        assert not running.in_flight
        assert await said(running, submit(running, prompt, 5)) == expected(prompt, 5)


async def test_only_failures_in_a_row_count(engine, expected):
    made = engine()
    passes = Passes(made.runner, {1, 2, 4, 5, 7, 8})
    async with started(made) as running:
        for _ in range(3):
            assert await error_of(running, submit(running, prompt_of(4), 4)) == BROKEN
            # Until the probe has found that steps work.
            await soon(lambda: passes.count in (3, 6, 9) and is_empty(made))
        assert await said(running, submit(running, prompt_of(4), 4)) == expected(prompt_of(4), 4)


@pytest.mark.parametrize(("which", "lives"), [({1}, True), ({1, 2, 3}, False)])
async def test_the_probe_finds_out_when_no_request_is_left(engine, which, lives):
    """One request fails, and no other comes: a broken engine must not look healthy."""
    made = engine()
    Passes(made.runner, which)
    async with started(made) as running:
        assert await error_of(running, submit(running, prompt_of(4), 4)) == BROKEN
        await soon(lambda: not running.alive or made.steps and is_empty(made))
        assert running.alive is lives


@pytest.mark.parametrize("error", [RuntimeError(), SystemExit()], ids=["always", "thread ends"])
async def test_nothing_waits_for_a_dead_engine(engine, error):
    """Running requests, waiting ones and calls, queued or late, all get an answer."""
    made, ended = engine(max_sequences=1), list[Ticket]()
    gate = Passes(made.runner, range(2, 1000), error, gate=True)
    async with started(made) as running:
        running.listeners.append(lambda step, spoke, over: ended.extend(over))
        tickets = [submit(running, prompt_of(4), 10) for _ in range(6)]
        gate.allow(1)
        await soon(lambda: gate.count == 2)  # the thread is in a pass that fails
        queued = asyncio.create_task(running.call(lambda _: None))
        await asyncio.sleep(0)
        gate.allow()
        errors = [await error_of(running, ticket) for ticket in tickets]
        assert set(errors) <= {BROKEN, DEAD} and errors[-1] == DEAD
        assert not running.alive and not running.in_flight
        assert set(ended) == set(tickets) and len(ended) == len(tickets)
        with pytest.raises(EngineDead, match="restart the server"):
            submit(running, [1], 1)
        with pytest.raises(EngineDead, match="restart the server"):
            await running.call(lambda _: None)
        await asyncio.wait([queued])
        await running.drain(HANG)

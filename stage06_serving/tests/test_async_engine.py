"""The engine on its thread: tokens, ends, and what is left after a failure. No HTTP in here."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage06_serving.async_engine import CLOSING, EngineDead, Overloaded
from stage06_serving.tests import tools
from stage06_serving.tests.tools import error_of, is_empty, prompt_of, run, said, submit, until

# ---- tokens -------------------------------------------------------------------------------------


def test_the_tokens_are_those_of_the_first_stage(gated, expected):
    made, gate = gated(max_sequences=4)
    prompts = [prompt_of(1 + 5 * i % 23, i) for i in range(12)]

    async def script(running):
        tickets = [submit(running, prompt, 5 + i) for i, prompt in enumerate(prompts)]
        gate.allow()
        answers = await asyncio.gather(*(said(running, ticket) for ticket in tickets))
        assert not running.in_flight
        ends = [(ticket.reason, ticket.generated) for ticket in tickets]
        assert ends == [("length", 5 + i) for i in range(12)]
        for ticket in tickets:
            times = [ticket.arrived, ticket.scheduled, ticket.first_token, ticket.last_token]
            assert times == sorted(time for time in times if time is not None)
        return answers

    answers = run(made, script)
    assert answers == [expected(prompt, 5 + i) for i, prompt in enumerate(prompts)]
    assert max(step.rows for step in made.steps) == 4 and is_empty(made)  # together


def test_samples_of_a_prompt_share_its_blocks(gated, tiny_model):
    """All of them are read at once, and each token belongs to its ticket."""
    made, gate = gated()
    sampling = [
        SamplingParams(max_tokens=6, temperature=1, seed=seed, ignore_eos=True) for seed in range(3)
    ]
    prompt = prompt_of(10)

    async def script(running):
        (group,) = running.submit([prompt], sampling)
        gate.allow()
        answers: dict[str, list[int]] = {ticket.id: [] for ticket in group}
        async for ticket, tokens in running.tokens(group):
            answers[ticket.id] += [token.id for token in tokens]
        return list(answers.values())

    assert run(made, script) == [tools.alone(tiny_model, prompt, params) for params in sampling]
    assert sum(step.prefill_tokens for step in made.steps) < 2 * len(prompt)


def test_a_slow_reader_delays_no_other(engine, expected):
    """Its tokens are kept, and are never more than its answer."""
    made, slow, quick = engine(), prompt_of(5, 1), prompt_of(7, 2)

    async def script(running):
        stalled = submit(running, slow, 40)
        for _ in range(3):  # others come and go
            assert await said(running, submit(running, quick, 15)) == expected(quick, 15)
        await until(lambda: stalled.ended)
        assert len(stalled.fresh) == 40 == stalled.generated
        parts = [[token.id for token in tokens] async for _, tokens in running.tokens([stalled])]
        assert parts == [expected(slow, 40)]  # all of it at once
        (pair,) = running.submit([quick], [tools.words(2), tools.words(50)])  # one ends early
        read = [ticket async for ticket, tokens in running.tokens(pair) for _ in tokens]
        assert [read.count(ticket) for ticket in pair] == [2, 50]

    run(made, script)
    assert is_empty(made)


def test_a_deadline_ends_the_waiting(gated):
    made, gate = gated()

    async def script(running):
        """What has arrived is read before, and does not wait for the end."""
        ticket, read = submit(running, prompt_of(4), 5), []
        gate.allow(1)
        await until(lambda: ticket.fresh)
        deadline = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(TimeoutError):
            async for _, tokens in running.tokens([ticket], deadline):
                read += tokens
        gate.allow()
        assert len(read) == 1 and len(await said(running, ticket)) == 4

    run(made, script)


# ---- abort --------------------------------------------------------------------------------------


def test_an_abort_is_heard_within_two_steps(gated, expected):
    """Of a running request, and of one that waits and is never run."""
    made, gate = gated(max_sequences=2)
    prompts = [prompt_of(6 + n, n) for n in range(3)]

    async def script(running):
        leaves, stays, waits = (submit(running, prompt, 30) for prompt in prompts)
        gate.allow(3)
        await until(lambda: len(made.steps) >= 3)
        for ticket in (leaves, leaves, waits):  # it may be repeated
            running.abort(ticket)
        gate.allow()
        tokens = await said(running, leaves)
        assert tokens == expected(prompts[0], 30)[: len(tokens)] and leaves.reason == "abort"
        assert await said(running, waits) == [] and waits.reason == "abort"
        assert await said(running, stays) == expected(prompts[1], 30)
        return leaves.id, waits.id

    ids = run(made, script)
    passes = [[each.request_id for each in step.sequences] for step in made.steps]
    left, waited = (sum(id in names for names in passes) for id in ids)
    assert left <= 3 + 2 and waited == 0 and len(passes) >= 30 and is_empty(made)


def test_the_end_of_the_last_request_is_reported_without_a_step(gated):
    made, gate = gated()

    async def script(running):
        ticket = submit(running, prompt_of(4), 50)
        gate.allow(2)
        await until(lambda: len(made.steps) >= 2)
        running.abort(ticket)
        gate.allow(1)  # at most one pass had begun
        await said(running, ticket)
        assert ticket.ended and not running.in_flight
        await running.drain(tools.HANG)  # returns at once

    run(made, script)
    assert is_empty(made)


# ---- capacity -----------------------------------------------------------------------------------


def test_capacity_is_counted_in_sequences(gated):
    made, gate = gated(max_sequences=2)
    prompt = prompt_of(4)
    two = [SamplingParams(max_tokens=4, temperature=1, seed=seed) for seed in range(2)]

    async def script(running):
        assert running.capacity == 5
        groups = running.submit([prompt], two) + running.submit([prompt, prompt], [tools.words(4)])
        with pytest.raises(Overloaded, match="4 sequences in flight, of at most 5"):
            running.submit([prompt], two)
        assert len(running.in_flight) == 4  # all or none
        groups += running.submit([prompt], [tools.words(4)])
        with pytest.raises(Overloaded):
            running.submit([prompt], [tools.words(4)])
        assert running.rejected == 2
        gate.allow()
        for ticket in [ticket for group in groups for ticket in group]:
            assert len(await said(running, ticket)) == 4
        for (ticket,) in running.submit([prompt] * 5, [tools.words(4)]):
            await said(running, ticket)

    run(made, script, max_queue=3)
    assert is_empty(made)


def test_a_request_that_can_never_be_answered_takes_no_place(engine):
    made = engine(blocks=6)

    async def script(running):
        for prompts, count, message in (
            ([prompt_of(4), [1] * 64], 4, "shorten the prompt"),
            ([[101]], 4, "not in the vocabulary"),
            ([[1]] * 73, 4, "at most 70"),
            ([prompt_of(20)], 6, "takes 7 blocks of 4 tokens, and there are 6"),
        ):
            with pytest.raises(UserError, match=message):
                running.submit(prompts, [tools.words(count)])
        assert not running.in_flight and await running.call(is_empty)
        assert not made.steps
        assert len(await said(running, submit(running, prompt_of(20), 5))) == 5

    run(made, script)


def test_other_work_takes_places_and_gives_them_back(gated):
    made, gate = gated(max_sequences=2)
    prompt = prompt_of(4)

    async def script(running):
        ticket = submit(running, prompt, 4)
        with running.place(2), running.place(1):
            submitted = submit(running, prompt, 4)
            with pytest.raises(Overloaded, match="5 sequences in flight, of at most 5"):
                submit(running, prompt, 4)
            with pytest.raises(Overloaded), running.place(1):
                raise AssertionError("there is no place")
        assert running.rejected == 2
        with pytest.raises(ZeroDivisionError), running.place(3):
            1 // 0  # noqa: B018
        with pytest.raises(UserError, match="at most 5"), running.place(6):
            raise AssertionError("there are never 6 places")
        with running.place(3):
            gate.allow()
            for each in (ticket, submitted):
                assert len(await said(running, each)) == 4
        running.submit([prompt] * 5, [tools.words(1)])  # all are free
        await running.drain(tools.HANG)
        with pytest.raises(EngineDead, match="shutting down"), running.place(1):
            raise AssertionError("nothing more is accepted")

    run(made, script, max_queue=3)
    assert is_empty(made)


# ---- commands, and the end ----------------------------------------------------------------------


def test_a_call_is_made_on_the_thread_between_two_steps(gated, expected):
    made, gate = gated()
    prompt, passes = prompt_of(5), []
    forward = made.engine.runner.run

    def watched(*arguments):
        passes.append("begun")
        try:
            return forward(*arguments)
        finally:
            passes.pop()

    made.engine.runner.run = watched

    async def script(running):
        ticket = submit(running, prompt, 30)
        await until(lambda: gate.count)  # a pass has begun
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
        with pytest.raises(EngineDead):
            submit(running, prompt, 3)

    run(made, script)


def test_requests_that_outlast_the_grace_end_with_an_error(gated):
    made, gate = gated(max_sequences=1)
    ended: list[tuple[str, str]] = []

    async def script(running):
        running.listeners.append(
            lambda step, spoke, over: ended.extend((ticket.id, ticket.reason) for ticket in over)
        )
        tickets = [submit(running, prompt_of(4), 50) for _ in range(3)]
        gate.allow(2)
        await until(lambda: len(made.steps) >= 2)
        await running.drain(0.02)
        assert ended == [(ticket.id, "error") for ticket in tickets]  # as the metrics count them
        assert [await error_of(running, ticket) for ticket in tickets] == [CLOSING] * 3
        gate.allow(1)

    run(made, script)
    assert is_empty(made) and len(made.steps) <= 3 and len(ended) == 3


def test_draining_lets_requests_in_flight_end_and_hurry_ends_it(gated, expected):
    made, gate = gated(max_sequences=1)
    prompts = [prompt_of(4 + i, i) for i in range(3)]

    async def script(running):
        hurry = asyncio.Event()
        *tickets, last = [submit(running, prompt, 8) for prompt in prompts]
        drained = asyncio.create_task(running.drain(100 * tools.HANG, hurry.is_set))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            submit(running, prompts[0], 8)
        gate.allow(8 + 8 + 1)
        for ticket, prompt in zip(tickets, prompts, strict=False):
            assert await said(running, ticket) == expected(prompt, 8)
        await asyncio.sleep(0.2)  # several checks
        assert not drained.done() and not last.ended
        hurry.set()
        await drained
        assert await error_of(running, last) == CLOSING and last.reason == "error"
        gate.allow(1)

    run(made, script)
    assert is_empty(made) and len(made.steps) <= 8 + 8 + 2


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "the grace ends"])
def test_draining_waits_for_other_work_too(engine, ends):
    """A prompt that is scored is not a sequence, but its client waits as well."""
    goes_on = threading.Event()

    async def script(running):
        async def work():
            with running.place(1):
                return await running.call(lambda _: goes_on.wait(tools.HANG))

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        drained = asyncio.create_task(running.drain(100 * tools.HANG if ends else 0.02))
        if ends:
            await asyncio.sleep(0.2)  # several checks
            assert not drained.done()
            goes_on.set()
            assert await working is True
        else:
            with pytest.raises(EngineDead, match="shutting down"):
                await working
            goes_on.set()
        await drained

    run(engine(), script)

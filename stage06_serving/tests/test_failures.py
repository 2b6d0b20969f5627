"""The engine's thread after a failure: which requests end, and which go on."""

from __future__ import annotations

import asyncio

import pytest

from stage06_serving.async_engine import BROKEN, DEAD, EngineDead
from stage06_serving.tests.tools import (
    HANG,
    Failing,
    Gate,
    error_of,
    is_empty,
    prompt_of,
    said,
    started,
    submit,
    until,
    words,
)


async def test_a_defect_in_adding_ends_all_samples_and_nothing_else(engine, expected):
    """The tickets of requests that the engine does not know end too, and their places are free."""
    made, prompt, added = engine(), prompt_of(4), []
    add = made.add

    def broken(request):
        added.append(request)
        if len(added) == 2:
            raise RuntimeError("a planted fault")
        return add(request)

    made.add = broken
    async with started(made) as running:
        (group,) = running.submit([prompt], [words(50)] * 3)
        assert [await error_of(running, ticket) for ticket in group] == [BROKEN] * 3
        assert not running.in_flight
        assert await said(running, submit(running, prompt, 5)) == expected(prompt, 5)
    assert len(made.steps) < 40


async def test_a_failing_step_ends_only_its_requests(failing, expected):
    """Two run when it fails, and two wait: these get their tokens, and so does a later request."""
    prompts = [prompt_of(4 + i, i) for i in range(5)]
    async with started(failing({3}, max_sequences=2)) as running:
        tickets = [submit(running, prompt, 12) for prompt in prompts[:4]]
        assert [await error_of(running, ticket) for ticket in tickets[:2]] == [BROKEN] * 2
        assert [ticket.reason for ticket in tickets[:2]] == ["error"] * 2
        tickets.append(submit(running, prompts[4], 12))
        for ticket, prompt in zip(tickets[2:], prompts[2:], strict=True):
            assert await said(running, ticket) == expected(prompt, 12)
        assert running.alive


async def test_only_failures_in_a_row_count(failing, expected):
    made = failing({1, 2, 4, 5, 7, 8})
    async with started(made) as running:
        for _ in range(3):
            assert await error_of(running, submit(running, prompt_of(4), 4)) == BROKEN
            # Until the probe has found that steps work.
            await until(lambda: made.engine.runner.run.count in (3, 6, 9) and is_empty(made))
        assert await said(running, submit(running, prompt_of(4), 4)) == expected(prompt_of(4), 4)


@pytest.mark.parametrize(("which", "lives"), [({1}, True), ({1, 2, 3}, False)])
async def test_the_probe_finds_out_when_no_request_is_left(failing, which, lives):
    """One request fails, and no other comes: a broken engine must not seem well for that."""
    made = failing(which)
    async with started(made) as running:
        assert await error_of(running, submit(running, prompt_of(4), 4)) == BROKEN
        await until(lambda: not running.alive or made.steps and is_empty(made))
        assert running.alive is lives


@pytest.mark.parametrize("error", [RuntimeError(), SystemExit()], ids=["always", "thread ends"])
async def test_nothing_waits_for_a_dead_engine(failing, error):
    """Running and waiting requests and calls are all answered."""
    ended: list[str] = []
    async with started(failing(range(2, 1000), error, max_sequences=1)) as running:
        running.listeners.append(
            lambda step, spoke, over: ended.extend(ticket.id for ticket in over)
        )
        tickets = [submit(running, prompt_of(4), 10) for _ in range(6)]
        errors = [await error_of(running, ticket) for ticket in tickets]
        assert set(errors) <= {BROKEN, DEAD} and errors[-1] == DEAD
        assert not running.alive and not running.in_flight
        assert sorted(ended) == sorted(ticket.id for ticket in tickets)
        with pytest.raises(EngineDead, match="restart the server"):
            submit(running, [1], 1)
        with pytest.raises(EngineDead, match="restart the server"):
            await running.call(lambda _: None)
        await running.drain(HANG)


async def test_a_command_in_the_queue_of_a_dying_thread_is_answered(engine):
    made = engine()
    runner = made.engine.runner
    gate = runner.run = Gate(Failing(runner.run, {2}, SystemExit()))
    async with started(made) as running:
        ticket = submit(running, prompt_of(4), 10)
        gate.allow(1)
        await until(lambda: gate.count == 2)  # the thread is in the pass that ends it
        asked = asyncio.create_task(running.call(lambda _: None))
        await asyncio.sleep(0)
        gate.allow(1)
        with pytest.raises(EngineDead):
            await asked
        assert await error_of(running, ticket) == DEAD

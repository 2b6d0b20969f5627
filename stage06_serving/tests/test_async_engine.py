"""The engine on its thread: what comes back, who is told of an end, and what is left after a failure. No HTTP in here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Scheduler
from stage06_serving.async_engine import (
    BROKEN,
    CLOSING,
    DEAD,
    AsyncEngine,
    Broken,
    EngineDead,
    Overloaded,
    Ticket,
)

HANG = 60.0  # seconds: nothing here takes a tenth of that


class Gate:
    """In front of an engine's forward pass: lets through as many passes as the test allows."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.permits = forward, threading.Semaphore(0)
        self.count = 0  # passes that have come to the gate

    def __call__(self, work: Any) -> Any:
        self.count += 1
        assert self.permits.acquire(timeout=HANG), "nobody has opened the gate"
        return self.forward(work)

    def allow(self, passes: int = 10_000) -> None:
        self.permits.release(passes)


class Failing:
    """A forward pass that raises `error` in those passes whose number, from 1 on, is in `which`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        which: Collection[int],
        error: BaseException | None = None,
    ) -> None:
        self.forward, self.which, self.count = forward, which, 0
        self.error = error or RuntimeError("a planted fault")

    def __call__(self, work: Any) -> Any:
        self.count += 1
        if self.count in self.which:
            raise self.error
        return self.forward(work)


@pytest.fixture
def engine(tiny_model):
    """make(**options): an engine that checks its memory after every step."""

    def make(blocks=80, **options):
        scheduler = Scheduler(BlockPool(blocks, 4), **{"max_sequences": 8, **options})
        return Engine(tiny_model, scheduler=scheduler, sanitize=True)

    return make


@pytest.fixture
def gated(engine, monkeypatch):
    """make(**options): an engine, and the gate before its passes."""

    def make(**options):
        made = engine(**options)
        gate = Gate(made._forward)
        monkeypatch.setattr(made, "_forward", gate)
        return made, gate

    return make


@pytest.fixture
def failing(engine, monkeypatch):
    """make(which, error=None, **options): an engine whose passes with these numbers fail."""

    def make(which, error=None, **options):
        made = engine(**options)
        monkeypatch.setattr(made, "_forward", Failing(made._forward, which, error))
        return made

    return make


@pytest.fixture
def expected(tiny_model):
    """expected(prompt, count): the tokens of stage 01."""
    return lambda prompt, count: Naive(tiny_model).generate([prompt], words(count))[0].token_ids


def run(
    engine: Engine, script: Callable[[AsyncEngine], Awaitable[Any]], max_queue: int = 64
) -> Any:
    """What `script` returns, with `engine` on its thread; afterwards the thread has ended."""

    async def main() -> Any:
        running = AsyncEngine(engine, max_queue)
        running.start()
        try:
            async with asyncio.timeout(HANG):
                return await script(running)
        finally:
            await running.stop()

    return asyncio.run(main())


def words(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def prompt_of(length: int, tiny: Any, seed: int = 0) -> list[int]:
    return random_prompt(length, tiny.config, f"async {seed}")


def submit(running: AsyncEngine, prompt: list[int], count: int) -> Ticket:
    return running.submit([prompt], [words(count)])[0][0]


async def said(running: AsyncEngine, ticket: Ticket) -> list[int]:
    """All tokens of a ticket, to its end."""
    return [token.id async for _, tokens in running.tokens([ticket]) for token in tokens]


async def passes(engine: Engine, count: int) -> None:
    """Until the engine has made so many."""
    while len(engine.steps) < count:
        await asyncio.sleep(0.001)


async def error_of(running: AsyncEngine, ticket: Ticket) -> str | None:
    """Why a ticket ended before its time."""
    try:
        await said(running, ticket)
    except (Broken, EngineDead) as error:
        return str(error)
    return None


def is_empty(engine: Engine) -> bool:
    """Whether nothing waits or runs, and nobody owns a block."""
    return (
        not engine.requests and not engine.scheduler.unfinished and engine.scheduler.pool.owned == 0
    )


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_the_tokens_are_those_of_the_first_stage(gated, expected, tiny):
    made, gate = gated(max_sequences=4)
    prompts = [prompt_of(1 + 5 * i % 23, tiny, i) for i in range(12)]

    async def script(running):
        tickets = [submit(running, prompt, 5 + i) for i, prompt in enumerate(prompts)]
        gate.allow()
        answers = await asyncio.gather(*(said(running, ticket) for ticket in tickets))
        assert not running.in_flight
        assert [(ticket.reason, ticket.generated) for ticket in tickets] == [
            ("length", 5 + i) for i in range(12)
        ]
        for ticket in tickets:
            times = [ticket.arrived, ticket.scheduled, ticket.first_token, ticket.last_token]
            assert times == sorted(time for time in times if time is not None)
        return answers

    answers = run(made, script)
    assert answers == [expected(prompt, 5 + i) for i, prompt in enumerate(prompts)]
    assert max(step.rows for step in made.steps) == 4 and is_empty(
        made
    )  # together, and not one after the other


def test_samples_of_a_prompt_are_computed_together(gated, tiny):
    made, gate = gated()
    sampling = [
        SamplingParams(max_tokens=6, temperature=1, seed=seed, ignore_eos=True) for seed in range(3)
    ]
    prompt = prompt_of(10, tiny)

    async def script(running):
        (group,) = running.submit([prompt], sampling)
        gate.allow()
        return await asyncio.gather(*(said(running, ticket) for ticket in group))

    answers = run(made, script)
    assert answers == [Naive(made.model).generate([prompt], each)[0].token_ids for each in sampling]
    assert sum(step.prefill_tokens for step in made.steps) == 10


def test_a_slow_reader_holds_up_nobody(engine, expected, tiny):
    """What it has not read is kept, and is never more than its answer."""
    made = engine()
    slow, quick = prompt_of(5, tiny, 1), prompt_of(7, tiny, 2)

    async def script(running):
        stalled = submit(running, slow, 40)
        for _ in range(3):  # others come and go
            assert await said(running, submit(running, quick, 15)) == expected(quick, 15)
        while stalled.id in running.in_flight:
            await asyncio.sleep(0.001)
        assert len(stalled.fresh) == 40 == stalled.generated
        return [[token.id for token in tokens] async for _, tokens in running.tokens([stalled])]

    assert run(made, script) == [expected(slow, 40)]  # all of it at once, and nothing lost
    assert is_empty(made)


# ---- abort ----------------------------------------------------------------------------------------------------------


def test_an_abort_is_heard_within_two_steps(gated, expected, tiny):
    made, gate = gated()
    first, second = prompt_of(6, tiny, 1), prompt_of(9, tiny, 2)

    async def script(running):
        leaves, stays = submit(running, first, 50), submit(running, second, 30)
        gate.allow(3)
        await passes(made, 3)
        running.abort(leaves)
        running.abort(leaves)  # as often as one likes
        gate.allow()
        tokens = await said(running, leaves)
        assert leaves.reason == "abort" and tokens == expected(first, 50)[: len(tokens)]
        assert await said(running, stays) == expected(second, 30)
        return leaves.id

    name = run(made, script)
    assert sum(each.request_id == name for step in made.steps for each in step.sequences) <= 3 + 2
    assert len(made.steps) >= 30 and is_empty(made)


def test_who_waits_can_be_aborted_and_is_never_run(gated, tiny):
    made, gate = gated(max_sequences=1)
    prompt = prompt_of(4, tiny)

    async def script(running):
        runs, waits = submit(running, prompt, 10), submit(running, prompt, 10)
        gate.allow(2)
        await passes(made, 2)
        running.abort(waits)
        gate.allow()
        assert (
            await said(running, waits) == [] and waits.scheduled is None and waits.reason == "abort"
        )
        assert len(await said(running, runs)) == 10
        return waits.id

    name = run(made, script)
    assert not any(each.request_id == name for step in made.steps for each in step.sequences)


def test_the_last_one_that_is_aborted_is_told_too(gated, tiny):
    """No step comes after it that could tell."""
    made, gate = gated()

    async def script(running):
        ticket = submit(running, prompt_of(4, tiny), 50)
        gate.allow(2)
        await passes(made, 2)
        running.abort(ticket)
        gate.allow(1)  # at most one pass had begun
        await said(running, ticket)
        assert ticket.ended and not running.in_flight
        await running.drain(HANG)  # it is not waited for

    run(made, script)
    assert is_empty(made)


# ---- capacity -------------------------------------------------------------------------------------------------------


def test_capacity_is_counted_in_sequences(gated, tiny):
    made, gate = gated(max_sequences=2)
    prompt = prompt_of(4, tiny)
    two = [SamplingParams(max_tokens=4, temperature=1, seed=seed) for seed in range(2)]

    async def script(running):
        assert running.capacity == 5
        groups = running.submit([prompt], two) + running.submit([prompt, prompt], [words(4)])
        with pytest.raises(Overloaded, match="4 sequences in hand, of at most 5"):
            running.submit([prompt], two)
        assert len(running.in_flight) == 4  # all or none
        groups += running.submit([prompt], [words(4)])
        with pytest.raises(Overloaded):
            running.submit([prompt], [words(4)])
        assert running.rejected == 2
        gate.allow()
        await asyncio.gather(*(said(running, ticket) for group in groups for ticket in group))
        await asyncio.gather(
            *(said(running, ticket) for (ticket,) in running.submit([prompt] * 5, [words(4)]))
        )

    run(made, script, max_queue=3)
    assert is_empty(made)


def test_what_can_never_be_answered_takes_no_place(engine, tiny):
    made = engine()

    async def script(running):
        with pytest.raises(UserError, match="shorten the prompt"):
            running.submit([prompt_of(4, tiny), [1] * 64], [words(4)])
        with pytest.raises(UserError, match="not in the vocabulary"):
            running.submit([[101]], [words(4)])
        with pytest.raises(UserError, match="at most 72"):
            running.submit([[1]] * 73, [words(4)])
        assert (
            not running.in_flight and await running.call(lambda engine: len(engine.requests)) == 0
        )

    run(made, script)
    assert not made.steps


def test_other_work_takes_places_and_gives_them_back(gated, tiny):
    """And as many are free again, whether it comes to an end or not."""
    made, gate = gated(max_sequences=2)
    prompt = prompt_of(4, tiny)

    async def script(running):
        ticket = submit(running, prompt, 4)
        with running.place(2), running.place(1):
            submitted = running.submit([prompt], [words(4)])[0][0]
            with pytest.raises(Overloaded, match="5 sequences in hand, of at most 5"):
                submit(running, prompt, 4)
            with pytest.raises(Overloaded), running.place(1):
                raise AssertionError("there is no place")
        assert running.rejected == 2
        with pytest.raises(ZeroDivisionError), running.place(3):
            1 // 0  # noqa: B018
        with pytest.raises(UserError, match="at most 5"), running.place(6):
            raise AssertionError("there will never be so many places")
        with running.place(3):
            gate.allow()
            for each in (ticket, submitted):
                assert len(await said(running, each)) == 4
        running.submit([prompt] * 5, [words(1)])  # all are free
        await running.drain(HANG)
        with pytest.raises(EngineDead, match="shutting down"), running.place(1):
            raise AssertionError("nothing more is taken in")

    run(made, script, max_queue=3)
    assert is_empty(made)


# ---- commands, and the end ------------------------------------------------------------------------------------------


def test_a_call_is_made_on_the_thread_between_two_steps(engine, expected, tiny):
    made = engine()
    prompt = prompt_of(5, tiny)

    async def script(running):
        ticket = submit(running, prompt, 30)
        names = [
            await running.call(lambda engine: (threading.current_thread().name, engine.work))
            for _ in range(5)
        ]
        assert names == [("engine", [])] * 5  # no pass is being made
        with pytest.raises(ZeroDivisionError):
            await running.call(lambda engine: 1 // 0)
        assert await said(running, ticket) == expected(prompt, 30)  # the thread lives on
        await running.stop()
        await asyncio.sleep(0)
        with pytest.raises(EngineDead):
            await running.call(lambda engine: None)
        with pytest.raises(EngineDead):
            submit(running, prompt, 3)

    run(made, script)


def test_whoever_leaves_a_call_disturbs_nobody(gated, tiny):
    made, gate = gated()

    async def script(running):
        ticket = submit(running, prompt_of(3, tiny), 3)
        while not gate.count:  # a pass has begun
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.call(lambda engine: None), 0.05)
        gate.allow()
        assert len(await said(running, ticket)) == 3
        assert await running.call(lambda engine: 7) == 7

    run(made, script)


def test_draining_lets_what_is_in_hand_end(gated, expected, tiny):
    made, gate = gated(max_sequences=1)
    prompts = [prompt_of(4 + i, tiny, i) for i in range(3)]

    async def script(running):
        tickets = [submit(running, prompt, 8) for prompt in prompts]
        drained = asyncio.create_task(running.drain(HANG))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            submit(running, prompts[0], 8)
        gate.allow()
        answers = await asyncio.gather(*(said(running, ticket) for ticket in tickets))
        await drained
        return answers

    assert run(made, script) == [expected(prompt, 8) for prompt in prompts]


def test_what_does_not_end_within_the_grace_ends_with_an_error(gated, tiny):
    made, gate = gated(max_sequences=1)
    ended: list[tuple[str, str]] = []

    async def script(running):
        running.listeners.append(
            lambda step, spoke, over: ended.extend((ticket.id, ticket.reason) for ticket in over)
        )
        tickets = [submit(running, prompt_of(4, tiny), 50) for _ in range(3)]
        gate.allow(2)
        await passes(made, 2)
        await running.drain(0.02)
        assert ended == [
            (ticket.id, "error") for ticket in tickets
        ]  # the metrics hear of all of them
        assert [await error_of(running, ticket) for ticket in tickets] == [CLOSING] * 3
        gate.allow(1)

    run(made, script)
    assert is_empty(made) and len(made.steps) <= 3 and len(ended) == 3


def test_who_is_in_a_hurry_ends_the_grace(gated, tiny):
    made, gate = gated()

    async def script(running):
        hurry = asyncio.Event()
        ticket = submit(running, prompt_of(4, tiny), 50)
        drained = asyncio.create_task(running.drain(100 * HANG, hurry.is_set))
        gate.allow(2)
        await passes(made, 2)
        await asyncio.sleep(0.2)  # several looks
        assert not drained.done() and not ticket.ended
        hurry.set()
        await drained
        assert await error_of(running, ticket) == CLOSING and ticket.reason == "error"
        gate.allow(1)

    run(made, script)
    assert is_empty(made) and len(made.steps) <= 3


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "the grace ends"])
def test_draining_waits_for_other_work_too(engine, ends):
    """A prompt that is scored is no sequence, and its client waits all the same: for the scores, or for the word."""
    made, goes_on = engine(), threading.Event()

    async def script(running):
        async def work():
            with running.place(1):
                return await running.call(lambda engine: goes_on.wait(HANG))

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        drained = asyncio.create_task(running.drain(100 * HANG if ends else 0.02))
        if ends:
            await asyncio.sleep(0.2)  # several looks
            assert not drained.done()
            goes_on.set()
            assert await working is True
        else:
            with pytest.raises(EngineDead, match="shutting down"):
                await working
            goes_on.set()
        await drained

    run(made, script)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_defect_in_taking_in_ends_the_request_and_nothing_else(
    engine, monkeypatch, expected, tiny
):
    """Nobody waits for ever for a sequence that the engine does not know; its place is free again."""
    made = engine()
    add, prompt = made.add_samples, prompt_of(4, tiny)

    def broken(prompt, sampling, salt, ids):
        monkeypatch.setattr(made, "add_samples", add)
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(made, "add_samples", broken)

    async def script(running):
        assert await error_of(running, submit(running, prompt, 5)) == BROKEN
        assert not running.in_flight
        return await said(running, submit(running, prompt, 5))

    assert run(made, script) == expected(prompt, 5)


def test_a_failing_step_ends_only_its_requests(failing, expected, tiny):
    """Two run when it fails, and two wait: these get their tokens, and so does who comes later."""
    made = failing({3}, max_sequences=2)
    prompts = [prompt_of(4 + i, tiny, i) for i in range(5)]

    async def script(running):
        tickets = [submit(running, prompt, 12) for prompt in prompts[:4]]
        assert [await error_of(running, ticket) for ticket in tickets[:2]] == [BROKEN] * 2
        assert [ticket.reason for ticket in tickets[:2]] == ["error"] * 2
        assert [await said(running, ticket) for ticket in tickets[2:]] == [
            expected(prompt, 12) for prompt in prompts[2:4]
        ]
        assert running.alive
        return await said(running, submit(running, prompts[4], 12))

    assert run(made, script) == expected(prompts[4], 12)
    assert is_empty(made)


def test_only_failures_in_a_row_count(failing, expected, tiny):
    made = failing({1, 2, 4, 5, 7, 8})
    prompt = prompt_of(4, tiny)

    async def script(running):
        for _ in range(3):
            assert await error_of(running, submit(running, prompt, 4)) == BROKEN
            while made.requests:  # until the probe has found that steps work
                await asyncio.sleep(0.001)
        return await said(running, submit(running, prompt, 4))

    assert run(made, script) == expected(prompt, 4)


def test_the_probe_finds_out_when_nobody_is_left(failing, tiny):
    """One request comes, fails, and nobody asks again: the engine must not seem well for that."""

    def after(which):
        async def script(running):
            assert await error_of(running, submit(running, prompt_of(4, tiny), 4)) == BROKEN
            while running.alive and made.requests:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            return running.alive

        made = failing(which)
        return run(made, script), made

    alive, made = after({1})
    assert alive and is_empty(made)
    alive, made = after({1, 2, 3})
    assert not alive


# pytest takes SystemExit in a thread for an accident.
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@dies
@pytest.mark.parametrize(
    "error", [RuntimeError("always"), SystemExit()], ids=["always", "the thread ends"]
)
def test_nobody_waits_for_a_dead_engine(failing, tiny, error):
    """Those that run, those that wait, and those that want something of the thread: all are told."""
    made = failing(range(2, 1000), error, max_sequences=1)
    ended: list[str] = []

    async def script(running):
        running.listeners.append(
            lambda step, spoke, over: ended.extend(ticket.id for ticket in over)
        )
        tickets = [submit(running, prompt_of(4, tiny), 10) for _ in range(6)]
        errors = [await error_of(running, ticket) for ticket in tickets]
        assert set(errors) <= {BROKEN, DEAD} and errors[-1] == DEAD
        assert not running.alive and not running.in_flight
        assert sorted(ended) == sorted(
            ticket.id for ticket in tickets
        )  # the metrics hear of all of them
        with pytest.raises(EngineDead, match="restart the server"):
            submit(running, [1], 1)
        with pytest.raises(EngineDead, match="restart the server"):
            await running.call(lambda engine: None)
        await running.drain(HANG)

    run(made, script)


@dies
def test_a_command_that_is_in_line_when_the_thread_dies_is_answered(engine, monkeypatch, tiny):
    made = engine()
    gate = Gate(Failing(made._forward, {2}, SystemExit()))
    monkeypatch.setattr(made, "_forward", gate)

    async def script(running):
        ticket = submit(running, prompt_of(4, tiny), 10)
        gate.allow(1)
        while gate.count < 2:  # the thread is in the pass that ends it
            await asyncio.sleep(0.001)
        asked = asyncio.create_task(running.call(lambda engine: None))
        await asyncio.sleep(0)
        gate.allow(1)
        with pytest.raises(EngineDead):
            await asked
        assert await error_of(running, ticket) == DEAD

    run(made, script)

"""A server in the process of its tests: clients that leave, answers that are late, passes that
fail, and the event loop, which answers while the engine computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from fastapi import Request

from stage06_serving.app import unless_gone
from stage06_serving.async_engine import AsyncEngine
from stage06_serving.errors import ApiError

from .asking import HANG, events, numbers_of
from .inside import Inside
from .tools import Passes, Plans, is_empty, until

PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
SCORED = SHORT | {"max_tokens": 0, "echo": True, "logprobs": 1}  # the prompt alone
OPTIONS = ["--engine", "paged", "--linear", "plain", "--kv-memory", "16MiB"]


class House:
    """A server at work: its engine, a gate before its passes, and a client."""

    def __init__(self, engine: Any, http: httpx2.AsyncClient) -> None:
        self.engine, self.http = engine, http
        (self.running,) = (one for one in engine.observers if isinstance(one, AsyncEngine))
        self.seen = Plans(engine).seen
        self.gate = Passes(engine.runner.runner, gate=True)  # below the scores

    def ask(self, **fields: Any) -> asyncio.Task[httpx2.Response]:
        return asyncio.create_task(self.http.post(PATH, json=fields))

    async def idle(self) -> None:
        """Wait until nothing is in the engine, which must be long before the end of LONG."""
        await until(lambda: is_empty(self.engine))
        assert len(self.seen) < 800

    async def numbers(self) -> dict[str, float]:
        return numbers_of((await self.http.get("/metrics")).text)


@asynccontextmanager
async def house(*options: str) -> AsyncIterator[House]:
    inside = Inside([*OPTIONS, *options])
    async with (
        inside.serving() as url,
        httpx2.AsyncClient(base_url=url, timeout=HANG, trust_env=False) as http,
    ):
        await until(lambda: hasattr(inside.engine.runner, "runner"))
        yield House(inside.engine, http)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2, "temperature": 1}])
async def test_a_client_that_leaves_ends_its_answer(fields):
    """The first leaves in mid-answer, the second while queued: it is never served."""
    async with house("--max-num-seqs", "2") as here:
        clients = [here.ask(**LONG | fields) for _ in range(3)]
        here.gate.allow(20)
        await until(lambda: here.gate.count > 20)
        for client in reversed(clients):
            client.cancel()
        await until(lambda: not here.running.awaited)  # the server has seen them leave
        here.gate.allow()
        await here.idle()
        assert len({name for step in here.seen for name in step.ids}) == 2


async def test_work_is_cancelled_when_its_client_leaves_and_not_before():
    ended: list[str] = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return f"{1 / seconds:g}"
        finally:
            ended.append("work")

    def asked(gone):
        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        return Request({"type": "http"}, receive)

    async with asyncio.timeout(10):
        assert await unless_gone(asked(asyncio.Event()), work(0.01)) == "100"
        with pytest.raises(ZeroDivisionError):
            await unless_gone(asked(asyncio.Event()), work(0))
        gone = asyncio.Event()
        waiting = asyncio.create_task(unless_gone(asked(gone), work(100)))
        await asyncio.sleep(0.01)
        assert not waiting.done() and ended == ["work"] * 2
        gone.set()
        with pytest.raises(ApiError):
            await waiting
        assert ended == ["work"] * 3  # it has ended by now; nothing is left behind
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_late_answer_ends_in_the_engine_too():
    """The deadline counts for answers, streams, which must not merely stop, and for prompts that
    are scored."""
    async with house("--request-timeout", "0.2") as here:
        late = [here.ask(**LONG | more) for more in ({}, {"n": 3, "temperature": 1}, SCORED)]
        late.append(here.ask(**SCORED | {"stream": True}))
        for answer in [await task for task in late]:
            assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
        stream = await here.ask(**LONG, stream=True)
        *_, error = events(stream.text)
        assert stream.status_code == 200 and error["error"]["code"] == 504
        here.gate.allow()
        await here.idle()


async def test_scoring_that_is_abandoned_delays_no_answer():
    """300 such requests beside a queue of 4 delayed the next answer by two minutes."""
    body = SCORED | {"prompt": "a " * 300}
    async with house("--max-num-seqs", "2") as here:
        running = here.ask(**SHORT)
        await until(lambda: here.gate.count)
        for stream in (False, True):
            clients = [here.ask(**body, stream=stream) for _ in range(20)]
            await until(lambda: here.running.awaited == 21)
            for client in clients:
                client.cancel()
            await until(lambda: here.running.awaited == 1)
        here.gate.allow()
        assert (await running).status_code == (await here.ask(**SHORT)).status_code == 200
        await here.idle()
        assert sum(step.prefill_tokens for step in here.seen) < 1500  # of 12,000


async def test_an_answer_streams_while_it_is_computed():
    """Its first event arrives before its second token is computed, the rest follow, and a whole
    answer has the same text. How many tokens an event holds depends on how busy the loop is."""
    async with house() as here:
        answer = here.http.stream("POST", PATH, json=LONG | {"max_tokens": 4, "stream": True})
        here.gate.allow(1)
        async with answer as stream:
            lines = stream.aiter_lines()
            first = await anext(lines)
            assert stream.headers["content-type"].startswith("text/event-stream")
            here.gate.allow()
            rest = [first, *[line async for line in lines if line]]
        chunks = events("\n\n".join([*rest, ""]))
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert len(texts) > 1 and chunks[-1]["choices"][0]["finish_reason"] == "length"
        whole = (await here.ask(**LONG | {"max_tokens": 4})).json()["choices"][0]
        assert whole["text"] == "".join(texts)


async def test_the_loop_answers_while_the_engine_computes():
    """/health answers, and refusals go out: a prompt being scored takes up a place, too."""
    async with house("--max-num-seqs", "2", "--max-queue", "3") as here:
        running = [here.ask(**SHORT) for _ in range(4)] + [here.ask(**SCORED)]
        await until(lambda: here.running.awaited == 5)
        for body in (SCORED, SHORT, SHORT | {"stream": True}):
            refused = await here.ask(**body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await here.http.get("/health")).json() == {"status": "ok"}
        assert (await here.numbers())["vllm:admission_rejections_total"] == 3
        here.gate.allow()
        assert [(await task).status_code for task in running] == [200] * 5


async def test_a_failing_pass_is_500_or_an_event_and_a_dead_engine_is_503():
    """Its text is logged and not sent."""
    async with house() as here:
        here.gate.failing, here.gate.gate = {1, 3, 4, 5, 6, 7, 8}, False
        answer = await here.ask(**SHORT)
        assert answer.status_code == 500 and "planted" not in answer.text
        await until(lambda: here.gate.count == 2)  # the probe
        *_, error = events((await here.ask(**LONG, stream=True)).text)
        assert error["error"]["code"] in (500, 503) and "planted" not in str(error)

        async def dead():
            return (await here.http.get("/health")).status_code == 503

        while not await dead():
            await asyncio.sleep(0.01)
        assert (await here.ask(**SHORT)).status_code == 503
        assert (await here.http.get("/live")).status_code == 503


async def test_the_page_s_state_shows_blocks_and_steps():
    async with house() as here:
        here.gate.gate = False
        await here.ask(**SHORT)
        state = (await here.http.get("/live")).json()
        assert [step["counts"][:2] for step in state["steps"]] == [[4, 0], [0, 1], [0, 1]]
        assert sum(length for _, length in state["map"]) == state["blocks"]
        assert state["running"] == [] and state["waiting"] == 0
        number = state["steps"][-1]["number"]
        assert (await here.http.get(f"/live?after={number}")).json()["steps"] == []

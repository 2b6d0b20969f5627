"""Clients that leave, answers that are late, passes that fail, and the event loop, which answers
while the engine computes. A gate before the passes decides what is computed when."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psutil
import pytest
from fastapi import Request

from stage06_serving import service
from stage06_serving.app import unless_gone
from stage06_serving.errors import ApiError

from .tools import HANG, House, events, is_empty, ran, soon

PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
SCORED = SHORT | {"max_tokens": 0, "echo": True, "logprobs": 1}  # the prompt alone


class Busy:
    """A server at work, the gate before its passes, and a client."""

    def __init__(self, house: House, http: httpx2.AsyncClient) -> None:
        self.house, self.http, self.engine = house, http, house.served.engine
        self.gate = house.gate(gate=True)

    def ask(self, **fields: Any) -> asyncio.Task[httpx2.Response]:
        return asyncio.create_task(self.http.post(PATH, json=fields))

    @property
    def awaited(self) -> int:
        return self.house.running.awaited

    async def idle(self) -> None:
        """Wait until nothing is in the engine, which must be long before the end of LONG."""
        await soon(lambda: is_empty(self.engine))
        assert len(self.engine.steps) < 800


@asynccontextmanager
async def busy(*options: str) -> AsyncIterator[Busy]:
    house = House("--kv-memory", "16MiB", *options)
    async with httpx2.AsyncClient(base_url=house.url, timeout=HANG, trust_env=False) as http:
        here = Busy(house, http)
        try:
            yield here
        finally:
            here.gate.allow()
    await asyncio.to_thread(house.stop)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2, "temperature": 1}])
async def test_a_client_that_leaves_ends_its_answer(fields):
    """The first leaves in mid-answer, the second while queued: it is never served."""
    async with busy("--max-num-seqs", "2") as here:
        clients = [here.ask(**LONG | fields) for _ in range(3)]
        here.gate.allow(20)
        await soon(lambda: here.gate.count > 20)
        for client in reversed(clients):
            client.cancel()
        await soon(lambda: not here.awaited)  # the server has seen them leave
        here.gate.allow()
        await here.idle()
        assert len({*ran(here.engine)}) == 2


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

    async with asyncio.timeout(HANG):
        assert await unless_gone(asked(asyncio.Event()), work(0.01)) == "100"
        with pytest.raises(ZeroDivisionError):
            await unless_gone(asked(asyncio.Event()), work(0))
        gone = asyncio.Event()
        waiting = asyncio.create_task(unless_gone(asked(gone), work(1000)))
        await asyncio.sleep(0)
        assert not waiting.done() and ended == ["work"] * 2
        gone.set()
        with pytest.raises(ApiError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing is left behind


async def test_a_late_answer_ends_in_the_engine_too():
    """The deadline counts for answers, streams, which must not merely stop, and for prompts that
    are scored."""
    async with busy("--request-timeout", "0.2") as here:
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
    async with busy("--max-num-seqs", "2") as here:
        running = here.ask(**SHORT)
        await soon(lambda: here.gate.count)
        for stream in (False, True):
            clients = [here.ask(**body, stream=stream) for _ in range(20)]
            await soon(lambda: here.awaited == 21)
            for client in clients:
                client.cancel()
            await soon(lambda: here.awaited == 1)
        here.gate.allow()
        assert (await running).status_code == (await here.ask(**SHORT)).status_code == 200
        await here.idle()
        assert sum(step.prefill_tokens for step in here.engine.steps) < 1500  # of 12,000


async def test_an_answer_streams_while_it_is_computed():
    """Its first event arrives before its second token is computed, and the rest follow. How many
    tokens an event holds depends on how busy the loop is."""
    async with busy() as here:
        answer = here.http.stream("POST", PATH, json=LONG | {"max_tokens": 4, "stream": True})
        here.gate.allow(1)
        async with answer as stream:
            texts = stream.aiter_text()
            first = await anext(texts)
            assert stream.headers["content-type"].startswith("text/event-stream")
            here.gate.allow()
            chunks = events(first + "".join([text async for text in texts]))
        assert len(chunks) > 1 and chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_tokens_that_come_fast_share_an_event(monkeypatch):
    """Or a fast model and many streams would take the processor that computes: see PACE."""
    monkeypatch.setattr(service, "PACE", 0.5)
    async with busy() as here:
        answer = here.ask(**LONG | {"max_tokens": 10, "stream": True})
        for _ in range(10):
            here.gate.allow(1)
            await asyncio.sleep(0.02)
        assert 1 < len(events((await answer).text)) < 5


async def test_the_loop_answers_while_the_engine_computes():
    """/health answers, and refusals go out: a prompt being scored takes up a place, too."""
    async with busy("--max-num-seqs", "2", "--max-queue", "3") as here:
        running = [here.ask(**SHORT) for _ in range(4)] + [here.ask(**SCORED)]
        await soon(lambda: here.awaited == 5)
        for body in (SCORED, SHORT, SHORT | {"stream": True}):
            refused = await here.ask(**body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await here.http.get("/health")).json() == {"status": "ok"}
        here.gate.allow()
        assert [(await task).status_code for task in running] == [200] * 5


async def test_a_failing_pass_is_500_or_an_event_and_a_dead_engine_is_503(caplog):
    """Its text is logged and not sent."""
    async with busy() as here:
        here.gate.failing, here.gate.gate = {1, 3, 4, 5, 6, 7, 8}, False
        answer = await here.ask(**SHORT)
        assert answer.status_code == 500 and "planted" not in answer.text
        await soon(lambda: here.gate.count == 2)  # the probe
        *_, error = events((await here.ask(**LONG, stream=True)).text)
        assert error["error"]["code"] in (500, 503) and "planted" not in str(error)
        await soon(lambda: not here.house.running.alive)
        assert (await here.http.get("/health")).status_code == 503
        assert (await here.ask(**SHORT)).status_code == 503
        assert (await here.http.get("/live")).status_code == 503
        assert "a planted fault" in caplog.text


async def test_the_page_s_state_shows_blocks_and_steps():
    async with busy() as here:
        here.gate.allow()
        await here.ask(**SHORT)
        await here.idle()
        state = (await here.http.get("/live")).json()
        assert [step["counts"][:2] for step in state["steps"]] == [[4, 0], [0, 1], [0, 1]]
        assert sum(length for _, length in state["map"]) == state["blocks"]
        assert state["running"] == state["waiting"] == 0
        number = state["steps"][-1]["number"]
        assert (await here.http.get(f"/live?after={number}")).json()["steps"] == []


async def test_draining_and_hurrying():
    """/health: the engine works. /ready: it takes requests. The first signal lets answers end, the
    second ends them with an error."""
    async with busy("--grace", "3600") as here:
        assert (await here.http.get("/ready")).json() == {"status": "ok"}
        ends = here.http.stream("POST", PATH, json=LONG | {"max_tokens": 3, "stream": True})
        lasts = here.http.stream("POST", PATH, json=LONG | {"stream": True})
        async with ends as ending, lasts as lasting:
            here.house.server.handle_exit(signal.SIGTERM, None)
            await soon(lambda: here.house.running.draining)
            assert (await here.http.get("/health")).json() == {"status": "draining"}
            for refused in (await here.ask(**SHORT), await here.http.get("/ready")):
                assert refused.status_code == 503 and refused.headers["retry-after"]
            here.gate.allow(5)
            last = events((await ending.aread()).decode())[-1]
            assert last["choices"][0]["finish_reason"] == "length"
            here.house.server.handle_exit(signal.SIGTERM, None)
            *chunks, last = events((await lasting.aread()).decode())
            assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
            assert 1 <= len(chunks) < 10 and not any("error" in chunk for chunk in chunks)


@pytest.mark.skipif(os.name != "posix", reason="counts file descriptors")
def test_a_storm_of_clients_that_leave(house, tiny_folder):
    """Each at a different moment, some in mid-request or before it. Everything is released: blocks,
    places, open files; and the next answer is right."""
    options = ["--max-num-seqs", "24", "--max-queue", "300", "--kv-memory", "1MiB"]
    server, chance = house("--model", str(tiny_folder), *options), random.Random(0)
    short = {"prompt": "abcd", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected, process = server.post(json=short).json()["choices"], psutil.Process()
    before, files = server.until_idle(), process.num_fds()

    async def leave(streams: bool) -> None:
        body = json.dumps(short | {"max_tokens": 200, "stream": streams})
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data[: chance.choice([0, len(head) // 2, len(data) - 5, *[len(data)] * 4])])
        await asyncio.sleep(chance.random() * 0.4)
        writer.close()

    async def storm() -> None:
        async with asyncio.timeout(2 * HANG):
            await asyncio.gather(*(leave(number % 2 == 0) for number in range(200)))
            await soon(lambda: process.num_fds() <= files + 6)  # those of this loop

    asyncio.run(storm())
    after = server.until_idle()
    assert after["abort"] >= before["abort"] + 50 and after["error"] == before["error"]
    assert server.post(json=short).json()["choices"] == expected

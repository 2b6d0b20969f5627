"""The application in the process of its tests, without a socket: for tests of a student's copy.

All of it is tested from outside as well, against real servers; but these are processes of their own
and run the reference.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from shared.course.museum.inside import Asking, Inside
from stage06_serving import sse
from stage06_serving.live import MOST_WATCHERS
from stage06_serving.service import Service
from stage06_serving.tests.tools import Failing

LONG = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}


async def idle(inside: Inside) -> None:
    """Until no block is owned."""
    while inside.engine.requests or inside.engine.scheduler.pool.owned:
        await asyncio.sleep(0.005)


def test_an_answer_is_a_stream_only_where_one_was_asked_for():
    async def script(inside: Inside) -> None:
        for path in ("/v1/completions", "/generate"):
            for fields in ({}, {"stream": False}, {"stream": None}):
                answer = await inside.ask(path, SHORT | fields)
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()["usage"]
            answer = await inside.ask(path, SHORT | {"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert list(answer.events())[-1] == "[DONE]"

    Inside.run(script)


def test_a_client_that_leaves_before_its_answer_ends_it():
    async def script(inside: Inside) -> None:
        asking = inside.begin("/v1/completions", LONG)
        await inside.passes(5)
        asking.leave()
        await asking.answer()
        await idle(inside)
        assert len(inside.engine.steps) < 900

    Inside.run(script)


def test_a_late_answer_ends_in_the_engine_too():
    async def script(inside: Inside) -> None:
        assert (await inside.ask("/v1/completions", LONG)).status == 504
        await idle(inside)
        assert len(inside.engine.steps) < 900

    Inside.run(script, request_timeout=0.1)


def test_a_reader_that_stands_still_is_cut_off_in_time(monkeypatch):
    """Catches a deadline that is only checked between two tokens."""

    async def full(asking: Asking, message: dict[str, Any]) -> None:
        """As a socket whose other end does not read."""
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    monkeypatch.setattr(Asking, "_send", full)
    monkeypatch.setattr(sse, "STALLED", 0.1)

    async def script(inside: Inside) -> None:
        async with asyncio.timeout(30):
            await inside.ask("/v1/completions", LONG | {"stream": True})
        await idle(inside)

    Inside.run(script, request_timeout=0.1)


def test_the_number_of_watching_pages_is_limited():
    """100 clients at /live kept the loop busy."""

    async def script(inside: Inside) -> None:
        async def watch() -> Asking:
            page = inside.begin("/live")
            while page.heard.status is None:
                await asyncio.sleep(0.005)
            return page

        watching = [await watch() for _ in range(MOST_WATCHERS)]
        refused = await inside.ask("/live")
        assert refused.status == 503 and refused.headers["retry-after"]
        assert "watch" in refused.json()["error"]["message"]
        watching[0].leave()
        await watching[0].answer()
        watching[0] = await watch()  # there is room again
        for page in watching:
            assert page.heard.status == 200
            page.leave()
            await page.answer()

    Inside.run(script)


def test_a_server_whose_engine_is_dead_can_be_stopped():
    async def script(inside: Inside) -> None:
        inside.engine.runner.run = Failing(inside.engine.runner.run, {1}, SystemExit())
        assert (await inside.ask("/v1/completions", SHORT)).status == 503
        assert (await inside.ask("/health")).status == 503

    Inside.run(script)  # which gives up after a while


def test_a_stream_that_fails_has_an_error_event():
    """The official client takes a stream that just ends for a whole answer."""

    async def script(inside: Inside) -> list[Any]:
        inside.engine.runner.run = Failing(inside.engine.runner.run, {5})
        return list((await inside.ask("/v1/completions", LONG | {"stream": True})).events())

    *chunks, error, done = Inside.run(script)
    assert done == "[DONE]" and error["error"]["code"] == 500
    assert chunks and all("choices" in each for each in chunks)


def test_the_text_of_an_unexpected_error_is_not_sent(monkeypatch):
    monkeypatch.setattr(Service, "score", Failing(None, {1}))

    async def script(inside: Inside) -> None:
        scored = SHORT | {"max_tokens": 0, "echo": True, "logprobs": 1}
        asking = inside.begin("/v1/completions", scored)
        with pytest.raises(RuntimeError):  # the framework raises it again, for the log
            await asking.answer()
        heard = asking.heard
        assert heard.status == 500 and b"planted" not in heard.body and b"its log" in heard.body

    Inside.run(script)


def test_only_the_engines_thread_touches_scheduler_pool_and_cache():
    """Metrics, page and admission read statuses and settings. Every other access is noted here."""
    touched: list[str] = []

    def guard(thing: Any) -> None:
        kind = type(thing)

        class Guarded(kind):  # type: ignore[misc, valid-type]
            def __getattribute__(self, name: str) -> Any:
                if threading.current_thread().name != "engine":
                    touched.append(f"{kind.__name__}.{name}")
                return super().__getattribute__(name)

        thing.__class__ = Guarded

    async def script(inside: Inside) -> None:
        runner, scheduler = inside.engine.runner, inside.engine.scheduler
        for thing in (runner.cache, scheduler.pool, scheduler, runner, inside.engine):
            guard(thing)
        stream = inside.begin("/v1/completions", LONG | {"max_tokens": 600})
        page = inside.begin("/live")
        while b'"running":[["sequence-1",0]' not in page.heard.body:
            await asyncio.sleep(0.001)
        numbers = (await inside.ask("/metrics")).body.decode()
        assert 'vllm:num_requests_running{model_name="stories"} 1.0' in numbers
        sampled = {"n": 2, "temperature": 1, "echo": True, "logprobs": 2, "stream": True}
        scored, long = {"max_tokens": 0, "echo": True, "logprobs": 1}, {"prompt": "a " * 300}
        for fields in (sampled, scored, long, {"max_tokens": 10**6}, {"stop": "e"}):
            status = (await inside.ask("/v1/completions", SHORT | fields)).status
            assert status == (400 if fields == {"max_tokens": 10**6} else 200)
        for path in ("/metrics", "/health", "/v1/models", "/version", "/"):
            assert (await inside.ask(path)).status == 200
        stream.leave()
        await stream.answer()
        while b'"running":[]' not in page.heard.body.splitlines()[-2]:
            await asyncio.sleep(0.01)
        page.leave()
        await page.answer()
        assert not touched, touched
        assert inside.engine and scheduler.running == []  # the guards work:
        assert touched == ["Scheduler.running"]

    Inside.run(script, kv_memory="4MiB")

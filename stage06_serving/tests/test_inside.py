"""The application in the process of its tests, without a socket: what a copy that is laid over the stage can be judged by.

All of it is tested from outside as well, against real servers; but these are processes of their own, with the reference.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shared.course.museum.inside import Asking, Inside
from stage06_serving import sse
from stage06_serving.live import MOST_WATCHERS

LONG = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}


async def idle(inside: Inside) -> None:
    """Until nobody owns a block."""
    while inside.engine.requests or inside.engine.scheduler.pool.owned:
        await asyncio.sleep(0.005)


def test_an_answer_is_a_stream_only_where_one_was_asked_for():
    """Catches a server that streams whatever a client says: there are false, null and nothing at all beside true."""

    async def script(inside: Inside) -> None:
        for path in ("/v1/completions", "/generate"):
            for fields in ({}, {"stream": False}, {"stream": None}):
                answer = await inside.ask(path, SHORT | fields)
                assert (
                    answer.headers["content-type"] == "application/json" and answer.json()["usage"]
                )
            answer = await inside.ask(path, SHORT | {"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert list(answer.events())[-1] == "[DONE]"

    Inside.run(script)


def test_a_client_that_leaves_before_its_answer_ends_it():
    """Catches a server that computes an answer in one piece to its end, whether anybody waits for it or not."""

    async def script(inside: Inside) -> None:
        asking = inside.begin("/v1/completions", LONG)
        await inside.passes(5)
        asking.leave()
        await asking.answer()
        await idle(inside)
        assert len(inside.engine.steps) < 900

    Inside.run(script)


def test_a_late_answer_ends_in_the_engine_too():
    """Catches a 504 behind which the engine goes on."""

    async def script(inside: Inside) -> None:
        answer = await inside.ask("/v1/completions", LONG)
        assert answer.status == 504
        await idle(inside)
        assert len(inside.engine.steps) < 900

    Inside.run(script, request_timeout=0.1)


def test_a_reader_that_stands_still_is_cut_off_in_time(monkeypatch):
    """Catches a deadline that is looked at only between two tokens: who does not read would be kept for ever."""

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


def test_pages_that_watch_are_few():
    """Catches a server that draws for whoever asks: a hundred clients at /live kept the loop from all other work."""

    async def script(inside: Inside) -> None:
        watching = [inside.begin("/live") for _ in range(MOST_WATCHERS)]
        while not all(each.heard.status == 200 for each in watching):
            await asyncio.sleep(0.005)
        refused = await inside.ask("/live")
        assert (
            refused.status == 503
            and refused.headers["retry-after"]
            and "watch" in refused.json()["error"]["message"]
        )
        watching[0].leave()
        await watching[0].answer()
        watching[0] = inside.begin("/live")  # there is room again
        while watching[0].heard.status is None:
            await asyncio.sleep(0.005)
        assert watching[0].heard.status == 200
        for each in watching:
            each.leave()
            await each.answer()

    Inside.run(script)


def test_a_server_whose_engine_is_dead_can_be_stopped():
    """Catches a shutdown that waits for answers which nobody will make."""

    async def script(inside: Inside) -> None:
        def failing(work: Any) -> Any:
            raise SystemExit

        inside.engine._forward = failing
        assert (await inside.ask("/v1/completions", SHORT)).status == 503
        assert (await inside.ask("/health")).status == 503

    Inside.run(script)  # which gives up after a while


def test_a_stream_that_fails_says_so():
    """Catches a stream that is cut: without [DONE] and without an error, the official client takes it for a whole one."""

    async def script(inside: Inside) -> list[Any]:
        forward = inside.engine._forward

        def failing(work: Any) -> Any:
            if len(inside.engine.steps) == 5:
                inside.engine._forward = forward
                raise RuntimeError("a planted fault")
            return forward(work)

        inside.engine._forward = failing
        return list((await inside.ask("/v1/completions", LONG | {"stream": True})).events())

    *said, error, done = Inside.run(script)
    assert done == "[DONE]" and error["error"]["code"] == 500
    assert said and all("choices" in each for each in said)

"""One request: what is written down of good answers, and of failures of every kind. Against the mock, and raw sockets where a
server of any library would be too polite."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from stage07_loadtest import client, mock
from stage07_loadtest.client import (
    CUT,
    ERROR_EVENT,
    FAILURES,
    HTTP_503,
    HTTP_504,
    HTTP_OTHER,
    PROTOCOL,
    REFUSED,
    RESET,
    TIMEOUT,
    TOKENS,
    Record,
    Target,
    open_session,
    read,
    send,
)
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.workload import Ask

ASK = Ask([1, 2, 3], 6)
QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}


async def ask(url: str, count: int = 1, what: Ask = ASK, **fields: Any) -> list[Record]:
    """Requests one after the other through one session."""
    target = Target(url, **{"timeout": 10.0} | fields)
    clock = asyncio.get_running_loop().time
    started = clock()
    async with open_session(target) as session:
        return [
            await send(session, target, what, 0.0, lambda: clock() - started, index)
            for index in range(count)
        ]


def ask_mock(
    count: int = 1, target: dict[str, Any] | None = None, **behaviour: Any
) -> tuple[list[Record], Mock]:
    async def run() -> tuple[list[Record], Mock]:
        async with mock.serving(Behaviour(**QUICK | behaviour)) as server:
            return await ask(server.url, count, **target or {}), server

    return asyncio.run(run())


def ask_raw(answer: bytes, close: bool = True, **fields: Any) -> Record:
    """One request to a socket that reads it whole, writes `answer`, and hangs up or falls silent."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().splitlines()
            if line.startswith(b"content-length")
        )
        await reader.readexactly(length)
        writer.write(answer)
        if not close:
            await reader.read()  # until the client goes
        writer.close()
        over.set()

    async def run() -> Record:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            (record,) = await ask(f"http://127.0.0.1:{port}", **fields)
            await over.wait()
            return record

    return asyncio.run(run())


def http(body: bytes, kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def sse(*data: Any) -> bytes:
    return b"".join(
        b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n"
        for each in data
    )


def chunk(text: str = "", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} | more]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}}
END = chunk(finish_reason="length")
ERROR = {"error": {"message": "out of luck", "type": "ServerError", "code": 500}}
DONE = b"[DONE]"


# ---- good answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_written_down_whole():
    (record,), server = ask_mock()
    assert (record.failure, record.detail, record.status, record.done) == (None, None, 200, True)
    assert (record.asked_tokens, record.prompt_tokens, record.completion_tokens) == (6, 3, 6)
    assert record.finish_reason == "length" and record.chunk_tokens == [1] * 6 and record.index == 0
    assert record.sent is not None
    times = [record.intended, record.sent, *record.chunks, record.end]
    assert len(record.chunks) == 6 and times == sorted(times)
    assert record.chunks[-1] - record.sent >= 0.002 + 5 * 0.001  # the mock sends nothing earlier
    (body,) = server.bodies
    assert {
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "max_tokens": 6,
        "prompt": [1, 2, 3],
    }.items() <= body.items()
    assert (
        body["stream_options"] == {"include_usage": True}
        and body["return_token_ids"] is True
        and "model" not in body
    )


def test_a_prompt_may_be_text_and_a_model_may_have_a_name():
    async def run() -> dict[str, Any]:
        async with mock.serving(Behaviour(**QUICK)) as server:
            await ask(server.url, what=Ask("Müller", 1), model="mine")
            return server.bodies[0]

    body = asyncio.run(run())
    assert (body["prompt"], body["model"], body["max_tokens"]) == ("Müller", "mine", 1)


def test_several_tokens_in_a_chunk_are_counted():
    (record,), _ = ask_mock(chunk_tokens=4)
    assert record.failure is None and record.chunk_tokens == [4, 2] and len(record.chunks) == 2


def test_a_key_is_sent():
    assert ask_mock(api_key="secret", target={"key": "secret"})[0][0].failure is None
    (record,), _ = ask_mock(api_key="secret")
    assert (
        record.failure == HTTP_OTHER
        and record.detail is not None
        and "401" in record.detail
        and "key" in record.detail
    )


def test_times_are_of_arrival_and_not_of_reading():
    """Two events that come half a second apart on the clock have those times, whatever is done with them later."""
    record = Record(0, 0.0, 2)
    read(record, [(1.0, sse(chunk("a"))), (1.5, sse(chunk("b"), END)), (1.75, sse(USAGE, DONE))])
    assert record.chunks == [1.0, 1.5, 1.5] and record.finish_reason == "length"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_reads_the_same_wherever_it_is_cut(newline: bytes):
    stream = sse(chunk("Mü"), chunk("ller", token_ids=[4, 5]), END, USAGE, DONE)
    stream = (b": a comment\n\nevent: x\n" + stream).replace(b"\n", newline)
    records = []
    for place in range(len(stream) + 1):
        record = Record(0, 0.0, 6)
        read(record, [(0.0, stream[:place]), (0.0, stream[place:])])
        records.append(record)
    assert all(record == records[0] for record in records)
    assert records[0].failure is None and records[0].chunk_tokens == [1, 2, 0] and records[0].done


def test_tokens_of_a_chunk_by_ids_or_logprobs_or_else_one():
    """One if there is text. A chunk that brings a finish reason and no more, as many servers send it, brings no token."""
    record = Record(0, 0.0, 6)
    empty, told = chunk(), chunk("", token_ids=[9])  # nothing at all, and a token without text
    scored = chunk("ab", logprobs={"tokens": ["a", "b"]})
    read(
        record,
        [
            (1.0, sse(empty)),
            (2.0, sse(told)),
            (3.0, sse(scored)),
            (4.0, sse(chunk("c"), END, USAGE, DONE)),
        ],
    )
    assert record.failure is None
    assert list(zip(record.chunks, record.chunk_tokens, strict=True)) == [
        (2.0, 1),
        (3.0, 2),
        (4.0, 1),
        (4.0, 0),
    ]


def test_usage_in_every_chunk_is_read_to_the_last():
    record = Record(0, 0.0, 6)
    running = chunk("a") | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    read(record, [(1.0, sse(running, END | {"usage": USAGE["usage"]}, DONE))])
    assert record.failure is None and record.completion_tokens == 6


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "failure", "words"),
    [
        ("refused", REFUSED, "connect"),
        ("500", HTTP_OTHER, "500: A planted fault"),
        ("503", HTTP_503, "503: A planted fault: no room"),
        ("504", HTTP_504, "504: A planted fault: too late"),
        ("reset", RESET, ""),
        ("hang", TIMEOUT, "1 s"),
        ("cut", CUT, "without a finish reason"),
        ("no_finish", CUT, "without a finish reason"),
        ("no_done", CUT, "without [DONE]"),
        ("error_event", ERROR_EVENT, "an error in the middle"),
        ("garbage", PROTOCOL, "{this is no JSON"),
        ("wrong_count", TOKENS, "5 tokens, and 6 were asked for"),
        ("no_usage", TOKENS, "no usage"),
    ],
)
def test_failures_of_every_kind(fault: str, failure: str, words: str):
    patience = 1.0 if fault == "hang" else 10.0
    (record,), server = ask_mock(fault=fault, target={"timeout": patience})
    assert record.failure == failure and record.detail is not None and words in record.detail
    assert record.sent is not None and record.end >= record.sent
    assert server.requests == (0 if fault == "refused" else 1)  # and nothing was tried again
    if fault in mock.IN_THE_MIDDLE:
        assert record.status == 200 and record.chunk_tokens == [1] * 3  # what had arrived is kept
    if fault in ("500", "503", "504", "refused"):
        assert record.chunks == [] and record.completion_tokens is None


def test_the_mock_knows_no_failure_that_is_not_tested():
    (mark,) = test_failures_of_every_kind.pytestmark
    tested = {case[0]: case[1] for case in mark.args[1]}
    assert {*tested} == {*mock.FAULTS} - {
        "wrong_counter",
        "leak",
    }  # of those, the client sees nothing
    assert {*tested.values()} == {*FAILURES}


def test_the_next_request_does_not_suffer():
    records, server = ask_mock(4, fault="reset", fault_every=2)
    assert [record.failure for record in records] == [
        None,
        RESET,
        None,
        RESET,
    ] and server.requests == 4


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"", RESET),  # accepted, read, and hung up without a word
        (b"HTTP/1.1 200 OK\r\nContent-Ty", RESET),
        (http(sse(chunk("a")))[:-4], RESET),  # shorter than announced
        (b"220 mail.example ESMTP\r\n", PROTOCOL),
        (
            http(json.dumps(END | USAGE).encode(), "application/json"),
            PROTOCOL,
        ),  # the answer, but no stream
        (http(b"<html>"), PROTOCOL),
        (http(sse([1, 2], DONE)), PROTOCOL),
        (http(sse({"id": 1}, DONE)), PROTOCOL),
        (http(sse({"choices": [7]}, DONE)), PROTOCOL),
        (http(sse(chunk("a", token_ids=7), DONE)), PROTOCOL),
        (http(sse(USAGE | {"usage": {"completion_tokens": "many"}}, DONE)), PROTOCOL),
        (http(sse(b"[" * 100_000, DONE)), PROTOCOL),
        (http(b""), CUT),
        (http(sse(END, USAGE) + b"data: [DO"), CUT),  # the last line never ended
        (http(sse({"error": "a word"}, DONE)), ERROR_EVENT),
        (http(sse(chunk("a"), ERROR))[:-1], ERROR_EVENT),  # it says why, and hangs up in the middle
        (http(b"no place", "text/plain", "503 Service Unavailable"), HTTP_503),
        (
            http(b'{"error": {"message": "not yours"}}', "application/json", "403 Forbidden"),
            HTTP_OTHER,
        ),
        (
            b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            HTTP_OTHER,
        ),
    ],
)
def test_servers_that_are_none(answer: bytes, failure: str):
    record = ask_raw(answer)
    assert record.failure == failure, record
    assert record.detail and len(record.detail) < 400


def test_what_an_error_says_is_kept():
    assert (
        ask_raw(http(json.dumps(ERROR).encode(), status="500 Internal Server Error")).detail
        == "500: out of luck"
    )
    assert ask_raw(http(b"no place", status="503 Service Unavailable")).detail == "503: no place"
    assert (
        ask_raw(http(b"<html>\n <b>no\n", "text/html", "404 Not Found")).detail
        == "404: <html> <b>no"
    )
    assert ask_raw(http(sse(ERROR, DONE))).detail == "out of luck"


@pytest.mark.parametrize("answer", [b"", http(sse(chunk("a")) * 9)[:-300]])
def test_silence_is_a_timeout_before_and_in_the_answer(answer: bytes):
    record = ask_raw(answer, close=False, timeout=1.0)
    assert record.failure == TIMEOUT and record.end >= 1.0
    assert bool(record.chunks) == bool(answer)


def test_a_name_that_nobody_has_is_refused():
    (record,) = asyncio.run(ask("http://nobody.invalid:1"))
    assert record.failure == REFUSED


def test_a_cancellation_comes_through():
    async def run() -> None:
        async with mock.serving(Behaviour(ttft=30)) as server:
            task = asyncio.create_task(ask(server.url))
            while not server.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


# ---- connections --------------------------------------------------------------------------------------------------------


def with_server(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    use: Callable[[str], Awaitable[Any]],
) -> Any:
    """Run `use(url)` against a server whose completions are `handle`."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(runner, listening).start()
        try:
            return await use(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def whole() -> web.Response:
    return web.Response(body=sse(chunk("a"), END, USAGE, DONE), content_type="text/event-stream")


def test_a_connection_is_used_again():
    seen = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append(request.transport.get_extra_info("peername"))
        assert request.headers["Accept-Encoding"] == "identity"  # nothing is held back to be packed
        return whole()

    records = with_server(handle, lambda url: ask(url, 5))
    assert [record.failure for record in records] == [None] * 5
    assert len(seen) == 5 and len({*seen}) == 1


def test_no_request_waits_for_a_connection():
    """150 of them at once: nobody is answered before all have come. A pool of aiohttp's own size, 100, would wait for ever."""
    everybody = asyncio.Barrier(150)

    async def handle(request: web.Request) -> web.Response:
        await everybody.wait()
        return whole()

    async def use(url: str) -> list[Record]:
        target = Target(url, timeout=20)
        async with open_session(target) as session:
            clock = asyncio.get_running_loop().time
            return await asyncio.gather(
                *(send(session, target, ASK, 0.0, clock, index) for index in range(150))
            )

    records = with_server(handle, use)
    assert [record.failure for record in records] == [None] * 150


def test_an_idle_connection_is_given_up_before_the_server_does_it(monkeypatch):
    """A server that closes a connection just when it is used again would look like a reset."""
    assert client.IDLE < 5  # seconds that uvicorn keeps one
    monkeypatch.setattr(client, "IDLE", 0.05)
    seen = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append(request.transport.get_extra_info("peername"))
        return whole()

    async def use(url: str) -> None:
        target = Target(url, timeout=20)
        async with open_session(target) as session:
            for _ in range(2):
                assert (await send(session, target, ASK, 0.0, lambda: 0.0)).failure is None
                await asyncio.sleep(0.2)

    with_server(handle, use)
    assert len(seen) == 2 and seen[0] != seen[1]

"""One request: its record for complete answers and for failures of every kind.

Against the mock, and raw sockets where a server of any library would be too polite.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from stage07_loadtest import client, mock
from stage07_loadtest.client import FAILURES, Record, Target, open_session, read, send
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.tests.helpers import DONE, END, USAGE, chunk, sse, whole, with_server
from stage07_loadtest.workload import Ask

ASK = Ask([1, 2, 3], 6)
QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}
ERROR = {"error": {"message": "out of luck", "type": "ServerError", "code": 500}}


async def ask(
    url: str, count: int = 1, what: Ask = ASK, pause: float = 0.0, **fields: Any
) -> list[Record]:
    """Requests one after the other through one session."""
    target = Target(url, **{"timeout": 10.0} | fields)
    clock, records = asyncio.get_running_loop().time, []
    started = clock()
    async with open_session(target) as session:
        for index in range(count):
            records.append(await send(session, target, what, 0, lambda: clock() - started, index))
            await asyncio.sleep(pause)
    return records


def ask_mock(
    count: int = 1, target: dict[str, Any] | None = None, **behaviour: Any
) -> tuple[list[Record], Mock]:
    async def run() -> tuple[list[Record], Mock]:
        async with mock.serving(Behaviour(**QUICK | behaviour)) as server:
            return await ask(server.url, count, **target or {}), server

    return asyncio.run(run())


def ask_raw(answer: bytes, close: bool = True, **fields: Any) -> Record:
    """One request to a socket that reads it, writes `answer`, and hangs up or falls silent."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length:")[1].split()[0]))
        writer.write(answer)
        if not close:
            await reader.read()  # until the client leaves
        writer.close()
        over.set()

    async def run() -> Record:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            (record,) = await ask(f"http://127.0.0.1:{port}", **fields)
            await over.wait()
            return record

    return asyncio.run(run())


def http(body: bytes, status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def streamed(*pieces: tuple[float, bytes]) -> Record:
    """The record of a stream that arrived in these pieces."""
    record = Record(0, 0.0, 6)
    read(record, pieces)
    return record


# ---- complete answers


def test_an_answer_is_recorded_whole():
    (record,), server = ask_mock()
    assert (record.failure, record.detail, record.status, record.done) == (None, None, 200, True)
    assert (record.asked_tokens, record.prompt_tokens, record.completion_tokens) == (6, 3, 6)
    assert record.finish_reason == "length" and record.chunk_tokens == [1] * 6 and record.index == 0
    assert record.sent is not None
    times = [record.intended, record.sent, *record.chunks, record.end]
    assert len(record.chunks) == 6 and times == sorted(times)
    assert record.chunks[-1] - record.sent >= 0.002 + 5 * 0.001  # the mock sends nothing earlier
    assert server.bodies[0] == {
        "prompt": [1, 2, 3],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_times_are_of_arrival_and_not_of_reading():
    """Two events that arrive half a second apart have those times, whenever they are parsed."""
    record = streamed((1.0, sse(chunk("a"))), (1.5, sse(chunk("b"), END)), (1.75, sse(USAGE, DONE)))
    assert record.chunks == [1.0, 1.5, 1.5] and record.finish_reason == "length"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_reads_the_same_wherever_it_is_cut(newline: bytes):
    stream = sse(chunk("Mü"), chunk("ller", token_ids=[4, 5]), END, USAGE, DONE)
    stream = (b": a comment\n\nevent: x\n" + stream).replace(b"\n", newline)
    first, *others = (
        streamed((0.0, stream[:place]), (0.0, stream[place:])) for place in range(len(stream) + 1)
    )
    assert all(record == first for record in others)
    assert first.failure is None and first.chunk_tokens == [1, 2, 0] and first.done


def test_tokens_of_a_chunk_by_ids_or_logprobs_or_else_one():
    """One with text. A chunk with only a finish reason, as many servers send it, has none."""
    record = streamed(
        (1.0, sse(chunk())),
        (2.0, sse(chunk("", token_ids=[9]))),  # a token without text
        (3.0, sse(chunk("ab", logprobs={"tokens": ["a", "b"]}))),
        (4.0, sse(chunk("c"), END, USAGE, DONE)),
    )
    assert record.failure is None
    chunks = list(zip(record.chunks, record.chunk_tokens, strict=True))
    assert chunks == [(2.0, 1), (3.0, 2), (4.0, 1), (4.0, 0)]


def test_usage_in_every_chunk_is_read_to_the_last():
    running = chunk("a") | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    record = streamed((1.0, sse(running, END | {"usage": USAGE["usage"]}, DONE)))
    assert record.failure is None and record.completion_tokens == 6


# ---- failures

FAULTS = {
    "refused": ("refused", "connect"),
    "500": ("http_other", "500: A planted fault"),
    "503": ("http_503", "503: A planted fault: no room"),
    "504": ("http_504", "504: A planted fault: too late"),
    "reset": ("reset", ""),
    "hang": ("timeout", "0.3 s"),
    "cut": ("cut", "without a finish reason"),
    "no_finish": ("cut", "without a finish reason"),
    "no_done": ("cut", "without [DONE]"),
    "error_event": ("error_event", "an error in the middle"),
    "garbage": ("protocol", "{this is not JSON"),
    "wrong_count": ("tokens", "5 tokens, but 6 tokens were requested"),
    "no_usage": ("tokens", "no usage"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_of_every_kind(fault: str):
    failure, words = FAULTS[fault]
    (record,), server = ask_mock(fault=fault, target={"timeout": 0.3 if fault == "hang" else 10.0})
    assert record.failure == failure and words in str(record.detail)
    assert record.sent is not None and record.end >= record.sent
    assert server.requests == (0 if fault == "refused" else 1)  # nothing is retried
    if fault in mock.IN_THE_MIDDLE:
        assert record.status == 200 and record.chunk_tokens == [1] * 3  # what arrived is kept
    if fault in ("500", "503", "504", "refused"):
        assert record.chunks == [] and record.completion_tokens is None


def test_all_failures_are_tested():
    assert {*FAULTS} == {*mock.FAULTS} - {"wrong_counter", "leak"}  # invisible to the client
    assert {failure for failure, _ in FAULTS.values()} == {*FAILURES}


def test_the_next_request_does_not_suffer():
    records, server = ask_mock(4, fault="reset", fault_every=2)
    assert [record.failure for record in records] == [None, "reset", None, "reset"]
    assert server.requests == 4


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    [
        (b"", "reset", ""),  # accepted, read, and hung up
        (b"HTTP/1.1 200 OK\r\nContent-Ty", "reset", ""),
        (http(sse(chunk("a")))[:-4], "reset", ""),  # shorter than announced
        (b"220 mail.example ESMTP\r\n", "protocol", ""),
        (
            http(json.dumps(END | USAGE).encode(), kind="application/json"),
            "protocol",
            "not an event",
        ),
        (http(b"<html>"), "protocol", "<html>"),
        (http(sse([1, 2], DONE)), "protocol", "[1, 2]"),
        (http(sse({"id": 1}, DONE)), "protocol", "not a completion chunk"),
        (http(sse({"choices": [7]}, DONE)), "protocol", ""),
        (http(sse(chunk("a", token_ids=7), DONE)), "protocol", ""),
        (http(sse(USAGE | {"usage": {"completion_tokens": "many"}}, DONE)), "protocol", ""),
        (http(sse(b"[" * 100_000, DONE)), "protocol", ""),
        (http(b""), "cut", ""),
        (http(sse(END, USAGE) + b"data: [DO"), "cut", "[DONE]"),  # the last line never ended
        (http(sse({"error": "a word"}, DONE)), "error_event", "a word"),
        (http(sse(ERROR, DONE)), "error_event", "out of luck"),
        (http(sse(chunk("a"), ERROR))[:-1], "error_event", "out of luck"),  # and hangs up early
        (http(b"no place", "503 Service Unavailable"), "http_503", "503: no place"),
        (http(json.dumps(ERROR).encode(), "500 Oh"), "http_other", "500: out of luck"),
        (http(b"<html>\n <b>no\n", "404 Not Found"), "http_other", "404: <html> <b>no"),
        (http(b"", "307 Redirect\r\nLocation: http://127.0.0.1:1/"), "http_other", "307"),
    ],
)
def test_answers_of_other_servers(answer: bytes, failure: str, detail: str):
    record = ask_raw(answer)
    assert record.failure == failure, record
    assert record.detail and detail in record.detail and len(record.detail) < 400


@pytest.mark.parametrize("answer", [b"", http(sse(chunk("a")) * 9)[:-300]])
def test_silence_is_a_timeout_before_and_in_the_answer(answer: bytes):
    record = ask_raw(answer, close=False, timeout=0.3)
    assert record.failure == "timeout" and record.end >= 0.3
    assert bool(record.chunks) == bool(answer)


def test_an_unknown_host_is_refused():
    (record,) = asyncio.run(ask("http://unknown.invalid:1"))
    assert record.failure == "refused"


# ---- connections


@pytest.mark.parametrize(("idle", "pause", "connections"), [(2.0, 0.0, 1), (0.02, 0.1, 3)])
def test_a_connection_is_used_again_unless_it_was_idle(
    monkeypatch, idle: float, pause: float, connections: int
):
    """A server that closes a connection just when it is used again would look like a reset."""
    assert client.IDLE < 5  # seconds for which uvicorn keeps one
    monkeypatch.setattr(client, "IDLE", idle)
    peers = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        assert request.headers["Accept-Encoding"] == "identity"  # not held back to be compressed
        peers.append(request.transport.get_extra_info("peername"))
        return whole()

    records = with_server(handle, lambda url: ask(url, 3, pause=pause))
    assert [record.failure for record in records] == [None] * 3
    assert len(peers) == 3 and len({*peers}) == connections


def test_no_request_waits_for_a_connection():
    """None of 150 is answered before all have arrived: more than aiohttp's default pool, 100."""
    all_here = asyncio.Barrier(150)

    async def handle(request: web.Request) -> web.Response:
        await all_here.wait()
        return whole()

    async def use(url: str) -> list[Record]:
        target = Target(url, timeout=20)
        async with open_session(target) as session:
            clock = asyncio.get_running_loop().time
            return await asyncio.gather(
                *(send(session, target, ASK, 0.0, clock) for _ in range(150))
            )

    assert [record.failure for record in with_server(handle, use)] == [None] * 150

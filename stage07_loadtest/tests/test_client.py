"""One request: its record for complete answers and for failures of every kind, against the mock,
and raw sockets where a server of any library would be too polite. What else is read from a server:
counters, the model's name, whether it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from typing import Any

import pytest

from stage07_loadtest import client
from stage07_loadtest.client import Record, Target, open_session, read, send
from stage07_loadtest.schedule import closed
from stage07_loadtest.server import Counters, describe, parse, scrape, settled
from stage07_loadtest.workload import Ask

from .helpers import QUICK, against

DONE = b"[DONE]"
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}}
ASK = Ask([1, 2, 3], 6)
ERROR = {"error": {"message": "out of luck", "type": "ServerError", "code": 500}}


def sse(*data: Any) -> bytes:
    lines = (item if isinstance(item, bytes) else json.dumps(item).encode() for item in data)
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


def chunk(text: str = "", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} | more]}


END = chunk(finish_reason="length")


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(url, timeout=10.0):
    """The record of one request."""
    target, clock = Target(url, timeout=timeout), asyncio.get_running_loop().time
    started = clock()
    async with open_session(target) as session:
        return await send(session, target, ASK, 0, lambda: clock() - started)


def with_raw(answer, use, close=True):
    """Run `use(url)` against a socket that has one answer for all, and hangs up after it or reads
    on. Also returns the heads of the requests."""
    heads: list[bytes] = []
    handlers: list[Any] = []

    async def serve(reader, writer):
        handlers.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has left
            while True:
                heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
                length = heads[-1].partition(b"content-length:")[2].split()
                await reader.readexactly(int(length[0]) if length else 0)
                writer.write(answer)
                if close:
                    break
        writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            found = await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await asyncio.wait(handlers)
            return found

    return asyncio.run(run()), heads


def streamed(*pieces):
    """The record of a stream that arrived in these pieces."""
    record = Record(0, 0.0, 6)
    read(record, pieces)
    return record


def test_an_answer_is_recorded_whole():
    point, server = against({}, [ASK], closed(1, 1))
    (record,) = point.records
    assert (record.failure, record.detail, record.status, record.done) == (None, None, 200, True)
    assert (record.asked_tokens, record.prompt_tokens, record.completion_tokens) == (6, 3, 6)
    assert record.finish_reason == "length" and record.chunk_tokens == [1] * 6 and record.index == 0
    assert record.sent is not None
    times = [record.intended, record.sent, *record.chunks, record.end]
    assert len(record.chunks) == 6 and times == sorted(times)
    took = QUICK["ttft"] + 5 * QUICK["itl"]
    assert record.chunks[-1] - record.sent >= took - 1e-9  # the mock sends nothing earlier
    assert server.bodies[0]["max_tokens"] == 6 and server.bodies[0]["ignore_eos"] is True


def test_times_are_of_arrival_and_not_of_reading():
    record = streamed((1.0, sse(chunk("a"))), (1.5, sse(chunk("b"), END)), (1.75, sse(USAGE, DONE)))
    assert record.chunks == [1.0, 1.5, 1.5] and record.finish_reason == "length"


def test_a_stream_reads_the_same_wherever_it_is_cut():
    stream = sse(chunk("Mü"), chunk("ller", token_ids=[4, 5]), END, USAGE, DONE)
    for newline in (b"\n", b"\r\n"):
        data = (b": a comment\n\nevent: x\n" + stream).replace(b"\n", newline)
        for place in range(len(data) + 1):
            record = streamed((0.0, data[:place]), (0.0, data[place:]))
            assert (record.failure, record.done) == (None, True)
            assert record.chunk_tokens == [1, 2, 0]
        cut = [(0.0, b"data: whole" + newline + b"data: half")]
        assert list(client.events(cut)) == [(0.0, b"whole")]


def test_tokens_of_a_chunk_by_ids_or_logprobs_or_else_one():
    """One with text. A chunk with only a finish reason, as many servers send it, has none."""
    running = chunk("") | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    record = streamed(
        (1.0, sse(running)),  # usage in every chunk is read to the last
        (2.0, sse(chunk("", token_ids=[9]))),  # a token without text
        (3.0, sse(chunk("ab", logprobs={"tokens": ["a", "b"]}))),
        (4.0, sse(chunk("c"), END, USAGE, DONE)),
    )
    assert record.failure is None
    chunks = list(zip(record.chunks, record.chunk_tokens, strict=True))
    assert chunks == [(2.0, 1), (3.0, 2), (4.0, 1), (4.0, 0)]


TEXT, HALF = chunk("a"), {**chunk("ab"), "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
ANSWERS: list[tuple[Any, str, str]] = [  # what a server does, the failure, and a part of its detail
    (None, "refused", "Connect call failed"),  # no server
    (b"", "reset", ""),  # accepted, read, and hung up
    (b"", "timeout", "0.3 s"),  # or silent
    (http(sse(TEXT))[:-4], "reset", ""),  # shorter than announced
    (b"220 mail.example ESMTP\r\n", "protocol", ""),
    (http(json.dumps(END | USAGE).encode()), "protocol", "not an event"),
    (http(sse(TEXT, b"{this is not JSON", DONE)), "protocol", "{this is not JSON"),
    (http(sse(END, USAGE) + b"data: [DO"), "cut", "without [DONE]"),  # the last line never ended
    (http(sse(TEXT, ERROR))[:-1], "error_event", "out of luck"),  # and hangs up early
    (http(sse(END, HALF, DONE)), "tokens", "5 tokens, but 6 tokens were requested"),
    (http(sse(END, DONE)), "tokens", "no usage"),
    (http(json.dumps(ERROR).encode(), "503 Unavailable"), "http_503", "503: out of luck"),
    (http(b"<html>\n <b>no\n", "404 Not Found"), "http_other", "404: <html> <b>no"),
]


@pytest.mark.parametrize(("answer", "failure", "detail"), ANSWERS)
def test_failures_of_every_kind(answer, failure, detail):
    """Nothing is retried."""
    silent = failure == "timeout"
    if answer is None:
        record = asyncio.run(ask("http://127.0.0.1:1"))
    else:
        timeout = 0.3 if silent else 10.0
        record, heads = with_raw(answer, partial(ask, timeout=timeout), close=not silent)
        assert len(heads) == 1
    assert record.failure == failure and record.sent is not None, record
    assert record.end >= max(record.sent, 0.3 * silent)  # the clock of both begins with the ask
    assert record.detail is not None and detail in record.detail and len(record.detail) < 400
    if failure.startswith(("refused", "http")):
        assert record.chunks == [] and record.completion_tokens is None


METRICS = """\
vllm:generation_tokens_total{model_name="a"} 1e+06
vllm:request_success_total{finished_reason="stop",model_name="a"} 2.0
vllm:request_success_total{finished_reason="length",model_name="a"} 5.0
vllm:num_requests_running{model_name="a"} 1.0
vllm:num_requests_waiting{model_name="a"} 0.0
vllm:kv_cache_usage_perc{model_name="a"} 0.125
"""
COUNTERS = Counters(1_000_000, 7, 1, 0, 0.125)


async def using(url, *uses):
    """What each `use(session, target)` of the server at `url` returns."""
    async with open_session(Target(url)) as session:
        return [await use(session, Target(url)) for use in uses]


def seen(answer, use):
    """`use(session, target)` of a server with this answer to GET."""
    ((found,), _) = with_raw(answer, lambda url: using(url, use), close=False)
    return found


def test_counters_are_summed_over_labels_and_idle_when_everything_was_released():
    metrics = METRICS.encode()
    assert seen(http(metrics), scrape) == parse(METRICS) == COUNTERS
    assert seen(http(b"\xff"), scrape) is seen(http(metrics, "401 Unauthorized"), scrape) is None
    assert parse(METRICS.replace("vllm:", "tgi:")) is parse(METRICS.replace("1e+06", "NaN")) is None
    states = ((0, 0, 0.0), (1, 0, 0.0), (0, 1, 0.0), (0, 0, 0.1))
    assert [Counters(1, 1, *state).idle for state in states] == [True, False, False, False]
    assert seen(http(b'{"data": [3]}'), describe) == (None, None)
    card = b'{"data": [{"id": "m", "max_model_len": 77}, {"id": "n"}]}'
    assert seen(http(card), describe) == ("m", 77)  # the first one listed
    absent = using("http://127.0.0.1:1", scrape, settled, describe)
    assert asyncio.run(absent) == [None, None, (None, None)]

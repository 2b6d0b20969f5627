"""The writer: tokens go from a step to the connections without a task in between, and what a client
reads is the same however it reads."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from random import Random
from typing import Any

import pytest

from stage06_serving import writer

from .asking import events, exchange, posted
from .in_process import Asking, Inside
from .tools import Passes, until

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
TEXT = BODY | {"prompt": "Once upon a time"}
CHAT = BODY | {"messages": [{"role": "user", "content": "Hello"}]}
IDS = TEXT | {"return_token_ids": True}
OPTIONS = [
    (PATH, IDS | {"seed": 1, "n": 2, "temperature": 1}),
    (PATH, TEXT | {"logprobs": 1, "echo": True}),
    (PATH, TEXT | {"stop": ["her name", " sea"], "stream_options": {"include_usage": True}}),
    (PATH, TEXT | {"stream_options": {"continuous_usage_stats": True}}),
    (CHATS, CHAT),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/generate", TEXT),
]


@pytest.fixture
def written(monkeypatch) -> list[bytes]:
    """What goes past ASGI's `send`, straight to the connection."""
    parts: list[bytes] = []
    write = Asking._write

    def noted(asking: Asking, data: bytes) -> bool:
        parts.append(data)
        return write(asking, data)

    monkeypatch.setattr(Asking, "_write", noted)
    return parts


async def one_by_one(inside: Inside, *bodies: Any) -> list[list[Any]]:
    """The events of streams, each step's sent before the next step begins."""
    gate = Passes(inside.engine.runner, gate=True)
    streams = [inside.begin(PATH, body) for body in bodies]
    running = inside.app.state.engine.in_flight

    def begun() -> bool:
        for stream in streams:
            stream.check()
        return len(running) == len(bodies)

    await until(begun)
    tickets = list(running.values())

    def generated() -> int:
        return sum(ticket.generated for ticket in tickets)

    while running:
        expected = generated() + 1
        gate.allow(1)
        while generated() < expected:
            begun()
            await asyncio.sleep(0.001)
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)
    return [events((await stream.answer()).body.decode()) for stream in streams]


def ids_of(chunks: list[Any]) -> list[list[int]]:
    return [chunk["choices"][0]["token_ids"] for chunk in chunks]


async def test_the_tokens_of_a_step_are_written_at_once(written):
    """Past the stream's task, which sends the end."""
    async with Inside.serving() as inside:
        answers = await one_by_one(inside, *[IDS] * 3)
    assert {len(ids) for chunks in answers for ids in ids_of(chunks)} == {1}
    assert ids_of(answers[0]) == ids_of(answers[1]) == ids_of(answers[2])
    assert len(answers[0]) == 30 and len(written) == 3 * 29
    assert all(part.startswith(b"data: {") and part.endswith(b"}\n\n") for part in written)


@pytest.mark.parametrize(("stop", "sizes"), [(None, [1, *[4] * 7, 1]), (["never"], [1] * 30)])
async def test_a_stream_gathers_tokens_over_the_interval(stop, sizes):
    """The first is sent at once; a stop string could end the text at any token."""
    async with Inside.serving(stream_interval=4) as inside:
        (chunks,) = await one_by_one(inside, IDS | {"stop": stop})
    assert [len(ids) for ids in ids_of(chunks)] == sizes


@pytest.mark.parametrize(("path", "fields"), OPTIONS)
async def test_a_client_reads_the_same_however_it_reads(monkeypatch, written, path, fields):
    """With connections that are now and then full, events only grow larger."""
    random = Random(1)
    send, write = Asking._send, Asking._write

    async def late(asking: Asking, message: Any) -> None:
        await asyncio.sleep(0.05 * random.random())
        await send(asking, message)

    def text(choice: Any) -> str:
        return (
            (choice.get("delta") or choice.get("message") or choice).get("content")
            or choice.get("text")
            or ""
        )

    async with Inside.serving(model="stories-chat" if path == CHATS else "stories") as inside:
        plain = {name: fields[name] for name in fields if not name.startswith("stream")}
        whole = (await inside.ask(path, plain)).json()
        quick = events((await inside.ask(path, fields)).body.decode())
        monkeypatch.setattr(Asking, "_send", late)
        monkeypatch.setattr(Asking, "_write", lambda *part: random.random() < 0.5 and write(*part))
        slow = events((await inside.ask(path, fields)).body.decode())
    assert written and len(slow) < len(quick)
    assert slow[0].keys() == quick[0].keys() and slow[-1].keys() == quick[-1].keys()
    assert slow[-1].get("usage") == quick[-1].get("usage")
    for chunks in (quick, slow):
        texts = defaultdict[int, str](str)
        for choice in (choice for chunk in chunks for choice in chunk.get("choices", [chunk])):
            texts[choice.get("index", 0)] += text(choice)
        choices = whole.get("choices", [whole])
        assert texts == {choice.get("index", 0): text(choice) for choice in choices}


async def test_a_client_that_reads_late_gets_parts(monkeypatch):
    """What gathers in seconds, with 20 log-probabilities a token, held the event loop for two
    seconds when the client read on."""
    monkeypatch.setattr(writer, "READ", 10)
    sizes, send = [], Asking._send
    async with Inside.serving() as inside:
        gate = Passes(inside.engine.runner, gate=True)
        running = inside.app.state.engine.in_flight

        async def late(asking: Asking, message: Any) -> None:
            if body := message.get("body"):
                chunks = [part for part in body.split(b"\n\n") if part.startswith(b"data: {")]
                sizes.append(sum(map(len, ids_of([json.loads(part[6:]) for part in chunks]))))
                gate.allow()
                await until(lambda: not running)
            await send(asking, message)

        monkeypatch.setattr(Asking, "_send", late)
        monkeypatch.setattr(Asking, "_write", lambda *part: False)
        stream = inside.begin(PATH, IDS | {"n": 2, "temperature": 1})
        await until(lambda: running)
        gate.allow(1)
        chunks = events((await stream.answer()).body.decode())
    assert sum(map(len, ids_of(chunks))) == sum(sizes) == 60
    assert len(sizes) > 3 and max(sizes) < 2 * writer.READ


def test_a_client_of_http_1_0_gets_a_plain_body(server):
    head, _, body = exchange(server, posted(TEXT).replace(b"HTTP/1.1", b"HTTP/1.0")).partition(
        b"\r\n\r\n"
    )
    assert b"chunked" not in head and len(events(body.decode())) == 30

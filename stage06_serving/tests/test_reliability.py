"""Clients that leave, stall and come in crowds, and too little time: what must be left of a server.

Real processes and sockets. Failing passes and the end of the server: test_faults.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from contextlib import ExitStack

import pytest

from stage06_serving.tests.crowd import (
    HANG,
    IDS,
    LONG,
    PASS,
    SCORED,
    SHORT,
    connected,
    error_of,
    in_flight,
    post,
    post_bytes,
    since,
    text_of,
)
from stage06_serving.tests.faulty_server import until

# ---- clients that leave


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
def test_the_blocks_of_a_client_that_leaves_are_released(few, http, metrics, wait_idle, streams):
    running, fault = few
    before = wait_idle(running.url)
    fault.plant(PASS)
    with connected(running, post_bytes(LONG | {"stream": streams})):
        until(lambda: since(before, metrics(running.url))["tokens"] >= 3)
    counts = since(before, wait_idle(running.url))
    assert (counts["abort"], counts["length"]) == (1, 0) and counts["tokens"] < 100
    fault.mend()
    assert post(http, running).status_code == 200


def test_a_client_that_leaves_the_queue_is_never_served(few, http, metrics, wait_idle):
    running, fault = few
    before = wait_idle(running.url)
    fault.plant("block")
    with ExitStack() as stack:
        for number in range(5):
            data = post_bytes(SHORT | {"stream": number % 2 == 0})
            stack.enter_context(connected(running, data))
        until(lambda: in_flight(metrics(running.url)) == 5)
    time.sleep(0.3)  # the engine is blocked, so nothing shows when the server has noticed
    fault.mend()
    counts = since(before, wait_idle(running.url))
    assert counts["abort"] == 5 and counts["tokens"] <= 2  # of the pass that had begun
    assert post(http, running).status_code == 200


PHASES = ("connected", "header", "body", "sent", "queue", "decode", "last")


async def leave(port, phase, streams, chance):
    """Connect, go as far as `phase`, and leave: with an orderly end, or with a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = (SHORT if phase == "last" else LONG) | {"stream": streams, "prompt": "abcd"}
    data = post_bytes(body, chance.choice(["/v1/completions", "/generate"]))
    cut = {"connected": 0, "header": data.index(b"\r\n\r\n") // 2, "body": len(data) - 5}
    writer.write(data[: cut.get(phase, len(data))])
    await writer.drain()
    if phase == "queue":
        await asyncio.sleep(chance.random() * 0.2)
    if phase == "decode" and streams:
        for _ in range(chance.randrange(1, 4)):
            await reader.readuntil(b"\n\n")
    if phase == "last":
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"[DONE]\n\n" if streams else b"}}")
    if chance.random() < 0.5:
        linger = struct.pack("ii", 1, 0)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


def test_a_storm_of_clients_that_leave(many, http, wait_idle):
    """Two hundred, streaming and not, each gone at another moment. All is released."""
    running, _ = many
    expected = text_of(post(http, running))
    before, log = wait_idle(running.url), running.stderr()
    chance = random.Random(0)
    clients = [(PHASES[number % 7], number // 7 % 2 == 0) for number in range(200)]

    async def one(phase, streams):
        await asyncio.sleep(chance.random())
        await leave(running.port, phase, streams, chance)

    async def storm():
        async with asyncio.timeout(2 * HANG):
            await asyncio.gather(*(one(*client) for client in clients))

    asyncio.run(storm())
    counts = since(before, wait_idle(running.url))
    assert counts["abort"] >= clients.count(("decode", True)) and counts["error"] == 0
    assert counts["length"] >= clients.count(("last", True)) + clients.count(("last", False))
    assert text_of(post(http, running)) == expected
    assert "Traceback" not in running.stderr().removeprefix(log), running.stderr()


# ---- overload


def test_exactly_the_surplus_is_refused(few, at_once, metrics, wait_idle):
    """Five have a place. The others are refused while the engine is blocked: without waiting."""
    running, fault = few
    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running, SHORT | {"stream": number % 2 == 0}) for number in range(12)]
    until(lambda: sum(answer.done() for answer in answers) == 7)
    for answer in [answer.result() for answer in answers if answer.done()]:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert error_of(answer)["type"] == "ServiceUnavailableError"
    assert in_flight(metrics(running.url)) == 5
    fault.mend()
    assert sum(answer.result().status_code == 200 for answer in answers) == 5
    counts = since(before, wait_idle(running.url))
    assert (counts["rejected"], counts["length"]) == (7, 5)


def test_each_sample_takes_a_place_and_releases_it(few, http, at_once, metrics, wait_idle):
    running, fault = few
    before = wait_idle(running.url)
    drawn = SHORT | {"temperature": 1, "seed": 1}
    for _ in range(2):  # the second time all places are free again
        fault.plant("block")
        accepted = [at_once(running, drawn | {"n": 3})]
        until(lambda: in_flight(metrics(running.url)) == 3)
        for more in ({"n": 3}, {"prompt": [IDS] * 3}):  # prompts count, too
            assert post(http, running, drawn | more).status_code == 503
        accepted.append(at_once(running, SHORT | {"prompt": [IDS] * 2}))
        until(lambda: in_flight(metrics(running.url)) == 5)
        assert post(http, running).status_code == 503
        fault.mend()
        assert [len(text_of(answer.result())) for answer in accepted] == [3, 2]
        wait_idle(running.url)
        assert post(http, running, SHORT | {"prompt": [300]}).status_code == 400
        fault.plant("once")
        assert post(http, running, drawn | {"n": 5}).status_code == 500
        wait_idle(running.url)
    assert since(before, wait_idle(running.url))["length"] >= 10


def test_a_scored_prompt_takes_a_place_too(few, http, at_once, metrics, wait_idle):
    """`echo` without tokens is work for the engine, though no sequence."""
    running, fault = few
    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running, SHORT)]
    until(lambda: in_flight(metrics(running.url)) == 1)
    answers += [at_once(running, SCORED | {"stream": number % 2 == 0}) for number in range(7)]
    until(lambda: sum(answer.done() for answer in answers) == 3)
    assert post(http, running, SCORED).status_code == post(http, running).status_code == 503
    fault.mend()
    assert sorted(answer.result().status_code for answer in answers) == [200] * 5 + [503] * 3

    assert since(before, wait_idle(running.url))["length"] == 1  # what was scored is no sequence


def test_a_reader_that_stalls_delays_no_other(many, http, at_once, wait_idle):
    """It requests megabytes and does not read them. Its answer is computed, and kept for it."""
    running, _ = many
    expected = text_of(post(http, running))
    body = LONG | {"max_tokens": 190, "prompt": [[index] for index in range(12)]}
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", running.port))
        stalled.settimeout(HANG)
        stalled.sendall(post_bytes(body | {"logprobs": 20, "stream": True}))
        answers = [at_once(running, SHORT) for _ in range(8)]
        assert [text_of(answer.result()) for answer in answers] == [expected] * 8
        wait_idle(running.url)
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            received += stalled.recv(2**16)
    assert len(received) > 2**20 and received.count(b"data: [DONE]") == 1
    assert sum(b'"finish_reason":"length"' in line for line in received.splitlines()) == 12


def test_health_answers_while_the_engine_computes(few, http, at_once, metrics):
    running, fault = few
    fault.plant("block")
    answer = at_once(running, SHORT)
    until(lambda: in_flight(metrics(running.url)) == 1)
    for _ in range(20):
        assert http.get(f"{running.url}/health").json() == {"status": "ok"}
    assert http.post(f"{running.url}/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert not answer.done()
    fault.mend()
    assert answer.result().status_code == 200


# ---- time


@pytest.mark.parametrize("pace", [PASS, "block"], ids=["slow", "stuck"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_late_request_is_aborted_and_answered_504(hasty, http, wait_idle, pace, n):
    running, fault = hasty
    before = wait_idle(running.url)
    fault.plant(pace)
    answer = post(http, running, LONG | {"n": n, "temperature": 1})
    assert answer.status_code == 504 and error_of(answer)["type"] == "TimeoutError"
    assert answer.headers["x-should-retry"] == "false"  # a retry makes it worse
    if pace == "block":
        fault.mend()
    counts = since(before, wait_idle(running.url))
    assert counts["abort"] == n and counts["tokens"] < 100 * n
    fault.mend()
    assert post(http, running).status_code == 200


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_late_echo_is_answered_504(hasty, http, at_once, metrics, wait_idle, tokens):
    """The prompt is scored before an answer begins, and the time for it counts."""
    running, fault = hasty
    before = wait_idle(running.url)
    fault.plant("block")
    beside = at_once(running, SHORT)
    until(lambda: in_flight(metrics(running.url)) == 1)
    answer = post(http, running, SCORED | {"max_tokens": tokens, "stream": True})
    assert answer.status_code == 504 and error_of(answer)["type"] == "TimeoutError"
    assert answer.headers["x-should-retry"] == "false" and beside.result().status_code == 504
    fault.mend()
    assert since(before, wait_idle(running.url))["abort"] == (2 if tokens else 1)
    assert post(http, running, SCORED).status_code == 200

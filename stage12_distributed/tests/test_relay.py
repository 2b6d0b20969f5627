"""A request on its way through the router: what is repeated, what is passed on, and what is left
behind when replicas or clients go. The servers here have no model; test_router.py has real ones."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from shared.errors import UserError
from shared.testing import python
from stage06_serving.tests.asking import events
from stage06_serving.tests.tools import until
from stage12_distributed.router import relay
from stage12_distributed.router.app import main
from stage12_distributed.tests.tools import (
    ASK,
    STREAM,
    answered,
    dies,
    held,
    mock,
    plain,
    routed,
    two,
)

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


async def begun(request: web.Request, kind: str = "text/event-stream") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    return response


async def test_answers_are_passed_on_with_the_names_of_request_and_replica():
    async with mock() as engine, routed(engine) as router:
        for fields in (ASK, STREAM):
            got = await router.post(fields, **{"x-request-id": "mine-1"})
            assert got.replica == (200, "replica-0") and got.headers["x-request-id"] == "mine-1"
        assert len(events(got.body)) == 8 and got.headers["cache-control"] == "no-cache"
        assert (await router.get("/v1/models"))["data"][0]["id"] == "mock"
        assert router.idle and engine.requests == 2
    async with plain(answered) as engine, routed(engine) as router:
        passed = {"x-request-id": "mine", "authorization": "Bearer k", "traceparent": "00-4bf9"}
        assert (await router.post(**passed, Cookie="secret")).body == {"text": "whole"}
        assert engine.seen.items() > passed.items()
        assert engine.seen["host"] in engine.url and "cookie" not in engine.seen


# ---- what is tried again ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_dead_replica_costs_one_request_a_second_try_and_the_others_nothing(fields):
    """It is chosen for its cache once, not again and again until a health check notices its
    death."""
    async with two(mock(), mock()) as (dead, other, router):
        lost = router.prefer(dead)
        lost.url = NOWHERE
        for _ in range(3):
            assert (await router.post(fields)).replica == (200, "replica-1")
        assert router.relay.counts["retries"] == 1 and (dead.requests, other.requests) == (0, 3)
        assert [replica.name for replica in router.replicas] == ["replica-1"]
        assert lost.standing.failures == 1 and not lost.ready


@pytest.mark.parametrize("fault", ["reset", "cut", "no_done"])
async def test_what_was_shown_is_never_tried_again(fault):
    async with two(mock(fault=fault), mock()) as (bad, other, router):
        got = await router.post(STREAM)
        *shown, last = events(got.body)
        assert got.status == 200 and shown and last["error"]["code"] == 503
        assert (bad.requests, other.requests) == (1, 0) and router.idle
        assert router.relay.counts["cut"] == 1 and not router.relay.counts["retries"]


async def test_an_event_that_was_cut_in_two_is_not_shown():
    async def half(request: web.Request) -> web.StreamResponse:
        response = await begun(request)
        for data in (b'data: {"first": 1}\r\n\r\ndata: {"seco', b'nd": 2}\n\ndata: {"third"'):
            await response.write(data)
            await asyncio.sleep(0.05)
        return await dies(request)

    async with plain(half) as engine, routed(engine) as router:
        text = (await router.post(STREAM)).body
        first, second, error = events(text.replace("\r\n", "\n"))
        assert (first, second) == ({"first": 1}, {"second": 2}) and error["error"]["code"] == 503


async def test_a_stream_is_over_with_its_last_event():
    """The replica may keep the connection open; the router then closes it."""

    async def lingers(request: web.Request) -> web.StreamResponse:
        response = await begun(request)
        await response.write(b'data: {"first": 1}\n\ndata: [DONE]\n\n')
        return await held(request)

    async with plain(lingers) as engine, routed(engine, timeout=2.0) as router:
        assert events((await router.post(STREAM)).body) == [{"first": 1}]
        await until(lambda: router.idle and not engine.running)
        answers = 'staircase:router_answers_total{replica="replica-0",status="200"} 1.0'
        assert answers in await router.metrics() and not router.relay.counts["left"]


async def test_a_death_before_the_first_byte_is_not_seen():
    """An answer that is not a stream is sent on as a whole: if it breaks off, it is asked for
    again."""

    async def broken(request: web.Request) -> web.StreamResponse:
        response = await begun(request, "application/json")
        await response.write(b'{"text": "ha')
        return await dies(request)

    async with two(plain(broken), mock()) as (bad, other, router):
        got = await router.post()
        assert got.replica == (200, "replica-1") and got.body["usage"]["completion_tokens"] == 8
        assert (bad.requests, other.requests) == (1, 1)


async def test_a_wrong_request_is_no_fault_of_the_replica():
    """After twenty errors, none of them retried, the replica gets the next request as before."""
    async with two(mock(), mock()) as (engine, other, router):
        for _ in range(20):
            assert (await router.post(ASK | {"max_tokens": -1})).status == 400
            assert router.idle and other.requests == 0 and not router.relay.counts["retries"]
            assert all(backend.ready for backend in router.backends)
        assert (await router.post()).replica == (200, "replica-0")


async def test_a_full_replica_is_passed_over_and_all_full_is_503():
    """Retries have a budget: a fleet that fails does not get twice the load."""
    async with two(mock(fault="503"), mock()) as (full, other, router):
        assert (await router.post()).replica == (200, "replica-1")
        assert (full.requests, other.requests) == (1, 1) and not router.prefer(full).ready
        other.behaviour = full.behaviour
        got = await router.post()
        assert got.status == 503 and got.headers["retry-after"] == "1" and "no room" in str(got)
        assert full.requests + other.requests == 4 and router.idle
        router.relay.budget, before = 0.0, router.relay.counts["retries"]
        for _ in range(30):
            assert (await router.post()).status == 503
        # One retry per ten requests; 30 times 0.1 may be less than 3.
        assert router.relay.counts["retries"] - before in (2, 3)


async def test_no_replica_is_503_with_the_time_to_try_again():
    async with mock() as engine, routed(NOWHERE) as router:
        got = await router.post()
        assert got.status == 503 and got.headers["retry-after"] == "1"
        assert got.body["error"]["code"] == (await router.get("/ready"))["error"]["code"] == 503
        (backend,) = router.backends
        backend.url = engine.url  # it lives now
        await router.pool.check(backend)
        assert (await router.post()).status == 200


# ---- deadlines, and clients that leave ----------------------------------------------------------


async def test_one_deadline_for_all_tries_whatever_stalls(monkeypatch):
    async def much(request: web.Request) -> web.StreamResponse:
        response = await begun(request)
        while True:
            await response.write(b"data: " + b"x" * 2**16 + b"\n\n")

    monkeypatch.setattr(relay, "STALLED", 0.1)
    async with plain(held) as engine, mock(fault="hang") as stalls, plain(much) as floods:
        for fields in (ASK, STREAM):
            async with routed(engine, timeout=0.1) as router:
                got = await router.post(fields)
                assert got.status == 504 and got.headers["x-should-retry"] == "false"
                assert router.idle and router.replicas[0].ready
        await until(lambda: not engine.running)
        assert engine.requests == 2
        async with routed(stalls, timeout=0.3) as router:
            *shown, last = events((await router.post(STREAM)).body)
            assert shown and last["error"]["code"] == 504 and router.idle
        await until(lambda: not stalls.running)
        async with routed(floods, timeout=0.5) as router:
            url = f"{router.url}/v1/completions"
            async with router.http.post(url, json=STREAM) as response:
                assert response.status == 200  # and nothing is read
                await until(lambda: router.idle and not floods.running)


async def test_a_client_that_leaves_is_passed_on_and_nothing_is_left():
    async with two(mock(itl=30.0), mock(itl=30.0)) as (engine, other, router):
        for _ in range(5):
            async with router.http.post(f"{router.url}/v1/completions", json=STREAM) as response:
                await response.content.readline()
                assert engine.running + other.running == 1
                response.close()
            await until(lambda: router.idle and not engine.running + other.running)
        assert router.relay.counts["left"] == 5
        assert all(backend.ready for backend in router.backends)


async def test_a_client_that_leaves_while_the_replica_is_being_reached_leaves_nothing_running():
    """The client leaves as soon as the choice is counted, then a little later each time."""
    async with mock(ttft=30.0) as engine, routed(engine) as router:
        for moment in range(20):
            asking = asyncio.create_task(router.post(STREAM))
            await until(lambda: router.relay.in_flight)
            for _ in range(moment):
                await asyncio.sleep(0)
            asking.cancel()
            await until(lambda: router.idle and not engine.running)


# ---- what is not an answer, and the end ---------------------------------------------------------


async def test_a_server_that_is_no_engine_is_an_error_in_one_sentence():
    """One whose JSON is garbage or a part passed for healthy, and every answer went to clients."""

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(NOWHERE)

    async def odd(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=999)  # uvicorn dropped the client's connection

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(body=bodies.pop(), content_type="application/json")

    bodies = [b"\x93{}\x1b", b'{"choices": [{"te', b""]
    for answer in (page, elsewhere, odd, *[broken] * len(bodies)):
        async with plain(answer) as engine, routed(engine) as router:
            got = await router.post()
            assert got.status == 502 and "something other than JSON" in got.body["error"]["message"]


async def test_what_cannot_be_read_is_for_a_replica_to_refuse():
    bodies = (
        *(b"", b"{", b"7", b"[]", b"null", b"[" * 50_000, b'{"prompt": 7}', b'{"prompt": {}}'),
        *(b'{"prompt": [1.5, null]}', b'{"prompt": [99999999999999999999]}', b'{"prompt": [[]]}'),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "a", "n": "many", "max_tokens": 1e999}'),
        b'{"messages": {"role": 1}}',
    )
    async with plain(answered) as engine, routed(engine) as router:
        url, kind = f"{router.url}/v1/completions", {"Content-Type": "application/json"}
        for body in bodies:
            async with router.http.post(url, data=body, headers=kind) as response:
                assert response.status == 200, body
        assert engine.requests == len(bodies) and router.idle


def test_the_cost_of_a_request_is_bounded_and_chats_have_prefixes():
    ids, tokens, answer = relay.size({"prompt": [[1, 2], [3]], "n": 3, "max_tokens": 10})
    assert (list(ids), tokens, answer) == ([1, 2], 3, 60)
    assert relay.size({"prompt": "a", "max_tokens": 10**9, "n": 10**9})[2] == relay.MOST_TOKENS
    assert relay.size({"prompt": "a", "max_tokens": 900})[1:] == (1, 900)
    turn = {"role": "user", "content": "Tell me a story about a fox and a river."}
    first, longer = (list(relay.size({"messages": [turn] * count})[0]) for count in (1, 2))
    assert longer[: len(first) - 1] == first[:-1]


async def test_at_the_end_answers_may_end_and_the_rest_gets_an_error():
    """As in a drain, which waits for requests in flight."""
    async with mock(itl=0.05) as engine, mock(fault="hang") as hangs:
        for server, grace, good in ((engine, 20.0, True), (hangs, 0.2, False)):
            async with routed(server, grace=grace) as router:
                asking = asyncio.create_task(router.post(STREAM))
                await until(lambda server=server: server.running)  # type: ignore[misc]
                (backend,) = router.backends
                assert not await router.pool.drain(backend, 0.0)
                assert await router.pool.drain(backend, grace) == good
                router.server.should_exit = True
                last = events((await asking).body)[-1]
                assert ("error" in last) != good
                assert good or "shutting down" in last["error"]["message"]
        await until(lambda: not engine.running + hangs.running)


async def test_keys_are_checked_by_the_router_too_and_used_by_its_own_requests():
    async with mock(api_key="k") as engine, routed(engine, keys=("k",)) as router:
        assert (await router.post()).status == 401 and engine.requests == 0
        assert (await router.post(Authorization="Bearer k")).status == 200
        listing = await router.get("/v1/models", Authorization="Bearer k")
        assert [model["id"] for model in listing["data"]] == ["mock"]
        counts = {"status": "ok", "ready": 1, "backends": 1}
        assert await router.get("/health") == counts  # no addresses without a key
        known = await router.get("/health", Authorization="Bearer k")
        assert known.pop("replicas") and known == counts
    async with plain(answered) as engine, routed(engine, keys=("k",)) as router:
        assert (await router.post()).status == 401 and engine.requests == 0
    async with mock() as engine, routed(engine) as router:  # and no prefix is another client's
        for key, cached in (("a", 0), ("b", 0), ("a", 64), ("b", 128)):
            await router.post(Authorization=f"Bearer {key}")
            assert router.relay.counts["cached_tokens"] == cached


def test_wrong_options_are_one_sentence():
    for words, message in (
        (["--backend", NOWHERE, "--max-queue", "7"], "--max-queue is for servers that we start"),
        (["--replicas", "0"], "not a whole number"),
        (["--backend", "127.0.0.1"], "invalid address"),
        (["--max-queue", "many"], "--max-queue"),
    ):
        with pytest.raises(UserError, match=message):
            main(words)
    done = python("-m", "stage12_distributed", "nothing")
    assert done.returncode == 2 and done.stderr.startswith("error: Argument COMMAND: invalid")

"""A request on its way through the router: what is repeated, what is passed on, and what is left
behind when replicas or clients go. The servers here have no model; test_router.py has real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from shared.course.testing import python
from shared.errors import UserError
from stage06_serving.tests.tools import until
from stage07_loadtest.mock import Behaviour, serving
from stage12_distributed import relay, replicas
from stage12_distributed.router import main
from stage12_distributed.tests.tools import PATH, Routed, plain, routed

NOWHERE = "http://127.0.0.1:9"  # nothing listens there
ASK: dict[str, Any] = {"prompt": "There was a fox. " * 16, "max_tokens": 8, "ignore_eos": True}
STREAM = ASK | {"stream": True}


def mock(**fields: Any) -> Any:
    """A server of stage 07: known latencies and faults."""
    return serving(Behaviour(**{"ttft": 0.01, "itl": 0.002, **fields}))


def prefer(router: Routed, server: Any) -> Any:
    """Have the prompt of ASK cached at this server alone; its backend."""
    digests = router.pool.routing.digests(relay.tokens_of(ASK["prompt"]), b"\0None")
    for backend in router.pool.backends.values():
        if backend.replica:
            backend.replica.tree.clear()
        if backend.url == server.url:
            found = backend
    assert found.replica is not None
    found.replica.remember(digests)
    return found


@asynccontextmanager
async def two(first: Any, second: Any, **options: Any) -> AsyncIterator[tuple[Any, Any, Routed]]:
    """Two servers behind a router, which prefers the first one for ASK."""
    async with first as one, second as other, routed(one.url, other.url, **options) as router:
        prefer(router, one)
        yield one, other, router


async def held(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def answered(request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "whole"})


async def dies(request: web.Request) -> web.StreamResponse:
    """As a process does."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def events(text: str) -> list[Any]:
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_answers_are_passed_on_with_the_names_of_request_and_replica():
    async with mock() as one, routed(one.url) as router:
        for fields in (ASK, STREAM):
            status, headers, body = await router.post(PATH, fields, **{"x-request-id": "mine-1"})
            assert (status, headers["x-request-id"], headers["x-replica"]) == (
                *(200, "mine-1", "replica-0"),
            )
        assert len(events(body)) == 8 and headers["cache-control"] == "no-cache"
        assert (await router.get("/v1/models"))["data"][0]["id"] == "mock"
        assert router.idle and one.requests == 2
    async with plain(answered) as one, routed(one.url) as router:
        sent = {"x-request-id": "mine", "Authorization": "Bearer k", "Cookie": "secret"}
        assert (await router.post(PATH, ASK, **sent))[2] == {"text": "whole"}
        seen = {name.lower(): value for name, value in one.seen.items()}
        assert seen["x-request-id"] == "mine" and seen["authorization"] == "Bearer k"
        assert seen["host"] in one.url and "cookie" not in seen


# ---- what is tried again ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_dead_replica_costs_one_request_a_second_try_and_the_others_nothing(fields):
    """It is chosen for its cache once, and not until a health check notices its death."""
    async with two(mock(), mock()) as (dead, other, router):
        lost = prefer(router, dead)
        lost.url = NOWHERE
        for _ in range(3):
            status, headers, _ = await router.post(PATH, fields)
            assert status == 200 and headers["x-replica"] == "replica-1"
        assert router.relay.counts["retries"] == 1 and (dead.requests, other.requests) == (0, 3)
        assert lost.name not in router.pool.routing.replicas
        assert lost.failures == 1 and not lost.ready


@pytest.mark.parametrize("fault", ["reset", "cut", "no_done"])
async def test_what_was_shown_is_never_tried_again(fault):
    async with two(mock(fault=fault), mock()) as (bad, other, router):
        status, _, text = await router.post(PATH, STREAM)
        *shown, last = events(text)
        assert status == 200 and shown and last["error"]["code"] == 503
        assert (bad.requests, other.requests) == (1, 0) and router.idle
        assert router.relay.counts["cut"] == 1 and not router.relay.counts["retries"]


async def test_an_event_that_was_cut_in_two_is_not_shown():
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in (b'data: {"first": 1}\r\n\r\ndata: {"seco', b'nd": 2}\n\ndata: {"third"'):
            await response.write(data)
            await asyncio.sleep(0.05)
        return await dies(request)

    async with plain(half) as one, routed(one.url) as router:
        text = (await router.post(PATH, STREAM))[2]
        first, second, error = events(text.replace("\r\n", "\n"))
        assert (first, second) == ({"first": 1}, {"second": 2}) and error["error"]["code"] == 503


async def test_a_death_before_the_first_byte_is_not_seen():
    """An answer that is no stream is shown as a whole: it can break off and be asked for again."""

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 100
        await response.prepare(request)
        await response.write(b'{"text": "ha')
        return await dies(request)

    async with two(plain(broken), mock()) as (bad, other, router):
        status, headers, body = await router.post(PATH, ASK)
        assert status == 200 and body["usage"]["completion_tokens"] == 8
        assert (bad.requests, other.requests) == (1, 1) and headers["x-replica"] == "replica-1"


@pytest.mark.parametrize("fault", ["500", "504", None])
async def test_a_wrong_request_is_no_fault_of_the_replica(fault):
    """Ten errors, none of which is tried again, and it gets the next request as before."""
    async with two(mock(fault=fault), mock()) as (one, other, router):
        fields = ASK if fault else ASK | {"max_tokens": -1}
        for number in range(10):
            assert (await router.post(PATH, fields))[0] == int(fault or 400)
            assert router.idle and other.requests == 0 and not router.relay.counts["retries"]
            assert {backend.ready for backend in router.pool.backends.values()} == {True}
            assert one.requests == (number + 1 if fault else 0)  # it counts valid ones alone
        one.behaviour = other.behaviour
        assert (await router.post(PATH, ASK))[1]["x-replica"] == "replica-0"


async def test_a_full_replica_is_passed_over_and_all_full_is_503():
    async with two(mock(fault="503"), mock()) as (full, other, router):
        assert (await router.post(PATH, ASK))[1]["x-replica"] == "replica-1"
        assert (full.requests, other.requests) == (1, 1) and prefer(router, full).ready
        other.behaviour = full.behaviour
        status, headers, body = await router.post(PATH, ASK)
        assert status == 503 and headers["retry-after"] == "1" and "no room" in str(body)
        assert full.requests + other.requests == 4 and router.idle


async def test_two_tries_are_the_most_and_they_have_a_budget():
    """A retry for ten requests: a fleet that fails does not get twice the load."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(mock(fault="503")) for _ in range(4)]
        router = await stack.enter_async_context(routed(*(each.url for each in servers)))
        prefer(router, servers[2])
        assert (await router.post(PATH, ASK))[0] == 503
        assert servers[2].requests == 1 and sum(each.requests for each in servers) == 2
        router.relay.budget = 0.0
        for _ in range(30):
            assert (await router.post(PATH, ASK))[0] == 503
        assert router.relay.counts["retries"] in (3, 4)  # 30 times 0.1 may be less than 3


async def test_no_replica_is_503_with_the_time_to_try_again():
    async with mock() as one, routed(NOWHERE) as router:
        status, headers, body = await router.post(PATH, ASK)
        assert status == 503 and headers["retry-after"] == "1" and body["error"]["code"] == 503
        async with router.http.get(router.url + "/ready") as ready:
            assert ready.status == 503
        (backend,) = router.pool.backends.values()
        backend.url = one.url  # it lives now
        await router.pool.check(backend)
        assert (await router.post(PATH, ASK))[0] == 200


# ---- deadlines, and clients that leave ----------------------------------------------------------


async def test_one_deadline_for_all_tries_whatever_stalls(monkeypatch):
    monkeypatch.setattr(relay, "STALLED", 0.1)
    async with plain(held) as one, mock(fault="hang") as stalls:
        for fields in (ASK, STREAM):
            async with routed(one.url, timeout=0.1) as router:
                status, headers, _ = await router.post(PATH, fields)
                assert status == 504 and headers["x-should-retry"] == "false"
                assert router.idle and router.replicas[0].ready
        await until(lambda: not one.running)
        assert one.requests == 2
        async with routed(stalls.url, timeout=0.3) as router:
            *shown, last = events((await router.post(PATH, STREAM))[2])
            assert shown and last["error"]["code"] == 504 and router.idle
        await until(lambda: not stalls.running)

    async def much(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 2**16 + b"\n\n")

    async with (
        plain(much) as one,
        routed(one.url, timeout=0.5) as router,
        router.http.post(router.url + PATH, json=STREAM) as response,
    ):
        assert response.status == 200  # and nothing is read
        await until(lambda: router.idle and not one.running)


async def test_a_client_that_leaves_is_passed_on_and_nothing_is_left():
    async with two(mock(itl=30.0), mock(itl=30.0)) as (one, other, router):
        for _ in range(5):
            async with router.http.post(router.url + PATH, json=STREAM) as response:
                await response.content.readline()
                assert one.running + other.running == 1
                response.close()
            await until(lambda: router.idle and not one.running + other.running)
        assert router.relay.counts["left"] == 5
        assert all(backend.ready for backend in router.pool.backends.values())


async def test_a_client_that_leaves_while_the_replica_is_being_reached_leaves_nothing_running():
    """At every moment: as soon as the choice is counted, and a little later each time."""
    async with mock(ttft=30.0) as one, routed(one.url) as router:
        for moment in range(20):
            asking = asyncio.create_task(router.post(PATH, STREAM))
            await until(lambda: router.relay.limits)
            for _ in range(moment):
                await asyncio.sleep(0)
            asking.cancel()
            await until(lambda: router.idle and not one.running)


# ---- who gets requests --------------------------------------------------------------------------


async def test_a_slow_health_check_leaves_the_load_and_shuts_the_replica_out(monkeypatch):
    async with two(plain(held), plain(answered)) as (slow, _, router):
        backend = prefer(router, slow)
        asking = asyncio.create_task(router.post(PATH, ASK))
        await until(lambda: slow.running)
        monkeypatch.setattr(replicas, "PATIENCE", 0.05)
        slow.slow = 1.0
        await router.pool.check(backend)
        replica = backend.replica
        assert not replica.ready and replica.requests == 1
        assert replica.tokens and replica.tree  # neither its load nor its cache is forgotten
        assert (await router.post(PATH, ASK))[1]["x-replica"] == "replica-1"
        slow.slow = 0.0
        await router.pool.check(backend)
        assert backend.ready and backend.replica is replica and replica.requests == 1
        asking.cancel()
        await until(lambda: router.idle)


async def test_failures_outlive_the_request_that_met_them():
    """A server whose health checks are good and whose answers never come gets its next chance
    later each time; one good answer, and it is forgiven."""
    async with two(plain(dies), plain(answered)) as (bad, _, router):
        waits = []
        for _ in range(3):
            backend = prefer(router, bad)
            assert (await router.post(PATH, ASK))[0] == 200
            waits.append(backend.until - asyncio.get_running_loop().time())
            await router.pool.check(backend)
            assert backend.replica is None  # its time has not come
            backend.until = 0.0
            await router.pool.check(backend)
        assert bad.requests == 3 and waits[0] < 0.6 * waits[1] < 0.4 * waits[2]
        prefer(router, bad)
        bad.answer = answered
        assert (await router.post(PATH, ASK))[0] == 200 and backend.failures == 0


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (b'{"data": [{"id": "other"}]}', "it serves the model 'other', and this router 'mock'"),
        *((lie, "no list of models") for lie in (b"", b'{"data": [7]}', b"[" * 10_000, b"<html>")),
    ],
)
async def test_a_server_with_another_model_or_none_gets_no_requests(models, why):
    async with two(plain(answered), plain(answered, models=models)) as (_, other, router):
        about = (await router.get("/health"))["replicas"]["replica-1"]
        assert not about["ready"] and why in about["why"]
        for number in range(6):
            assert (await router.post(PATH, {"prompt": str(number)}))[0] == 200
        assert other.requests == 0


async def test_servers_that_have_left_the_list_get_nothing_though_they_answer():
    async with plain(answered) as old, plain(answered) as new:
        listed = [old.url]

        async def find() -> list[str]:
            if not listed:
                raise OSError("the list cannot be had")
            return listed

        async with routed(find=find) as router:
            assert (await router.post(PATH, ASK))[0] == 200
            listed[:] = [new.url]
            await router.pool._look()
            for number in range(6):
                assert (await router.post(PATH, {"prompt": str(number)}))[0] == 200
            assert (old.requests, new.requests) == (1, 6) and len(router.pool.backends) == 1
            listed.clear()
            await router.pool._look()  # those that are known stay
            assert (await router.post(PATH, ASK))[0] == 200


async def test_a_server_that_is_no_engine_is_an_error_in_one_sentence():
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("http://169.254.169.254/")

    for answer in (page, elsewhere):
        async with plain(answer) as one, routed(one.url) as router:
            status, _, body = await router.post(PATH, ASK)
            assert status == 502 and "something else than JSON" in body["error"]["message"]


async def test_what_cannot_be_read_is_for_a_replica_to_refuse():
    bodies = (
        *(b"", b"{", b"7", b"[]", b"null", b"[" * 50_000, b'{"prompt": 7}', b'{"prompt": {}}'),
        *(b'{"prompt": [1.5, null]}', b'{"prompt": [99999999999999999999]}', b'{"prompt": [[]]}'),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "a", "n": "many", "max_tokens": 1e999}'),
        b'{"messages": {"role": 1}}',
    )
    async with plain(answered) as one, routed(one.url) as router:
        for body in bodies:
            kind = {"Content-Type": "application/json"}
            async with router.http.post(router.url + PATH, data=body, headers=kind) as response:
                assert response.status == 200, body
        assert one.requests == len(bodies) and router.idle


def test_the_cost_of_a_request_is_bounded_and_chats_have_prefixes():
    ids, tokens, answer = relay.size({"prompt": [[1, 2], [3]], "n": 3, "max_tokens": 10})
    assert (list(ids), tokens, answer) == ([1, 2], 3, 60)
    assert relay.size({"prompt": "a", "max_tokens": 10**9, "n": 10**9})[2] == relay.MOST_TOKENS
    assert relay.size({"prompt": "a", "max_tokens": 900})[1:] == (1, 900)
    turn = {"role": "user", "content": "Tell me a story about a fox and a river."}
    first, longer = (list(relay.size({"messages": [turn] * count})[0]) for count in (1, 2))
    assert longer[: len(first) - 1] == first[:-1]


async def test_drain_and_resume_are_for_the_administrator():
    async with plain(answered) as one, routed(one.url, admin_key="a") as router:
        name = {"replica": "replica-0"}
        for headers, status in (({}, 401), ({"x-admin-key": "b"}, 401)):
            assert (await router.post("/admin/drain", name, **headers))[0] == status
        key = {"x-admin-key": "a"}
        assert (await router.post("/admin/drain", name, **key))[2] == {"drained": True}
        assert (await router.post(PATH, ASK))[0] == 503 and one.requests == 0
        for backend in router.pool.backends.values():
            await router.pool.check(backend)  # a good health check does not end a drain
        assert (await router.post(PATH, ASK))[0] == 503
        assert (await router.post("/admin/resume", name, **key))[2] == {"ready": True}
        assert (await router.post(PATH, ASK))[0] == 200
        for action, fields, status in (
            *(("drain", {"replica": "x"}, 400), ("drain", {}, 400), ("drain", [], 400)),
            *(("stop", name, 404), ("update", {}, 400)),
        ):
            assert (await router.post(f"/admin/{action}", fields, **key))[0] == status
    async with plain(answered) as one, routed(one.url) as router:
        assert (await router.post("/admin/drain", name))[0] == 403


async def test_at_the_end_answers_may_end_and_the_rest_gets_an_error():
    """As at a drain, which waits for what is in flight."""
    async with mock(itl=0.05) as one, mock(fault="hang") as hangs:
        for server, grace, good in ((one, 20.0, True), (hangs, 0.2, False)):
            async with routed(server.url, grace=grace) as router:
                asking = asyncio.create_task(router.post(PATH, STREAM))
                await until(lambda server=server: server.running)  # type: ignore[misc]
                (backend,) = router.pool.backends.values()
                assert not await router.pool.drain(backend, 0.0)
                assert await router.pool.drain(backend, grace) == good
                router.server.should_exit = True
                last = events((await asking)[2])[-1]
                assert ("error" in last) != good
                assert good or "being stopped" in last["error"]["message"]
        await until(lambda: not one.running + hangs.running)


async def test_one_page_of_metrics_for_all():
    async with two(mock(), mock()) as (_, other, router):
        for _ in range(2):
            await router.post(PATH, ASK)
        other.registry = None  # its page cannot be made: it is left out
        async with router.http.get(router.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in (
            'vllm:generation_tokens_total{model_name="mock",replica="replica-0"} 16.0',
            'staircase:router_answers_total{replica="replica-0",status="200"} 2.0',
            'staircase:replica_ready{replica="replica-1"} 1.0',
            "staircase:router_requests_total 2.0",
        ):
            assert line in lines
        assert not [line for line in lines if line.startswith("vllm:") and "replica-1" in line]
        cached = next(line for line in lines if line.startswith("staircase:router_cached_tokens_"))
        assert float(cached.split()[1]) == 2 * 64  # of 68 tokens: 4 blocks of 16


async def test_keys_are_checked_by_the_router_too_and_used_by_its_own_requests():
    async with mock(api_key="k") as one, routed(one.url, keys=("k",)) as router:
        assert (await router.post(PATH, ASK))[0] == 401 and one.requests == 0
        assert (await router.post(PATH, ASK, Authorization="Bearer k"))[0] == 200
        found = await router.get("/v1/models", Authorization="Bearer k")
        assert [model["id"] for model in found["data"]] == ["mock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "http://127.0.0.1:1", "--", "--dtype", "float64"], "leave out --backend"),
        (["--replicas", "0"], "not a whole number"),
        (["--backend", "127.0.0.1"], "invalid address"),
        (["--", "--max-queue", "many"], "--max-queue"),
    ],
)
def test_wrong_options_are_one_sentence(words, message):
    with pytest.raises(UserError, match=message):
        main(words)


def test_an_unknown_command_is_one_sentence():
    done = python("-m", "stage12_distributed", "nothing")
    assert done.returncode == 2 and done.stderr.startswith("error: Argument COMMAND: invalid")

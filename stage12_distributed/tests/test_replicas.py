"""Which servers there are, and which of them get requests. The servers here have no model."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from shared.errors import UserError
from stage06_serving.logs import Queued
from stage06_serving.tests.asking import events
from stage06_serving.tests.tools import until
from stage12_distributed.router import process, replicas, standing
from stage12_distributed.router.relay import MOST_BUDGET
from stage12_distributed.router.replicas import Options, Pool
from stage12_distributed.tests.tools import STREAM, answered, dies, held, mock, plain, routed, two

MOCK = "stage07_loadtest.mock"


async def test_a_slow_health_check_leaves_the_load_and_shuts_the_replica_out(monkeypatch):
    async with two(plain(held), plain(answered)) as (slow, _, router):
        backend = router.prefer(slow)
        replica: Any = backend.replica
        asking = asyncio.create_task(router.post())
        await until(lambda: slow.running)
        monkeypatch.setattr(replicas, "PATIENCE", 0.05)
        slow.slow = 1.0
        await router.pool.check(backend)
        assert not replica.ready and replica.requests == 1
        assert replica.tokens and replica.tree  # neither its load nor its cache is forgotten
        assert (await router.post()).replica == (200, "replica-1")
        slow.slow = 0.0
        await router.pool.check(backend)
        assert backend.ready and replica.requests == 1 and backend.replica is replica
        asking.cancel()
        await until(lambda: router.idle)


async def test_why_a_process_does_not_start_is_shown_once(monkeypatch, capsys, caplog):
    """By who waits for it: here the log, as the process should start again."""
    why = "replica-0 did not start: Argument --itl:"
    async with routed(replicas=1, module=MOCK) as router:
        (backend,) = router.backends
        assert backend.process is not None
        monkeypatch.setattr(replicas, "FIRST", 0.01)
        router.pool.options = Options(arguments=("--itl", "-1"), module=MOCK)
        backend.process.kill()
        await until(lambda: why in caplog.text)
    assert "--itl" not in capsys.readouterr().err


async def test_the_log_of_a_process_waits_for_no_reader(monkeypatch):
    """When its standard error was a pipe that was full, the router answered nothing any more."""
    reading, writing = os.pipe()
    code = "import sys; [print('x' * 99, file=sys.stderr) for _ in range(2_000)]"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=PIPE)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    late = threading.Event()

    def drain() -> None:  # lest a test that fails waits for ever
        late.set()
        os.close(reading)

    timer = threading.Timer(5, drain)
    timer.start()
    with suppress(BrokenPipeError), open(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(logging.root, "handlers", [Queued(stream)])
        await process._show("replica-0", child, url)
        timer.cancel()
        os.close(reading)
    assert not late.is_set()
    with pytest.raises(UserError, match="did not start: x+"):
        await url


async def test_many_servers_are_checked_less_often():
    """A hundred, twice a second, took a quarter of the event loop."""
    few, many = (Pool(Options(replicas=count)) for count in (2, 64))
    assert few.pause == replicas.CHECK and many.pause == 64 / replicas.MOST_CHECKS


async def test_failures_outlive_the_request_that_met_them():
    """A server that passes its health checks but never answers gets its next chance later each
    time; one good answer, and it is healthy."""
    async with two(plain(dies), plain(answered)) as (bad, _, router):
        waits = []
        for _ in range(3):
            backend = router.prefer(bad)
            assert (await router.post()).status == 200
            waits.append(backend.standing.until - asyncio.get_running_loop().time())
            await router.pool.check(backend)
            assert not backend.ready  # its next chance has not come yet
            backend.standing.until = 0.0
            router.pool.settle()
        assert bad.requests == 3 and waits[0] < 0.6 * waits[1] < 0.4 * waits[2]
        router.prefer(bad)
        bad.answer = answered
        assert (await router.post()).status == 200 and backend.standing.failures == 0


def failing(status: int, **headers: str) -> Any:
    async def fails(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "planted"}, status=status, headers=headers)

    return fails


async def broken(request: web.Request) -> web.StreamResponse:
    text = 'data: {"error":{"message":"planted"}}\n\ndata: [DONE]\n\n'
    return web.Response(text=text, content_type="text/event-stream")


@pytest.mark.parametrize(("status", "seen"), [(500, 6), (502, 6), (429, 6), (503, 1)], ids=str)
async def test_a_replica_that_fails_fast_draws_no_traffic(monkeypatch, status, seen):
    """It is the less busy one, always."""
    monkeypatch.setattr(standing, "FIRST", standing.LONGEST)
    fails = failing(status, **{"Retry-After": "30"})
    async with two(plain(fails), plain(answered)) as (bad, _, router):
        statuses = [(await router.post({"prompt": str(n)})).status for n in range(60)]
        assert bad.requests == seen and statuses.count(200) >= 60 - 6
        about = (await router.get("/health"))["replicas"]["replica-0"]
        assert not about["ready"] and about["url"] == bad.url
        assert ("no room" if status == 503 else str(status)) in about["why"]


async def test_a_replica_whose_streams_are_errors_draws_no_traffic(monkeypatch):
    """Their status is 200, since it is sent first."""
    monkeypatch.setattr(standing, "FIRST", standing.LONGEST)
    async with two(plain(broken), mock()) as (bad, _, router):
        answers = [await router.post(STREAM | {"prompt": str(n)}) for n in range(60)]
        assert bad.requests == 6 and sum("planted" in answer.body for answer in answers) == 6
        assert "error" in router.backends[0].about()["why"]


async def test_after_an_ejection_one_request_is_a_probe():
    """The others go elsewhere until it is answered."""
    released = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await released.wait()
        return await answered(request)

    async with two(plain(failing(500)), plain(answered)) as (bad, other, router):
        while (backend := router.prefer(bad)).ready:
            await router.post()
        bad.answer, backend.standing.until, before = waits, 0.0, bad.requests
        router.pool.settle()
        probe = asyncio.create_task(router.post())
        await until(lambda: bad.running)
        assert "shows whether it works" in backend.about()["why"]
        for _ in range(5):
            assert (await router.post()).replica == (200, "replica-1")
        released.set()
        assert (await probe).replica == (200, "replica-0") and bad.requests == before + 1
        assert router.prefer(bad).ready and (await router.post()).replica == (200, "replica-0")


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_when_all_replicas_fail_requests_still_reach_them(count):
    """The fault may be the requests': at most half of the replicas are ejected."""
    async with AsyncExitStack() as stack:
        bad = [await stack.enter_async_context(plain(failing(500))) for _ in range(count)]
        router = await stack.enter_async_context(routed(*bad))
        for number in range(40):
            assert (await router.post({"prompt": str(number)})).status == 500
        assert sum(backend.ready for backend in router.backends) == count - count // 2


async def test_a_replica_that_is_silent_is_ejected_and_an_answer_at_the_end_is_not_silence():
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await answered(request)

    limits = {"first_byte": 0.1, "idle": 0.1}
    async with two(plain(held), mock(), **limits) as (silent, _, router):
        assert (await router.post(STREAM)).replica == (200, "replica-1")
        assert silent.requests == 1 and "silent" in router.backends[0].about()["why"]
    async with two(mock(fault="hang"), mock(), **limits) as (silent, _, router):
        *shown, last = events((await router.post(STREAM)).body)
        assert shown and last["error"]["code"] == 504 and not router.backends[0].ready
    async with two(plain(slow), mock(), **limits) as (_, other, router):
        assert (await router.post()).replica == (200, "replica-0") and not other.requests


@pytest.mark.parametrize(
    ("pace", "name"), [(0, "replica-1"), (1, "replica-0"), (None, "replica-0")]
)
async def test_a_whole_answer_is_waited_for_while_its_replica_computes(monkeypatch, pace, name):
    """One that accepts and never answers took five requests with their whole timeouts; a long
    answer looks the same, but for the passes. None: the replica reports none."""
    monkeypatch.setattr(replicas, "CHECK", 0.02)
    monkeypatch.setattr(replicas, "PATIENCE", 0.4)

    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return await answered(request)

    first = plain(late, passes=None if pace is None else 7, pace=pace or 0)
    async with two(first, plain(answered), first_byte=0.1) as (_, other, router):
        assert (await router.post()).replica == (200, name)
        assert other.requests == (name == "replica-1")
        assert router.relay.counts["retries"] == other.requests and router.idle
        if other.requests:
            assert "silent" in router.backends[0].about()["why"]


async def test_a_death_loses_nothing_that_was_not_shown_however_much_waits_there():
    dying = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await dying.wait()
        return await dies(request)

    async with plain(waits) as bad, plain(answered) as good, routed(bad) as router:
        asking = [asyncio.create_task(router.post()) for _ in range(80)]
        await until(lambda: bad.running == 80)
        await router.pool.add(good.url)
        dying.set()
        assert {(await answer).replica for answer in asking} == {(200, "replica-1")}
        assert router.relay.counts["retries"] == 80 and router.relay.budget == MOST_BUDGET


async def test_the_queue_that_a_replica_reports_counts():
    """Other routers send it requests, too."""
    async with two(plain(answered), plain(answered)) as (queued, _, router):
        queued.waiting = 50
        await router.pool.check(router.prefer(queued))
        assert (await router.post()).replica == (200, "replica-1")
        queued.waiting = 0
        await router.pool.check(router.prefer(queued))
        assert (await router.post()).replica == (200, "replica-0")


async def test_one_slow_health_check_delays_no_other(monkeypatch):
    monkeypatch.setattr(replicas, "CHECK", 0.02)
    async with two(plain(answered), plain(answered)) as (slow, other, router):
        monkeypatch.setattr(replicas, "PATIENCE", 1000.0)
        slow.slow, other.waiting = 1000.0, 1
        await until(lambda: router.backends[1].about()["queued"] == 1)
        other.waiting = 2
        await until(lambda: router.backends[1].about()["queued"] == 2)


OTHER = (b'{"data": [{"id": "other"}]}', "it serves the model 'other', not 'mock' like the others")
LIES = [(lie, "no list of models") for lie in (b"", b'{"data": [7]}', b"[" * 10_000, b"<html>")]


@pytest.mark.parametrize(("models", "why"), [OTHER, *LIES])
async def test_a_server_with_another_model_or_none_gets_no_requests(models, why):
    async with two(plain(answered), plain(answered, models=models)) as (_, other, router):
        about = (await router.get("/health"))["replicas"]["replica-1"]
        assert not about["ready"] and why in about["why"]
        for number in range(6):
            assert (await router.post({"prompt": str(number)})).status == 200
        assert other.requests == 0


async def test_servers_that_have_left_the_list_get_nothing_though_they_answer(tmp_path):
    """A list that cannot be read, or is empty, changes nothing."""
    file = tmp_path / "backends.txt"
    async with plain(answered) as old, plain(answered) as new:

        async def listed(text: str) -> None:
            file.write_text(text, encoding="utf-8")
            await router.pool.follow()
            await until(lambda: all(backend.ready for backend in router.backends))

        file.write_text(f"{old.url}  # the first\n\n", encoding="utf-8")
        async with routed(f"file:{file}") as router:
            assert (await router.post()).status == 200
            await listed(new.url)
            large = f"{old.url}\n{'#' * 2**20}"  # it would be cut, perhaps within an address
            crowd = "".join(f"http://127.0.0.1:{port}\n" for port in range(1, 1_002))
            for text in (new.url, "", "no address", large, crowd):
                await listed(text)
                assert [backend.url for backend in router.backends] == [new.url]
            for number in range(6):
                assert (await router.post({"prompt": str(number)})).status == 200
            assert (old.requests, new.requests) == (1, 6)


async def test_a_file_is_read_though_no_name_can_be_looked_up(tmp_path):
    """Names that do not resolve held all threads of the event loop, which read the file, too."""
    file, free = tmp_path / "backends.txt", threading.Event()
    async with plain(answered) as old, plain(answered) as new:
        file.write_text(old.url, encoding="utf-8")
        async with routed(f"file:{file}") as router:
            waiting = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(40)]
            try:
                file.write_text(new.url, encoding="utf-8")
                await until(lambda: [backend.url for backend in router.backends] == [new.url])
            finally:
                free.set()
                await asyncio.gather(*waiting)


async def test_a_router_that_leads_to_itself_gets_no_requests():
    """Without another server, each request opened a thousand connections until its deadline."""
    async with plain(answered) as engine, routed(engine, admin_key="a") as router:
        for url in (router.url, router.url.replace("127.0.0.1", "localhost")):
            got = await router.post({"url": url}, "/admin/add", **{"x-admin-key": "a"})
            assert got.body["ready"] is False
        await router.pool.drain(router.backends[0], 0.0)
        got = await router.post()
        assert got.status == 503 and router.relay.counts["requests"] == 1


async def test_a_request_names_the_routers_on_its_way_and_is_refused_if_it_comes_back():
    async with plain(answered) as engine, routed(engine) as router:
        assert (await router.post(via="1.1 another")).status == 200
        via = engine.seen["via"]
        assert via.startswith("1.1 another") and router.pool.via in via
        assert (await router.post(via=via)).status == 503 and engine.requests == 1
        headers = {"via": "1.1 another", "authorization": "Bearer its"}
        async with router.http.get(router.url + "/live", headers=headers) as response:
            await response.read()
        assert engine.seen["authorization"] == "Bearer its"  # the router need not know the key
        assert engine.seen["via"] == via


async def test_routers_that_list_each_other_ask_each_other_once(monkeypatch):
    """One look at the page of metrics went round for ever: who waits for it no more stops no one
    who was asked."""
    asked: list[tuple[str, ...]] = []
    get = Pool.get

    def recorded(pool: Pool, backend: Any, *question: str) -> Any:
        asked.append(question)
        return get(pool, backend, *question)

    key = {"x-admin-key": "a"}
    async with (
        plain(answered) as engine,
        routed(engine, admin_key="a") as router,
        routed(router) as other,
    ):
        await router.post({"url": other.url}, "/admin/add", **key)
        monkeypatch.setattr(Pool, "get", recorded)
        await router.metrics()
        assert [path for path, *_ in asked].count("/metrics") == 3


async def test_servers_come_from_dns_too():
    async with plain(answered) as engine, routed(f"dns:localhost:{URL(engine.url).port}") as router:
        assert (await router.post()).status == 200
        assert engine.url in {backend.url for backend in router.backends}


async def test_an_administrator_adds_and_removes_servers():
    key = {"x-admin-key": "a"}
    async with plain(answered) as old, plain(answered) as new, routed(old, admin_key="a") as router:
        for status in (200, 400):  # the second time it is there
            got = await router.post({"url": new.url}, "/admin/add", **key)
            assert got.status == status
        got = await router.post({"replica": "replica-0"}, "/admin/remove", **key)
        assert got.body == {"drained": True}
        assert list((await router.get("/health"))["replicas"]) == ["replica-1"]
        assert (await router.post()).replica == (200, "replica-1") and old.requests == 0


async def test_drain_and_resume_are_for_the_administrator():
    async with (
        plain(answered) as engine,
        routed(engine, admin_key="a") as router,
        routed(engine) as open,
    ):
        name, key = {"replica": "replica-0"}, {"x-admin-key": "a"}
        assert (await open.post(name, "/admin/drain")).status == 403
        for action, fields, headers, status in (
            *(("drain", name, {}, 401), ("drain", name, {"x-admin-key": "b"}, 401)),
            *(("drain", {"replica": "x"}, key, 400), ("drain", {}, key, 400)),
            *(("drain", [], key, 400), ("stop", name, key, 404), ("update", {}, key, 400)),
            *(("add", {"url": "nowhere"}, key, 400), ("add", {}, key, 400)),
        ):
            assert (await router.post(fields, f"/admin/{action}", **headers)).status == status
        assert (await router.post(name, "/admin/drain", **key)).body == {"drained": True}
        assert (await router.post()).status == 503 and engine.requests == 0
        await router.pool.check(router.backends[0])  # a good health check does not end a drain
        assert (await router.post()).status == 503
        assert (await router.post(name, "/admin/resume", **key)).body == {"ready": True}
        assert (await router.post()).status == 200

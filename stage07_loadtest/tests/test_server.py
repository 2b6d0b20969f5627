"""What is read from a server besides its answers: counters, the model's name, and whether it has come to rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stage07_loadtest import mock
from stage07_loadtest.client import Target, open_session, send
from stage07_loadtest.mock import MODEL, Behaviour
from stage07_loadtest.server import Counters, describe, parse, scrape, settled
from stage07_loadtest.tests import virtual
from stage07_loadtest.workload import Ask

METRICS = """\
# HELP vllm:prompt_tokens_total Tokens of prompts.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="a"} 12.0
vllm:prompt_tokens_total{model_name="b"} 3.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="a"} 1e+06
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop",model_name="a"} 2.0
vllm:request_success_total{finished_reason="length",model_name="a"} 5.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="a"} 0.125
"""


def test_counters_are_added_up_over_labels():
    assert parse(METRICS) == Counters(15, 1_000_000, 7, 1, 0, 0.125)


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_a_counter_that_is_no_number_is_none_of_ours(value: str):
    for number in ("1e+06", "0.125"):
        assert parse(METRICS.replace(number, value)) is None


@pytest.mark.parametrize(
    "text",
    ["", "<html>no</html>", METRICS.replace("vllm:", "tgi:"), METRICS.replace("usage", "use")],
)
def test_other_metrics_are_none_of_ours(text: str):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ({}, True),
        ({"running": 1}, False),
        ({"waiting": 1}, False),
        ({"kv_cache_usage": 0.01}, False),
    ],
)
def test_idle_means_that_everything_came_back(busy: dict[str, Any], idle: bool):
    assert (
        Counters(
            **{
                "prompt_tokens": 1,
                "generation_tokens": 1,
                "success": 1,
                "running": 0,
                "waiting": 0,
                "kv_cache_usage": 0.0,
            }
            | busy
        ).idle
        is idle
    )


def against(
    routes: dict[str, tuple[int, bytes]],
    use: Callable[[aiohttp.ClientSession, Target], Awaitable[Any]],
) -> Any:
    """Run `use(session, target)` against a server that has these answers to GET."""

    async def run() -> Any:
        app = web.Application()
        for path, answer in routes.items():

            async def handle(
                request: web.Request, answer: tuple[int, bytes] = answer
            ) -> web.Response:
                return web.Response(
                    status=answer[0], body=answer[1], content_type="text/plain", charset="utf-8"
                )

            app.router.add_get(path, handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target = Target("http://{}:{}".format(*runner.addresses[0][:2]))
        try:
            async with open_session(target) as session:
                return await use(session, target)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_server_without_metrics_has_none():
    assert against({}, scrape) is None
    assert against({"/metrics": (200, b"hello")}, scrape) is None
    assert against({"/metrics": (200, b"\xff")}, scrape) is None
    assert against({"/metrics": (401, METRICS.encode())}, scrape) is None
    assert against({"/metrics": (200, METRICS.encode())}, scrape) == parse(METRICS)


def test_nobody_there_has_none_either():
    async def use() -> Any:
        target = Target("http://127.0.0.1:1")
        async with open_session(target) as session:
            return (
                await scrape(session, target),
                await settled(session, target),
                await describe(session, target),
            )

    assert asyncio.run(use()) == (None, None, (None, None))


def test_who_is_never_at_rest_is_waited_for_in_vain_and_told_so():
    found = against(
        {"/metrics": (200, METRICS.encode())}, lambda session, target: settled(session, target, 0.1)
    )
    assert found is not None and not found.idle


def test_settled_waits_for_what_is_in_hand():
    async def run() -> tuple[Counters | None, Counters | None]:
        async with mock.serving(Behaviour(ttft=0.2, itl=0.01)) as running:
            target = Target(running.url)
            async with open_session(target) as session:
                asking = asyncio.create_task(send(session, target, Ask([1], 5), 0.0, lambda: 0.0))
                while not running.running:
                    await asyncio.sleep(0.001)
                before, after = await scrape(session, target), await settled(session, target)
                await asking
                return before, after

    before, after = virtual.run(run())
    assert (
        before is not None and before.running == 1 and before.kv_cache_usage > 0 and not before.idle
    )
    assert after is not None and after.idle and (after.generation_tokens, after.success) == (5, 1)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"data": [{"id": "m", "max_model_len": 77}, {"id": "n"}]}, ("m", 77)),
        ({"data": [{"id": "m"}]}, ("m", None)),
        ({"data": [{"id": 5, "max_model_len": "long"}]}, (None, None)),
        ({"data": []}, (None, None)),
        ({"data": [3]}, (None, None)),
        ([], (None, None)),
    ],
)
def test_the_model_is_the_first_that_is_named(body: Any, found: tuple[Any, Any]):
    assert against({"/v1/models": (200, json.dumps(body).encode())}, describe) == found
    assert against({"/v1/models": (200, b"{")}, describe) == (None, None)


def test_the_mock_is_described():
    async def run() -> Any:
        async with mock.serving() as running:
            target = Target(running.url)
            async with open_session(target) as session:
                return await describe(session, target)

    assert asyncio.run(run()) == (MODEL, None)

"""What is read from a server besides answers: counters, the model's name, whether it is idle."""

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
from stage07_loadtest.tests.helpers import with_server
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
COUNTERS = Counters(15, 1_000_000, 7, 1, 0, 0.125)


def test_counters_are_summed_over_labels():
    assert parse(METRICS) == COUNTERS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>no</html>",
        METRICS.replace("vllm:", "tgi:"),
        METRICS.replace("usage", "use"),
        METRICS.replace("1e+06", "NaN"),
        METRICS.replace("0.125", "+Inf"),
    ],
)
def test_other_metrics_are_not_counters(text: str):
    assert parse(text) is None


@pytest.mark.parametrize("busy", [None, "running", "waiting", "kv_cache_usage"])
def test_idle_means_that_everything_was_released(busy: str | None):
    state = {"running": 0, "waiting": 0, "kv_cache_usage": 0.0} | ({busy: 1} if busy else {})
    assert Counters(1, 1, 1, **state).idle is (busy is None)  # type: ignore[arg-type]


Use = Callable[[aiohttp.ClientSession, Target], Awaitable[Any]]


def against(path: str, status: int, body: bytes, use: Use) -> Any:
    """Run `use(session, target)` against a server with this answer to GET."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")

    async def run(url: str) -> Any:
        async with open_session(Target(url)) as session:
            return await use(session, Target(url))

    return with_server({path: handle}, run)


@pytest.mark.parametrize(
    ("path", "status", "body", "counters"),
    [
        ("/metrics", 200, METRICS.encode(), COUNTERS),
        ("/metrics", 200, b"hello", None),
        ("/metrics", 200, b"\xff", None),
        ("/metrics", 401, METRICS.encode(), None),
        ("/other", 200, b"", None),
    ],
)
def test_a_server_without_metrics_has_no_counters(
    path: str, status: int, body: bytes, counters: Counters | None
):
    assert against(path, status, body, scrape) == counters


def test_an_absent_server_has_no_counters_and_no_name():
    async def use() -> Any:
        target = Target("http://127.0.0.1:1")
        async with open_session(target) as session:
            return [await use(session, target) for use in (scrape, settled, describe)]

    assert asyncio.run(use()) == [None, None, (None, None)]


def test_settled_waits_until_the_server_is_idle():
    async def run() -> tuple[Counters | None, Counters | None]:
        async with mock.serving(Behaviour(ttft=0.2, itl=0.01)) as running:
            target = Target(running.url)
            async with open_session(target) as session:
                asking = asyncio.create_task(send(session, target, Ask([1], 5), 0.0, lambda: 0.0))
                while not running.running:
                    await asyncio.sleep(0.001)
                before, after = await scrape(session, target), await settled(session, target)
                await asking
                assert await describe(session, target) == (MODEL, None)
                return before, after

    before, after = virtual.run(run())
    assert before is not None and before.running == 1 and before.kv_cache_usage > 0
    assert after is not None and after.idle and (after.generation_tokens, after.success) == (5, 1)
    impatient = against(
        "/metrics", 200, METRICS.encode(), lambda session, target: settled(session, target, 0.1)
    )
    assert impatient == COUNTERS and not impatient.idle


@pytest.mark.parametrize(
    ("card", "described"),
    [
        ({"data": [{"id": "m", "max_model_len": 77}, {"id": "n"}]}, ("m", 77)),
        ({"data": [{"id": "m"}]}, ("m", None)),
        ({"data": [{"id": 5, "max_model_len": "long"}]}, (None, None)),
        ({"data": []}, (None, None)),
        ({"data": [3]}, (None, None)),
        ([], (None, None)),
        (None, (None, None)),
    ],
)
def test_the_model_is_the_first_one_listed(card: Any, described: tuple[Any, Any]):
    body = b"{" if card is None else json.dumps(card).encode()
    assert against("/v1/models", 200, body, describe) == described

"""The page of metrics, and the log. The servers here have no model."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from stage06_serving.tests.asking import HANG
from stage12_distributed.router import metrics
from stage12_distributed.tests.tools import answered, held, mock, plain, routed, two


async def test_one_page_of_metrics_for_all():
    async with two(mock(), mock()) as (_, other, router):
        for _ in range(2):
            await router.post()
        other.held = None  # its page cannot be rendered: it is left out
        lines = await router.metrics()
        assert {
            'vllm:generation_tokens_total{model_name="mock",replica="replica-0"} 16.0',
            'staircase:router_answers_total{replica="replica-0",status="200"} 2.0',
            'staircase:replica_ready{replica="replica-1"} 1.0',
            "staircase:router_requests_total 2.0",
            "staircase:router_cached_tokens_total 128.0",  # twice 4 blocks of 16, of 68 tokens
        } < lines
        assert not [line for line in lines if line.startswith("vllm:") and "replica-1" in line]


async def test_the_page_of_metrics_stops_no_request(monkeypatch):
    merging, merged = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def merge(pages: Any) -> str:
        loop.call_soon_threadsafe(merging.set)
        assert merged.wait(HANG)
        return ""

    monkeypatch.setattr(metrics, "merge", merge)
    async with plain(answered) as engine, routed(engine) as router:
        page = asyncio.create_task(router.metrics())
        await merging.wait()
        assert (await router.post()).status == 200
        merged.set()
        await page


def test_pages_are_merged_by_family_and_a_page_that_cannot_be_read_is_left_out():
    text = '# HELP a_s About.\n# TYPE a_s histogram\na_s_bucket{le="1.0"} 2.0\na_s_count 2.0\n'
    pages = {"x": text, "bad": "<html>", "y": text + "other 1e3 1700000000000\n", "empty": ""}
    assert metrics.merge(pages).splitlines() == [
        "# HELP a_s About.",
        "# TYPE a_s histogram",
        'a_s_bucket{le="1.0",replica="x"} 2.0',
        'a_s_count{replica="x"} 2.0',
        'a_s_bucket{le="1.0",replica="y"} 2.0',
        'a_s_count{replica="y"} 2.0',
        'other{replica="y"} 1e3 1700000000000',
    ]
    assert metrics.total(pages["y"], "other", "a_s_count") == 1002.0


async def test_every_answer_is_counted_and_logged(caplog):
    """Also the router's own, and those of requests that it refused."""
    caplog.set_level(logging.INFO, "staircase.requests")
    async with plain(held) as engine, routed(engine, timeout=0.1) as router:
        assert (await router.post()).status == 504
        await router.pool.drain(router.backends[0], 0.0)
        assert (await router.post()).status == 503
        async with router.http.post(router.url + "/v1/completions", data=b"text") as response:
            assert response.status == 400
        assert {
            'staircase:router_answers_total{replica="replica-0",status="504"} 1.0',
            'staircase:router_answers_total{replica="router",status="503"} 1.0',
            'staircase:router_responses_total{status="400"} 1.0',
            "staircase:router_request_seconds_count 2.0",
            'staircase:router_first_byte_seconds_bucket{le="0.08"} 1.0',
        } < await router.metrics()
    lines = [record.getMessage() for record in caplog.records if "completions" in str(record.args)]
    assert lines[0].endswith("s replica-0") and lines[1].endswith(" s")

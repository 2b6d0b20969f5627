"""One page of metrics: the router's own, and the replicas' with their names as labels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .relay import Relay
from .replicas import Backend, Pool, whole

LARGEST = 2**22  # bytes of a replica's page
PATIENCE = 2.0  # seconds in which a replica must send it
COUNTS = {
    "requests": "Requests that arrived.",
    "retries": "Requests that were sent to a second replica.",
    "cut": "Answers that broke off, after which the client got an error.",
    "left": "Requests whose client disconnected.",
    "prompt_tokens": "Tokens of prompts, as the router counts them.",
    "cached_tokens": "Tokens of the prompts that the replica was expected to have in its cache.",
    "restarts": "Processes that were restarted.",
}
GAUGES = {
    "ready": "1 if the replica may get requests.",
    "requests": "Requests in flight.",
    "tokens": "Tokens in flight.",
}


class Page(Collector):
    """The metrics of the router, and of all replicas' `pages` at one time."""

    def __init__(self, relay: Relay, pages: dict[str, str]) -> None:
        self.relay, self.pages = relay, pages

    def collect(self) -> Iterator[Metric]:
        pool = self.relay.pool
        counts = {**self.relay.counts, "restarts": pool.restarts}
        for name, about in COUNTS.items():
            yield CounterMetricFamily(f"staircase:router_{name}", about, counts.get(name, 0))
        answers = CounterMetricFamily(
            "staircase:router_answers", "Answers passed on.", labels=["replica", "status"]
        )
        for (replica, status), number in self.relay.answers.items():
            answers.add_metric([replica, str(status)], number)
        yield answers
        for name, about in GAUGES.items():
            gauge = GaugeMetricFamily(f"staircase:replica_{name}", about, labels=["replica"])
            for backend in pool.backends.values():
                gauge.add_metric([backend.name], float(backend.about().get(name, 0)))
            yield gauge
        merged: dict[str, Metric] = {}
        for replica, text in self.pages.items():
            for found in text_string_to_metric_families(text):
                new = Metric(found.name, found.documentation, found.type)
                family = merged.setdefault(found.name, new)
                for sample in found.samples:
                    labels = {**sample.labels, "replica": replica}
                    family.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def total(page: str, *names: str) -> float:
    """The sum of these metrics of a server's page, over all labels."""
    families = text_string_to_metric_families(page)
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name in names)


async def render(relay: Relay) -> bytes:
    """The page that Prometheus reads. A replica that does not answer in time is left out."""
    reachable = [backend for backend in relay.pool.backends.values() if backend.url]
    texts = await asyncio.gather(*(_fetch(relay.pool, backend) for backend in reachable))
    pages = {backend.name: text for backend, text in zip(reachable, texts, strict=True)}
    registry = CollectorRegistry()
    registry.register(Page(relay, pages))
    return generate_latest(registry)


async def _fetch(pool: Pool, backend: Backend) -> str:
    """A replica's page; empty if it cannot be read."""
    try:
        async with asyncio.timeout(PATIENCE), pool.get(backend, "/metrics") as response:
            text = (await whole(response, LARGEST)).decode() if response.status == 200 else ""
        list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, OSError, ValueError):
        return ""
    return text

"""One page of metrics: the router's own, and the replicas' with their names as labels."""

from __future__ import annotations

import asyncio
import re
from collections import Counter as Counts
from collections.abc import Iterator, Mapping

import aiohttp
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stage06_serving.metrics import SECONDS

from .client import whole
from .relay import Answer, Relay
from .replicas import Backend

LARGEST = 2**20  # bytes of a replica's page
PATIENCE = 2.0  # seconds in which a replica must send it
ROUTER = "router"  # in place of a replica's name, for answers of the router itself
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
    "queued": "Requests that wait at the replica, as it reports.",
}
# "name 1.0", 'name{label="text"} 1.0', perhaps with a time
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([-+.0-9a-zA-Z]+(?: [0-9]+)?)")


class Metrics(Collector):
    """The router's own numbers. statuses: of all answers, also of those that no replica saw."""

    def __init__(self, relay: Relay, statuses: Mapping[int, int]) -> None:
        self.relay, self.statuses = relay, statuses
        self.answers = Counts[tuple[str, int]]()  # by replica and status
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.first, self.last = (
            Histogram(
                f"staircase:router_{name}_seconds", about, registry=self.registry, buckets=SECONDS
            )
            for name, about in (
                ("first_byte", "From the arrival of a request to the first byte of its answer."),
                ("request", "From the arrival of a request to the end of its answer."),
            )
        )
        relay.listeners.append(self._listen)

    def _listen(self, answer: Answer) -> None:
        if answer.status:
            name = answer.replica.name if answer.replica else ROUTER
            self.answers[name, answer.status] += 1
            self.first.observe(answer.first)
            self.last.observe(answer.seconds)

    def collect(self) -> Iterator[Metric]:
        pool = self.relay.pool
        counts = {**self.relay.counts, "restarts": pool.restarts}
        for name, about in COUNTS.items():
            yield CounterMetricFamily(f"staircase:router_{name}", about, counts.get(name, 0))
        about, labels = "Answers to forwarded requests.", ["replica", "status"]
        answers = CounterMetricFamily("staircase:router_answers", about, labels=labels)
        for (replica, status), number in self.answers.items():
            answers.add_metric([replica, str(status)], number)
        yield answers
        about = "All answers of the router, to requests that it refused too."
        responses = CounterMetricFamily("staircase:router_responses", about, labels=["status"])
        for status, number in self.statuses.items():
            responses.add_metric([str(status)], number)
        yield responses
        for name, about in GAUGES.items():
            gauge = GaugeMetricFamily(f"staircase:replica_{name}", about, labels=["replica"])
            for backend in pool.backends.values():
                gauge.add_metric([backend.name], float(backend.about().get(name, 0)))
            yield gauge

    async def render(self, via: str) -> bytes:
        """The page that Prometheus reads. A replica that does not answer in time is left out. The
        event loop serves requests meanwhile: a hundred pages take seconds to read. via: the routers
        that ask, which may be replicas here."""
        reachable = [backend for backend in self.relay.pool.backends.values() if backend.url]
        texts = await asyncio.gather(*(self._fetch(backend, via) for backend in reachable))
        pages = {backend.name: text for backend, text in zip(reachable, texts, strict=True)}
        return generate_latest(self.registry) + (await asyncio.to_thread(merge, pages)).encode()

    async def _fetch(self, backend: Backend, via: str) -> str:
        """A replica's page; empty if it cannot be read."""
        try:
            async with (
                asyncio.timeout(PATIENCE),
                self.relay.pool.get(backend, "/metrics", via) as response,
            ):
                return (await whole(response, LARGEST)).decode() if response.status == 200 else ""
        except (aiohttp.ClientError, OSError, ValueError):
            return ""


def merge(pages: Mapping[str, str]) -> str:
    """Pages of metrics as one: the name of its page becomes a label of each sample. A page with a
    line that is no sample is left out."""
    families: dict[str, list[str]] = {}
    for page, text in pages.items():
        try:
            for family, lines in labelled(page, text).items():
                first = family not in families
                families.setdefault(family, []).extend(li for li in lines if first or li[0] != "#")
        except ValueError:
            continue
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def labelled(page: str, text: str) -> dict[str, list[str]]:
    """The lines of a page by family, each sample with the label replica="page". Raises ValueError
    for a line that is no sample."""
    families: dict[str, list[str]] = {}
    lines: list[str] = []
    family = ""
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) > 2 and words[1] in ("HELP", "TYPE"):
                if words[2] != family:
                    family = words[2]
                    lines = families.setdefault(family, [])
                lines.append(line)
        elif line:
            match = SAMPLE.fullmatch(line)
            if match is None:
                raise ValueError(f"no sample: {line[:100]}")
            name, labels, value = match.groups()
            if not name.startswith(family):
                family = name
                lines = families.setdefault(family, [])
            labels = f"{labels.rstrip(',')}," if labels else ""
            lines.append(f'{name}{{{labels}replica="{page}"}} {value}')
    return families


def total(page: str, *names: str) -> float:
    """The sum of metrics of a server's page, over all labels."""
    matches = filter(None, map(SAMPLE.fullmatch, page.splitlines()))
    return sum(float(match[3].split()[0]) for match in matches if match[1] in names)

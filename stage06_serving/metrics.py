"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .async_engine import PROBE, AsyncEngine, Step, Ticket

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
REASONS = ("stop", "length", "abort", "error")
HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of an answer.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
}
DRAFTS = {  # counts that an engine with drafts keeps: names and fields
    "spec_decode_num_drafts": ("passes", "Passes of a sequence that verified drafts."),
    "spec_decode_num_draft_tokens": ("proposed", "Drafts verified."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafts accepted."),
}
disable_created_metrics()


class Metrics(Collector):
    """Counts the work of `engine`, step by step. Labels come from a fixed list: nothing that a
    client sends becomes one.

    drafts: counts of an engine that makes drafts.
    """

    def __init__(self, engine: AsyncEngine, model: str, drafts: Any = None) -> None:
        self.engine, self.model, self.drafts = engine, model, drafts
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.prompt_tokens = self.generated = 0
        self.ended = Counter(dict.fromkeys(REASONS, 0))
        self.histograms: dict[str, Histogram] = {}
        for name, about in HISTOGRAMS.items():
            options: dict[str, Any] = {"buckets": SECONDS, "registry": self.registry}
            histogram = Histogram(f"vllm:{name}", about, ["model_name"], **options)
            self.histograms[name] = histogram.labels(model)
        engine.listeners.append(self._listen)

    def render(self) -> bytes:
        """The text that Prometheus reads. Must be called on the event loop."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        status, drafts = self.engine.status, self.drafts
        usage = status.owned / status.blocks
        for name, about, value in (
            ("num_requests_running", "Sequences in a step.", status.running),
            ("num_requests_waiting", "Accepted, not running.", self.engine.waiting),
            ("kv_cache_usage_perc", "Share of the blocks owned, 0 to 1.", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        for name, about, value in (
            ("num_preemptions", "Sequences preempted.", status.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", status.lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", status.hit_tokens),
            ("prompt_tokens", "Prompt tokens computed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated),
            *((name, about, getattr(drafts, f)) for name, (f, about) in DRAFTS.items() if drafts),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            counter.add_metric([self.model], value)
            yield counter
        labels = ["model_name", "finished_reason"]
        ended = CounterMetricFamily("vllm:request_success", "Sequences that ended.", labels=labels)
        for reason, count in self.ended.items():
            ended.add_metric([self.model, reason], count)
        yield ended

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        self.generated += sum(name != PROBE for name, _ in step.tokens)
        self.prompt_tokens += step.prefill_tokens
        for ticket in emitted:
            if ticket.last_token is None:
                self._observe("time_to_first_token_seconds", now - ticket.arrived)
            else:
                self._observe("inter_token_latency_seconds", now - ticket.last_token)
        for ticket in ended:
            self.ended[ticket.reason or "error"] += 1
            self._observe("e2e_request_latency_seconds", now - ticket.arrived)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

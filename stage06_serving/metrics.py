"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .async_engine import PROBE, AsyncEngine, Step, Ticket

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
REASONS = ("stop", "length", "abort", "error")
HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens computed in a step.", TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
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
        self.histograms: dict[str, Any] = {}
        for name, (about, buckets) in HISTOGRAMS.items():
            options: dict[str, Any] = {"buckets": buckets, "registry": self.registry}
            histogram = Histogram(f"vllm:{name}", about, ["model_name"], **options)
            self.histograms[name] = histogram.labels(model)
        engine.listeners.append(self._listen)

    def render(self) -> bytes:
        """The text that Prometheus reads. Must be called on the event loop."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        status, engine = self.engine.status, self.engine
        usage = status.owned / status.blocks
        for name, about, value in (
            ("num_requests_running", "Sequences in a step.", len(status.running)),
            ("num_requests_waiting", "Accepted, not running.", engine.waiting),
            ("kv_cache_usage_perc", "Share of the blocks owned, 0 to 1.", usage),
        ):
            yield self._family(GaugeMetricFamily, name, about, {"": value})
        for name, about, value in (
            ("num_preemptions", "Sequences preempted.", status.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", status.lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", status.hit_tokens),
            ("prompt_tokens", "Prompt tokens computed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated),
            ("admission_rejections", "Requests refused: no room.", engine.rejected),
            *((n, a, getattr(self.drafts, f)) for n, (f, a) in DRAFTS.items() if self.drafts),
        ):
            yield self._family(CounterMetricFamily, name, about, {"": value})
        ended, about = dict(self.ended), "Sequences that ended, by reason."
        yield self._family(CounterMetricFamily, "request_success", about, ended, "finished_reason")
        if self.drafts is not None:
            name, about = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place."
            places = dict(enumerate(list(self.drafts.per_position)))
            yield self._family(CounterMetricFamily, name, about, places, "position")

    def _family(
        self, kind: Any, name: str, about: str, values: Mapping[Any, float], label: str = ""
    ) -> Metric:
        family: Any = kind(f"vllm:{name}", about, labels=["model_name", label][: 1 + bool(label)])
        for value, count in values.items():
            family.add_metric([self.model, str(value)][: 1 + bool(label)], count)
        metric: Metric = family
        return metric

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now, observe = time.perf_counter(), self._observe
        self.generated += sum(name != PROBE for name, _ in step.tokens)
        self.prompt_tokens += step.prefill_tokens
        if step.shares:
            observe("iteration_tokens_total", step.prefill_tokens + step.decode_tokens)
        for ticket in emitted:
            if ticket.last_token is not None:
                observe("inter_token_latency_seconds", now - ticket.last_token)
                continue
            observe("time_to_first_token_seconds", now - ticket.arrived)
            if ticket.scheduled is not None:
                observe("request_prefill_time_seconds", now - ticket.scheduled)
        for ticket in ended:
            self.ended[ticket.reason or "error"] += 1
            observe("request_prompt_tokens", ticket.prompt_tokens)
            observe("request_generation_tokens", ticket.generated)
            observe("e2e_request_latency_seconds", now - ticket.arrived)
            if ticket.scheduled is not None:
                observe("request_queue_time_seconds", ticket.scheduled - ticket.arrived)
            if ticket.generated:  # an only token is the first one, and arrives now
                observe("request_decode_time_seconds", now - (ticket.first_token or now))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    statuses: answers by HTTP status, which are counted elsewhere. drafts: counts of an engine that
    makes drafts.
    """

    def __init__(
        self, engine: AsyncEngine, model: str, statuses: Mapping[int, int], drafts: Any = None
    ) -> None:
        self.engine, self.model, self.statuses, self.drafts = engine, model, statuses, drafts
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.prompt_tokens = self.generated = 0
        self.ended = Counter(dict.fromkeys(REASONS, 0))
        self.histograms = {name: self._histogram(name, *rest) for name, rest in HISTOGRAMS.items()}
        engine.listeners.append(self._listen)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Any:
        options: dict[str, Any] = {"buckets": buckets, "registry": self.registry}
        return Histogram(f"vllm:{name}", about, ["model_name"], **options).labels(self.model)

    def render(self) -> bytes:
        """The text that Prometheus reads. Must be called on the event loop."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        status = self.engine.status
        usage = status.owned / status.blocks
        yield self._gauge("num_requests_running", "Sequences in a step.", len(status.running))
        yield self._gauge("num_requests_waiting", "Accepted, not running.", self.engine.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks owned, 0 to 1.", usage)
        for name, about, value in (
            ("num_preemptions", "Sequences preempted.", status.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", status.lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", status.hit_tokens),
            ("prompt_tokens", "Prompt tokens computed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated),
            ("admission_rejections", "Requests refused: no room.", self.engine.rejected),
        ):
            yield self._counter(name, about, [(None, value)])
        about = "Sequences that ended, by reason."
        yield self._counter("request_success", about, self.ended.items(), "finished_reason")
        about, counts = "Answers, by status.", self.statuses.items()
        yield self._counter("http_responses", about, counts, "status", "staircase")
        if self.drafts is not None:
            for name, (field, about) in DRAFTS.items():
                yield self._counter(name, about, [(None, getattr(self.drafts, field))])
            places = enumerate(list(self.drafts.per_position))
            name, about = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place."
            yield self._counter(name, about, places, "position")

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(
        self,
        name: str,
        about: str,
        counts: Iterable[tuple[object, int]],
        label: str | None = None,
        prefix: str = "vllm",
    ) -> CounterMetricFamily:
        labels = ["model_name", *([label] if label else [])]
        family = CounterMetricFamily(f"{prefix}:{name}", about, labels=labels)
        for value, count in counts:
            family.add_metric([self.model, *([str(value)] if label else [])], count)
        return family

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now, observe = time.perf_counter(), self._observe
        self.generated += sum(name != PROBE for name, _ in step.tokens)
        self.prompt_tokens += step.prefill_tokens
        if step.rows:
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

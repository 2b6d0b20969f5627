"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .async_engine import PROBE, AsyncEngine, Step, Ticket

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
REASONS = ("stop", "length", "abort", "error")
DRAFTS = {"drafts": "passes", "draft_tokens": "proposed", "accepted_tokens": "accepted"}
prometheus_client.disable_created_metrics()


class Metrics(Collector):
    """Counts the work of `engine`, step by step. Labels come from a fixed list: nothing that a
    client sends becomes one.

    drafts: counts of an engine that makes drafts; None: it makes none.
    """

    def __init__(self, engine: AsyncEngine, model: str, drafts: Any) -> None:
        self.engine, self.model, self.drafts = engine, model, drafts
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def metric(kind: Any, name: str, about: str, *labels: str, **options: Any) -> Any:
            names = ["model_name", *labels]
            return kind(f"vllm:{name}", about, names, registry=self.registry, **options)

        def seconds(name: str, about: str) -> Any:
            return metric(Histogram, f"{name}_seconds", about, buckets=SECONDS).labels(model)

        self.first = seconds("time_to_first_token", "From arrival to the first token.")
        self.gap = seconds("inter_token_latency", "Between two tokens of an answer.")
        self.whole = seconds("e2e_request_latency", "From arrival to the last token.")
        self.prompt = metric(Counter, "prompt_tokens", "Prompt tokens computed.").labels(model)
        self.generated = metric(Counter, "generation_tokens", "Tokens generated.").labels(model)
        ended = metric(Counter, "request_success", "Sequences that ended.", "finished_reason")
        self.ended = {reason: ended.labels(model, reason) for reason in REASONS}
        engine.listeners.append(self._listen)

    def collect(self) -> Iterator[Metric]:
        """What the engine itself counts. Must be called on the event loop."""
        status, gauge, counter = self.engine.status, GaugeMetricFamily, CounterMetricFamily
        drafts = {
            f"spec_decode_num_{name}": getattr(self.drafts, field)
            for name, field in (DRAFTS if self.drafts else {}).items()
        }
        for kind, name, about, value in (
            (gauge, "num_requests_running", "Sequences in a step.", status.running),
            (gauge, "num_requests_waiting", "Accepted, not running.", self.engine.waiting),
            (gauge, "kv_cache_usage_perc", "Share of owned blocks.", status.owned / status.blocks),
            (counter, "num_preemptions", "Sequences preempted.", status.preemptions),
            (counter, "prefix_cache_queries", "Tokens looked up.", status.lookup_tokens),
            (counter, "prefix_cache_hits", "Tokens found.", status.hit_tokens),
            *((counter, name, "Of drafts.", value) for name, value in drafts.items()),
        ):
            family = kind(f"vllm:{name}", about, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        self.generated.inc(sum(name != PROBE for name, _ in step.tokens))
        self.prompt.inc(step.prefill_tokens)
        for ticket in emitted:
            start = ticket.arrived if ticket.last_token is None else ticket.last_token
            (self.first if ticket.last_token is None else self.gap).observe(now - start)
        for ticket in ended:
            self.ended[ticket.reason or "error"].inc()
            self.whole.observe(now - ticket.arrived)

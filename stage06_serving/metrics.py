"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .async_engine import PROBE, AsyncEngine, Step, Ticket

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0),
)
LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 9, 17)  # tokens a step
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
REASONS = ("stop", "length", "abort", "error")
# Counts that a part of the engine keeps: their names, the fields that hold them, and what they are.
DRAFTS = (
    ("vllm:spec_decode_num_drafts", "passes", "Passes of a sequence that verified drafts."),
    ("vllm:spec_decode_num_draft_tokens", "proposed", "Drafts verified."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted", "Drafts accepted."),
)
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place."


class Tally:
    """A histogram: prometheus_client's takes 20 times as long to add a value."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def family(self, model: str) -> HistogramMetricFamily:
        names = [*map(str, self.bounds), "+Inf"]
        family = HistogramMetricFamily(self.name, self.about, labels=["model_name"])
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        family.add_metric([model], buckets, self.sum)
        return family


class Metrics(Collector):
    """Counts the work of `engine`, step by step. Labels come from a fixed list: nothing that a
    client sends becomes one."""

    def __init__(
        self, engine: AsyncEngine, model: str, statuses: Mapping[int, int] | None = None
    ) -> None:
        """statuses: answers by HTTP status, which are counted elsewhere."""
        self.engine, self.model = engine, model
        self.statuses = {} if statuses is None else statuses
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.prompt_tokens = self.generated = 0
        self.ended = Counter(dict.fromkeys(REASONS, 0))
        self.tallies: list[Tally] = []

        def tally(name: str, about: str, bounds: Sequence[float] = SECONDS) -> Tally:
            self.tallies.append(Tally(name, about, bounds))
            return self.tallies[-1]

        self.iteration = tally("vllm:iteration_tokens_total", "Tokens computed in a step.", TOKENS)
        self.first = tally("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.between = tally("vllm:inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = tally("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = tally("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self.prefill = tally(
            "vllm:request_prefill_time_seconds", "From the first step to the first token."
        )
        self.decode = tally("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.prompts = tally("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answers = tally("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.lengths: Tally | None = None
        if engine.engine.drafts is not None:
            self.lengths = tally(
                "staircase:request_spec_decode_acceptance_length",
                "Tokens per step of a request, 1 without accepted drafts.",
                LENGTHS,
            )
        engine.listeners.append(self._listen)

    def render(self) -> bytes:
        """The text that Prometheus reads. Must be called on the event loop."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        status = self.engine.status
        waiting = max(0, len(self.engine.in_flight) - len(status.running))
        for name, about, value in (
            ("num_requests_running", "Sequences in the newest step.", len(status.running)),
            ("num_requests_waiting", "Sequences accepted but not running.", waiting),
            (
                "kv_cache_usage_perc",
                "Share of the blocks that are owned, 0 to 1.",
                status.owned / status.blocks,
            ),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        tasks = "Tasks of the event loop: a number that only rises is a leak."
        yield GaugeMetricFamily("staircase:asyncio_tasks", tasks, len(asyncio.all_tasks()))
        for name, about, value in (
            ("num_preemptions", "Sequences preempted.", status.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", status.lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", status.hit_tokens),
            ("prompt_tokens", "Prompt tokens computed.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated),
            (
                "admission_rejections",
                "Requests refused because the queue was full.",
                self.engine.rejected,
            ),
        ):
            yield self._counter(f"vllm:{name}", about, value)
        about = "Sequences that ended, by reason."
        yield self._counters("vllm:request_success", about, "finished_reason", self.ended.items())
        answered = CounterMetricFamily(
            "staircase:http_responses", "Answers, by status.", labels=["status"]
        )
        for code, count in self.statuses.items():
            answered.add_metric([str(code)], count)
        yield answered
        if self.engine.engine.drafts is not None:
            for name, field, about in DRAFTS:
                yield self._counter(name, about, getattr(self.engine.engine.drafts, field))
            places = enumerate(list(self.engine.engine.drafts.per_position))
            yield self._counters(*PLACES, "position", places)
        yield from (tally.family(self.model) for tally in self.tallies)

    def _counter(self, name: str, about: str, count: int) -> CounterMetricFamily:
        family = CounterMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self.model], count)
        return family

    def _counters(
        self, name: str, about: str, label: str, counts: Iterable[tuple[object, int]]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, about, labels=["model_name", label])
        for value, count in counts:
            family.add_metric([self.model, str(value)], count)
        return family

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        self.generated += sum(name != PROBE for name, _ in step.tokens)
        if step.record is not None:
            sequences = [s for s in step.record.sequences if s.request_id != PROBE]
            prefill = sum(s.prefill_tokens for s in sequences)
            self.prompt_tokens += prefill
            if sequences:
                self.iteration.observe(prefill + sum(s.decode_tokens for s in sequences))
        for ticket in emitted:
            if ticket.last_token is None:
                self.first.observe(now - ticket.arrived)
                if ticket.scheduled is not None:
                    self.prefill.observe(now - ticket.scheduled)
            else:
                self.between.observe(now - ticket.last_token)
        for ticket in ended:
            self.ended[ticket.reason or "error"] += 1
            self.prompts.observe(ticket.prompt_tokens)
            self.answers.observe(ticket.generated)
            self.whole.observe(now - ticket.arrived)
            if self.lengths and ticket.generated:
                steps = ticket.steps + (ticket in emitted)  # this one is counted afterwards
                self.lengths.observe(ticket.generated / steps)
            if ticket.scheduled is not None:
                self.queue.observe(ticket.scheduled - ticket.arrived)
            if ticket.generated:  # an only token is the first one, and arrives now
                self.decode.observe(now - (ticket.first_token or now))

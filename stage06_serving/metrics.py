"""Metrics for Prometheus, under the names that vLLM gave them, so that its dashboards work here."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from .async_engine import PROBE, AsyncEngine, Step, Ticket
from .status import DiskCounts, DraftCounts

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0),
)
LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 9, 17)  # tokens a step
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
REASONS = ("stop", "length", "abort", "error")


class Tally(Collector):
    """A histogram: prometheus_client's takes 20 times as long to add a value."""

    def __init__(self, name: str, about: str, model: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.model, self.bounds = name, about, model, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(str, self.bounds), "+Inf"]
        family = HistogramMetricFamily(self.name, self.about, labels=["model_name"])
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        family.add_metric([self.model], buckets, self.sum)
        yield family


class Disk(Collector):
    """The counts of the prefix cache on disk. vLLM has names for tokens found outside its cache."""

    NAMES = {
        "vllm:external_prefix_cache_queries": ("queries", "Tokens looked up on the disk."),
        "vllm:external_prefix_cache_hits": ("hits", "Tokens read from the disk."),
        "staircase:prefix_disk_read_bytes": ("read_bytes", "Bytes read."),
        "staircase:prefix_disk_written_bytes": ("written_bytes", "Bytes written."),
        "staircase:prefix_disk_rejected": ("rejected", "Files with wrong content, removed."),
        "staircase:prefix_disk_dropped": ("dropped", "Blocks that could not be written."),
    }

    def __init__(self, counts: DiskCounts, model: str) -> None:
        self.counts, self.model = counts, model

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (key, about) in self.NAMES.items():
            family = CounterMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self.model], getattr(self.counts, key))
            yield family


class Drafts(Collector):
    """The counts of speculative decoding."""

    def __init__(self, counts: DraftCounts, model: str) -> None:
        self.counts, self.model = counts, model

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, key, about in (
            ("num_drafts", "passes", "Passes of a sequence that verified drafts."),
            ("num_draft_tokens", "proposed", "Drafts verified."),
            ("num_accepted_tokens", "accepted", "Drafts accepted."),
        ):
            name = f"vllm:spec_decode_{name}"
            family = CounterMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self.model], getattr(self.counts, key))
            yield family
        name, about = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place."
        family = CounterMetricFamily(name, about, labels=["model_name", "position"])
        for position, count in enumerate(list(self.counts.per_position)):
            family.add_metric([self.model, str(position)], count)
        yield family


class Metrics:
    """Counts the work of `engine`, step by step. Labels come from a fixed list: nothing that a
    client sends becomes one."""

    def __init__(
        self, engine: AsyncEngine, model: str, statuses: Mapping[int, int] | None = None
    ) -> None:
        """statuses: answers by HTTP status, which are counted elsewhere."""
        self.engine, self.statuses = engine, {} if statuses is None else statuses
        self.registry = CollectorRegistry()

        def gauge(name: str, about: str) -> Gauge:
            labelled = Gauge(f"vllm:{name}", about, ["model_name"], registry=self.registry)
            return labelled.labels(model)

        def counter(name: str, about: str) -> Counter:
            labelled = Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry)
            return labelled.labels(model)

        def histogram(name: str, about: str, bounds: tuple[float, ...]) -> Tally:
            tally = Tally(f"vllm:{name}", about, model, bounds)
            self.registry.register(tally)
            return tally

        self.running = gauge("num_requests_running", "Sequences in the newest step.")
        self.waiting = gauge("num_requests_waiting", "Sequences accepted but not running.")
        self.cache = gauge("kv_cache_usage_perc", "Share of the blocks that are owned, 0 to 1.")
        self.tasks = Gauge(
            "staircase:asyncio_tasks",
            "Tasks of the event loop: a number that only rises is a leak.",
            registry=self.registry,
        )
        self.preemptions = counter("num_preemptions", "Sequences preempted.")
        self.queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.")
        self.generated = counter("generation_tokens", "Tokens generated.")
        self.iteration = histogram("iteration_tokens_total", "Tokens computed in a step.", TOKENS)
        ended = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.ended = {reason: ended.labels(model, reason) for reason in REASONS}
        self.rejected = counter(
            "admission_rejections", "Requests refused because the queue was full."
        )
        self.first = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", SECONDS
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", SECONDS
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", SECONDS
        )
        self.queue = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", SECONDS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", SECONDS
        )
        self.prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answers = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.responses = Counter(
            "staircase:http_responses", "Answers, by status.", ["status"], registry=self.registry
        )
        if engine.disk is not None:
            self.registry.register(Disk(engine.disk, model))
        self.lengths: Tally | None = None
        if engine.drafts is not None:
            self.registry.register(Drafts(engine.drafts, model))
            about = "Tokens per step of a request, 1 without accepted drafts."
            name = "staircase:request_spec_decode_acceptance_length"
            self.lengths = Tally(name, about, model, LENGTHS)
            self.registry.register(self.lengths)
        self._counted = {"preemptions": 0, "queries": 0, "hits": 0, "rejected": 0}
        self._answered = Counts[int]()
        engine.listeners.append(self._listen)

    def render(self) -> bytes:
        """The text that Prometheus reads. Must be called on the event loop."""
        status = self.engine.status
        self.tasks.set(len(asyncio.all_tasks()))
        self.running.set(len(status.running))
        self.waiting.set(max(0, len(self.engine.in_flight) - len(status.running)))
        self.cache.set(status.owned / status.blocks)
        totals = {
            "preemptions": status.preemptions,
            "queries": status.lookup_tokens,
            "hits": status.hit_tokens,
            "rejected": self.engine.rejected,
        }
        for name, total in totals.items():
            getattr(self, name).inc(total - self._counted[name])
        self._counted = totals
        for code, total in self.statuses.items():
            self.responses.labels(str(code)).inc(total - self._answered[code])
            self._answered[code] = total
        return generate_latest(self.registry)

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        self.generated.inc(sum(name != PROBE for name, _ in step.tokens))
        if step.record is not None:
            sequences = [s for s in step.record.sequences if s.request_id != PROBE]
            prefill = sum(s.prefill_tokens for s in sequences)
            self.prompt_tokens.inc(prefill)
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
            self.ended[ticket.reason or "error"].inc()
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

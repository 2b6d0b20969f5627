"""Numbers for Prometheus, under the names that vLLM gave them, so that its dashboards show this server too."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .async_engine import PROBE, AsyncEngine, Step, Ticket

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
    300.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Counts what `engine` does, from its steps. Labels come from a fixed list: nothing a client writes becomes one."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(
                model
            )

        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(
                model
            )

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"vllm:{name}", about, ["model_name"], registry=self.registry, buckets=buckets
            ).labels(model)

        self.running = gauge("num_requests_running", "Sequences in the newest step.")
        self.waiting = gauge("num_requests_waiting", "Sequences in hand that do not run.")
        self.cache = gauge(
            "kv_cache_usage_perc", "Share of the blocks that are owned, from 0 to 1."
        )
        self.tasks = Gauge(
            "staircase:asyncio_tasks",
            "Tasks of the event loop: a number that only rises is a leak.",
            registry=self.registry,
        )
        self.preemptions = counter("num_preemptions", "Sequences whose memory was taken away.")
        self.queries = counter(
            "prefix_cache_queries", "Tokens that were looked up in the prefix cache."
        )
        self.hits = counter("prefix_cache_hits", "Tokens that were found there.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were computed.")
        self.generated = counter("generation_tokens", "Tokens of answers.")
        self.iteration = histogram("iteration_tokens_total", "Tokens computed in a step.", TOKENS)
        ended = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.ended = {reason: ended.labels(model, reason) for reason in REASONS}
        self.rejected = counter(
            "admission_rejections", "Requests refused because the line was full."
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
            "request_queue_time_seconds", "From arrival to the first pass.", SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first pass to the first token.", SECONDS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", SECONDS
        )
        self.asked = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.said = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._counted = {"preemptions": 0, "queries": 0, "hits": 0, "rejected": 0}
        engine.listeners.append(self._listen)

    def render(self) -> bytes:
        """The text that Prometheus reads. To be called on the event loop."""
        self.tasks.set(len(asyncio.all_tasks()))
        scheduler = self.engine.engine.scheduler
        running = len(scheduler.running)
        self.running.set(running)
        self.waiting.set(max(0, len(self.engine.in_flight) - running))
        self.cache.set(scheduler.pool.owned / scheduler.pool.count)
        counts = scheduler.counts
        totals = {
            "preemptions": counts.preemptions, "queries": counts.lookup_tokens, "hits": counts.hit_tokens,
            "rejected": self.engine.rejected,
        }  # fmt: skip
        for name, total in totals.items():
            getattr(self, name).inc(total - self._counted[name])
            self._counted[name] = total
        return generate_latest(self.registry)

    def _listen(self, step: Step, spoke: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        self.generated.inc(
            sum(name != PROBE for name, _ in step.said)
        )  # the probe is ours, and nobody's request
        if step.record is not None:
            theirs = [each for each in step.record.sequences if each.request_id != PROBE]
            self.prompt_tokens.inc(sum(each.prefill_tokens for each in theirs))
            if theirs:
                self.iteration.observe(
                    sum(each.prefill_tokens + each.decode_tokens for each in theirs)
                )
        for ticket in spoke:
            if ticket.last_token is None:
                self.first.observe(now - ticket.arrived)
                if ticket.scheduled is not None:
                    self.prefill.observe(now - ticket.scheduled)
            else:
                self.between.observe(now - ticket.last_token)
        for ticket in ended:
            self.ended[ticket.reason or "error"].inc()
            self.asked.observe(ticket.prompt_tokens)
            self.said.observe(ticket.generated)
            self.whole.observe(now - ticket.arrived)
            if ticket.scheduled is not None:
                self.queue.observe(ticket.scheduled - ticket.arrived)
            if ticket.generated:  # if it was one token, it was the first just now
                self.decode.observe(now - (ticket.first_token or now))

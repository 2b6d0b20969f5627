"""A cell of replicas in simulated time.

Stage 05's scheduler and blocks and this stage's routing run unchanged. Only the passes are not
computed: each takes a time fitted to passes of the real engine (passes.py). So one machine
simulates a minute of twenty in a few seconds, with the same result each time.

Not simulated: the network, HTTP, tokenizing, and differences between machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from shared.errors import UserError
from stage01_forward.generation import Token
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool
from stage05_paged.scheduler import Scheduler

from ..router.routing import Replica, Route, Routing
from .passes import PassTime, greedy

POLICIES = ("random", "load", "prefix")
NONE_READY = "no replica was ready"
LOST = "its replica died after the first token, or two died"


def simpy() -> Any:
    """Raises UserError where SimPy is not installed."""
    try:
        return import_module("simpy")
    except ImportError:
        raise UserError(
            "The simulator needs SimPy: run python -m pip install -r requirements-distributed.txt"
        ) from None


class Server:
    """A replica: stage 05's scheduler over a pool of its own, and a fitted time for each pass.
    Times are those of SimPy's environment `env`."""

    def __init__(
        self, env: Any, blocks: int, sequences: int, budget: int, pass_time: PassTime,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.env, self.pass_time, self.rng = env, pass_time, rng
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, sequences, max(budget, sequences))
        self.dead, self.busy, self.born, self.gone = False, 0.0, env.now, math.inf
        self._ends: dict[Request, tuple[Any, list[float]]] = {}
        self._work = env.event()
        env.process(self._run())

    def submit(self, request: Request, times: list[float]) -> Any:
        """The event that the request, or its replica, ends; `times` collects the times of its
        tokens."""
        self.scheduler.add(request)
        if not self._work.triggered:
            self._work.succeed()
        self._ends[request] = self.env.event(), times
        return self._ends[request][0]

    def receive(self, digests: Sequence[bytes]) -> None:
        """Take copied blocks with these digests into the cache, as many as there is room for."""
        missing = digests[len(self.pool.match(digests)) :][: self.pool.available]
        blocks = [self.pool.take() for _ in missing]
        for block, digest in reversed(list(zip(blocks, missing, strict=True))):
            self.pool.publish(block, digest)
            self.pool.give_back(block)

    def kill(self) -> None:
        self.dead, self.gone = True, self.env.now
        for ended, _ in self._ends.values():
            ended.succeed()

    def _run(self) -> Iterator[Any]:
        while True:
            if not self.scheduler.unfinished:
                self._work = self.env.event()
                yield self._work
            plan = self.scheduler.schedule()
            seconds = self.pass_time.seconds(plan, self.rng)
            yield self.env.timeout(seconds)
            if self.dead:
                return
            self.busy += seconds
            self.scheduler.advance(plan)
            for request in [work.request for work in plan.work if work.rows]:
                answer, (ended, times) = request.output, self._ends[request]
                last = len(answer.token_ids) + 1 == request.sampling.max_tokens
                answer.append(Token(0, None, "length" if last else None))
                times.append(self.env.now)
                if last:
                    self.scheduler.finish(request)
                    del self._ends[request]
                    ended.succeed()


@dataclass(frozen=True)
class Ask:
    """A request: an answer of `max_tokens`, `at` seconds after the start."""

    prompt: list[int]
    max_tokens: int
    at: float


@dataclass(frozen=True)
class Cell:
    """Replicas behind one router. Times are in seconds; a replica dies at each of `failures`.

    prefill: replicas that only compute prompts, beside the `replicas`, which then only decode.
    handover: seconds to copy a token's keys and values from one kind to the other.
    target: requests in flight for each running replica, from one to `replicas` of them; one is
        removed after `calm` seconds with too many. 0: all run always.
    starting: until a new replica is ready.
    """

    replicas: int = 1
    policy: str = "prefix"
    blocks: int = 512
    sequences: int = 32
    budget: int = 256
    prefill: int = 0
    handover: float = 0.0
    failures: tuple[float, ...] = ()
    starting: float = 30.0
    target: float = 0.0
    calm: float = 60.0


@dataclass
class SimRequest:
    """A request: the times of its tokens, and why it was lost, if it was."""

    ask: Ask
    tokens: list[float] = field(default_factory=list)
    error: str = ""
    retried: bool = False


class Fleet:
    """A cell and its traffic, run to the end of the last request by `run`."""

    def __init__(self, cell: Cell, pass_time: PassTime, asks: Sequence[Ask]) -> None:
        self.cell, self.pass_time, self.rng = cell, pass_time, random.Random("fleet 0")
        self.requests, self.left = [SimRequest(ask) for ask in asks], len(asks)
        self.env = simpy().Environment()
        self.over = self.env.event()
        self.servers: dict[Replica, Server] = {}  # the dead ones too
        self.front, self.back = Routing(seed=0), Routing(seed=1)
        self.coming = 0  # replicas that start
        first = cell.prefill or (1 if cell.target else cell.replicas)
        for routing in [self.front] * first + [self.back] * (cell.replicas * (cell.prefill > 0)):
            self._add(routing)

    def run(self) -> Fleet:
        self.env.process(self._arrive())
        self.env.process(self._fail())
        if self.cell.target:
            self.env.process(self._scale())
        self.env.run(self.over)
        return self

    def choose(
        self, routing: Routing, digests: Sequence[bytes], ask: Ask, without: Collection[Replica]
    ) -> Route | None:
        """Choose by the cell's policy. A decode-only replica is chosen by its load, because its
        blocks are sent to it."""
        policy = "load" if routing is self.back else self.cell.policy
        if policy == "prefix":
            return routing.choose(digests, len(ask.prompt), ask.max_tokens, without)
        able = [r for r in routing.replicas.values() if r.ready and r not in without]
        if not able:
            return None
        if policy == "random":
            best = self.rng.choice(able)
        else:
            best = min(able, key=lambda replica: (replica.tokens, self.rng.random()))
        return Route(best, [], 0, len(ask.prompt) + ask.max_tokens)

    def _add(self, routing: Routing) -> None:
        replica = routing.add(f"replica {len(self.servers) + 1}", self.cell.blocks)
        sizes = self.cell.blocks, self.cell.sequences, self.cell.budget
        self.servers[replica] = Server(self.env, *sizes, self.pass_time, self.rng)

    # ---- processes ------------------------------------------------------------------------------

    def _arrive(self) -> Iterator[Any]:
        for sim in self.requests:
            if sim.ask.at > self.env.now:  # those of one moment come before any pass
                yield self.env.timeout(sim.ask.at - self.env.now)
            self.env.process(self._serve(sim))

    def _serve(self, sim: SimRequest) -> Iterator[Any]:
        most = sim.ask.max_tokens
        phases = [(self.front, 1), (self.back, most)] if self.cell.prefill else [(self.front, most)]
        for routing, tokens in phases:
            if len(sim.tokens) < most and not sim.error:
                yield from self._run_on(sim, routing, tokens)
        self.left -= 1
        if not self.left:
            self.over.succeed()

    def _run_on(self, sim: SimRequest, routing: Routing, tokens: int) -> Iterator[Any]:
        """Run an answer of `tokens`, or the rest of one, on one replica; on a second one if the
        first dies before the first token."""
        ask, tried = sim.ask, list[Replica]()
        digests = routing.digests(ask.prompt)
        while route := self.choose(routing, digests, ask, tried):
            routing.start(route)
            server, request = self.servers[route.replica], Request(ask.prompt, greedy(tokens))
            if sim.tokens:  # of the phase before
                yield self.env.timeout(self.cell.handover * len(ask.prompt))
                server.receive(digests)
                request.output.append(Token(0, None, None))
            if not server.dead:
                yield server.submit(request, sim.tokens)
            routing.finish(route)
            if request.output.finish_reason:
                return
            if sim.tokens or tried:
                sim.error = LOST
                return
            tried, sim.retried = [route.replica], True
        sim.error = NONE_READY

    def _fail(self) -> Iterator[Any]:
        routing = self.back if self.cell.prefill else self.front
        for at in self.cell.failures:
            yield self.env.timeout(at - self.env.now)
            if routing.replicas:
                replica = self.rng.choice(list(routing.replicas.values()))
                routing.remove(replica.name)
                self.servers[replica].kill()
                self.env.process(self._begin(routing))

    def _begin(self, routing: Routing) -> Iterator[Any]:
        self.coming += 1
        yield self.env.timeout(self.cell.starting)
        self.coming -= 1
        self._add(routing)

    def _scale(self) -> Iterator[Any]:
        cell, routing, calm = self.cell, self.front, 0.0
        every = min(cell.starting, cell.calm) / 4
        while True:
            yield self.env.timeout(every)
            replicas = list(routing.replicas.values())
            ready = [replica for replica in replicas if replica.ready]
            load = sum(replica.requests for replica in replicas)
            wanted = min(max(math.ceil(load / cell.target), 1), cell.replicas)
            for _ in range(wanted - len(ready) - self.coming):
                self.env.process(self._begin(routing))
            calm = calm + every if wanted < len(ready) else 0.0
            if calm >= cell.calm:
                min(ready, key=lambda r: r.requests).ready, calm = False, 0.0  # it drains
            for replica in replicas:
                if not replica.ready and not replica.requests:
                    routing.remove(replica.name)
                    self.servers[replica].gone = self.env.now

    # ---- the result -----------------------------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """Latencies in seconds, without lost requests. hits: share of the prompts' tokens that were
        found. balance: time that the busiest replica was busy, over the mean. tokens: per second.
        paid: seconds of all replicas."""
        ended, now = [sim for sim in self.requests if not sim.error], self.env.now
        counts = [server.scheduler.counts for server in self.servers.values()]
        busy = [server.busy for server in self.servers.values()]
        summary = {
            "requests": len(self.requests),
            "lost": len(self.requests) - len(ended),
            "retried": sum(sim.retried for sim in self.requests),
            "hits": sum(c.hit_tokens for c in counts) / sum(c.lookup_tokens for c in counts),
            "balance": max(busy) * len(busy) / sum(busy),
            "tokens": sum(len(sim.tokens) for sim in self.requests) / now,
            "paid": sum(min(s.gone, now) - s.born for s in self.servers.values()),
            "seconds": now,
        }
        latencies = {
            "ttft": [sim.tokens[0] - sim.ask.at for sim in ended],
            "itl": [b - a for sim in ended for a, b in pairwise(sim.tokens)] or [0.0],
            "e2e": [sim.tokens[-1] - sim.ask.at for sim in ended],
        }
        for name, values in latencies.items():
            low, high = np.percentile(values, (50, 99)).tolist()
            summary |= {f"{name}_p50": low, f"{name}_p99": high}
        return summary

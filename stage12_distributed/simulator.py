"""A fleet in virtual time, for lab.ipynb and the benchmark.

Stage 05's scheduler and blocks and this stage's routing run unchanged. Only the passes are not
computed: each takes a time fitted to passes of the real engine (passes.py). So one machine
simulates a minute of a hundred replicas in a few seconds, with the same result each time.

Not simulated: the network, HTTP, tokenizing, and differences between machines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from shared.errors import UserError
from shared.kit import greedy
from stage01_forward.generation import Token
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool
from stage05_paged.scheduler import Scheduler

from .passes import VOCABULARY, PassTime
from .routing import Replica, Route, Routing

POLICIES = ("random", "load", "prefix")
TRAFFIC = ("prefix", "free", "hot")
PREFIXES, SYSTEM, QUESTION, ANSWER = 64, 256, (8, 32), 50  # system prompts; tokens
TURNS = 8  # of a chat
LOAD = 0.7  # of `policies`: a share of what the replicas can answer
GRID = tuple(product((2, 10, 100), (0.1, 0.4, 0.8)))  # replicas and load, of `chats`
EACH = 15  # of its requests to each replica, at least
CROWD = 100  # requests at once, to find what a replica answers a second


def simpy() -> Any:
    """Raises UserError where SimPy is not installed."""
    try:
        return import_module("simpy")
    except ImportError:
        raise UserError(
            "The simulator needs SimPy: run python -m pip install -r requirements-distributed.txt"
        ) from None


@dataclass(frozen=True)
class Ask:
    """A request: an answer of `max_tokens`, `at` seconds after the start."""

    prompt: list[int]
    max_tokens: int
    at: float


@dataclass(frozen=True)
class Cell:
    """Replicas behind one router."""

    replicas: int = 1
    policy: str = "prefix"
    blocks: int = 512
    sequences: int = 32
    budget: int = 256


class SimRequest:
    """A request: the events that its first token comes and that it ends, and its tokens' times."""

    def __init__(self, env: Any, ask: Ask) -> None:
        self.ask, self.first, self.end = ask, env.event(), env.event()
        self.tokens: list[float] = []


class Server:
    """A replica: stage 05's scheduler over a pool of its own, and a fitted time for each pass.
    Times are those of SimPy's environment `env`."""

    def __init__(self, env: Any, cell: Cell, pass_time: PassTime, rng: random.Random) -> None:
        self.env, self.pass_time, self.rng = env, pass_time, rng
        budget = max(cell.budget, cell.sequences)
        self.scheduler = Scheduler(BlockPool(cell.blocks), cell.sequences, budget)
        self.busy = 0.0  # seconds
        self._requests: dict[Request, SimRequest] = {}  # in flight
        self._work = env.event()
        env.process(self._run())

    def submit(self, sim: SimRequest) -> None:
        request = Request(sim.ask.prompt, greedy(sim.ask.max_tokens))
        self.scheduler.add(request)
        self._requests[request] = sim
        if not self._work.triggered:
            self._work.succeed()

    def _run(self) -> Iterator[Any]:
        while True:
            if not self.scheduler.unfinished:
                self._work = self.env.event()
                yield self._work
            plan = self.scheduler.schedule()
            seconds = self.pass_time.seconds(plan, self.rng)
            yield self.env.timeout(seconds)
            self.busy += seconds
            self.scheduler.advance(plan)
            for request in [work.request for work in plan.work if work.rows]:
                sim = self._requests[request]
                sim.tokens.append(self.env.now)
                last = len(sim.tokens) == sim.ask.max_tokens
                request.output.append(Token(0, None, "length" if last else None))
                if len(sim.tokens) == 1:
                    sim.first.succeed()
                if last:
                    self.scheduler.finish(request)
                    self._requests.pop(request).end.succeed()


class Fleet:
    """A cell and its traffic, run to the end of the last request by `run`."""

    def __init__(self, cell: Cell, pass_time: PassTime, asks: Sequence[Ask]) -> None:
        self.cell, self.rng = cell, random.Random("fleet 0")
        self.env, self.left = simpy().Environment(), len(asks)
        self.requests = [SimRequest(self.env, ask) for ask in asks]
        self.over = self.env.event()
        self.servers: dict[Replica, Server] = {}
        self.routing = Routing(seed=0)
        for number in range(cell.replicas):
            replica = self.routing.add(f"replica {number}", cell.blocks)
            self.servers[replica] = Server(self.env, cell, pass_time, self.rng)

    def run(self) -> Fleet:
        self.env.process(self._arrive())
        self.env.run(self.over)
        return self

    def choose(self, digests: Sequence[bytes], ask: Ask) -> Route:
        """Choose by the cell's policy."""
        if self.cell.policy == "prefix":
            route = self.routing.choose(digests, len(ask.prompt), ask.max_tokens)
            assert route is not None  # all replicas are ready
            return route
        able = list(self.servers)
        if self.cell.policy == "random":
            best = self.rng.choice(able)
        else:
            best = min(able, key=lambda replica: (replica.requests, self.rng.random()))
        return Route(best, [], 0, len(ask.prompt) + ask.max_tokens, ask.max_tokens)

    def _arrive(self) -> Iterator[Any]:
        for sim in self.requests:
            if sim.ask.at > self.env.now:  # those of one moment come before any pass
                yield self.env.timeout(sim.ask.at - self.env.now)
            self.env.process(self._serve(sim))

    def _serve(self, sim: SimRequest) -> Iterator[Any]:
        route = self.choose(self.routing.digests(sim.ask.prompt), sim.ask)
        self.routing.start(route)
        self.servers[route.replica].submit(sim)
        yield sim.first
        self.routing.begin(route)
        yield sim.end
        self.routing.finish(route)
        self.left -= 1
        if not self.left:
            self.over.succeed()

    def summary(self) -> dict[str, float]:
        """Latencies in seconds. hits: share of the prompts' tokens that were found. balance: time
        that the busiest replica was busy, over the mean."""
        counts = [server.scheduler.counts for server in self.servers.values()]
        busy = [server.busy for server in self.servers.values()]
        summary = {
            "hits": sum(c.hit_tokens for c in counts) / sum(c.lookup_tokens for c in counts),
            "balance": max(busy) * len(busy) / sum(busy),
        }
        ttft = [sim.tokens[0] - sim.ask.at for sim in self.requests]
        summary["ttft_p50"], summary["ttft_p99"] = np.percentile(ttft, (50, 99)).tolist()
        return summary


# ---- traffic ------------------------------------------------------------------------------------


def arrivals(rate: float, count: int) -> list[float]:
    """Poisson arrivals at a mean `rate` a second."""
    rng, now = random.Random("arrivals 0"), 0.0
    return [now := now + rng.expovariate(rate) for _ in range(count)]


def traffic(kind: str, starts: Sequence[float], answer: int = ANSWER) -> list[Ask]:
    """Prompts that begin with SYSTEM tokens: "prefix" has one of PREFIXES, the n-th 1/n times as
    often as the first; "hot" has one for all; "free" has a new one each. "chats": each is a chat of
    TURNS turns, which repeats all that was said in it before."""
    rng = random.Random("traffic 0")

    def ids(count: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=count)

    known = [ids(SYSTEM) for _ in range(1 if kind == "hot" else PREFIXES)]
    often, asks = [1 / (place + 1) for place in range(len(known))], []
    chats = [ids(SYSTEM) for _ in range(-(-len(starts) // TURNS))]
    turns = rng.sample(list(range(len(chats))) * TURNS, len(chats) * TURNS)
    for place, at in enumerate(starts):
        question = ids(rng.randint(*QUESTION))
        if kind == "chats":
            begin = chats[turns[place]]
            chats[turns[place]] = begin + question + ids(answer)
        else:
            begin = ids(SYSTEM) if kind == "free" else rng.choices(known, often)[0]
        asks.append(Ask(begin + question, answer, at))
    return asks


def one_big_cache(asks: Sequence[Ask]) -> float:
    """Share of the prompts' tokens that a single cache without limit would have."""
    routing, seen, hits = Routing(), set[bytes](), 0
    for ask in asks:
        digests = routing.digests(ask.prompt)
        hits += sum(digest in seen for digest in digests) * routing.block_size
        seen.update(digests)
    return hits / sum(len(ask.prompt) for ask in asks)


def capacity(cell: Cell, pass_time: PassTime) -> float:
    """Requests a second that one replica answers when it always has enough to do."""
    alone = Cell(blocks=cell.blocks, sequences=cell.sequences, budget=cell.budget)
    return CROWD / Fleet(alone, pass_time, traffic("free", [0.0] * CROWD)).run().env.now


Case = dict[str, Any]


def compare(cells: Mapping[str, Cell], times: PassTime, asks: Sequence[Ask]) -> Iterator[Case]:
    """The same requests to several cells."""
    big = one_big_cache(asks)
    for policy, cell in cells.items():
        about: Case = {"policy": policy, "replicas": cell.replicas, "big": big}
        yield about | Fleet(cell, times, asks).run().summary()


def policies(cell: Cell, times: PassTime, count: int) -> Iterator[Case]:
    """All traffic by all policies: `count` requests to the replicas of a cell."""
    starts = arrivals(LOAD * cell.replicas * capacity(cell, times), count)
    cells = {policy: replace(cell, policy=policy) for policy in POLICIES}
    for kind in TRAFFIC:
        for case in compare(cells, times, traffic(kind, starts)):
            yield {"traffic": kind, "load": LOAD} | case


def chats(cell: Cell, times: PassTime, count: int, grid: Any = GRID) -> Iterator[Case]:
    """At least `count` requests of chats on few and many replicas at low and high load; by the
    policy, which has no bound of a replica's load, and by the least load."""
    rate = capacity(cell, times)
    for number, load in grid:
        many = replace(cell, replicas=number)
        cells = {"no bound": many, "least load": replace(many, policy="load")}
        starts = arrivals(load * number * rate, max(count, EACH * number))
        for case in compare(cells, times, traffic("chats", starts)):
            yield {"traffic": "chats", "load": load} | case

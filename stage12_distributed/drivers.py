"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from shared import models
from shared.config import Config
from shared.course.driver import Entry, outcome, random_checkpoint, tensors
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool, BlockTable
from stage05_paged.drivers import state_of
from stage08_llama.config import LlamaConfig

from .disaggregated.leases import Disaggregated, Lease
from .router import relay
from .router.routing import Replica, Route, Routing
from .tensor import ring, shard

TRIALS = 400  # of a choice that may be random


def choices(draw: Random) -> Iterator[Entry]:
    """Choices in fleets at some moment, each many times: how often which replica was chosen."""
    for _ in range(8):
        size = draw.choice([1, 4])
        routing = Routing(size, draw.choice([1.0, 1.5, 4.0]), seed=draw.randrange(1000))
        texts = [[draw.randrange(9) for _ in range(12 * size)] for _ in range(2)]
        alike = draw.random() < 0.3  # then any that remembers may be chosen
        text, known = draw.choice(texts), 12 * size
        for number in range(draw.randint(0, 6)):
            replica = routing.add(f"replica-{number}")
            replica.ready = draw.random() < 0.85
            if not alike:
                replica.requests, replica.queued = draw.choice([0, 0, 1, 5]), draw.choice([0, 0, 6])
                replica.tokens = draw.choice([0, 0, 3, 40])
                text, known = draw.choice(texts), draw.choice([0, 0, 4 * size, 12 * size])
            replica.remember(routing.digests(text[:known]))
        prompt = draw.choice(texts)[: draw.choice([1, 4 * size, 9 * size + 1, 12 * size])]
        digests, answer = routing.digests(prompt), draw.choice([0, 7])
        replicas = list(routing.replicas.values())
        without = draw.sample(replicas, draw.choice([0, 0, min(1, len(replicas))]))
        before = [(r.name, r.requests, r.tokens, len(r.tree)) for r in replicas]
        counts: Counter[str] = Counter()
        routes = set()
        for _ in range(TRIALS):
            route = routing.choose(digests, len(prompt), answer, without)
            counts[route.replica.name if route else "none"] += 1
            if route:
                what = route.replica.name, route.cached, route.tokens, len(route.digests)
                routes.add((*what, route.running))
        after = [(r.name, r.requests, r.tokens, len(r.tree)) for r in replicas]
        loads = [(r.name, r.ready, r.load, r.tokens, r.match(digests)) for r in replicas]
        call = f"{len(prompt)} tokens, blocks of {size}, bound {routing.bound}, without "
        call += f"{[r.name for r in without]}: (name, ready, load, tokens, blocks) {loads}"
        entry: Entry = {"call": call, "chosen": counts, "routes": routes}
        yield entry | {"before": before, "after": after}


def as_often(expected: Any, result: Any) -> str:
    """Whether each replica is chosen about as often as by the reference, and never where that never
    does: five and a half standard deviations, which chance exceeds once in 20 million cases."""
    if not isinstance(result, list) or len(result) != len(expected):
        return "the choices are not all there"
    for right, entry in zip(expected, result, strict=True):
        call, wanted, counts = right["call"], right["chosen"], entry["chosen"]
        for name in wanted.keys() | counts.keys():
            often, shown = counts.get(name, 0), wanted.get(name, 0)
            if not shown and often > 3 or abs(often - shown) > 78:
                return f"{call}: {name} was chosen {often} times of {TRIALS}, not {shown}"
        routes = {tuple(route) for route in right["routes"]}
        names = {route[0] for route in routes}
        for route in entry["routes"]:
            if tuple(route) not in routes and route[0] in names:
                return f"{call}: the route (name, cached, tokens, digests, running) is {route}"
        if entry["after"] != right["after"]:
            return f"{call}: a count has changed: {entry['after']}"
    return ""


def config_of(draw: Random) -> Config:
    heads, width = draw.choice([2, 3, 6]), draw.choice([4, 8])
    if draw.random() < 0.5:
        return Config(101, 64, heads * width, 2, heads, name="odd")
    kv = draw.choice([count for count in (1, 2, 3, 6) if heads % count == 0])
    biases = {name: draw.random() < 0.5 for name in ("qkv_bias", "o_bias", "mlp_bias")}
    sizes: dict[str, Any] = {
        "n_kv_head": kv,
        "head_dim": width,
        "n_inner": draw.choice([16, 41]),
        **biases,
    }
    return LlamaConfig(101, 64, 24, 2, heads, name="llama", **sizes)


def parts(draw: Random) -> Iterator[Entry]:
    for _ in range(5):
        config, ranks = config_of(draw), draw.choice([1, 2, 3])
        model = models.load_model(random_checkpoint(config, 1), dtype=torch.float64)
        for rank in range(ranks):
            shards = outcome(shard.shards, model, rank, ranks)
            call = f"shards of {config}, rank {rank} of {ranks}"
            shown: object = shards
            if not isinstance(shards, Exception):
                shown = {name: [s.shape, s.rows, s.columns] for name, s in sorted(shards.items())}
            yield {"call": call, "shards": shown}


class Fleet(relay.Relay):
    """A relay, and its policy: `count` replicas in turn, whose tries end as in `ends`: with an
    error, or an answer."""

    def __init__(self, count: int, ends: Sequence[Any], budget: float) -> None:
        super().__init__(SimpleNamespace(routing=self), timeout=10.0)  # type: ignore[arg-type]
        self.able, self.ends = [Replica(str(number)) for number in range(count)], list(ends)
        self.budget = budget
        self.events: list[Any] = []
        self.sent: list[Any] = []  # status and body of each message to the client

    def choose(self, digests: Any, tokens: int, answer: int, without: Any = ()) -> Route | None:
        able = [replica for replica in self.able if replica not in without]
        return Route(able[0], digests, 0, tokens + answer) if able else None

    def start(self, route: Route) -> None:
        self.events.append(("start", route.replica.name))

    def finish(self, route: Route) -> None:
        self.events.append(("finish", route.replica.name))

    async def _try(self, request: Any, route: Route, answer: Any) -> None:
        self.events.append(("try", route.replica.name, self.budget, self.counts["retries"]))
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        await answer.send_whole(200, {}, end)

    async def serve(self) -> None:
        """Have a request answered."""

        async def send(message: Any) -> None:
            self.sent.append((message.get("status"), message.get("body")))

        request = relay.ForwardedRequest("POST", "/v1/completions", b"", {})
        await self._tries(request, relay.Answer(send))


def tries(draw: Random) -> Iterator[Entry]:
    for _ in range(30):
        count, budget = draw.randint(0, 4), draw.choice([0.0, 0.5, 0.99, 1.0, 3.5])
        ends: list[Any] = []
        for number in range(6):
            died = draw.random() < 0.4
            failed = relay.Failed(502 + number, {}, f"failure {number}".encode(), died)
            ends.append(draw.choice([failed, failed, b"an answer", TimeoutError()]))
        shown = [(end.status, end.died) if isinstance(end, relay.Failed) else end for end in ends]
        fleet, ended = Fleet(count, ends, budget), None
        try:
            asyncio.run(fleet.serve())
        except TimeoutError as error:
            ended = error
        call = f"_tries of {count} replicas that end with {shown}, budget {budget}"
        entry: Entry = {"call": call, "events": fleet.events, "sent": fleet.sent, "ended": ended}
        yield entry | {"budget": fleet.budget, "retries": fleet.counts["retries"]}


class Labels:
    """A cache in place of `Disaggregated`'s: blocks with labels, and generations."""

    def __init__(self, blocks: int, draw: Random) -> None:
        self.held = [f"block {number}" for number in range(blocks)]
        self.generations, self.draw = torch.zeros(blocks, dtype=torch.int64), draw
        self.taken, self.moved = 0, list[str]()  # leased blocks to take, while or after copying

    def move(self, moves: Any) -> None:
        for move in moves:
            self.held[move.target] = self.held[move.source]
            self.moved.append(f"{move.kind} {self.held[move.source]}")
        if self.taken and moves:  # without any, a copy may end before it begins
            self.generations[self.taken] += 1


def copies(draw: Random) -> Iterator[Entry]:
    for _ in range(20):
        size, count = 4, draw.randint(2, 8)
        pool, cache = BlockPool(20 + count, size), Labels(20 + count, draw)
        for _ in range(20):  # the other process's
            pool.take()
        prompt = [draw.randrange(5) for _ in range(draw.randint(size, 6 * size))]
        digests = BlockTable(pool).digest(prompt)
        table = BlockTable(pool)
        table.grow(min(len(digests), draw.randint(0, 3), count) * size)
        for block, digest in zip(table.blocks, digests, strict=False):
            pool.publish(block, digest)
            cache.held[block] = "ours " + digest.hex()[:6]
        table.release()
        busy = BlockTable(pool)
        busy.grow(draw.randint(0, pool.available) * size)
        leased = tuple(draw.sample(range(1, 20), draw.choice([len(digests), len(digests) - 1])))
        lease = Lease("x", 1, leased, (0,) * len(leased), expires=10.0)
        late = draw.choice([0.0, 0.0, 9.99, 10.0, 11.0])
        cache.taken = draw.choice([0, 0, *leased])
        decode: Any = Disaggregated.__new__(Disaggregated)
        decode.pool, decode.cache, decode.clock = pool, cache, lambda late=late: late
        known, free = len(pool.match(digests)), pool.available
        valid = decode._copy(Request(prompt, SamplingParams(max_tokens=2)), lease)
        call = f"_copy of {len(leased)} blocks, {known} known, {free} available, at {late} of 10 s"
        call += f", block {cache.taken} taken meanwhile" if cache.taken else ""
        labels = [cache.held[block] for block in pool.match(digests)]
        entry: Entry = {"call": call, "valid": bool(valid), "found": labels}
        if valid:  # in which order they are copied is free; and of an expired lease, whether
            entry |= {"moved": sorted(cache.moved), "pool": state_of(pool)}
        yield entry | {"available": pool.available}


def reduced(
    inputs: Sequence[torch.Tensor], noisy: tuple[int, int] | None = None
) -> tuple[list[Any], list[list[int]]]:
    """What `all_reduce` returns on each rank, a thread with one of `inputs`, or its error; and how
    many numbers the rank has sent in each turn. noisy: a rank and a turn; 1 is added to what it
    sends then."""
    ways: list[Queue[torch.Tensor]] = [Queue() for _ in inputs]
    sent: list[list[int]] = [[] for _ in inputs]

    def work(rank: int) -> object:
        def exchange(piece: torch.Tensor) -> torch.Tensor:
            noise = float((rank, len(sent[rank])) == noisy)
            sent[rank].append(piece.numel())
            ways[(rank + 1) % len(inputs)].put(piece.clone() + noise)
            return ways[rank].get(timeout=4)

        try:
            return ring.all_reduce(inputs[rank], rank, len(inputs), exchange)
        except Exception as error:
            return repr(error)

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(work, range(len(inputs)))), sent


def noise(inputs: Sequence[torch.Tensor], rank: int, turn: int) -> list[Any]:
    """How many numbers of each rank's sum are wrong if 1 is added to what `rank` sends in `turn`:
    none where the numbers did not come by the ring, as threads share a memory."""
    results, _ = reduced(inputs, (rank, turn))
    total = torch.stack(list(inputs)).sum(0)
    return [
        int(((result - total).abs() > 0.5).sum()) if isinstance(result, torch.Tensor) else result
        for result in results
    ]


def rings(draw: Random) -> Iterator[Entry]:
    for _ in range(5):
        size = draw.choice([1, 2, 3, 5])
        shape = draw.choice([(7,), (1,), (4, 6), (2, 3, 5)])
        inputs = [tensors(draw, *shape) for _ in range(size)]
        kept = [x.clone() for x in inputs]
        results, sent = reduced(inputs)
        same = all(isinstance(r, torch.Tensor) and torch.equal(r, results[0]) for r in results)
        unchanged = all(map(torch.equal, inputs, kept))
        most = -(-inputs[0].numel() // size)
        call = f"all_reduce of {list(shape)} numbers on {size} ranks"
        entry: Entry = {"call": call, "results": results, "same": same, "unchanged": unchanged}
        entry |= {"too many turns": [len(counts) > 2 * (size - 1) for counts in sent]}
        yield entry | {"too many": [max(counts, default=0) > most for counts in sent]}
        if size > 1:  # pieces of one size: how many numbers are wrong does not depend on the cut
            rank, turn = draw.randrange(size), draw.randrange(2 * (size - 1))
            call = f"all_reduce on {size} ranks; 1 is added to what rank {rank} sends in {turn=}"
            whole = [tensors(draw, 2 * size) for _ in range(size)]
            yield {"call": call, "wrong numbers": noise(whole, rank, turn)}


DRIVERS = {1: choices, 2: parts, 3: tries, 4: copies, 5: rings}
RULES = {1: as_often}

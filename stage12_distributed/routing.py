"""Which replica gets a request: the policy of the router and of the simulator. Plain Python: no
HTTP, no tensors, no clock.

A replica that has computed the beginning of a prompt can skip it (stage 05's prefix cache). So a
request costs a replica the tokens of its prompt that are not in that replica's cache, and waits
behind the tokens in flight there: the cheapest replica gets it. The policy does not ask what a
replica has cached; it remembers the digests of the blocks that were sent there.

    routing = Routing(block_size=16)
    routing.add("http://127.0.0.1:8001")
    digests = routing.digests(prompt_ids, salt)            # once per request
    route = routing.choose(digests, len(prompt_ids))       # None: no replica can take it
    routing.start(route)                                   # before anything else can choose
    ...                                                    # the request runs on route.replica
    routing.finish(route)                                  # however it ended
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stage05_paged.blocks import chain

BLOCK_SIZE = 16  # tokens: the servers' default
BLOCKS = 2048  # remembered for each replica, unless the caller knows its pool


@dataclass(eq=False)
class Replica:
    """A server as the policy knows it. A server that is started again is a new replica.

    blocks: digests to remember, at least 1. More than its pool has blocks would predict false hits.
    tree: the digests, the least recently used first.
    ready: whether it may be chosen. A replica that drains or fails its health checks keeps its load
        and its tree: its requests are still in flight.
    requests, tokens: in flight. Only `Routing` writes them.
    """

    name: str
    blocks: int = BLOCKS
    ready: bool = True
    requests: int = 0
    tokens: int = 0
    tree: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)

    def match(self, digests: Sequence[bytes]) -> int:
        """Number of blocks of the longest prefix that was sent here.

        No digest is in the tree without those before it, so a binary search finds the end.
        """
        if not digests or digests[0] not in self.tree:
            return 0
        return bisect_left(digests, True, key=lambda digest: digest not in self.tree)

    def remember(self, digests: Sequence[bytes]) -> None:
        """Add a chain, or renew it. A chain's end counts as older than its beginning, so that it is
        forgotten first."""
        for digest in reversed(digests):
            self.tree[digest] = None
            self.tree.move_to_end(digest)
        while len(self.tree) > self.blocks:
            self.tree.popitem(last=False)


@dataclass(eq=False)
class Route:
    """A choice for one request.

    cached: tokens of the prompt that the replica should have.
    tokens: that the request costs the replica: the rest of the prompt, and the answer. answer: the
        latter alone.
    """

    replica: Replica
    digests: Sequence[bytes]
    cached: int
    tokens: int
    answer: int = 0


class Routing:
    """Longest cached prefix against load. Not thread-safe: one event loop, or one simulated clock.

    block_size: of the replicas, in tokens. seed: of the random choices.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, seed: int | None = None) -> None:
        self.block_size, self.random = block_size, random.Random(seed)
        self.replicas: dict[str, Replica] = {}  # by name

    def add(self, name: str, blocks: int = BLOCKS) -> Replica:
        """A new replica with an empty cache, in place of one of the same name."""
        self.replicas[name] = replica = Replica(name, blocks)
        return replica

    def remove(self, name: str) -> None:
        """Forget a replica that is dead, with its tree: its cache died with it. Routes to it may
        still `finish`."""
        self.replicas.pop(name, None)

    def digests(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """The digests of the prompt's full blocks, as stage 05 names them.

        salt: what separates requests that must not, or cannot, share blocks: tenant and adapter.
        """
        digests, parent, size = [], hashlib.sha256(salt).digest(), self.block_size
        for first in range(0, len(tokens) - size + 1, size):
            parent = chain(parent, tokens[first : first + size])
            digests.append(parent)
        return digests

    def choose(
        self,
        digests: Sequence[bytes],
        tokens: int,
        answer: int = 0,
        without: Collection[Replica] = (),
    ) -> Route | None:
        """The route of a request; None if no replica can take it. Changes no count.

        tokens: of the prompt. answer: tokens that it may generate, as far as the caller knows.
        without: replicas that have failed this request.

        The candidates are the replicas that have some of the prompt, and two of all at random
        (Mitzenmacher, "The power of two choices", 2001): several routers that each know only their
        own requests must not all see the same best one. A hot prefix fills no replica: each request
        raises its replica's price, until another one computes the prefix, too.
        """
        able = [r for r in self.replicas.values() if r.ready and r not in without]
        if not able:
            return None
        useful = max(0, tokens - 1) // self.block_size  # blocks: the last token is always computed
        cached = {r: min(useful, r.match(digests)) * self.block_size for r in able}
        pair = self.random.sample(able, min(2, len(able)))
        candidates = dict.fromkeys([*(r for r in able if cached[r]), *pair])

        def cost(replica: Replica) -> tuple[int, float]:
            return tokens - cached[replica] + replica.tokens, self.random.random()  # ties

        best = min(candidates, key=cost)
        return Route(best, digests, cached[best], tokens - cached[best] + answer, answer)

    def start(self, route: Route) -> None:
        """The request is sent: it counts as in flight, and its prompt as cached."""
        route.replica.requests += 1
        route.replica.tokens += route.tokens
        route.replica.remember(route.digests)

    def begin(self, route: Route) -> None:
        """The answer has begun: the prompt is computed, and only the answer is still ahead."""
        route.replica.tokens -= route.tokens - route.answer
        route.tokens = route.answer

    def finish(self, route: Route) -> None:
        """The request has ended, however it did."""
        route.replica.requests -= 1
        route.replica.tokens -= route.tokens

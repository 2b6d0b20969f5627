"""The scheduler: before every pass it decides who runs, for how many tokens, and in which blocks.

Stage 04's rules for the budget still apply. Memory is new. A request is admitted when there is room
for the tokens that it has now, not for all that it may come to have. So memory can run out, and
then a request gives its blocks back and waits: preemption. The latest arrival goes first, so the
earliest always makes progress, and every request ends.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from dataclasses import dataclass, replace

from shared.errors import UserError
from stage04_continuous.plan import Plan, Work
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import PATIENCE, POLICIES, check_settings

from .blocks import BlockPool, BlockTable, Move


@dataclass
class Counts:
    """Counters since start."""

    lookup_tokens: int = 0  # tokens of requests at their first admission
    hit_tokens: int = 0  # of `lookup_tokens`, those found in the prefix cache
    copies: int = 0  # blocks copied because they were shared and about to be written
    recomputed: int = 0  # preemptions that dropped keys and values
    swapped_out: int = 0  # preemptions that moved them to the swap pool
    swapped_in: int = 0

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.swapped_out

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that were found and need not be computed."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class Scheduler:
    """Shares the blocks of `pool` and `token_budget` tokens a pass among requests, at most
    `max_sequences` at a time.

    policy, max_chunk: as in stage 04.
    prefix_caching: find full blocks again by their tokens.
    watermark: share of the blocks that must stay free when a request is admitted beside others, so
        that the others can grow.
    swap_pool: a preempted request's keys and values move there, if there is room; else they are
        dropped, and computed again.
    longest: most tokens that a sequence may have: the model's context.
    Raises UserError for settings that cannot work.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int = 256,
        token_budget: int = 256,
        policy: str = "fcfs",
        max_chunk: int | None = None,
        prefix_caching: bool = True,
        watermark: float = 0.01,
        swap_pool: BlockPool | None = None,
        longest: int = sys.maxsize,
    ) -> None:
        max_sequences = min(max_sequences, pool.count)  # each has at least one block
        check_settings("sequence", max_sequences, token_budget, policy, max_chunk)
        if not 0 <= watermark < 1:
            raise UserError(
                f"The watermark must be a share of the blocks, from 0 to below 1, not {watermark}."
            )
        if swap_pool is not None and swap_pool.block_size != pool.block_size:
            raise UserError(
                f"Blocks of the swap pool hold {swap_pool.block_size} tokens, but the others "
                f"{pool.block_size}: make them equal."
            )
        self.pool, self.swap_pool, self.max_sequences = pool, swap_pool, max_sequences
        self.token_budget, self.policy, self.patience = token_budget, policy, PATIENCE
        self.max_chunk, self.longest = max_chunk or token_budget, longest
        self.prefix_caching = prefix_caching
        self.watermark = math.ceil(watermark * pool.count)  # in blocks
        self.tables: dict[Request, BlockTable] = {}  # of all requests that wait or run
        self.parents: dict[Request, Request] = {}  # of waiting requests that follow another
        self.swapped: dict[Request, list[int]] = {}  # waiting requests -> blocks of the swap pool
        self.counts = Counts()
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by admission
        self.step = 0  # plans made
        self._arrivals = 0
        self._preempted: set[Request] = set()  # of all that wait or run

    # ---- requests come and go -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request, which `check` has accepted."""
        request.move(State.WAITING)
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.tables[request] = BlockTable(self.pool)
        self.waiting.append(request)

    def follow(self, child: Request, parent: Request) -> None:
        """Let `child`, just queued, begin with the tokens of `parent`. It waits until the parent
        has computed them, and shares its blocks: a sample of the same prompt, or a fork."""
        self.parents[child] = parent
        self.tables[child] = replace(self.tables[parent], blocks=[], digests=[])

    def check(self, prompt: int, answer: int) -> None:
        """Raise UserError if a request for `answer` tokens after `prompt` tokens can never run,
        however long it waits. Reads settings only."""
        most = min(prompt + answer, self.longest) - 1  # an answer's last token is never computed
        needed, size = self.pool.blocks_for(most), self.pool.block_size
        if needed > self.pool.count:
            room = self.pool.count * size + 1 - prompt
            advice = f"ask for at most {room} tokens" if room > 0 else "shorten the prompt"
            raise UserError(
                f"The prompt has {prompt} tokens and its answer up to {answer}: that takes "
                f"{needed} blocks of {size} tokens, but there are {self.pool.count}: {advice}, or "
                "give more memory."
            )

    def finish(self, request: Request) -> None:
        """Release a request, waiting or running. Its blocks are free from the next step on; full
        ones can still be found, unless it ended with an error."""
        queue = self.running if request.state is State.RUNNING else self.waiting
        request.move(State.FINISHED)  # raises for an unknown request, before any change
        queue.remove(request)
        self.parents.pop(request, None)
        children = [child for child, parent in self.parents.items() if parent is request]
        for child in children[1:]:
            self.parents[child] = children[0]
        if children:  # the first computes what the others still need
            del self.parents[children[0]]
        self._preempted.discard(request)
        self.tables.pop(request).release(trusted=request.output.error is None)
        self._leave_swap(request)

    def advance(self, plan: Plan) -> None:
        """Note that the pass of `plan` was computed, and publish the blocks that it filled."""
        for work in plan.work:
            work.request.computed += work.count
            if self.prefix_caching:
                self._publish(work)

    def _publish(self, work: Work) -> None:
        size, end = self.pool.block_size, work.start + work.count
        blocks, digests = self.tables[work.request].blocks, self._digests(work.request, end)
        for index in range(work.start // size, end // size):
            self.pool.publish(blocks[index], digests[index])

    def _digests(self, request: Request, end: int) -> list[bytes]:
        """Digests of all full blocks of the first `end` tokens; each is worked out once."""
        table = self.tables[request]
        digested = len(table.digests) * self.pool.block_size
        return table.digest(request.tokens(digested, max(0, end - digested)))

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.tables)

    # ---- before a pass --------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan the next pass: who runs, and how many tokens of each. Admits and preempts."""
        plan = Plan()
        self.step += 1
        budget = self.token_budget
        preempted = self._make_room(plan)
        # Decoding requests first; otherwise in order of admission.
        for request in sorted(self.running, key=lambda request: not request.decoding):
            if count := self._chunk_size(request, budget):
                plan.work.append(self._work(request, count))
                budget -= count
        while len(self.running) < self.max_sequences and budget and not preempted:
            first = self._next_waiting()
            if first is None or not self._admit(plan, first):
                break  # no request overtakes the first in line
            count = self._chunk_size(first, budget)
            plan.work.append(self._work(first, count))
            budget -= count
        return plan

    def _make_room(self, plan: Plan) -> bool:
        """Give every running request the blocks for its tokens, the most senior first; when none
        are left, take those of the most junior. Returns whether a request was preempted."""
        preempted = False
        for request in sorted(self.running, key=self._rank):
            missing = self.tables[request].missing(request.token_count)
            while request.state is State.RUNNING and missing > self.pool.available:
                # The last resort is `request` itself.
                self._preempt(plan, max(self.running, key=self._rank))
                preempted = True
            if request.state is State.RUNNING:
                self._grow(plan, request)
        return preempted

    def _grow(self, plan: Plan, request: Request) -> None:
        # A new block holds another sequence's past. A mask hides it, but 0 times NaN is NaN.
        for block in self.tables[request].grow(request.token_count):
            plan.moves.append(Move("wipe", block, block))

    def _admit(self, plan: Plan, request: Request) -> bool:
        """Admit `request` with blocks for all its tokens, if they and the watermark are
        available."""
        table, size = self.tables[request], self.pool.block_size
        known = request.token_count - 1  # the last token is always computed: it gives the next one
        blocks = self._parents_blocks(request, known)
        inherited = bool(blocks)
        if inherited:
            computed = known
        else:
            blocks = self._lookup(request, known)
            computed = max(request.computed, len(blocks) * size)
        copied = inherited and known % size > 0  # the next write would hit the parent's last block
        unused = sum(self.pool.references[block] == 0 for block in blocks)  # until now
        needed = self.pool.blocks_for(request.token_count) - len(blocks) + unused + copied
        if needed + (self.watermark if self.running else 0) > self.pool.available:
            return False
        if request not in self._preempted and not inherited:
            # Finding its own blocks again would flatter the hit rate.
            self.counts.lookup_tokens += request.token_count
            self.counts.hit_tokens += computed
        self.waiting.remove(request)
        request.move(State.RUNNING)
        self.running.append(request)
        table.adopt(blocks)
        if copied:  # copy-on-write; all other shared blocks are full, and not written again
            plan.moves.append(Move("copy", *table.replace(known)))
            self.counts.copies += 1
        self._grow(plan, request)
        if request in self.swapped:
            self.counts.swapped_in += 1
        for index, block in enumerate(self._leave_swap(request)):
            if index >= len(blocks):
                plan.moves.append(Move("in", block, table.blocks[index]))
        request.computed = computed
        self.parents.pop(request, None)
        return True

    def _parents_blocks(self, request: Request, known: int) -> list[int]:
        """The parent's blocks with the first `known` tokens of `request`, if the parent runs
        and has computed them."""
        parent = self.parents.get(request)
        if parent is None or parent.state is not State.RUNNING or parent.computed < known:
            return []
        return self.tables[parent].blocks[: self.pool.blocks_for(known)]

    def _lookup(self, request: Request, known: int) -> list[int]:
        """The cached blocks with the first tokens of `request`, at most `known` of them."""
        if not self.prefix_caching:
            return []
        digests = self._digests(request, known)
        useful = request.computed if request in self.swapped else known
        return self.pool.match(digests[: useful // self.pool.block_size])

    def _preempt(self, plan: Plan, request: Request) -> None:
        """Take the blocks of a running request and make it wait again. It keeps its answer."""
        table = self.tables[request]
        used = self.pool.blocks_for(request.computed)
        if self.swap_pool and 0 < used <= self.swap_pool.available:
            blocks = [self.swap_pool.take() for _ in range(used)]
            pairs = zip(table.blocks, blocks, strict=False)
            plan.moves += [Move("out", *pair) for pair in pairs]
            self.swapped[request] = blocks
            self.counts.swapped_out += 1
        else:
            request.computed = 0
            self.counts.recomputed += 1
        table.release()
        self._preempted.add(request)
        self.running.remove(request)
        request.move(State.WAITING)
        insort(self.waiting, request, key=lambda request: request.arrival)

    def _leave_swap(self, request: Request) -> list[int]:
        """Give back the blocks of the swap pool that `request` has, if any; returns them."""
        blocks = self.swapped.pop(request, [])
        if self.swap_pool:
            for block in blocks:
                self.swap_pool.give_back(block)
        return blocks

    def _chunk_size(self, request: Request, budget: int) -> int:
        """How many tokens of `request` fit into the remaining budget."""
        return min(request.remaining, self.max_chunk, budget)

    def _work(self, request: Request, count: int) -> Work:
        rows = int(count == request.remaining)
        return Work(request, self.tables[request].blocks, request.computed, count, rows)

    def _rank(self, request: Request) -> tuple[int, int]:
        """Seniority: the lowest rank keeps its memory longest."""
        return POLICIES[self.policy](request), request.arrival

    def _next_waiting(self) -> Request | None:
        ready = (request for request in self.waiting if not self._awaits_parent(request))
        return min(ready, key=self._place_in_line, default=None)

    def _place_in_line(self, request: Request) -> tuple[int, int]:
        waited = self.step - request.arrival_step
        return POLICIES[self.policy](request) - waited // self.patience, request.arrival

    def _awaits_parent(self, request: Request) -> bool:
        """Whether the parent of `request` has yet to compute what both need."""
        parent = self.parents.get(request)
        return parent is not None and parent.computed < request.token_count - 1

"""The scheduler: before every forward pass it decides who runs, how many tokens of each, and in which blocks.

Stage 04's rules for the budget stand. New is memory. A request is let in when the tokens that it has now find room, not those
that it may come to have. So memory can run out, and then somebody gives theirs back and waits: preemption. Whoever came last goes
first, so that whoever came first always gets on, and everybody ends.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import UserError
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES

from .blocks import BlockPool, BlockTable
from .cache import Move

PREEMPTIONS = ("auto", "recompute", "swap")


@dataclass(frozen=True)
class Work:
    """One request's share of a pass, as it was decided: compute `count` tokens from position `start` on."""

    request: Request
    blocks: list[int]  # the request's table
    start: int
    count: int
    samples: bool  # whether the pass reaches the request's last token, so that the next one can be sampled

    @property
    def prefill_tokens(self) -> int:
        """How many of them are tokens of the prompt."""
        return max(
            0, min(self.start + self.count, len(self.request.output.prompt_ids)) - self.start
        )


@dataclass
class Counts:
    """What has happened so far."""

    lookup_tokens: int = 0  # that requests had when they were let in for the first time, and
    hit_tokens: int = 0  # how many of these were found in the prefix cache
    copies: int = 0  # blocks copied because they were shared and about to be written
    recomputed: int = 0  # preemptions that threw the keys and values away
    swapped_out: int = 0  # preemptions that moved them out
    swapped_in: int = 0

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.swapped_out

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were found and did not have to be computed."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class Scheduler:
    """Shares the blocks of `pool` and `token_budget` tokens a pass among at most `max_sequences` requests.

    policy, max_chunk, chunked, patience: as in stage 04.
    prefix_caching: full blocks are found again by what they hold.
    watermark: share of the blocks that stays free when a request is let in beside others, so that these can grow.
    preemption: "recompute" throws a request's keys and values away, "swap" moves them to `swap_pool`, and "auto" asks `cheaper`,
        which gets the number of computed tokens and says one of the two. Where there is no room to swap, it is recomputed.
    Raises UserError for settings that cannot work.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int = 256,
        token_budget: int = 256,
        policy: str = "fcfs",
        max_chunk: int | None = None,
        chunked: bool = True,
        patience: int = 256,
        prefix_caching: bool = True,
        watermark: float = 0.01,
        preemption: str = "auto",
        swap_pool: BlockPool | None = None,
    ) -> None:
        if max_sequences < 1:
            raise UserError(f"There must be at least 1 sequence at a time, not {max_sequences}.")
        max_sequences = min(max_sequences, pool.count)  # each has a block at least
        if token_budget < max_sequences:
            raise UserError(
                f"A budget of {token_budget} tokens a step is too small for {max_sequences} sequences, each of which needs one: "
                f"give at least {max_sequences}, or fewer sequences."
            )
        if policy not in POLICIES:
            raise UserError(f"Unknown policy '{policy}': choose one of {', '.join(POLICIES)}.")
        if max_chunk is not None and max_chunk < 1:
            raise UserError(f"A chunk has at least 1 token, not {max_chunk}.")
        if patience < 1:
            raise UserError(f"Patience is at least 1 step, not {patience}.")
        if not 0 <= watermark < 1:
            raise UserError(
                f"The watermark is a share of the blocks, from 0 to below 1, not {watermark}."
            )
        if preemption not in PREEMPTIONS:
            raise UserError(
                f"Unknown preemption '{preemption}': choose one of {', '.join(PREEMPTIONS)}."
            )
        if preemption == "swap" and swap_pool is None:
            raise UserError(
                "There is no memory to swap to: give some, or choose the preemption 'recompute'."
            )
        if swap_pool is not None and swap_pool.block_size != pool.block_size:
            raise UserError(
                f"Blocks to swap to hold {swap_pool.block_size} tokens, and the others {pool.block_size}: make them alike."
            )
        self.pool, self.swap_pool, self.max_sequences = pool, swap_pool, max_sequences
        self.token_budget, self.policy, self.patience, self.chunked = (
            token_budget,
            policy,
            patience,
            chunked,
        )
        self.max_chunk = token_budget if max_chunk is None else max_chunk
        self.prefix_caching, self.preemption = prefix_caching, preemption
        self.watermark = math.ceil(watermark * pool.count)  # in blocks
        self.cheaper: Callable[[int], str] = lambda tokens: (
            "recompute"
        )  # the engine knows better, and
        self.longest = sys.maxsize  # how many tokens a sequence may have
        self.tables: dict[Request, BlockTable] = {}  # of all that wait or run
        self.swapped: dict[
            Request, list[int]
        ] = {}  # blocks of the swap pool, of those that wait there
        self.samples: dict[
            Request, list[Request]
        ] = {}  # those that wait for another one to compute the prompt of all
        self.moves: list[Move] = []  # memory work to be done before the next pass, in this order
        self.counts = Counts()
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by admission
        self.step = 0  # passes scheduled so far
        self._arrivals = 0
        self._preempted: set[Request] = set()  # of all that wait or run

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def add(self, request: Request, salt: bytes = b"") -> None:
        """Take in a new request; only those with the same `salt` share what they have in common by digest.

        Raises UserError if it can never run.
        """
        self.check(request)
        self._arrive(request, BlockTable(self.pool, salt))
        self.waiting.append(request)

    def add_sample(self, first: Request, request: Request) -> None:
        """Take in another sample of the prompt of `first`, which is waiting: it begins when `first` has computed the prompt."""
        self._arrive(request, BlockTable(self.pool, self.tables[first].salt))
        self.samples.setdefault(first, []).append(request)

    def begin_samples(self, first: Request) -> list[Request]:
        """The samples that wait for `first`, which has computed its prompt: from now on each goes on by itself."""
        samples = self.samples.pop(first, [])
        for request in samples:
            self._branch(first, request)
        return samples

    def check(self, request: Request) -> None:
        """Raise UserError if `request` can never run, however long it waits."""
        prompt = len(request.output.prompt_ids)
        if not self.chunked and prompt > self.token_budget:
            raise UserError(
                f"The prompt has {prompt} tokens and a step has room for {self.token_budget}: allow chunks, or raise the budget."
            )
        answer = request.sampling.max_tokens
        most = (
            min(prompt + answer, self.longest) - 1
        )  # the last token of an answer is never computed
        needed, size = self.pool.blocks_for(most), self.pool.block_size
        if needed > self.pool.count:
            room = self.pool.count * size + 1 - prompt
            advice = f"ask for at most {room} tokens" if room > 0 else "shorten the prompt"
            raise UserError(
                f"The prompt has {prompt} tokens and its answer up to {answer}: that takes {needed} blocks of {size} tokens, and "
                f"there are {self.pool.count}: {advice}, or give more memory."
            )

    def fork(self, parent: Request, child: Request) -> None:
        """Take in `child`, which goes on from where `parent` is, with the same tokens.

        If there is room for one more beside `parent`, it runs at once and shares the blocks of everything computed. If not, or
        if `parent` does not run, it waits and computes again what it does not find.
        """
        self.check(child)
        self._arrive(child, BlockTable(self.pool, self.tables[parent].salt))
        self._branch(parent, child)

    def _branch(self, parent: Request, child: Request) -> None:
        if parent.state is State.RUNNING and len(self.running) < self.max_sequences:
            self.tables[child].adopt(
                self.tables[parent].blocks[: self.pool.blocks_for(parent.computed)]
            )
            child.computed = parent.computed
            child.move(State.RUNNING)
            self.running.append(child)
        else:
            insort(self.waiting, child, key=lambda each: each.arrival)

    def finish(self, request: Request) -> None:
        """Let go of a request, wherever it is. Its blocks are free from the next pass on; full ones can still be found, unless
        it ended with an error."""
        was = request.state
        request.move(State.FINISHED)  # raises for one that is not here, before anything is touched
        if was is State.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            next(samples for samples in self.samples.values() if request in samples).remove(request)
        if heirs := self.samples.pop(
            request, []
        ):  # the next one computes the prompt for the others
            insort(self.waiting, heirs[0], key=lambda each: each.arrival)
            self.samples[heirs[0]] = heirs[1:]
        self._preempted.discard(request)
        self.tables.pop(request).release(trusted=request.output.error is None)
        for block in self.swapped.pop(request, ()):
            self._swap_pool.give_back(block)

    def publish(self, work: Work) -> None:
        """Let the blocks be found that `work`, which has been done, has filled."""
        if self.prefix_caching:
            table, size, ids = self.tables[work.request], self.pool.block_size, work.request.tokens
            end = work.start + work.count
            table.digest(ids(len(table.digests) * size, end - len(table.digests) * size))
            for index in range(work.start // size, end // size):
                self.pool.publish(table.blocks[index], table.digests[index])

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.tables)

    # ---- before a pass ----------------------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """Who runs in the next pass, and how much; an empty list if there is nobody. Lets requests in, and preempts."""
        self.step += 1
        budget, work = self.token_budget, []
        preempted = self._make_room()
        ready = sorted(
            self.running, key=lambda request: request.remaining > 1
        )  # single tokens first; the order holds
        for request in ready:
            if count := self._share(request, budget):
                work.append(self._work(request, count))
                budget -= count
        while self.waiting and len(self.running) < self.max_sequences and not preempted:
            request = self._next_waiting()
            if not budget or not self._admit(request, budget):
                break  # nobody overtakes the first in line
            count = self._share(request, budget)
            work.append(self._work(request, count))
            budget -= count
        return work

    def _make_room(self) -> bool:
        """Give every running request the blocks for the tokens it has, the senior first; where none are left, those of the most
        junior. Returns whether somebody was preempted."""
        preempted = False
        for request in sorted(self.running, key=self._rank):
            while request.state is State.RUNNING and self._need(request) > self.pool.available:
                self.preempt(max(self.running, key=self._rank))  # in the end it is `request` itself
                preempted = True
            if request.state is State.RUNNING:
                table = self.tables[request]
                if table.is_shared(request.computed):
                    self.moves.append(Move("copy", *table.replace(request.computed)))
                    self.counts.copies += 1
                self._grow(request)
        return preempted

    def _need(self, request: Request) -> int:
        """Blocks to take before the next tokens of `request` can be written."""
        table = self.tables[request]
        return table.missing(request.token_count) + table.is_shared(request.computed)

    def _grow(self, request: Request) -> None:
        # What a new block holds is somebody else's past. A mask hides it, but 0 times NaN is NaN, should there be one.
        self.moves += [
            Move("wipe", block, block) for block in self.tables[request].grow(request.token_count)
        ]

    def _admit(self, request: Request, budget: int) -> bool:
        """Let `request` in, with blocks for all tokens it has, if they and the watermark are there and the budget is enough."""
        table, size = self.tables[request], self.pool.block_size
        known = (
            request.token_count - 1
        )  # the last token is computed even if it could be found: it gives the next one
        hits = []
        if self.prefix_caching:
            table.digest(
                request.tokens(len(table.digests) * size, known - len(table.digests) * size)
            )
            hits = self.pool.match(
                table.digests[: (request.computed if request in self.swapped else known) // size]
            )
        computed = max(request.computed, len(hits) * size)
        unused = sum(
            self.pool.references[block] == 0 for block in hits
        )  # found, but counted as available until now
        needed = self.pool.blocks_for(request.token_count) - len(hits) + unused
        if needed + (self.watermark if self.running else 0) > self.pool.available:
            return False
        if not self.chunked and min(request.token_count - computed, self.token_budget) > budget:
            return False
        if request not in self._preempted:  # what it finds of its own would flatter the rate
            self.counts.lookup_tokens += request.token_count
            self.counts.hit_tokens += computed
        self.waiting.remove(request)
        request.move(State.RUNNING)
        self.running.append(request)
        table.adopt(hits)
        self._grow(request)
        if request in self.swapped:
            self.counts.swapped_in += 1
        for index, block in enumerate(self.swapped.pop(request, ())):
            if index >= len(hits):
                self.moves.append(Move("in", block, table.blocks[index]))
            self._swap_pool.give_back(block)
        request.computed = computed
        return True

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request away and send it back in line. What it has said stays said."""
        table, used = self.tables[request], self.pool.blocks_for(request.computed)
        if self._swaps(request, used):
            blocks = [self._swap_pool.take() for _ in range(used)]
            self.moves += [Move("out", *pair) for pair in zip(table.blocks, blocks, strict=False)]
            self.swapped[request] = blocks
            self.counts.swapped_out += 1
        else:
            request.computed = 0
            self.counts.recomputed += 1
        table.release()
        self._preempted.add(request)
        self.running.remove(request)
        request.move(State.WAITING)
        insort(self.waiting, request, key=lambda each: each.arrival)

    def _swaps(self, request: Request, used: int) -> bool:
        if self.swap_pool is None or not 0 < used <= self.swap_pool.available:
            return False
        return (
            self.cheaper(request.computed) if self.preemption == "auto" else self.preemption
        ) == "swap"

    @property
    def _swap_pool(self) -> BlockPool:
        assert self.swap_pool is not None
        return self.swap_pool

    def _arrive(self, request: Request, table: BlockTable) -> None:
        request.move(State.WAITING)
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.tables[request] = table

    def _share(self, request: Request, budget: int) -> int:
        """How many tokens of `request` fit into what is left of the budget."""
        if (
            self.chunked or request.token_count > self.token_budget
        ):  # the latter after preemption only: prompts are shorter
            return min(request.remaining, self.max_chunk, budget)
        return request.remaining if request.remaining <= budget else 0

    def _work(self, request: Request, count: int) -> Work:
        return Work(
            request,
            self.tables[request].blocks,
            request.computed,
            count,
            samples=count == request.remaining,
        )

    def _rank(self, request: Request) -> tuple[int, int]:
        """Who keeps memory longest: the lowest comes first."""
        return (request.priority if self.policy == "priority" else 0), request.arrival

    def _next_waiting(self) -> Request:
        if self.policy == "fcfs":
            return self.waiting[0]
        return min(
            self.waiting,
            key=lambda each: (each.priority - self._waited(each) // self.patience, each.arrival),
        )

    def _waited(self, request: Request) -> int:
        return self.step - request.arrival_step

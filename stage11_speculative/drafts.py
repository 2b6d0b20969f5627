"""Drafts in a plan: tokens that may come next, computed beside the newest one to be verified.

Drafts are data of one plan and live no longer than its step. They take only what the plan leaves:
of the budget, of the blocks that are free, of the answer and of the context. So they cost no other
request its place, and a request that is preempted has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stage04_continuous.plan import Plan, Share, Work
from stage04_continuous.request import Request
from stage05_paged.blocks import Move
from stage05_paged.scheduler import Scheduler

Drafts = list[int]  # ids that may follow a request's tokens, in order


class Proposer(Protocol):
    """Makes drafts."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        """Of each request, at most `most` ids that may follow its tokens: as many as it likes."""
        ...

    def forget(self, request: Request) -> None:
        """Called when the request has ended."""


@dataclass
class DraftPlan(Plan):
    """A plan whose shares may end with drafts: `count` and `rows` of their Work include them.

    drafts: by request. accepted: how many of them were verified, once the step has sampled.
    """

    drafts: Mapping[Request, Drafts] = field(default_factory=dict)
    accepted: dict[Request, int] = field(default_factory=dict)

    def tokens(self) -> tuple[list[int], list[Share], list[int]]:
        """As a Plan's, with the drafts behind the tokens of their request."""
        ids: list[int] = []
        rows: list[int] = []
        for work in self.work:
            drafts = self.drafts.get(work.request, [])
            ids += work.request.tokens(work.start, work.count - len(drafts)) + drafts
            rows += range(len(ids) - work.rows, len(ids))
        return ids, [(work.table, work.start, work.count) for work in self.work], rows


@dataclass
class Counts:
    """Counters since start. per_position: accepted drafts that were the first of their pass, the
    second, ..."""

    passes: int = 0  # of a request, with drafts
    proposed: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        self.passes += 1
        self.proposed += proposed
        self.accepted += accepted
        self.per_position += [0] * (accepted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1


class DraftScheduler:
    """Stage 05's scheduler, which plans as without drafts, and then adds those of `proposer`.

    most: of one request in a pass. Everything else is the scheduler's own.
    """

    def __init__(self, scheduler: Scheduler, proposer: Proposer, most: int = 4) -> None:
        self.inner, self.proposer, self.most = scheduler, proposer, most
        # Called with a plan's moves before its drafts are made: for the cache of a draft model.
        self.prepare: Callable[[Sequence[Move]], None] = lambda moves: None
        self.draft_counts = Counts()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self) -> DraftPlan:
        """Plan the next pass, with drafts of the requests whose next token it gives."""
        plan = self.inner.schedule()
        self.prepare(plan.moves)
        drafts = self._drafts(plan)
        if not drafts:
            return DraftPlan(plan.started, plan.work, plan.moves)
        moves, work = list(plan.moves), []
        for share in plan.work:
            if count := len(drafts.get(share.request, ())):
                table = self.inner.tables[share.request]
                blocks = table.grow(share.request.token_count + count)
                moves += [Move("wipe", block, block) for block in blocks]
                share = replace(share, count=share.count + count, rows=share.rows + count)
            work.append(share)
        return DraftPlan(plan.started, work, moves, drafts)

    def advance(self, plan: DraftPlan) -> None:
        """Note that the pass of `plan` was computed. Its drafts are not verified yet: they do not
        count, and no other request may find them."""
        shares = [self._without(plan, work) for work in plan.work] if plan.drafts else plan.work
        self.inner.advance(Plan(plan.started, shares))

    def accept(self, plan: DraftPlan) -> None:
        """Count `plan.accepted` drafts as computed, and give back the blocks of the others."""
        work = [
            Work(request, self.inner.tables[request].blocks, request.computed, count, 0)
            for request, count in plan.accepted.items()
            if count
        ]
        self.inner.advance(Plan(plan.started, work))
        for request, drafts in plan.drafts.items():
            count = plan.accepted.get(request, 0)
            self.draft_counts.add(len(drafts), count)
            table = self.inner.tables[request]
            for _ in range(self.inner.pool.blocks_for(request.token_count), len(table.blocks)):
                self.inner.pool.give_back(table.blocks.pop())

    def finish(self, request: Request) -> None:
        self.proposer.forget(request)
        self.inner.finish(request)

    def _drafts(self, plan: Plan) -> dict[Request, Drafts]:
        """What is proposed for the plan, cut to what the budget and the free blocks leave."""
        requests = [work.request for work in plan.work if work.rows]
        if not requests:
            return {}
        most = [self._most(request) for request in requests]
        budget = self.inner.token_budget - sum(work.count for work in plan.work)
        free = len(self.inner.pool.free)
        kept: dict[Request, Drafts] = {}
        proposed = self.proposer.propose(requests, most)
        for request, drafts, length in zip(requests, proposed, most, strict=True):
            table, size = self.inner.tables[request], self.inner.pool.block_size
            room = (len(table.blocks) + free) * size - request.token_count
            if count := min(len(drafts), length, budget, room):
                kept[request] = drafts[:count]
                budget -= count
                free -= table.missing(request.token_count + count)
        return kept

    def _most(self, request: Request) -> int:
        """How many drafts could become tokens: the pass itself gives one more."""
        answer = request.sampling.max_tokens - len(request.output.token_ids)
        context = self.inner.longest - request.token_count
        return max(0, min(self.most, answer - 1, context - 1))

    @staticmethod
    def _without(plan: DraftPlan, work: Work) -> Work:
        count = len(plan.drafts.get(work.request, ()))
        return replace(work, count=work.count - count, rows=work.rows - count)

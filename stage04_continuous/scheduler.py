"""The scheduler: before every forward pass it decides who runs, and how many tokens of each. No tensors, no clock.

The unit of scheduling is one forward pass, not one request (Yu et al., "Orca", OSDI 2022). A pass has a budget of tokens.
Requests with one token to compute go first: most of them are in the middle of an answer that somebody is reading. What is
left of the budget goes to prompts, a long one in chunks (Agrawal et al., "Sarathi-Serve", OSDI 2024).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from shared.errors import UserError

from .request import Request, State

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class Work:
    """One request's share of a pass, as it was decided: compute `count` tokens from position `start` on."""

    request: Request
    slot: int
    start: int
    count: int
    samples: bool  # whether the pass reaches the request's last token, so that the next one can be sampled

    @property
    def prefill_tokens(self) -> int:
        """How many of them are tokens of the prompt."""
        return max(
            0, min(self.start + self.count, len(self.request.output.prompt_ids)) - self.start
        )


class Scheduler:
    """Shares `max_sequences` slots and `token_budget` tokens a pass among requests.

    policy: "fcfs" is first come, first served. "priority" lets the lowest `priority` go first, ties by arrival; every
        `patience` steps of waiting count as one priority, so that nobody waits for ever.
    max_chunk: at most so many tokens of one prompt in a pass; None: as many as the budget has left.
    chunked: False runs a prompt whole or not at all, as engines did before Sarathi.
    Raises UserError for settings that cannot work.
    """

    def __init__(
        self,
        max_sequences: int = 8,
        token_budget: int = 256,
        policy: str = "fcfs",
        max_chunk: int | None = None,
        chunked: bool = True,
        patience: int = 256,
    ) -> None:
        if max_sequences < 1:
            raise UserError(f"There must be at least 1 slot, not {max_sequences}.")
        if token_budget < max_sequences:
            raise UserError(
                f"A budget of {token_budget} tokens a step is too small for {max_sequences} slots, each of which needs one: "
                f"give at least {max_sequences}, or fewer slots."
            )
        if policy not in POLICIES:
            raise UserError(f"Unknown policy '{policy}': choose one of {', '.join(POLICIES)}.")
        if max_chunk is not None and max_chunk < 1:
            raise UserError(f"A chunk has at least 1 token, not {max_chunk}.")
        if patience < 1:
            raise UserError(f"Patience is at least 1 step, not {patience}.")
        self.token_budget, self.policy, self.patience, self.chunked = (
            token_budget,
            policy,
            patience,
            chunked,
        )
        self.max_chunk = token_budget if max_chunk is None else max_chunk
        self.free_slots = list(range(max_sequences))  # a heap: the lowest free slot is taken first
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by admission
        self.step = 0  # passes scheduled so far
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Take in a new request. Raises UserError if it can never run."""
        if not self.chunked and len(request.output.prompt_ids) > self.token_budget:
            raise UserError(
                f"The prompt has {len(request.output.prompt_ids)} tokens and a step has room for {self.token_budget}: "
                "allow chunks, or raise the budget."
            )
        request.move(State.WAITING)
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """Who runs in the next pass, and how much; an empty list if there is nobody. Admits requests to free slots."""
        self.step += 1
        budget, work = self.token_budget, []
        ready = sorted(
            self.running, key=lambda request: request.remaining > 1
        )  # single tokens first; the order holds
        for request in ready:
            if count := self._share(request, budget):
                work.append(self._work(request, count))
                budget -= count
        while self.waiting and self.free_slots:
            request = self._next_waiting()
            count = self._share(request, budget)
            if not count:
                break  # nobody overtakes the first in line
            self.waiting.remove(request)
            request.move(State.RUNNING)
            request.slot = heapq.heappop(self.free_slots)
            self.running.append(request)
            work.append(self._work(request, count))
            budget -= count
        return work

    def finish(self, request: Request) -> None:
        """Let go of a request, wherever it is; its slot is free from the next pass on."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            heapq.heappush(self.free_slots, request.slot)
            request.slot = -1
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        request.move(State.FINISHED)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def _share(self, request: Request, budget: int) -> int:
        """How many tokens of `request` fit into what is left of the budget."""
        if self.chunked:
            return min(request.remaining, self.max_chunk, budget)
        return request.remaining if request.remaining <= budget else 0

    def _work(self, request: Request, count: int) -> Work:
        return Work(
            request, request.slot, request.computed, count, samples=count == request.remaining
        )

    def _next_waiting(self) -> Request:
        if self.policy == "fcfs":
            return self.waiting[0]
        return min(
            self.waiting,
            key=lambda each: (each.priority - self._waited(each) // self.patience, each.arrival),
        )

    def _waited(self, request: Request) -> int:
        return self.step - request.arrival_step

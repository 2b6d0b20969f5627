"""The scheduler: before every pass it decides who runs, and how many tokens of each. No tensors.

The unit of scheduling is one forward pass, not one request (Yu et al., "Orca", OSDI 2022). A pass
has a budget of tokens. Decoding requests go first: a client is reading their answers. The rest of
the budget goes to prompts, long ones in chunks (Agrawal et al., "Sarathi-Serve", OSDI 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from shared.errors import UserError

from .plan import Plan, Wipe, Work
from .request import Request, State

PATIENCE = 256  # steps of waiting that count as one priority
# The priority of a request, by policy: the lowest goes first, and arrival decides between equals.
POLICIES: dict[str, Callable[[Request], int]] = {
    "fcfs": lambda request: 0,
    "priority": lambda request: request.priority,
}


def check_settings(
    row: str, rows: int, token_budget: int, policy: str, max_chunk: int | None
) -> None:
    """Raise UserError for settings that cannot work. row: "slot" or "sequence", for the message."""
    if rows < 1:
        raise UserError(f"There must be at least 1 {row} at a time, not {rows}.")
    if token_budget < rows:
        raise UserError(
            f"A budget of {token_budget} tokens a step is too small for {rows} {row}s, each of "
            f"which needs one: give at least {rows}, or fewer {row}s."
        )
    if policy not in POLICIES:
        raise UserError(f"Unknown policy '{policy}': choose one of {', '.join(POLICIES)}.")
    if max_chunk is not None and max_chunk < 1:
        raise UserError(f"A chunk must have at least 1 token, not {max_chunk}.")


class Scheduler:
    """Shares `max_sequences` slots and `token_budget` tokens a pass among requests.

    policy: "fcfs" is first come, first served. "priority" lets the lowest `priority` go first, ties
        by arrival; every `patience` steps of waiting count as one priority, so that every request
        runs eventually.
    max_chunk: most tokens of one prompt in a pass; None: as many as the budget allows.
    Raises UserError for settings that cannot work.
    """

    def __init__(
        self,
        max_sequences: int = 8,
        token_budget: int = 256,
        policy: str = "fcfs",
        max_chunk: int | None = None,
    ) -> None:
        check_settings("slot", max_sequences, token_budget, policy, max_chunk)
        self.max_sequences, self.token_budget, self.policy = max_sequences, token_budget, policy
        self.patience, self.max_chunk = PATIENCE, max_chunk or token_budget
        self.free_slots = list(range(max_sequences))  # a heap: the lowest free slot is taken first
        self.dirty = [0] * max_sequences  # positions that the last sequence of a slot may have used
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by admission
        self.step = 0  # plans made
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request, which `check` has accepted."""
        request.move(State.WAITING)
        request.arrival, request.arrival_step = self._arrivals, self.step
        self._arrivals += 1
        self.waiting.append(request)

    def check(self, prompt: int, answer: int) -> None:
        """Raise UserError if a request for `answer` tokens after `prompt` tokens can never run.
        Here each can: a slot holds a whole context."""

    def schedule(self) -> Plan:
        """Plan the next pass: who runs, and how many tokens of each. Admits waiting requests."""
        plan = Plan()
        self.step += 1
        budget = self.token_budget
        # Decoding requests first; otherwise in order of admission.
        for request in sorted(self.running, key=lambda request: not request.decoding):
            if count := self._chunk_size(request, budget):
                plan.work.append(self._work(request, count))
                budget -= count
        while self.waiting and self.free_slots:
            request = self._next_waiting()
            count = self._chunk_size(request, budget)
            if not count:
                break  # no request overtakes the first in line
            self.waiting.remove(request)
            request.move(State.RUNNING)
            request.slot = heapq.heappop(self.free_slots)
            self.running.append(request)
            plan.moves.append(Wipe(request.slot, self.dirty[request.slot]))
            plan.work.append(self._work(request, count))
            budget -= count
        return plan

    def advance(self, plan: Plan) -> None:
        """Note that the pass of `plan` was computed."""
        for work in plan.work:
            work.request.computed += work.count

    def finish(self, request: Request) -> None:
        """Release a request, waiting or running; its slot is free from the next step on."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            heapq.heappush(self.free_slots, request.slot)
            self.dirty[request.slot] = request.token_count
            request.slot = -1
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        request.move(State.FINISHED)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def _chunk_size(self, request: Request, budget: int) -> int:
        """How many tokens of `request` fit into the remaining budget."""
        return min(request.remaining, self.max_chunk, budget)

    def _work(self, request: Request, count: int) -> Work:
        rows = int(count == request.remaining)  # the last token gives the next one
        return Work(request, request.slot, request.computed, count, rows)

    def _next_waiting(self) -> Request:
        return min(self.waiting, key=self._place_in_line)

    def _place_in_line(self, request: Request) -> tuple[int, int]:
        waited = self.step - request.arrival_step
        return POLICIES[self.policy](request) - waited // self.patience, request.arrival

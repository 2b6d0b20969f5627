"""A plan: what one step computes, and what memory it prepares first.

The scheduler makes it, the runner carries it out, and observers look at it. It is plain data:
tokens and addresses are ints, not tensors, so a plan can be sent to another process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from .request import Request

Table = Any  # where a cache keeps a sequence: its slot, or (from stage 05 on) its blocks
Move = Any  # what a cache's `move` takes: a Wipe, or (from stage 05 on) a move of a block
Share = tuple[Table, int, int]  # table, first position, number of tokens that a pass computes


@dataclass(frozen=True)
class Wipe:
    """Memory work before a pass: zero the first `used` positions of `slot`."""

    slot: int
    used: int


@dataclass(frozen=True)
class Work:
    """One request's share of a pass: compute `count` tokens from position `start` on."""

    request: Request
    table: Table
    start: int
    count: int
    rows: int  # how many of its last tokens need logits: 0 for a chunk that is not the last

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the share that belong to the prompt."""
        prompt = len(self.request.output.prompt_ids)
        return max(0, min(self.start + self.count, prompt) - self.start)


@dataclass
class Plan:
    """The work of one forward pass and the moves before it, both in order. Falsy without work."""

    started: float = field(default_factory=time.perf_counter)  # when scheduling began
    work: list[Work] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.work)

    def tokens(self) -> tuple[list[int], list[Share], list[int]]:
        """The arguments of `Runner.run`: ids, packed one share after the other; the shares; and
        the places among the ids whose logits are wanted."""
        ids: list[int] = []
        rows: list[int] = []
        for work in self.work:
            ids += work.request.tokens(work.start, work.count)
            rows += range(len(ids) - work.rows, len(ids))
        return ids, [(work.table, work.start, work.count) for work in self.work], rows


class Observer(Protocol):
    """Watches an engine's steps without taking part in them."""

    def before(self, plan: Plan) -> None:
        """Called after the moves of `plan` and before its pass."""

    def after(self, plan: Plan) -> None:
        """Called at the end of the step."""


class AnyScheduler(Protocol):
    """What an engine needs of a scheduler; the methods are explained in scheduler.py."""

    running: list[Request]  # in order of admission
    waiting: list[Request]  # in order of arrival

    def check(self, prompt: int, answer: int) -> None: ...
    def add(self, request: Request) -> None: ...
    def schedule(self) -> Plan: ...
    def advance(self, plan: Plan) -> None: ...
    def finish(self, request: Request) -> None: ...

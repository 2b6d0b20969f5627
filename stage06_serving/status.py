"""What the server needs from an engine, and what the engine reports to the rest of the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import UserError
from stage01_forward.generation import Output, Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Observer
from stage04_continuous.request import Request
from stage05_paged.records import BlocksRecord


class Refused(str):
    """An output's error whose cause is the request itself, found while it ran: status 400."""


class DraftCounts(Protocol):
    """Drafts since the start. The engine's thread counts, and any thread may read."""

    passes: int  # of one sequence, with drafts
    proposed: int  # tokens
    accepted: int
    per_position: list[int]  # accepted drafts that were the first of their pass, the second, ...


@dataclass(frozen=True)
class Status:
    """An engine at one moment. The engine's thread makes it, and any thread may read it."""

    max_sequences: int
    blocks: int  # in the pool
    block_size: int  # tokens
    owned: int = 0  # blocks
    running: tuple[tuple[str, int], ...] = ()  # ids, each with its number on the map of the blocks
    waiting: int = 0  # sequences
    preemptions: int = 0  # since the start, as the two below
    lookup_tokens: int = 0  # looked up in the prefix cache
    hit_tokens: int = 0  # found there

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class AnyEngine(Protocol):
    """An engine that the server can run. Any thread may use `check` and the properties; only the
    engine's own may use the rest."""

    steps: deque[BlocksRecord]  # one a forward pass, the newest last
    takes_prompt_requests: bool  # whether it takes a PromptRequest, and a request with a form
    drafts: DraftCounts | None

    @property
    def health(self) -> str:
        """ "ok", or in one word why the engine answers no request now."""
        ...

    @property
    def status(self) -> Status:
        """The newest status: replaced before each step and after each change, never mutated."""
        ...

    @property
    def variants(self) -> Mapping[str, bytes]:
        """The names that the engine answers to beside the model's, such as its adapters', each with
        the end of the salt of its requests."""
        ...

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise UserError if such a request can never be answered. Reads only constant settings."""
        ...

    def enqueue(self, request: Request) -> Request:
        """Queue a request that has an id, and that `check` has accepted."""
        ...

    def abort(self, request_id: str) -> Output:
        """End a request now, waiting or running; returns its output so far."""
        ...

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is work. Returns its tokens, each with its request's id."""
        ...

    def fail(self, error: UserError) -> list[Request]:
        """End with `error` the requests of a step that raised, or all if none was running."""
        ...

    def observe(self, observer: Observer) -> None:
        """Have `observer` see the plans of its passes, if it has any."""
        ...

    def map(self) -> Sequence[int]:
        """The state of each block, as in stage 05's `blockmap`."""
        ...

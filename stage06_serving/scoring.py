"""Log-probabilities of prompts, from the passes that compute them: chunks in the batch, like any
other request's, so no other request waits for them, and an abort ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stage01_forward.generation import Logprobs
from stage04_continuous.plan import Plan, Share
from stage04_continuous.request import Request

if TYPE_CHECKING:  # the settings are checked before PyTorch is imported
    from torch import Tensor

    from stage04_continuous.runner import AnyRunner

Scores = list[Logprobs | None]  # of the tokens of a prompt; None for the first: it has no context


@dataclass(eq=False)
class ScoredRequest(Request):
    """A request whose prompt is scored: the row of a position scores the next token. It waits
    behind all that are answered, since one body may hold a thousand prompts."""

    priority: int = 2**31
    top: int = 0  # likeliest tokens beside each token of the prompt
    scores: Scores = field(default_factory=lambda: [None])  # complete before the first token

    @property
    def wanted(self) -> range:
        """The positions whose rows it still wants."""
        return range(len(self.scores) - 1, len(self.output.prompt_ids) - 1)

    def take(self, logits: Tensor) -> None:
        """Take the next wanted rows: logits (R, V)."""
        from stage01_forward.sampling import logprobs_of  # here: it loads PyTorch, for seconds

        first = len(self.scores)
        targets = self.output.prompt_ids[first : first + len(logits)]
        pairs = zip(logits, targets, strict=True)
        self.scores += [logprobs_of(row, target, self.top) for row, target in pairs]


class ScoringRunner:
    """Runs the passes of `runner`, and hands scored requests the rows that they want. `plan`, which
    an observer sets before each pass, has them."""

    def __init__(self, runner: AnyRunner) -> None:
        self.runner, self.config, self.plan = runner, runner.config, Plan()

    def move(self, moves: Sequence[Any]) -> None:
        self.runner.move(moves)

    def run(self, ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor:
        """As stage 04's Runner."""
        takers: list[tuple[ScoredRequest, range]] = []  # with the places of its rows among `ids`
        end = 0
        for work in self.plan.work:
            begin, end = end, end + work.count
            request = work.request
            if isinstance(request, ScoredRequest):
                wanted = request.wanted  # a preempted request has taken some already
                first = max(begin, begin + wanted.start - work.start)
                if places := range(first, min(end, begin + wanted.stop - work.start)):
                    takers.append((request, places))
        if not takers:
            return self.runner.run(ids, shares, rows)
        computed = sorted({*rows, *(row for _, places in takers for row in places)})
        logits = self.runner.run(ids, shares, computed)
        order = {row: place for place, row in enumerate(computed)}
        for request, places in takers:
            request.take(logits[[order[row] for row in places]])
        return logits[[order[row] for row in rows]]

"""A request: what it asks for, its output so far, and how far the engine has got with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from stage01_forward.generation import Output, Row
from stage01_forward.params import SamplingParams


class State(Enum):
    """Where a request is. Its output holds the reason why it ended."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


NEXT = {
    State.NEW: {State.WAITING},
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.FINISHED, State.WAITING},  # back to waiting: preemption, in stage 05
    State.FINISHED: set(),
}


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    `computed` counts the tokens, prompt and answer together, whose keys and values are cached.
    The remaining work follows from it alone. "No answer yet, so in prefill" would be a shortcut
    that breaks as soon as a request must compute its tokens a second time.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    id: str = ""  # "": the engine gives it one
    priority: int = 0  # the lowest goes first; only the scheduler's "priority" policy reads it

    output: Output = field(init=False)
    state: State = field(init=False, default=State.NEW)
    computed: int = field(init=False, default=0)
    slot: int = field(init=False, default=-1)  # while it runs; else -1
    arrival: int = field(init=False, default=-1)  # arrival order
    arrival_step: int = field(init=False, default=-1)  # the scheduler's step at arrival

    def __post_init__(self) -> None:
        self.output = Output(list(self.prompt_ids))
        # With its own random numbers, so that neighbours never change what it draws.
        self.row = Row(self.sampling, self.output.prompt_ids, self.output.token_ids)

    @property
    def token_count(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.output.prompt_ids) + len(self.output.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens not computed yet. The logits of the last one give the next token."""
        return self.token_count - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the newest token is all that is left to compute."""
        return self.computed >= self.token_count - 1

    def tokens(self, start: int, count: int) -> list[int]:
        """The ids at positions start..start+count-1 of prompt and answer."""
        prompt, answer = self.output.prompt_ids, self.output.token_ids
        first, last = max(0, start - len(prompt)), max(0, start + count - len(prompt))
        return prompt[start : start + count] + answer[first:last]

    def move(self, state: State) -> None:
        """Go on to `state`. Raises RuntimeError for a transition that no request may make."""
        if state not in NEXT[self.state]:
            raise RuntimeError(
                f"request {self.id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

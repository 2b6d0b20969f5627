"""A request: what is asked for, what has come of it, and how far the engine has got with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from stage01_forward.generation import Output
from stage01_forward.sampling import SamplingParams


class State(Enum):
    """Where a request is. Its output says how it ended: "stop", "length", "abort" or "error"."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


NEXT = {
    State.NEW: {State.WAITING},
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {
        State.FINISHED,
        State.WAITING,
    },  # back in line: only stage 05 does that, when memory is short
    State.FINISHED: set(),
}


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    `computed` counts the tokens, of prompt and answer together, whose keys and values are in the cache. What there is to do
    follows from it and from nothing else: a request is not "in prefill" because it has no answer yet. That shortcut
    breaks as soon as a request must compute its tokens a second time.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    id: str = ""  # "": the engine gives it one
    priority: int = 0  # the lower, the sooner; only the scheduler's "priority" policy looks at it

    output: Output = field(init=False)
    state: State = field(init=False, default=State.NEW)
    computed: int = field(init=False, default=0)
    slot: int = field(init=False, default=-1)  # only while it runs; -1 is none
    arrival: int = field(init=False, default=-1)  # the how-manieth the scheduler was given, and
    arrival_step: int = field(init=False, default=-1)  # before which step

    def __post_init__(self) -> None:
        self.output = Output(list(self.prompt_ids))
        self.generator = (
            self.sampling.generator()
        )  # its own, so that neighbours never change what it draws

    @property
    def token_count(self) -> int:
        """Tokens there are: the prompt, and the answer so far."""
        return len(self.output.prompt_ids) + len(self.output.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens there are and that are not computed yet; the last of them is what the next token is sampled after."""
        return self.token_count - self.computed

    def tokens(self, start: int, count: int) -> list[int]:
        """The ids at positions start..start+count-1 of prompt and answer."""
        prompt, answer = self.output.prompt_ids, self.output.token_ids
        return (
            prompt[start : start + count]
            + answer[max(0, start - len(prompt)) : max(0, start + count - len(prompt))]
        )

    def move(self, state: State) -> None:
        """Go on to `state`. Raises RuntimeError for a step that no request may take."""
        if state not in NEXT[self.state]:
            raise RuntimeError(
                f"request {self.id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

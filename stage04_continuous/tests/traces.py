"""Scenarios of a scheduler, without a model, as text: a line is a step, "before > who runs | line".

Before: "a9" asks for a prompt of 9 tokens, "a9:2" with priority 2, "b<a" for another sample of a's
prompt; "-a" ends a, and "^a" takes its memory (stage 05). Who runs, in the order of the plan:
"a0-4" computes a's tokens 0 to 3, "a4-9!" those from 4 to 8, and samples; "..." is anything. Line:
who still waits, if that matters.
"""

from __future__ import annotations

import re
from typing import Any

from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request

WORD = Token(1, None, None)


class Trace:
    """A scheduler, and its requests by id, of one letter each."""

    def __init__(self, scheduler: Any, answer: int = 16) -> None:
        self.scheduler, self.answer = scheduler, answer
        self.requests: dict[str, Request] = {}

    def ask(self, id: str, prompt: Any, priority: int = 0, answer: int = 0) -> Request:
        """Queue a request for `prompt`, or for that many tokens, which no other id has."""
        tokens = [ord(id)] * prompt if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens=answer or self.answer, seed=0)
        request = self.requests[id] = Request(tokens, sampling, id, priority)
        self.scheduler.add(request)
        return request

    def compute(self, plan: Plan) -> str:
        """What an engine does with a plan; who ran."""
        self.scheduler.advance(plan)
        for work in plan.work:
            if work.rows:
                work.request.output.append(WORD)
        return " ".join(
            f"{work.request.id}{work.start}-{work.start + work.count}{'!' * work.rows}"
            for work in plan.work
        )

    def step(self) -> str:
        """Who ran."""
        return self.compute(self.scheduler.schedule())

    def preempt(self, id: str) -> None:
        """Take the memory of a running request."""
        self.scheduler._preempt(Plan(), self.requests[id])

    def play(self, *lines: str) -> None:
        """Check the next steps."""
        for line in lines:
            before, _, after = line.rpartition("> ")
            for event in before.split():
                if asked := re.fullmatch(r"(\w)(\d+):?(-?\d*)", event):
                    self.ask(asked[1], int(asked[2]), int(asked[3] or 0))
                elif event[0] == "-":
                    self.scheduler.finish(self.requests[event[1]])
                elif event[0] == "^":
                    self.preempt(event[1])
                else:
                    parent = self.requests[event[2]]
                    child = self.ask(event[0], parent.output.prompt_ids)
                    self.scheduler.follow(child, parent)
            who, bar, waiting = after.partition(" | ")
            ran = self.step()
            assert ran == who or who == "...", line
            assert not bar or "".join(one.id for one in self.scheduler.waiting) == waiting, line

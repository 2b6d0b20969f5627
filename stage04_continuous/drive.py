"""Three ways to use an engine that has `add`, `abort` and `step`. Engines adopt them as methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from shared.errors import UserError
from stage01_forward.generation import Output, Sampling, Token, sampling_per_prompt
from stage01_forward.params import SamplingParams

from .request import Request


class Clearable(Protocol):
    def clear(self) -> None: ...


class Steps(Protocol):
    """An engine that advances all its requests, one step at a time."""

    @property
    def steps(self) -> Clearable: ...  # records, cleared by `generate`

    requests: dict[str, Request]  # those that wait or run

    def add(self, request: Request) -> Request: ...

    def abort(self, request_id: str) -> Output: ...

    def step(self) -> list[tuple[str, Token]]: ...


def run(engine: Steps) -> Iterator[tuple[str, Token]]:
    """Step until no request waits or runs. Yields each token with the id of its request."""
    while engine.requests:
        yield from engine.step()


def generate(engine: Steps, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
    """Continue every prompt (token ids) to its end. An invalid one ends with the reason "error",
    and does not affect the rest.

    Raises UserError if there is no prompt at all.
    """
    params = sampling_per_prompt(prompts, sampling)
    if not prompts:
        raise UserError("There are no prompts: give at least one.")
    engine.steps.clear()
    requests = [Request(prompt, options) for prompt, options in zip(prompts, params, strict=True)]
    for request in requests:
        try:
            engine.add(request)
        except UserError as error:
            request.output.fail(error)
    for _ in run(engine):
        pass
    return [request.output for request in requests]


def stream(engine: Steps, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
    """Continue one prompt and yield each token at once; the last one carries the finish reason.

    Other requests advance too, so several streams may be read in turn. Closing the stream early
    aborts its request.
    """
    request = engine.add(Request(prompt, sampling))
    output, sent = request.output, 0
    try:
        while output.finish_reason is None or sent < len(output.tokens):
            if sent == len(output.tokens):
                engine.step()
            for token in output.tokens[sent:]:
                sent += 1
                yield token
    finally:
        if engine.requests.get(request.id) is request:  # not a later one with the same id
            engine.abort(request.id)
    if output.error is not None:
        raise UserError(output.error)

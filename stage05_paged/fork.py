"""Several answers that share their common beginning: forks, and samples of one prompt.

Both are ordinary requests that follow another one: the scheduler lets them begin with its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

if TYPE_CHECKING:
    from stage04_continuous.engine import Engine

    from .scheduler import Scheduler


def fork(
    engine: Engine[Scheduler], request_id: str, sampling: SamplingParams | None = None
) -> Request:
    """Queue a request that continues another one's prompt and answer so far on its own, with
    `sampling` or else the other one's options. They share blocks until one writes.

    Raises KeyError if no such request waits or runs, and UserError if the new one is invalid.
    """
    parent = engine.requests[request_id]
    sampling = parent.sampling if sampling is None else sampling
    answer = parent.output.token_ids
    if len(answer) >= sampling.max_tokens:
        raise UserError(
            f"The request '{request_id}' has {len(answer)} tokens already: "
            "give its fork a larger max_tokens."
        )
    child = Request(parent.output.prompt_ids, sampling, priority=parent.priority)
    child.output.token_ids += answer
    child.output.tokens += parent.output.tokens
    engine.add(child)
    engine.scheduler.follow(child, parent)
    return child


def add_samples(
    engine: Engine[Scheduler],
    prompt: Sequence[int],
    sampling: Sequence[SamplingParams],
    ids: Sequence[str] = (),
) -> list[Request]:
    """Queue several samples of one prompt, named by `ids` if given. The prompt is computed once.

    Raises what `Engine.add` raises, and then queues none of them.
    """
    if not sampling:
        raise UserError("There are no samples to generate: ask for at least 1.")
    names = ids or [""] * len(sampling)
    requests = [Request(prompt, *pair) for pair in zip(sampling, names, strict=True)]
    for request in requests:
        engine.check(request.prompt_ids, request.sampling)
    taken = [*engine.requests, *filter(None, names)]
    if len(set(taken)) < len(taken):
        raise UserError("An id is taken already: give each sample an id of its own.")
    for request in requests:
        engine.enqueue(request)
        if request is not requests[0]:
            engine.scheduler.follow(request, requests[0])
    return requests

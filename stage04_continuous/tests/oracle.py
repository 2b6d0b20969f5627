"""What tests of engines compare with: the naive engine's answers, on a model of random weights.

In float64, where tokens must be equal and their log-probabilities nearly so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from shared.config import Config
from shared.models import load_model
from shared.parity import random_prompt
from shared.testing import random_checkpoint
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

CONFIG = Config(101, 64, 24, 2, 2, name="wide")
DRAWN = SamplingParams(
    max_tokens=12, temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=11, logprobs=3
)
PENALIZED = replace(DRAWN, presence_penalty=0.3, frequency_penalty=0.2)
IDS = itertools.count()
SHAPES = [CONFIG]  # the last is that of `the_model`


@cache
def _model(config: Config, dtype: torch.dtype) -> Any:
    return load_model(random_checkpoint(config, spread=24), dtype=dtype)


def the_model(dtype: torch.dtype = torch.float64) -> Any:
    """Weights so wide that an answer has many tokens: a model that repeats one proves nothing."""
    return _model(SHAPES[-1], dtype)


@contextmanager
def shape(config: Config) -> Iterator[None]:
    """`the_model` of another family, with CONFIG's vocabulary, context and name."""
    SHAPES.append(config)
    yield
    SHAPES.pop()


class Oracle:
    """The naive engine, which works out each answer once."""

    def __init__(self, model: Any) -> None:
        self.model, self.naive = model, Naive(model)
        self.answers: dict[Any, Output] = {}

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Output]:
        keys = [(tuple(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        for prompt, sampling in keys:
            if (prompt, sampling) not in self.answers:
                (self.answers[prompt, sampling],) = self.naive.generate([list(prompt)], sampling)
        return [self.answers[key] for key in keys]


oracle_of = cache(Oracle)


def naive(prompt: list[int], sampling: SamplingParams) -> Output:
    """The naive engine's answer to one prompt."""
    return oracle_of(the_model()).generate([prompt], [sampling])[0]


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, **options)


def prompt_of(length: int, seed: int | str = "ask") -> list[int]:
    return random_prompt(length, CONFIG, seed)


def answer(length: int, count: int) -> list[int]:
    """The naive engine's greedy answer to `prompt_of(length)`."""
    return naive(prompt_of(length), greedy(count)).token_ids


def ask(engine: Any, length: int, count: int = 12, id: str = "", **options: Any) -> Request:
    id = id or f"ask {next(IDS)}"
    return engine.add(Request(prompt_of(length), greedy(count), id, **options))


def finish(engine: Any) -> list[Any]:
    """Step to the end; the tokens on the way."""
    tokens: list[Any] = []
    for _ in range(2000):
        if not engine.requests:
            return tokens
        tokens += engine.step()
    raise AssertionError("a live-lock: no test has so many tokens")


def assert_answered(*requests: Request, given: int = 0, aborted: bool = False) -> None:
    """Each request has the naive engine's answer, or its beginning if it may be `aborted`. The
    first `given` tokens of the answer are those of the request it was forked from."""
    for request in requests:
        output, beginning = request.output, request.output.token_ids[:given]
        rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - given)
        want = naive(output.prompt_ids + beginning, rest)
        count = len(want.token_ids)
        if aborted and output.finish_reason == "abort":
            count = len(output.token_ids) - given
        else:
            assert output.finish_reason == want.finish_reason
        assert output.token_ids[given:] == want.token_ids[:count]
        for mine, its in zip(output.logprobs[given:], want.logprobs[:count], strict=True):
            assert [id for id, _ in mine.top] == [id for id, _ in its.top]
            assert abs(mine.token - its.token) < 1e-9 and abs(mine.highest - its.highest) < 1e-9

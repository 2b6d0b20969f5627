"""The engine as the server runs it: stage 04's contract, and stage 01's tokens for a crowd."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from shared.checkpoint import load
from stage01_forward.engine import Engine as Naive
from stage01_forward.model import load_model
from stage04_continuous.tests.contract import StepContract
from stage04_continuous.tests.oracle import the_model
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make as make_paged
from stage06_serving.engines import Paged
from stage06_serving.protocol import CompletionBody

from .asking import events, post, read_metrics
from .tools import is_empty


class TestPaged(StepContract):
    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        options |= {"max_sequences": sequences, "token_budget": budget}
        return Paged(make_paged(the_model(), pool=BlockPool(64, 8), **options))

    def assert_idle(self, engine: Any) -> None:
        assert engine.requests == {} and is_empty(engine) and engine.step() == []


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 1, "logit_bias": {"5": 3, "7": -100}, "min_tokens": 3},
    {"temperature": 1, "stop_token_ids": list(range(20))},
]


def crowd_of(count):
    """Bodies with prompts as ids, many of them with a common beginning, and options of all kinds;
    every other one for a stream."""
    rng = random.Random("parity")
    beginning = [rng.randrange(300) for _ in range(30)]
    made = []
    for number in range(count):
        own = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
        fields = OPTIONS[number % len(OPTIONS)] | {"max_tokens": rng.randint(4, 30), "seed": number}
        fields |= {"return_token_ids": True, "stream": number % 2 == 1}
        made.append(fields | {"prompt": beginning + own if number % 2 else own})
    return made


def answer_of(running, body):
    """Tokens and finish reason."""
    answer = post(running, json=body)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text) if body["stream"] else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return tokens, choices[-1]["finish_reason"]


MEMORY = "--block-size 4 --kv-memory 72KiB --max-num-seqs 8 --token-budget 48 --preemption"


@pytest.mark.parametrize(
    "preemption", ["recompute", pytest.param("swap --swap-memory 1MiB", marks=pytest.mark.slow)]
)
def test_a_crowd_gets_the_answers_of_stage_01(house, tiny_folder, preemption):
    """And so do samples of one prompt. With memory for 2 whole contexts and 8 sequences, prompts
    share blocks, and requests lose them."""
    naive = Naive(load_model(load(str(tiny_folder)), dtype=torch.float64))
    options, bodies = f"--dtype float64 {MEMORY} {preemption}", crowd_of(45)
    running = house("--model", str(tiny_folder), *options.split())

    def expected(body: dict[str, Any]) -> tuple[list[int], str | None]:
        params = CompletionBody(**body).params(body["max_tokens"], None, 0)
        output = naive.generate([body["prompt"]], params)[0]
        return output.token_ids, output.finish_reason

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(partial(answer_of, running), bodies))
    for got, body in zip(answers, bodies, strict=True):
        assert got == expected(body), body
    assert {reason for _, reason in answers} == {"stop", "length"}
    body = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 10, "temperature": 1}
    samples = {"n": 3, "seed": 40, "return_token_ids": True, "echo": True, "logprobs": 1}
    choices = post(running, json=body | samples).json()["choices"]
    for seed, choice in enumerate(choices, 40):
        assert choice["token_ids"] == expected(body | {"seed": seed})[0]
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[:24] == [None, *choices[0]["logprobs"]["token_logprobs"][1:24]]
    numbers = read_metrics(running)
    assert numbers["vllm:num_preemptions_total"] > 0
    assert numbers["vllm:prefix_cache_hits_total"] > 0

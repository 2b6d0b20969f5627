"""Over HTTP, in a crowd and with little memory, each request gets the tokens of stage 01."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest
import torch

from shared import checkpoint
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.model import load_model
from stage01_forward.params import SamplingParams

KINDS: list[dict[str, Any]] = [
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


def naive(model: str) -> Naive:
    return Naive(load_model(checkpoint.load(model), dtype=torch.float64))


def alone(engine: Naive, prompt: list[int], fields: dict[str, Any]) -> Output:
    """The answer of stage 01 to the fields of a body."""
    bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
    stops = tuple(fields.get("stop_token_ids", ()))
    options = fields | {"logit_bias": bias, "stop_token_ids": stops}
    return engine.generate([prompt], SamplingParams(**options))[0]


def requests(vocabulary: int, count: int, longest: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts as ids, many of them with a common beginning, and options of all kinds."""
    rng = random.Random("parity")
    beginning = [rng.randrange(vocabulary) for _ in range(longest // 2)]
    made = []
    for number in range(count):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest // 2))]
        fields = KINDS[number % len(KINDS)] | {"max_tokens": rng.randint(4, 30), "seed": number}
        made.append((beginning + own if number % 2 else own, fields))
    return made


def crowd(
    url: str, model: str, made: list[tuple[list[int], dict[str, Any]]]
) -> list[tuple[list[int], str]]:
    """Tokens and finish reasons of all requests, sent at once, every other one as a stream."""
    extra = {"return_token_ids": True}

    async def ask(client: Any, number: int) -> tuple[list[int], str]:
        prompt, fields = made[number]
        options = {"model": model, "prompt": prompt, "extra_body": fields | extra}
        if number % 2 == 0:
            choice = (await client.completions.create(**options)).choices[0]
            return choice.token_ids, choice.finish_reason
        chunks = [
            chunk.choices[0]
            async for chunk in await client.completions.create(**options, stream=True)
        ]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return tokens, chunks[-1].finish_reason

    async def ask_all() -> list[tuple[list[int], str]]:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(len(made))))

    return asyncio.run(ask_all())


def assert_parity(
    engine: Naive, url: str, model: str, made: list[tuple[list[int], dict[str, Any]]]
) -> list[tuple[list[int], str]]:
    """A crowd gets the answers of stage 01; its answers."""
    answers = crowd(url, model, made)
    for answer, (prompt, fields) in zip(answers, made, strict=True):
        expected = alone(engine, prompt, fields)
        assert answer == (expected.token_ids, expected.finish_reason), fields
    return answers


@pytest.mark.parametrize("preemption", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_a_crowd_with_little_memory(house, metrics, tiny_folder, preemption):
    """Memory for 2 whole contexts, and 8 sequences: prompts share blocks, and requests lose
    them."""
    folder = str(tiny_folder)
    options = ("--dtype", "float64", "--block-size", "4", "--kv-memory", "72KiB")
    swap = ("--swap-memory", "1MiB") if preemption == "swap" else ()
    limits = ("--max-sequences", "8", "--token-budget", "48")
    running = house("--model", folder, *options, "--preemption", preemption, *swap, *limits)
    answers = assert_parity(naive(folder), running.url, "tiny", requests(300, 45, 60))
    numbers = metrics(running.url)
    assert numbers["vllm:num_preemptions_total"] > 0 and numbers["vllm:prefix_cache_hits_total"] > 0
    assert {reason for _, reason in answers} == {"stop", "length"}


def test_the_embedded_model(house):
    """Samples of one prompt, which share its blocks, are those of single requests with their
    seeds."""
    engine = naive("stories")
    running = house("--dtype", "float64", "--kv-memory", "6MiB", "--max-sequences", "6")
    made = requests(checkpoint.load("stories").config.vocab_size, 9, 40)
    made = [(prompt, fields | {"max_tokens": 10}) for prompt, fields in made]
    assert_parity(engine, running.url, "stories", made)
    assert_samples(engine, running.url, "stories", [5, 6, 7, 8, 9, 10] * 4)


def assert_samples(engine: Naive, url: str, model: str, prompt: list[int], **fields: Any) -> Any:
    """Three samples of one prompt have the tokens of stage 01 for their seeds; the answer."""
    extra = {"return_token_ids": True, "seed": 40, "n": 3, "max_tokens": 10, **fields}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer: Any = client.completions.create(model=model, prompt=prompt, extra_body=extra)
    for number, choice in enumerate(answer.choices):
        options = {"temperature": 1, "seed": 40 + number, "max_tokens": 10}
        assert choice.token_ids == alone(engine, prompt, options).token_ids
    return answer


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 6},
        {"temperature": 0},
        {"logit_bias": {"5": 50}},
        {"repetition_penalty": 3.0},
        {"top_k": 1},
    ],
)
def test_the_oracle_notices_every_option(tiny_folder, other):
    engine, fields = naive(str(tiny_folder)), {"temperature": 1, "seed": 5, "max_tokens": 12}
    tokens = alone(engine, [1, 2, 3], fields).token_ids
    assert alone(engine, [1, 2, 3], fields | other).token_ids != tokens

"""Over HTTP, in a crowd and with hardly any memory, each request gets the tokens that stage 01 gives it alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from shared import checkpoint
from shared.course import stages
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.params import SamplingParams

# The fields of a body that the engine knows by another name, or only as a tuple.
DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "logit_bias": lambda given: {int(token): bias for token, bias in given.items()},
    "stop_token_ids": tuple,
}


def naive(model: str) -> Naive:
    return Naive(stages.load_model(checkpoint.load(model), dtype=torch.float64))


def alone(engine: Naive, prompt: list[int], fields: dict[str, Any]) -> Output:
    """What stage 01 says, with nobody beside it."""
    options = {
        name: DIFFERENT[name](value) if name in DIFFERENT else value
        for name, value in fields.items()
    }
    return engine.generate([prompt], SamplingParams(**options))[0]


def requests(vocabulary: int, count: int, longest: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts as ids, many of them with a common beginning, and options of all kinds."""
    rng = random.Random("parity")
    beginning = [rng.randrange(vocabulary) for _ in range(longest // 2)]
    kinds: list[dict[str, Any]] = [
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
    made = []
    for number in range(count):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest // 2))]
        fields = kinds[number % len(kinds)] | {"max_tokens": rng.randint(4, 30), "seed": number}
        made.append((beginning + own if number % 2 else own, fields))
    return made


async def ask(
    client: openai.AsyncOpenAI, model: str, prompt: Any, fields: dict[str, Any], stream: bool
) -> tuple[list[int], str]:
    """The tokens of an answer and its finish reason."""
    known = (
        "temperature",
        "max_tokens",
        "top_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    )
    sent = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known} | {
        "return_token_ids": True
    }
    if not stream:
        choice: Any = (
            await client.completions.create(model=model, prompt=prompt, **sent, extra_body=extra)
        ).choices[0]
        return choice.token_ids, choice.finish_reason
    chunks: Any = [
        chunk.choices[0]
        async for chunk in await client.completions.create(
            model=model, prompt=prompt, **sent, extra_body=extra, stream=True
        )
    ]
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish_reason


def crowd(
    url: str, model: str, made: list[tuple[list[int], dict[str, Any]]]
) -> list[tuple[list[int], str]]:
    """All requests at once, every other one as a stream."""

    async def talk() -> list[tuple[list[int], str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(
                *(
                    ask(client, model, prompt, fields, bool(number % 2))
                    for number, (prompt, fields) in enumerate(made)
                )
            )

    return asyncio.run(talk())


@pytest.mark.parametrize("preemption", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_a_crowd_with_hardly_any_memory(house, metrics, tiny_folder, preemption):
    """Blocks of 4 tokens for 2 whole contexts, and 8 answers at a time: prompts share blocks, and requests lose theirs."""
    engine = naive(str(tiny_folder))
    made = requests(300, 45, 60)
    options = (
        "--model",
        str(tiny_folder),
        "--dtype",
        "float64",
        "--block-size",
        "4",
        "--kv-memory",
        "72KiB",
    )
    swap = (
        ("--preemption", preemption, "--swap-memory", "1MiB")
        if preemption == "swap"
        else ("--preemption", preemption)
    )
    running = house(*options, *swap, "--max-sequences", "8", "--token-budget", "48")
    found = crowd(running.url, "tiny", made)
    numbers = metrics(running.url)
    for (tokens, reason), (prompt, fields) in zip(found, made, strict=True):
        expected = alone(engine, prompt, fields)
        assert (tokens, reason) == (expected.token_ids, expected.finish_reason), fields
    assert numbers["vllm:num_preemptions_total"] > 0 and numbers["vllm:prefix_cache_hits_total"] > 0
    assert {reason for _, reason in found} == {"stop", "length"}


def test_the_embedded_model(house):
    """Text in, text out; samples of one prompt, which share its blocks, are what as many seeds would say."""
    engine = naive("stories")
    loaded = checkpoint.load("stories")
    running = house("--dtype", "float64", "--kv-memory", "6MiB", "--max-sequences", "6")
    made = requests(loaded.config.vocab_size, 9, 40)
    for _, fields in made:
        fields["max_tokens"] = 10
    found = crowd(running.url, "stories", made)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        prompt = [5, 6, 7, 8, 9, 10] * 4
        samples: Any = client.completions.create(
            model="stories",
            prompt=prompt,
            n=3,
            seed=40,
            max_tokens=10,
            extra_body={"return_token_ids": True},
        )
    for (tokens, reason), (ids, fields) in zip(found, made, strict=True):
        expected = alone(engine, ids, fields)
        assert (tokens, reason) == (expected.token_ids, expected.finish_reason), fields
    for number, choice in enumerate(samples.choices):
        expected = alone(engine, prompt, {"temperature": 1, "seed": 40 + number, "max_tokens": 10})
        assert choice.token_ids == expected.token_ids


def test_the_oracle_can_tell(tiny_folder: Path):
    """Had the seeds or the options not arrived, the tokens would be others."""
    engine = naive(str(tiny_folder))
    prompt, fields = [1, 2, 3], {"temperature": 1, "seed": 5, "max_tokens": 12}
    said = alone(engine, prompt, fields).token_ids
    for other in (
        {"seed": 6},
        {"temperature": 0},
        {"logit_bias": {"5": 50}},
        {"repetition_penalty": 3.0},
        {"top_k": 1},
    ):
        assert alone(engine, prompt, fields | other).token_ids != said

"""The first stages give the naive engine's tokens: all of them in float64, all but near ties in
float32. From stage 04 on the contract has the scenarios; a seed is tested here for all.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import models, parity, testing
from stage01_forward.engine import Engine
from stage01_forward.params import SamplingParams
from stage04_continuous.tests.oracle import oracle_of

ENGINES = testing.engines()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("stage", list(ENGINES)[1:3])
def test_all_scenarios(stage, dtype, tiny):
    model = models.load_model(tiny, dtype=dtype)
    proof = parity.prove(ENGINES[stage](model), oracle_of(model), SamplingParams)
    assert proof.tokens > 200
    assert proof.near_ties <= (proof.sequences * 0.05 if dtype == torch.float32 else 0)


def random_params(rng: random.Random) -> Any:
    """Any mix of options that every engine must serve alike."""

    def either(off: Any, *others: Any) -> Any:
        return rng.choice(others) if rng.random() < 0.4 else off

    return SamplingParams(
        max_tokens=rng.randint(1, 6),
        temperature=either(1.0, 0.0, 0.02, 0.7, 2.0),
        top_k=either(0, 1, 5, 40, 101),
        top_p=either(1.0, 0.05, 0.5, 0.9, 0.999),
        min_p=either(0.0, 0.01, 0.2, 1.0),
        repetition_penalty=either(1.0, 0.8, 1.5),
        presence_penalty=either(0.0, -1.0, 0.5),
        frequency_penalty=either(0.0, -0.5, 1.5),
        logit_bias=either({}, {3: 5.0, 7: -100}),
        min_tokens=either(0, 1),
        logprobs=either(None, 0, 3),
        seed=rng.randrange(2**32),
    )


@pytest.fixture(scope="module")
def requests(tiny_model):
    """150 prompts, options, and the oracle's answers."""
    rng = random.Random(0)
    prompts = [[rng.randrange(101) for _ in range(rng.randint(1, 9))] for _ in range(150)]
    params = [random_params(rng) for _ in prompts]
    return prompts, params, Engine(tiny_model).generate(prompts, params)


@pytest.mark.parametrize("stage", list(ENGINES)[1:])
def test_a_seed_gives_the_same_tokens_in_every_engine(stage, requests, tiny_model):
    prompts, params, expected = requests
    outputs = ENGINES[stage](tiny_model).generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.fixture(scope="module")
def answer(tiny_model):
    """answer(max_tokens): the oracle's answer to one prompt."""
    oracle, likeliest = Engine(tiny_model), parity.LIKELIEST
    return lambda most: oracle.generate(
        [[1, 2]], SamplingParams(max_tokens=most, logprobs=likeliest)
    )


def test_a_wrong_token_an_early_end_and_another_probability_are_refused(tiny_model, answer):
    oracle = Engine(tiny_model)

    def one_wrong(prompts, sampling):
        outputs = oracle.generate(prompts, sampling)
        outputs[3].token_ids[7] ^= 1
        return outputs

    with pytest.raises(parity.ParityError, match="many lengths, sequence 3, token 7"):
        engine = SimpleNamespace(model=tiny_model, generate=one_wrong)
        parity.prove(engine, oracle, SamplingParams, ["many lengths"])
    with pytest.raises(parity.ParityError, match="token 7"):
        parity.compare("short", answer(8), answer(7), torch.float32, parity.Parity())
    (other := answer(8))[0].logprobs[7].token += 1e-8
    with pytest.raises(parity.ParityError, match="token 7: the same token"):
        parity.compare("other", answer(8), other, torch.float64, parity.Parity())


def test_a_near_tie_is_counted_and_a_clear_choice_is_refused(answer):
    for dtype, highest, gap, tie in (
        *((torch.float64, 20.0, 1e-12, False), (torch.float32, 20.0, 0.0009, True)),
        *((torch.float32, 20.0, 0.0011, False), (torch.bfloat16, 16.0, 0.5, False)),
        (torch.bfloat16, 31.0, 0.375, True),  # 3 steps of 1/8
        (torch.bfloat16, 15.9, 0.25, False),  # 4 steps of 1/16
    ):
        expected, got = answer(8), answer(8)
        judged = expected[0].logprobs[4]
        (first, _), (second, _), (third, _), *_ = judged.top
        judged.token, judged.highest = -1.0, highest
        judged.top = [(first, -1.0), (second, -1.0 - gap)]  # of others nothing is known
        for token, ties in ((second, tie), (third, False)):
            got[0].token_ids[4], proof = token, parity.Parity()
            refused = pytest.raises(parity.ParityError, match="sequence 0, token 4")
            with nullcontext() if ties else refused:
                parity.compare("tie", expected, got, dtype, proof)
                # The 3 tokens behind it are not compared.
                assert (proof.sequences, proof.tokens, proof.near_ties) == (1, 5, 1)

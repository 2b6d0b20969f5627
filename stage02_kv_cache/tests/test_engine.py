"""The cached engine: the naive engine's tokens, with one step for the prompt, then one a token."""

from __future__ import annotations

import pytest
import torch

from shared.errors import UserError
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage02_kv_cache.engine import Engine


@pytest.fixture
def engine(tiny_model):
    return Engine(tiny_model)


@pytest.mark.parametrize("length", [5, 1])  # a prompt of one token is a prefill too
def test_one_prefill_then_one_token_a_step(engine, tiny_model, length):
    """Of several requests each: the cache is empty again for the next."""
    prompts = [[token] * length for token in (1, 2, 3)]
    params, entered = SamplingParams(max_tokens=4, ignore_eos=True), list[int]()
    # Tokens that enter the model, whatever the records say.
    hook = tiny_model.register_forward_pre_hook(lambda _, given: entered.append(len(given[0])))
    outputs = engine.generate(prompts, params)
    hook.remove()
    records = [(s.rows, s.prefill_tokens, s.decode_tokens) for s in engine.steps]
    assert records == [(1, length, 0), *[(1, 0, 1)] * 3] * 3 and entered == [length, 1, 1, 1] * 3
    assert outputs == Naive(tiny_model).generate(prompts, params)


def test_nothing_of_the_request_before_is_visible(engine, tiny_model):
    """NaN in the slots of the last request must not reach the next."""
    params = SamplingParams(max_tokens=10)
    engine.generate([[3] * 50], params)
    engine.cache.kv.fill_(torch.nan)
    with pytest.raises(UserError, match="shorten"):
        engine.generate([[1], [2] * 64], params)
    outputs = [each.generate([[4, 5]], params) for each in (engine, Naive(tiny_model))]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("length", [1, 62, 63])
def test_prompt_and_answer_fill_the_context_and_no_more(engine, tiny_model, length):
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    outputs = engine.generate([[3] * length], params)
    assert (len(outputs[0].token_ids), outputs[0].finish_reason) == (64 - length, "length")
    assert outputs == Naive(tiny_model).generate([[3] * length], params)


def test_two_streams_at_once_are_an_error_not_a_wrong_text(engine, tiny_model):
    """The error comes before the first stream could write over the second one's slots."""
    params = SamplingParams(max_tokens=5)
    first, second = engine.stream([1, 2], params), engine.stream([3, 4], params)
    next(first)
    tokens = [next(second).id]
    with pytest.raises(RuntimeError):
        next(first)
    tokens += [token.id for token in second]
    assert tokens == [token.id for token in Naive(tiny_model).stream([3, 4], params)]

"""The engine for a static batch: the tokens of each request alone, and the records of each pass."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.params import SamplingParams
from stage02_kv_cache.engine import Engine as Cached
from stage03_batching.engine import Engine

# Nine requests with nine kinds of options.
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 9, "logprobs": 0},
    {"temperature": 0.7, "seed": 3, "top_p": 0.8, "max_tokens": 5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 4},
    {"frequency_penalty": 1.0, "logit_bias": {7: 2.0, 8: -100.0}},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.3, "max_tokens": 1},
    {"temperature": 2.0, "seed": 5, "stop_token_ids": tuple(range(0, 101, 5)), "min_tokens": 6},
    {"stop_token_ids": tuple(range(50)), "logprobs": 1},
]


@pytest.fixture
def engine(tiny_model):
    return Engine(tiny_model)


@pytest.fixture
def naive(tiny_model):
    return Naive(tiny_model)


def assert_same(outputs, expected):
    """Tokens, finish reasons, and log probabilities, which move long before the tokens do."""
    for got, want in zip(outputs, expected, strict=True):
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
        logprobs = [logprob.token for logprob in want.logprobs]
        assert [logprob.token for logprob in got.logprobs] == pytest.approx(logprobs, abs=1e-11)


def work(engine):
    return [(s.rows, s.prefill_tokens, s.decode_tokens, s.wasted_tokens) for s in engine.steps]


@pytest.mark.parametrize("lengths", [[9], [6] * 5, [2, 1], [1, 30, 4, 17]], ids=str)
def test_a_batch_gives_the_tokens_of_one_at_a_time(engine, tiny_model, lengths):
    many = [random_prompt(length, tiny_model.config, i) for i, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=14, logprobs=0)
    assert_same(engine.generate(many, params), Cached(tiny_model).generate(many, params))
    assert engine.steps[0].rows == len(lengths)


def test_each_request_has_its_own_sampling(engine, naive, prompts, tiny):
    """Seeds, filters, penalties, limits, stops, min_tokens: the same alone and in any order."""
    many = prompts(tiny.config, len(MIXED), 15)
    params = [SamplingParams(**{"max_tokens": 10, **options}) for options in MIXED]
    alone = naive.generate(many, params)
    assert len({len(output.token_ids) for output in alone}) > 3  # rows end at several steps
    for seed in range(3):
        order = random.Random(seed).sample(range(len(many)), len(many))
        batch = engine.generate([many[i] for i in order], [params[i] for i in order])
        assert_same(batch, [alone[i] for i in order])


def test_end_of_text_in_one_row_ends_that_row_alone(tiny_model, naive):
    """Pitfall, both ways: the first end of text ends the batch, or a row does not end."""
    prompts = [[50, 2], [3], [5, 6, 7, 8], [12] * 6]
    free = naive.generate(prompts, SamplingParams(max_tokens=12))
    ends = (free[0].token_ids[4],)
    plain: list[Any] = [{}] * 4
    mixed: list[Any] = [{"min_tokens": count} for count in (8, 12, 3)]
    mixed.insert(2, {"ignore_eos": True})
    for options in (plain, mixed):
        params = [SamplingParams(max_tokens=12, **each) for each in options]
        outputs = Engine(tiny_model, eos_ids=ends).generate(prompts, params)
        assert_same(outputs, Naive(tiny_model, eos_ids=ends).generate(prompts, params))
        lengths = [len(output.token_ids) for output in outputs]
        assert options is mixed or min(lengths) < 12 == max(lengths)  # early, and at its limit


def test_a_row_that_has_ended_emits_nothing_more(engine):
    """One token a pass until a row's last; the output already has each token that `run` yields."""
    params = [SamplingParams(max_tokens=count) for count in (2, 7, 1, 4)]
    outputs = [Output([1]), Output([2, 3]), Output([4, 5, 6]), Output([7])]
    passes: list[list[int]] = [[], [], [], []]
    for row, token in engine.run(outputs, params):
        passes[row].append(len(engine.steps))
        assert outputs[row].token_ids[-1] == token.id
        assert outputs[row].finish_reason == token.finish_reason
        assert (token.finish_reason is not None) == (len(passes[row]) == params[row].max_tokens)
    assert passes == [[1, 2], [1, 2, 3, 4, 5, 6, 7], [1], [1, 2, 3, 4]]


@pytest.mark.parametrize("lengths", [[2, 60], [63, 62, 61, 1], [1, 1, 40]], ids=str)
def test_rows_end_at_the_end_of_the_context_while_others_go_on(engine, naive, tiny_model, lengths):
    """The rectangle grows wider than the context (64): columns are not positions."""
    many = [random_prompt(length, tiny_model.config, i) for i, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=500, ignore_eos=True, logprobs=0)
    outputs = engine.generate(many, params)
    assert [len(output.token_ids) for output in outputs] == [64 - n for n in lengths]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_same(outputs, naive.generate(many, params))
    columns = max(lengths) + (64 - min(lengths)) - 1  # what can be filled, whatever max_tokens is
    token = tiny_model.config.kv_bytes_per_token(torch.float64)
    assert engine.cache_bytes == len(lengths) * columns * token


def test_a_record_of_every_pass(engine):
    params = [SamplingParams(max_tokens=count) for count in (2, 4, 3)]
    engine.generate([[1] * 5, [2] * 3, [3]], params)
    # 15 columns for 9 tokens; then all three rows; then the first has ended, and the third too.
    assert work(engine) == [(3, 9, 0, 6), (3, 0, 3, 0), (2, 0, 2, 1), (1, 0, 1, 2)]
    assert all(step.seconds > 0 for step in engine.steps)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_the_records_add_up(tiny_model, naive, max_batch):
    rng = random.Random(max_batch)
    engine = Engine(tiny_model, max_batch=max_batch)
    many = [random_prompt(rng.randint(1, 30), tiny_model.config, i) for i in range(8)]
    params = [SamplingParams(max_tokens=rng.randint(1, 20), logprobs=0) for _ in many]
    outputs = [Output(prompt) for prompt in many]
    places = [place for place, _ in engine.run(outputs, params)]
    batches = [place // max_batch for place in places]
    assert batches == sorted(batches)  # one batch after the other
    assert_same(outputs, naive.generate(many, params))
    assert sum(step.prefill_tokens for step in engine.steps) == sum(map(len, many))
    decoded = sum(len(output.token_ids) - 1 for output in outputs)
    assert sum(step.decode_tokens for step in engine.steps) == decoded
    starts = range(0, 8, max_batch)  # of the batches, each as long as its longest answer
    longest = [max(len(o.token_ids) for o in outputs[n : n + max_batch]) for n in starts]
    assert len(engine.steps) == sum(longest)


UNFIT = {"empty": [], "shorten the prompt to 63": [3] * 64, "Token id 101": [5, 101]}


@pytest.mark.parametrize("says", [*UNFIT, "stop_token_ids"])
def test_an_unfit_prompt_fails_alone_and_takes_no_seat(tiny_model, naive, says):
    engine, prompt, good = Engine(tiny_model, max_batch=2), UNFIT.get(says, [5]), [[1, 2], [4], [6]]
    params = SamplingParams(max_tokens=4, logprobs=0)
    wrong = params if says in UNFIT else replace(params, stop_token_ids=(101,))
    sampling = [wrong, params, wrong, params, params]
    outputs = engine.generate([prompt, good[0], prompt, *good[1:]], sampling)
    for bad in (outputs.pop(2), outputs.pop(0)):
        assert (bad.prompt_ids, bad.token_ids, bad.finish_reason) == (prompt, [], "error")
        assert bad.error is not None and says in bad.error
    assert_same(outputs, naive.generate(good, params))
    assert [step.rows for step in engine.steps] == [2] * 4 + [1] * 4
    with pytest.raises(UserError):
        next(engine.stream(prompt, wrong))


@pytest.mark.parametrize("good", [0, 2])
def test_scores_that_are_not_finite_end_one_row(engine, naive, tiny_model, monkeypatch, good):
    """A row with NaN scores, after `good` tokens, ends with an error; the other rows do not."""
    params = SamplingParams(max_tokens=6)
    forward = tiny_model.logits

    def spoiled(hidden):
        scores = forward(hidden)
        if len(scores) == 1 or len(engine.steps) == good:
            scores[-1] = torch.nan
        return scores

    monkeypatch.setattr(tiny_model, "logits", spoiled)
    outputs = engine.generate([[1, 2, 3], [4], [5, 6]], params)
    assert [output.finish_reason for output in outputs] == ["length", "length", "error"]
    assert len(outputs[2].token_ids) == good and "NaN" in outputs[2].error
    with pytest.raises(UserError):
        list(engine.stream([1, 2], params))
    monkeypatch.undo()
    assert_same(outputs[:2], naive.generate([[1, 2, 3], [4]], params))

"""The naive engine: what it generates, when it stops, what it records."""

from __future__ import annotations

import pytest
import torch

from shared.errors import UserError
from shared.peers import transformers_batch, transformers_model
from stage01_forward.engine import Engine
from stage01_forward.generation import Row, finish_reason
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample


@pytest.fixture
def engine(tiny_model):
    return Engine(tiny_model)


def test_greedy_tokens_are_those_of_transformers(engine, tiny, prompts):
    twin = transformers_model(tiny, torch.float64)
    many = prompts(tiny.config, 25, 20)
    outputs = engine.generate(many, SamplingParams(max_tokens=16))
    assert [o.token_ids for o in outputs] == transformers_batch(twin, many, 16)


def test_stream_is_generate_token_by_token(engine):
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=4)
    stream = engine.stream([1, 2, 3], params)
    streamed = [next(stream)]
    assert len(engine.steps) == 1  # a token comes as soon as it is sampled
    streamed += stream
    (output,) = engine.generate([[1, 2, 3]], params)
    assert [token.id for token in streamed] == output.token_ids
    assert [token.finish_reason for token in streamed] == [None] * 8 + ["length"]
    assert output.logprobs == []  # unless they are requested


def test_every_step_computes_everything_again(engine, tiny_model):
    entered = []  # tokens that enter the model, whatever the records say
    hook = tiny_model.register_forward_pre_hook(lambda _, given: entered.append(len(given[0])))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    hook.remove()
    records = [(s.rows, s.prefill_tokens, s.decode_tokens) for s in engine.steps]
    assert records == [(1, 3, 0), (1, 3, 1), (1, 3, 2), (1, 3, 3)] and entered == [3, 4, 5, 6]


def test_a_request_has_one_generator_and_a_whole_history(engine, tiny_model):
    prompt, ids = list(range(0, 101, 3)), list[int]()  # a third of all tokens is penalized
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=3, repetition_penalty=9.0, presence_penalty=0.5
    )
    row = Row(params, prompt, ids)
    for _ in range(12):
        ids += sample(engine._forward(prompt + ids)[None], [row])[0]
    for end in (ids[5], 999):
        (output,) = Engine(tiny_model, eos_ids=[end]).generate([prompt], params)
        last = ids.index(end) + 1 if end in ids else 12
        assert output.token_ids == ids[:last]
        assert output.finish_reason == ("stop" if end in ids else "length")


@pytest.mark.parametrize(
    ("output", "options", "reason"),
    [
        *(([5, 7], {}, "stop"), ([5, 8], {}, "stop"), ([5, 6], {}, "length"), ([5], {}, None)),
        *(([7], {"min_tokens": 2}, None), ([5, 7], {"min_tokens": 2}, "stop")),
        *(([7, 5], {"min_tokens": 2}, "length"), ([7], {"ignore_eos": True}, None)),
        ([7], {"ignore_eos": True, "stop_token_ids": (7,)}, "stop"),
    ],
)
def test_end_of_text_on_the_last_allowed_token_is_a_stop(tiny, output, options, reason):
    params = SamplingParams(max_tokens=2, **options)
    row = Row(params, [1, 2, 3], output[:-1])
    assert finish_reason(output[-1], row, tiny.config, eos_ids=(7, 8)) == reason


@pytest.mark.parametrize("length", [1, 62, 63])
def test_prompt_and_answer_fill_the_context_and_no_more(engine, length):
    (output,) = engine.generate([[3] * length], SamplingParams(max_tokens=500, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (64 - length, "length")


def test_unfit_prompts_are_refused_before_any_work(engine):
    refused = {"empty": [], "64 tokens": [3] * 64, "shorten": [3] * 5000, "101": [101], "-1": [-1]}
    params = SamplingParams(max_tokens=2)
    for words, prompt in refused.items():
        with pytest.raises(UserError, match=words):
            engine.generate([[1, 2], prompt], params)
        with pytest.raises(UserError, match=words):
            next(engine.stream(prompt, params))
    assert engine.steps == []


def test_one_sampling_for_all_or_one_each(engine):
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)]
    outputs = engine.generate([[1], [1]], params)
    assert [len(output.token_ids) for output in outputs] == [2, 5]
    with pytest.raises(UserError, match="2 prompts and 1"):
        engine.generate([[1], [1]], [SamplingParams()])

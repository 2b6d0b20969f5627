"""The engine for a static batch: every request gets what it gets alone, and the records say what that cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import random_prompt
from shared.peers import transformers_model
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.params import SamplingParams
from stage02_kv_cache.engine import Engine as Cached
from stage03_batching.engine import Engine

# One request of each kind. The seeds differ, and so does everything else.
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 9, "logprobs": 0},
    {"temperature": 0.7, "seed": 3, "top_p": 0.8, "max_tokens": 5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 4},
    {"frequency_penalty": 1.0, "logit_bias": {7: 2.0, 8: -100.0}},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.3, "max_tokens": 1},
    {
        "temperature": 2.0,
        "seed": 5,
        "stop_token_ids": tuple(range(0, 101, 5)),
        "min_tokens": 6,
        "logprobs": 2,
    },
    {"stop_token_ids": tuple(range(50)), "logprobs": 1},
]


@pytest.fixture
def engine(tiny_model):
    return Engine(tiny_model)


@pytest.fixture
def naive(tiny_model):
    return Naive(tiny_model)


def answers(outputs):
    return [(output.token_ids, output.finish_reason) for output in outputs]


def assert_same(outputs, expected):
    """Tokens, finish reasons, and the log-probabilities of the tokens: these move long before another token is taken."""
    assert answers(outputs) == answers(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert [each.token for each in got.logprobs] == pytest.approx(
            [each.token for each in want.logprobs], abs=1e-11
        )


def work(engine):
    return [(s.rows, s.prefill_tokens, s.decode_tokens, s.wasted_tokens) for s in engine.steps]


# ---- the tokens ----


def test_greedy_tokens_are_those_of_transformers_for_the_same_batch(engine, tiny, prompts):
    """Theirs is padded on the left by their caller, who gives the mask too."""
    twin = transformers_model(tiny, torch.float64)
    many = prompts(tiny.config, 24, 20)
    width = max(len(prompt) for prompt in many)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in many])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in many])
    theirs = twin.generate(
        ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
    )[:, width:]
    outputs = engine.generate(many, SamplingParams(max_tokens=16))
    assert [output.token_ids for output in outputs] == theirs.tolist()


@pytest.mark.parametrize(
    "lengths", [[9], [6] * 5, [1, 2], [2, 1], [1, 30, 4, 17], [1] * 4], ids=str
)
def test_a_batch_gives_the_tokens_of_one_at_a_time(engine, tiny_model, lengths):
    many = [random_prompt(length, tiny_model.config, i) for i, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=14, logprobs=0)
    assert_same(engine.generate(many, params), Cached(tiny_model).generate(many, params))
    assert engine.steps[0].rows == len(lengths)


def test_a_needle_is_the_same_in_50_crowds(engine, tiny_model):
    params = SamplingParams(max_tokens=12, logprobs=0)
    needle = random_prompt(9, tiny_model.config, "needle")
    (alone,) = engine.generate([needle], params)
    for crowd in range(50):
        rng = random.Random(crowd)
        prompts = [
            random_prompt(rng.randint(1, 40), tiny_model.config, f"{crowd} {i}")
            for i in range(rng.randint(1, 11))
        ]
        place = rng.randint(0, len(prompts))
        outputs = engine.generate([*prompts[:place], needle, *prompts[place:]], params)
        assert_same([outputs[place]], [alone])


def test_the_order_of_the_rows_does_not_matter(engine, prompts, tiny):
    many = prompts(tiny.config, len(MIXED), 15)
    params = [SamplingParams(**{"max_tokens": 10, **each}) for each in MIXED]
    expected = engine.generate(many, params)
    for seed in range(3):
        order = random.Random(seed).sample(range(len(many)), len(many))
        shuffled = engine.generate([many[i] for i in order], [params[i] for i in order])
        assert_same(shuffled, [expected[i] for i in order])


def test_each_request_has_its_own_sampling(engine, naive, prompts, tiny):
    """Seeds, filters, penalties, limits, stop tokens, min_tokens: alone and in a crowd the same."""
    many = prompts(tiny.config, len(MIXED), 15)
    params = [SamplingParams(**{"max_tokens": 10, **each}) for each in MIXED]
    crowd, alone = engine.generate(many, params), naive.generate(many, params)
    assert_same(crowd, alone)
    assert (
        len({len(output.token_ids) for output in crowd}) > 3
    )  # or little was tested: rows must have ended at several steps
    for each, got, expected in zip(params, crowd, alone, strict=True):
        assert len(got.logprobs) == (0 if each.logprobs is None else len(got.token_ids))
        for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_seed_gives_one_sample_alone_and_in_a_crowd(engine):
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=11)
    (alone,) = engine.generate([[5, 6, 7]], params)
    neighbours = [SamplingParams(max_tokens=5 + i, temperature=1.0, seed=i) for i in range(4)]
    crowd = engine.generate(
        [[1] * 9, [2], [5, 6, 7], [3] * 4, [4] * 20], [*neighbours[:2], params, *neighbours[2:]]
    )
    assert crowd[2].token_ids == alone.token_ids
    twins = engine.generate(
        [[5, 6, 7]] * 3, params
    )  # one seed and one prompt are one sample, however often
    assert answers(twins) == answers([alone] * 3)


# ---- how rows end ----


def test_end_of_text_in_one_row_ends_that_row_alone(tiny_model, naive):
    """Pitfall 8, both ways: the first end of text ends the batch, or a row that has ended goes on."""
    prompts = [[8, 9], [3], [5, 6, 7, 8], [12] * 6]
    free = naive.generate(prompts, SamplingParams(max_tokens=12))
    eos = free[0].token_ids[4]
    stopping, params = Engine(tiny_model, eos_ids=(eos,)), SamplingParams(max_tokens=12)
    outputs = stopping.generate(prompts, params)
    for whole, output in zip(free, outputs, strict=True):
        ended = eos in whole.token_ids
        expected = whole.token_ids[: whole.token_ids.index(eos) + 1] if ended else whole.token_ids
        assert (output.token_ids, output.finish_reason) == (expected, "stop" if ended else "length")
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths[0] <= 5 and max(lengths) == 12  # one ended early, one went on to its limit
    ignoring = stopping.generate(
        prompts, [SamplingParams(max_tokens=12, ignore_eos=row == 0) for row in range(4)]
    )
    assert ignoring[0].token_ids == free[0].token_ids
    assert answers(ignoring[1:]) == answers(outputs[1:])
    later = [
        SamplingParams(max_tokens=12, min_tokens=count) for count in (8, 12, 0, 3)
    ]  # hold the end of text back
    assert answers(stopping.generate(prompts, later)) == answers(
        Naive(tiny_model, eos_ids=(eos,)).generate(prompts, later)
    )


def test_a_row_that_has_ended_says_nothing_more(engine):
    """Each row's tokens are numbered by the pass that made them: none after its last, and one a pass until then."""
    params = [SamplingParams(max_tokens=count) for count in (2, 7, 1, 4)]
    outputs = [Output([1]), Output([2, 3]), Output([4, 5, 6]), Output([7])]
    passes: list[list[int]] = [[], [], [], []]
    for row, token in engine.run(outputs, params):
        passes[row].append(len(engine.steps))
        assert (token.finish_reason is not None) == (len(passes[row]) == params[row].max_tokens)
    assert passes == [[1, 2], [1, 2, 3, 4, 5, 6, 7], [1], [1, 2, 3, 4]]
    assert [output.finish_reason for output in outputs] == ["length"] * 4


@pytest.mark.parametrize(
    "lengths", [[60, 2], [2, 60], [63, 1], [63, 62, 61, 1], [1, 1, 40]], ids=str
)
def test_rows_end_at_the_end_of_the_context_while_others_go_on(engine, naive, tiny_model, lengths):
    """The rectangle grows wider than the context (64): its columns are no positions, and there is no index error."""
    many = [random_prompt(length, tiny_model.config, i) for i, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=500, ignore_eos=True, logprobs=0)
    outputs = engine.generate(many, params)
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [
        (64 - n, "length") for n in lengths
    ]
    assert_same(outputs, naive.generate(many, params))
    columns = (
        max(lengths) + (64 - min(lengths)) - 1
    )  # of memory: what can be filled, whatever max_tokens asks for
    assert engine.cache_bytes == len(lengths) * columns * tiny_model.config.kv_bytes_per_token(
        torch.float64
    )


# ---- the records: what was really batched ----


def test_a_record_of_every_pass(engine):
    engine.generate(
        [[1] * 5, [2] * 3, [3]], [SamplingParams(max_tokens=count) for count in (2, 4, 3)]
    )
    # 15 columns for 9 tokens; then all three rows; then the first has ended, and the third too.
    assert work(engine) == [(3, 9, 0, 6), (3, 0, 3, 0), (2, 0, 2, 1), (1, 0, 1, 2)]
    assert all(step.seconds > 0 for step in engine.steps)


def test_equal_lengths_waste_nothing(engine):
    engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=3))
    assert work(engine) == [(4, 12, 0, 0), (4, 0, 4, 0), (4, 0, 4, 0)]


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_the_records_add_up(tiny_model, max_batch):
    rng = random.Random(max_batch)
    engine = Engine(tiny_model, max_batch=max_batch)
    many = [random_prompt(rng.randint(1, 30), tiny_model.config, i) for i in range(8)]
    outputs = engine.generate(many, [SamplingParams(max_tokens=rng.randint(1, 20)) for _ in many])
    assert sum(step.prefill_tokens for step in engine.steps) == sum(len(prompt) for prompt in many)
    assert sum(step.decode_tokens for step in engine.steps) == sum(
        len(output.token_ids) - 1 for output in outputs
    )
    passes, through, largest = 0, 0, 0
    for start in range(0, len(outputs), max_batch):
        batch = outputs[start : start + max_batch]
        width, longest = max(len(o.prompt_ids) for o in batch), max(len(o.token_ids) for o in batch)
        passes += longest
        through += len(batch) * (width + longest - 1)
        largest = max(largest, len(batch) * (width + longest - 1))
    assert (
        len(engine.steps) == passes
    )  # a pass serves all rows: the longest answer says how many there are
    assert (
        sum(s.prefill_tokens + s.decode_tokens + s.wasted_tokens for s in engine.steps) == through
    )
    assert engine.cache_bytes == largest * tiny_model.config.kv_bytes_per_token(torch.float64)


def test_more_prompts_than_a_batch_holds(tiny_model, naive, prompts):
    engine, params = Engine(tiny_model, max_batch=3), SamplingParams(max_tokens=4, logprobs=0)
    many = prompts(tiny_model.config, 7, 9)
    outputs = [Output(prompt) for prompt in many]
    order = [place for place, _ in engine.run(outputs, params)]
    assert (
        order == [0, 1, 2] * 4 + [3, 4, 5] * 4 + [6] * 4
    )  # one batch after the other, each to its end
    assert [step.rows for step in engine.steps] == [3] * 8 + [1] * 4
    assert_same(outputs, naive.generate(many, params))


def test_an_answer_holds_each_token_when_it_is_told(engine):
    outputs = [Output([1, 2]), Output([3])]
    for place, token in engine.run(outputs, SamplingParams(max_tokens=3, logprobs=0)):
        assert outputs[place].token_ids[-1] == token.id
        assert outputs[place].logprobs[-1] is token.logprobs
        assert outputs[place].finish_reason == token.finish_reason


# ---- one call and the next ----


def test_stream_is_generate_token_by_token(engine):
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=4)
    streamed = list(engine.stream([1, 2, 3], params))
    assert work(engine) == [(1, 3, 0, 0)] + [(1, 0, 1, 0)] * 8
    (output,) = engine.generate([[1, 2, 3]], params)
    assert [token.id for token in streamed] == output.token_ids
    assert [token.finish_reason for token in streamed] == [None] * 8 + ["length"]


def test_streams_read_in_turn_are_independent(engine, naive):
    """Each call has a cache of its own."""
    prompts, params = (
        [[1, 2], [3, 4, 5, 6], [7]],
        SamplingParams(max_tokens=6, temperature=0.9, seed=3, logprobs=0),
    )
    outputs = [Output(prompt) for prompt in prompts]
    for tokens in zip(*[engine.stream(prompt, params) for prompt in prompts], strict=True):
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
    assert_same(outputs, naive.generate(prompts, params))


def test_a_call_that_is_left_early_leaves_nothing_behind(engine, naive):
    params = SamplingParams(max_tokens=5, logprobs=0)
    running = engine.run([Output([9] * 12), Output([8])], params)
    for _ in range(3):
        next(running)
    running.close()
    prompts = [[1, 2], [3]]
    for _ in range(2):
        assert_same(engine.generate(prompts, params), naive.generate(prompts, params))
        assert (
            work(engine) == [(2, 3, 0, 1)] + [(2, 0, 2, 0)] * 4
        )  # of the last call, and only of that


# ---- bad input ----


@pytest.mark.parametrize("sampling", [SamplingParams(), []], ids=["one for all", "one each"])
def test_no_prompts_is_an_error(engine, sampling):
    with pytest.raises(UserError, match="no prompts: give at least one"):
        engine.generate([], sampling)


@pytest.mark.parametrize("max_batch", [0, -1])
def test_a_batch_of_none_is_an_error(tiny_model, max_batch):
    with pytest.raises(UserError, match=f"at least 1 prompt, not {max_batch}"):
        Engine(tiny_model, max_batch=max_batch)


UNFIT: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "empty": ([], {}, "empty"),
    "no room for an answer": ([3] * 64, {}, "shorten the prompt to 63"),
    "far too long": ([3] * 5000, {}, "5000 tokens"),
    "unknown id": ([5, 101], {}, "Token id 101"),
    "negative id": ([-1], {}, "Token id -1"),
    "stop token unknown": ([5], {"stop_token_ids": (101,)}, "stop_token_ids"),
    "top_k too large": ([5], {"top_k": 102}, "top_k"),
}


@pytest.mark.parametrize(("prompt", "options", "says"), UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_unfit_prompt_fails_alone(engine, naive, place, prompt, options, says):
    params = SamplingParams(max_tokens=4, logprobs=0)
    good = [[1, 2, 3], [4]]
    prompts = [*good[:place], prompt, *good[place:]]
    sampling = [params] * 3
    sampling[place] = SamplingParams(max_tokens=4, **options)
    outputs = engine.generate(prompts, sampling)
    bad = outputs.pop(place)
    assert (bad.prompt_ids, bad.token_ids, bad.finish_reason) == (prompt, [], "error")
    assert bad.error is not None and says in bad.error
    assert_same(outputs, naive.generate(good, params))
    assert all(output.error is None for output in outputs)
    assert engine.steps[0].rows == 2  # it takes no part
    with pytest.raises(UserError, match=says):
        next(engine.stream(prompt, sampling[place]))


def test_unfit_prompts_take_no_seat_in_a_batch(tiny_model):
    engine = Engine(tiny_model, max_batch=2)
    outputs = engine.generate([[], [1], [101], [2, 3], [4]], SamplingParams(max_tokens=2))
    assert [output.finish_reason for output in outputs] == [
        "error",
        "length",
        "error",
        "length",
        "length",
    ]
    assert work(engine) == [(2, 3, 0, 1), (2, 0, 2, 0), (1, 1, 0, 0), (1, 0, 1, 0)]


def test_only_unfit_prompts_run_nothing(engine):
    engine.generate([[1]], SamplingParams(max_tokens=2))
    outputs = engine.generate([[], []], SamplingParams())
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert (engine.steps, engine.cache_bytes) == ([], 0)


def test_one_sampling_for_all_or_one_each(engine):
    with pytest.raises(UserError, match="2 prompts and 1"):
        engine.generate([[1], [1]], [SamplingParams()])


def test_a_request_that_leaves_no_token_to_take_fails_alone(engine, naive):
    """What only shows in the scores is bad input too: here every token would end a text that must not end yet."""
    params = SamplingParams(max_tokens=4)
    nothing_left = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(101)))
    outputs = engine.generate([[1, 2, 3], [4], [5, 6]], [params, nothing_left, params])
    assert (outputs[1].token_ids, outputs[1].finish_reason) == ([], "error")
    assert answers([outputs[0], outputs[2]]) == answers(naive.generate([[1, 2, 3], [5, 6]], params))


@pytest.mark.parametrize("good", [0, 2])
def test_scores_that_are_not_numbers_end_one_row_and_a_stream_says_so(
    engine, naive, tiny_model, monkeypatch, good
):
    """A row whose scores are NaN, after `good` tokens, ends with an error; its neighbours' answers stand."""
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
    with pytest.raises(UserError, match="NaN"):
        list(engine.stream([1, 2], params))
    monkeypatch.undo()
    assert answers(outputs[:2]) == answers(naive.generate([[1, 2, 3], [4]], params))

"""The engine: what its records say was run, and that it was; requests that come, go and are refused; streams."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from shared.checkpoint import Config
from shared.course import stages
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Token
from stage01_forward.sampling import SamplingParams
from stage04_continuous.engine import Engine, SlotRecord
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import Scheduler

CONFIG = Config(101, 64, 24, 3, 2, name="wide")


@pytest.fixture(scope="module")
def model():
    return stages.load_model(random_checkpoint(CONFIG, spread=24), dtype=torch.float64)


@pytest.fixture
def passes(model):
    """What went through the real model: for each forward pass, (tokens, rows of logits)."""
    tokens, rows = [], []
    handles = [
        model.register_forward_pre_hook(lambda module, given: tokens.append(given[0].numel())),
        model.lm_head.register_forward_pre_hook(lambda module, given: rows.append(len(given[0]))),
    ]
    yield lambda: list(zip(tokens, rows, strict=True))
    for handle in handles:
        handle.remove()


def engine_of(model, slots=4, budget=32, slot_tokens=None, **options):
    return Engine(model, scheduler=Scheduler(slots, budget, **options), slot_tokens=slot_tokens)


def words(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def ask(engine, length, count, id=""):
    return engine.add(Request(prompt_of(length), words(count), id=id))


def prompt_of(length):
    return random_prompt(length, CONFIG, "ask")


def naive(model, length, count):
    return Naive(model).generate([prompt_of(length)], words(count))[0].token_ids


def finish(engine):
    return list(engine.run())


def shape(engine):
    """(rows, prefill, decode, waiting) of each record."""
    return [
        (each.rows, each.prefill_tokens, each.decode_tokens, each.waiting) for each in engine.steps
    ]


# ---- what was run ---------------------------------------------------------------------------------------------------


def test_the_whole_record_of_a_small_crowd(model, passes):
    """Two slots, a budget of 8, and every pass of it worked out by hand."""
    engine = engine_of(model, 2, 8)
    for id, length, count in (("a", 5, 2), ("b", 6, 3), ("c", 3, 2), ("d", 1, 1)):
        ask(engine, length, count, id)
    finish(engine)
    assert shape(engine) == [
        (2, 8, 0, 2),  # all of a, 3 tokens of b
        (2, 3, 1, 2),  # the rest of b beside a's first word; a ends
        (2, 3, 1, 1),  # c takes a's place at once
        (2, 0, 2, 1),  # b and c end
        (1, 1, 0, 0),  # d
    ]
    assert [sorted(record.slots, key=lambda each: each.slot) for record in engine.steps] == [
        [SlotRecord(0, "a", 5, 0, None), SlotRecord(1, "b", 3, 0, None)],
        [SlotRecord(0, "a", 0, 1, "length"), SlotRecord(1, "b", 3, 0, None)],
        [SlotRecord(0, "c", 3, 0, None), SlotRecord(1, "b", 0, 1, None)],
        [SlotRecord(0, "c", 0, 1, "length"), SlotRecord(1, "b", 0, 1, "length")],
        [SlotRecord(0, "d", 1, 0, "length")],
    ]
    assert passes() == [(8, 1), (4, 2), (4, 2), (2, 2), (1, 1)]


def test_one_forward_pass_serves_all_rows(model, passes):
    """Catches: one forward pass a request, and requests that are run one after the other."""
    engine = engine_of(model, 6, 64)
    for _ in range(6):
        ask(engine, 7, 10)
    finish(engine)
    assert shape(engine) == [(6, 42, 0, 0)] + [(6, 0, 6, 0)] * 9
    assert passes() == [(42, 6)] + [(6, 6)] * 9


@pytest.mark.parametrize(
    "slots, budget, max_chunk", [(1, 1, None), (3, 5, 2), (4, 32, None), (8, 16, 7), (5, 64, 64)]
)
def test_tokens_through_the_model_are_those_of_the_records(slots, budget, max_chunk, model, passes):
    """Packed: no row and no column of padding, and logits for no row that is not sampled."""
    engine = engine_of(model, slots, budget, max_chunk=max_chunk)
    requests = [ask(engine, 1 + 5 * i % 17, 1 + 3 * i % 8) for i in range(14)]
    sampled = []
    while engine.scheduler.unfinished:
        sampled.append(len(engine.step()))
    ran = passes()
    assert len(ran) == len(engine.steps)
    assert [tokens for tokens, _ in ran] == [
        each.prefill_tokens + each.decode_tokens for each in engine.steps
    ]
    assert [rows for _, rows in ran] == sampled
    assert sum(each.prefill_tokens for each in engine.steps) == sum(
        len(each.output.prompt_ids) for each in requests
    )
    assert sum(each.decode_tokens for each in engine.steps) == sum(
        len(each.output.token_ids) - 1 for each in requests
    )
    assert sum(sampled) == sum(len(each.output.token_ids) for each in requests)
    assert max(tokens for tokens, _ in ran) <= budget
    assert max(each.rows for each in engine.steps) == slots
    for record in engine.steps:
        if record.waiting:
            assert record.rows == slots or record.prefill_tokens + record.decode_tokens == budget
    ends = [
        each.finish_reason for record in engine.steps for each in record.slots if each.finish_reason
    ]
    assert ends == ["length"] * 14


def test_a_mixed_pass_is_one_pass(model, passes):
    """A prompt that arrives while others decode is computed in the same pass with them, and they do not wait for it."""
    engine = engine_of(model, 4, 16)
    early = [ask(engine, 3, 20) for _ in range(3)]
    for _ in range(4):
        engine.step()
    before = len(passes())
    ask(engine, 30, 5, "late")
    tokens = [engine.step() for _ in range(3)]
    assert shape(engine)[-3:] == [(4, 13, 3, 0), (4, 13, 3, 0), (4, 4, 3, 0)]
    assert passes()[before:] == [(16, 3), (16, 3), (7, 4)]
    assert [len({id for id, _ in each} & {request.id for request in early}) for each in tokens] == [
        3,
        3,
        3,
    ]


def test_a_freed_slot_is_filled_in_the_next_pass(model):
    """No pass of one row while others wait: short answers leave, and the line moves up beside the long one."""
    engine = engine_of(model, 2, 16)
    ask(engine, 4, 30, "long")
    for i in range(9):
        ask(engine, 2, 3, f"short {i}")
    finish(engine)
    assert all(record.rows == 2 for record in engine.steps if record.waiting)
    beside = [each.request_id for record in engine.steps for each in record.slots if each.slot == 1]
    assert beside == [f"short {i}" for i in range(9) for _ in range(3)]
    assert len(engine.steps) == 30  # 10 requests in the time of the longest


def test_equal_lengths_go_in_waves(model):
    """The null workload: nobody leaves early, so there is nothing to gain, and nothing is lost either."""
    engine = engine_of(model, 4, 64)
    engine.generate([prompt_of(6)] * 12, words(5))
    assert shape(engine) == [
        (4, prefill, decode, waiting)
        for waiting in (8, 4, 0)
        for prefill, decode in ((24, 0), (0, 4), (0, 4), (0, 4), (0, 4))
    ]


def test_times_of_a_record_fit_together(model):
    engine = engine_of(model, 2)
    engine.generate([prompt_of(4)] * 5, words(4))
    for record in engine.steps:
        assert 0 < record.bookkeeping_seconds <= record.seconds
    for before, after in zip(engine.steps, list(engine.steps)[1:], strict=False):
        assert before.started + before.seconds <= after.started


def test_a_step_without_requests_runs_nothing(model, passes):
    engine = engine_of(model)
    assert (engine.step(), list(engine.run()), len(engine.steps), passes()) == ([], [], 0, [])


def test_records_do_not_grow_for_ever(model, monkeypatch):
    monkeypatch.setattr("stage04_continuous.engine.STEPS_KEPT", 3)
    engine = engine_of(model)
    assert isinstance(engine.steps, deque) and engine.steps.maxlen == 3
    ask(engine, 2, 8)
    finish(engine)
    assert shape(engine) == [(1, 0, 1, 0)] * 3


# ---- what comes of it -----------------------------------------------------------------------------------------------


def test_run_yields_each_token_with_the_id_of_its_request(model):
    engine = engine_of(model, 2)
    for id, length, count in (("a", 9, 4), ("b", 2, 1), ("c", 5, 3)):
        ask(engine, length, count, id)
    told = finish(engine)
    for id, length, count in (("a", 9, 4), ("b", 2, 1), ("c", 5, 3)):
        mine = [token for whose, token in told if whose == id]
        assert [token.id for token in mine] == naive(model, length, count)
        assert [token.finish_reason for token in mine] == [None] * (count - 1) + ["length"]


def test_a_stop_frees_the_slot_at_once(model):
    answer = naive(model, 9, 12)
    stop = answer[4]
    engine = engine_of(model, 1)
    first = engine.add(
        Request(
            prompt_of(9), SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
        )
    )
    second = ask(engine, 5, 3)
    finish(engine)
    said = answer[: answer.index(stop) + 1]
    assert (first.output.token_ids, first.output.finish_reason) == (said, "stop")
    assert second.output.token_ids == naive(model, 5, 3)
    assert len(engine.steps) == len(said) + 3


def test_an_end_of_text_ends_its_row_alone(model):
    answer = naive(model, 9, 12)
    engine = Engine(model, eos_ids=(answer[3],), scheduler=Scheduler(2, 32))
    prompts = [prompt_of(9), prompt_of(9)]
    stops, goes_on = engine.generate(prompts, [SamplingParams(max_tokens=12), words(12)])
    assert (stops.token_ids, stops.finish_reason) == (answer[: answer.index(answer[3]) + 1], "stop")
    assert (goes_on.token_ids, goes_on.finish_reason) == (answer, "length")


@pytest.mark.parametrize("length", [1, 62, 63])
def test_prompt_and_answer_fill_the_context_and_no_more(length, model):
    (output,) = engine_of(model).generate([prompt_of(length)], words(500))
    assert (output.token_ids, output.finish_reason) == (naive(model, length, 500), "length")
    assert len(output.token_ids) == 64 - length


def test_generate_keeps_the_order_of_the_prompts_and_drops_old_records(model):
    engine = engine_of(model, 2)
    engine.generate([prompt_of(3)], words(9))
    outputs = engine.generate([prompt_of(i) for i in (5, 1, 8)], [words(1), words(6), words(3)])
    assert [output.prompt_ids for output in outputs] == [prompt_of(i) for i in (5, 1, 8)]
    assert [len(output.token_ids) for output in outputs] == [1, 6, 3]
    assert sum(each.prefill_tokens for each in engine.steps) == 14


def test_priority_reaches_the_scheduler(model):
    engine = engine_of(model, 1, policy="priority")
    for id, priority in (("a", 2), ("b", 0), ("c", 1)):
        engine.add(Request(prompt_of(2), words(1), id=id, priority=priority))
    assert [id for id, _ in finish(engine)] == ["b", "c", "a"]


# ---- bad input: an error for that request alone -----------------------------------------------------------------------


BAD = {
    "empty": ([], SamplingParams(), "prompt is empty"),
    "too long": ([1] * 64, SamplingParams(), "has 64 tokens, and wide sees 64"),
    "no such token": ([1, 101], SamplingParams(), "Token id 101 is not in the vocabulary"),
    "no such stop token": ([1], SamplingParams(stop_token_ids=(101,)), "stop_token_ids"),
    "no token left": (
        [1],
        SamplingParams(stop_token_ids=tuple(range(101)), min_tokens=1),
        "no token could begin the answer",
    ),
}


@pytest.mark.parametrize("prompt, params, message", BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_and_the_others_go_on(prompt, params, message, model):
    engine = engine_of(model, 2)
    good = [ask(engine, 5, 6), ask(engine, 9, 6), ask(engine, 2, 6)]
    engine.step()
    bad = Request(prompt, params, id="bad")
    with pytest.raises(UserError, match=message):
        engine.add(bad)
    assert (
        bad.state is State.NEW and "bad" not in engine.requests and engine.scheduler.unfinished == 3
    )
    finish(engine)
    assert [request.output.token_ids for request in good] == [
        naive(model, length, 6) for length in (5, 9, 2)
    ]


@pytest.mark.parametrize("prompt, params, message", BAD.values(), ids=BAD)
def test_one_bad_prompt_among_good_ones(prompt, params, message, model):
    prompts = [prompt_of(5), prompt, prompt_of(9)]
    first, bad, last = engine_of(model, 2).generate(prompts, [words(6), params, words(6)])
    assert (bad.finish_reason, bad.token_ids) == ("error", []) and message in (bad.error or "")
    assert (first.token_ids, last.token_ids) == (naive(model, 5, 6), naive(model, 9, 6))
    assert (first.error, last.error, first.finish_reason) == (None, None, "length")


def test_only_bad_prompts(model, passes):
    outputs = engine_of(model).generate([[], [1] * 64], SamplingParams())
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert passes() == []


def test_no_prompts_at_all(model):
    with pytest.raises(UserError, match="There are no prompts: give at least one"):
        engine_of(model).generate([], SamplingParams())
    with pytest.raises(UserError, match="2 prompts and 1 sampling settings"):
        engine_of(model).generate([[1], [2]], [SamplingParams()])


def test_a_prompt_longer_than_a_slot(model):
    engine = engine_of(model, slot_tokens=10)
    fits, bad = engine.generate([prompt_of(9), prompt_of(10)], words(6))
    assert (fits.token_ids, fits.finish_reason) == (naive(model, 9, 1), "length")
    assert bad.error == (
        "The prompt has 10 tokens, and a slot holds 10 with the answer counted in: shorten the prompt to 9 tokens or fewer."
    )


def test_without_chunks_a_prompt_over_the_budget(model):
    engine = engine_of(model, 2, 8, chunked=False)
    bad, fits = engine.generate([prompt_of(9), prompt_of(8)], words(4))
    assert bad.finish_reason == "error" and "allow chunks, or raise the budget" in (bad.error or "")
    assert fits.token_ids == naive(model, 8, 4)


@pytest.mark.parametrize("slots, budget", [(4, 3), (1, 0)])
def test_a_budget_that_cannot_serve_its_slots(slots, budget, model):
    with pytest.raises(
        UserError, match=f"budget of {budget} tokens a step is too small for {slots} slots"
    ):
        engine_of(model, slots, budget)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_id_is_taken_while_its_request_is_in_the_engine(steps, model):
    engine = engine_of(model, 1)
    first = ask(engine, 3, 4, "twin")
    for _ in range(steps):
        engine.step()
    with pytest.raises(UserError, match="request 'twin' in the engine already"):
        ask(engine, 5, 4, "twin")
    finish(engine)
    assert first.output.token_ids == naive(model, 3, 4)
    again = ask(engine, 5, 4, "twin")  # the first has gone
    finish(engine)
    assert again.output.token_ids == naive(model, 5, 4)


def test_requests_without_an_id_get_names_of_their_own(model):
    engine = engine_of(model)
    assert len({ask(engine, 2, 1).id for _ in range(5)}) == 5


def test_a_name_that_the_engine_gives_is_not_one_that_is_taken(model):
    engine = engine_of(model)
    ask(engine, 2, 1, "request-1")
    assert ask(engine, 2, 1).id not in ("", "request-1")


@pytest.mark.parametrize("how", ["unknown", "finished", "aborted", "refused"])
def test_abort_of_a_request_that_is_not_there(how, model):
    engine = engine_of(model)
    other = ask(engine, 5, 6)
    engine.step()
    if how == "finished":
        ask(engine, 2, 1, how)
        engine.step()
    elif how == "aborted":
        ask(engine, 2, 9, how)
        engine.abort(how)
    elif how == "refused":
        with pytest.raises(UserError):
            engine.add(Request([], words(1), id=how))
    with pytest.raises(UserError, match=f"There is no request '{how}' to abort"):
        engine.abort(how)
    finish(engine)
    assert other.output.token_ids == naive(model, 5, 6)


def test_a_request_that_has_ended_cannot_be_added_again(model):
    engine = engine_of(model)
    request = ask(engine, 2, 1)
    finish(engine)
    with pytest.raises(RuntimeError, match="from finished to waiting"):
        engine.add(request)
    assert (engine.requests, engine.scheduler.unfinished) == ({}, 0)


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_ends_with_the_reason(model):
    told = list(engine_of(model).stream(prompt_of(5), words(6)))
    assert [token.id for token in told] == naive(model, 5, 6)
    assert [token.finish_reason for token in told] == [None] * 5 + ["length"]


def test_several_streams_read_in_turn(model):
    """Whoever asks for a token moves all of them on, and nobody misses one."""
    engine = engine_of(model, 2)
    asked = [(5, 8), (9, 3), (2, 12), (14, 5)]
    streams = {
        i: engine.stream(prompt_of(length), words(count)) for i, (length, count) in enumerate(asked)
    }
    told: dict[int, list[Token]] = {i: [] for i in streams}
    while streams:
        for i in list(streams):
            token = next(streams[i], None)
            if token is None:
                del streams[i]
            else:
                told[i].append(token)
    for i, (length, count) in enumerate(asked):
        assert [token.id for token in told[i]] == naive(model, length, count)
        assert [token.finish_reason for token in told[i]] == [None] * (count - 1) + ["length"]
    assert max(record.rows for record in engine.steps) == 2
    assert (engine.requests, engine.scheduler.unfinished) == ({}, 0)


def test_a_stream_that_was_moved_on_by_others_still_tells_all(model):
    engine = engine_of(model)
    slow = engine.stream(prompt_of(5), words(6))
    told = [next(slow).id]
    list(engine.stream(prompt_of(2), words(20)))  # by now the slow one has ended, too
    assert engine.requests == {}
    assert told + [token.id for token in slow] == naive(model, 5, 6)


def test_a_closed_stream_is_aborted(model):
    engine = engine_of(model, 1)
    closed = engine.stream(prompt_of(5), words(30))
    next(closed)
    waits = ask(engine, 9, 4)
    assert len(engine.requests) == 2
    closed.close()
    assert list(engine.requests.values()) == [waits]
    assert engine.scheduler.free_slots == [0]
    finish(engine)
    assert waits.output.token_ids == naive(model, 9, 4)


def test_a_stream_aborted_by_another_hand_ends(model):
    engine = engine_of(model)
    stream = engine.stream(prompt_of(5), words(30))
    next(stream)
    (id,) = engine.requests
    engine.abort(id)
    assert list(stream) == []


def test_a_bad_stream_is_an_error_and_leaves_no_trace(model):
    engine = engine_of(model)
    with pytest.raises(UserError, match="empty"):
        next(engine.stream([], words(3)))
    sick = engine.stream(prompt_of(4), words(30))
    next(sick)
    (request,) = engine.requests.values()
    engine.cache.kv[:, :, request.slot, :, : request.computed] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        next(sick)
    assert (engine.requests, engine.scheduler.unfinished) == ({}, 0)

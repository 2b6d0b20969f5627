"""The engine: what its records say was run, and in which blocks; what is found, shared, copied and taken away; requests that
come, go and are refused; streams."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

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
from stage04_continuous.request import Request, State
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine, SequenceRecord
from stage05_paged.memory import Cost
from stage05_paged.scheduler import Scheduler

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


def engine_of(model, blocks=60, size=4, swap_blocks=0, preemption="recompute", **options):
    swap_pool = BlockPool(swap_blocks, size) if swap_blocks else None
    scheduler = Scheduler(
        BlockPool(blocks, size), preemption=preemption, swap_pool=swap_pool, **options
    )
    return Engine(model, scheduler=scheduler, sanitize=True)


def words(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def drawn(count, seed):
    return SamplingParams(max_tokens=count, temperature=1, seed=seed, ignore_eos=True)


def prompt_of(length):
    return random_prompt(length, CONFIG, "ask")


def ask(engine, length, count, id="", salt=b""):
    return engine.add(Request(prompt_of(length), words(count), id=id), salt)


def naive(model, length, count):
    return Naive(model).generate([prompt_of(length)], words(count))[0].token_ids


def go_on(model, request, said, sampling):
    """What the naive engine says after the prompt and the first `said` tokens of a request."""
    beginning = request.output.token_ids[:said]
    rest = replace(sampling, max_tokens=sampling.max_tokens - said)
    return (
        beginning
        + Naive(model).generate([request.output.prompt_ids + beginning], rest)[0].token_ids
    )


def finish(engine):
    """Run to the end; what was told on the way."""
    told: list[tuple[str, Token]] = []
    for _ in range(2000):
        if not engine.scheduler.unfinished:
            return told
        told += engine.step()
    raise AssertionError("a live-lock: nobody here has so many tokens")


def shape(engine):
    """(rows, prefill, decode, waiting) of each record."""
    return [
        (each.rows, each.prefill_tokens, each.decode_tokens, each.waiting) for each in engine.steps
    ]


def memory(engine):
    """(owned, shared, cached, used tokens) of each record."""
    return [
        (each.owned_blocks, each.shared_blocks, each.cached_blocks, each.used_tokens)
        for each in engine.steps
    ]


def evict(engine, count):
    """Memory is needed for something else: the `count` blocks whose use is longest ago are evicted from the prefix cache."""
    pool = engine.scheduler.pool
    for block in [pool.take() for _ in range(len(pool.free) + count)]:
        pool.give_back(block)


def nothing_is_held(engine):
    scheduler = engine.scheduler
    held = [
        scheduler.tables,
        scheduler.swapped,
        scheduler.samples,
        scheduler.running,
        scheduler.waiting,
        scheduler._preempted,
    ]
    return (
        not any([*held, engine.requests])
        and scheduler.pool.owned == 0
        and (scheduler.swap_pool is None or scheduler.swap_pool.owned == 0)
    )


# ---- what was run ---------------------------------------------------------------------------------------------------


def test_the_whole_record_of_a_small_crowd(model, passes):
    """Seven blocks of 3 tokens, a budget of 8, and every pass of it worked out by hand."""
    engine = engine_of(model, 7, 3, max_sequences=2, token_budget=8, prefix_caching=False)
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
    assert [
        sorted(record.sequences, key=lambda each: each.request_id) for record in engine.steps
    ] == [
        [SequenceRecord("a", 5, 0, 2, None), SequenceRecord("b", 3, 0, 1, None)],
        [SequenceRecord("a", 0, 1, 2, "length"), SequenceRecord("b", 3, 0, 2, None)],
        [SequenceRecord("b", 0, 1, 3, None), SequenceRecord("c", 3, 0, 1, None)],
        [SequenceRecord("b", 0, 1, 3, "length"), SequenceRecord("c", 0, 1, 2, "length")],
        [SequenceRecord("d", 1, 0, 1, "length")],
    ]
    # b has the blocks of all its prompt from the start; nobody has one for a token that is not there yet.
    assert memory(engine) == [
        (4, 0, 0, 8),
        (4, 0, 0, 12),
        (4, 0, 0, 10),
        (5, 0, 0, 12),
        (1, 0, 0, 1),
    ]
    assert [Counter(move.kind for move in record.moves) for record in engine.steps] == [
        Counter(wipe=4), Counter(), Counter(wipe=2), Counter(wipe=1), Counter(wipe=1)
    ]  # fmt: skip
    assert [record.preempted for record in engine.steps] == [0] * 5
    assert passes() == [(8, 1), (4, 2), (4, 2), (2, 2), (1, 1)]


def test_one_forward_pass_serves_all_rows(model, passes):
    """Catches: one forward pass a request, and requests that are run one after the other."""
    engine = engine_of(model)
    for number in range(6):
        engine.add(Request(random_prompt(7, CONFIG, number), words(10)))
    finish(engine)
    assert shape(engine) == [(6, 42, 0, 0)] + [(6, 0, 6, 0)] * 9
    assert passes() == [(42, 6)] + [(6, 6)] * 9


@pytest.mark.parametrize(
    "sequences, budget, max_chunk",
    [(1, 1, None), (3, 5, 2), (4, 32, None), (8, 16, 7), (5, 64, 64)],
)
def test_tokens_through_the_model_are_those_of_the_records(
    sequences, budget, max_chunk, model, passes
):
    """Packed: no row and no column of padding, and logits for no row that is not sampled."""
    engine = engine_of(
        model,
        max_sequences=sequences,
        token_budget=budget,
        max_chunk=max_chunk,
        prefix_caching=False,
    )
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
    assert max(each.rows for each in engine.steps) == sequences
    for record in engine.steps:
        counts = [each.prefill_tokens + each.decode_tokens for each in record.sequences]
        assert counts == sorted(counts)  # who can attend together lies together
        if record.waiting:
            assert (
                record.rows == sequences or record.prefill_tokens + record.decode_tokens == budget
            )
    ends = [
        each.finish_reason
        for record in engine.steps
        for each in record.sequences
        if each.finish_reason
    ]
    assert ends == ["length"] * 14


def test_memory_alone_decides_how_many_run(model):
    """Nothing else holds anybody back; and whoever waits is let in when memory is given back."""
    engine = engine_of(model, 9, 4, prefix_caching=False)
    for _ in range(6):
        ask(engine, 12, 4)  # 3 blocks, and a fourth for the answer
    finish(engine)
    # The watermark is a block: beside one that runs, 3 blocks and 1 must be there.
    assert [record.rows for record in engine.steps][:1] == [2]
    assert max(record.rows for record in engine.steps) == 2
    assert [record.owned_blocks for record in engine.steps] == [6, 8, 8, 8] * 3
    assert engine.scheduler.counts.preemptions == 0


def test_a_mixed_pass_is_one_pass(model, passes):
    """A prompt that arrives while others decode is computed in the same pass with them, and they do not wait for it."""
    engine = engine_of(model, token_budget=16, max_sequences=4)
    early = [ask(engine, 3, 20) for _ in range(3)]
    for _ in range(4):
        engine.step()
    before = len(passes())
    ask(engine, 30, 5, "late", b"finds nothing")
    tokens = [engine.step() for _ in range(3)]
    assert shape(engine)[-3:] == [(4, 13, 3, 0), (4, 13, 3, 0), (4, 4, 3, 0)]
    assert passes()[before:] == [(16, 3), (16, 3), (7, 4)]
    assert [len({id for id, _ in each} & {request.id for request in early}) for each in tokens] == [
        3,
        3,
        3,
    ]


def test_times_of_a_record_fit_together(model):
    engine = engine_of(model)
    engine.generate([prompt_of(4)] * 5, words(4))
    for record in engine.steps:
        assert 0 < record.bookkeeping_seconds <= record.seconds
    for before, after in zip(engine.steps, list(engine.steps)[1:], strict=False):
        assert before.started + before.seconds <= after.started


def test_a_step_without_requests_runs_nothing(model, passes):
    engine = engine_of(model)
    assert (engine.step(), list(engine.run()), len(engine.steps), passes()) == ([], [], 0, [])


def test_records_do_not_grow_for_ever(model, monkeypatch):
    monkeypatch.setattr("stage05_paged.engine.STEPS_KEPT", 3)
    engine = engine_of(model)
    assert isinstance(engine.steps, deque) and engine.steps.maxlen == 3
    ask(engine, 2, 8)
    finish(engine)
    assert shape(engine) == [(1, 0, 1, 0)] * 3


# ---- the prefix cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("running", [False, True])
def test_a_whole_prompt_found_still_computes_its_last_token(running, size, model, passes):
    """Catches: a prompt of which nothing is left to compute, so that there is nothing to sample from."""
    for length in (size, 2 * size, 2 * size + 1):
        engine = engine_of(model, 96 // size, size)
        first = ask(engine, length, 6)
        if running:
            engine.step()
        else:
            finish(engine)
        before = len(engine.steps)
        again = ask(engine, length, 6)
        finish(engine)
        found = (
            (length - 1) // size * size
        )  # the last token is computed, and so is the rest of its block
        assert engine.steps[before].prefill_tokens == length - found >= 1
        assert passes()[-len(engine.steps) :][before][0] == length - found + running
        assert engine.scheduler.counts.hit_tokens == found
        assert first.output.token_ids == again.output.token_ids == naive(model, length, 6)


def test_the_hit_rate_is_of_the_tokens_that_were_looked_up(model):
    engine = engine_of(model)
    ask(engine, 21, 3)
    assert engine.scheduler.counts.hit_rate == 0
    finish(engine)
    ask(engine, 21, 3)
    finish(engine)
    counts = engine.scheduler.counts
    assert (counts.lookup_tokens, counts.hit_tokens, counts.hit_rate) == (42, 20, 20 / 42)
    off = engine_of(model, prefix_caching=False)
    for _ in range(2):
        ask(off, 21, 3)
        finish(off)
    assert off.scheduler.counts.hit_tokens == 0 and off.scheduler.pool.found == {}


def test_what_is_found_is_shared_and_kept_until_its_memory_is_needed(model):
    engine = engine_of(model, 12)
    ask(engine, 17, 2)
    finish(engine)
    assert memory(engine) == [(5, 0, 0, 17), (5, 0, 0, 18)]
    ask(engine, 17, 2)
    ask(engine, 17, 2)
    finish(engine)
    assert memory(engine)[2:] == [(6, 4, 0, 34), (6, 4, 0, 36)]  # 4 blocks for both, and one each
    assert (engine.scheduler.pool.evictions, len(engine.scheduler.pool.cached)) == (0, 4)
    engine.add(Request(random_prompt(40, CONFIG, "other"), words(2)))
    finish(engine)
    assert memory(engine)[4:] == [
        (10, 0, 2, 40),
        (11, 0, 1, 41),
    ]  # one more for the word that it said
    assert engine.scheduler.pool.evictions == 3
    ask(engine, 17, 2)
    finish(engine)
    assert engine.scheduler.counts.hit_tokens == 32 + 4  # the end of the chain was evicted first


def test_salts_keep_tenants_apart(model):
    """The same prompt, but nobody can find out by the time it takes what another tenant has asked."""
    engine = engine_of(model)
    requests = []
    for salt in (b"", b"one", b"two", b"one", b""):
        hits = engine.scheduler.counts.hit_tokens
        requests.append((ask(engine, 21, 3, salt=salt), salt))
        finish(engine)
        known = salt in [each for _, each in requests[:-1]]
        assert engine.scheduler.counts.hit_tokens - hits == (20 if known else 0)
    requests += [
        (request, b"one") for request in engine.add_samples(prompt_of(21), [words(3)] * 2, b"one")
    ]
    fork = engine.fork(requests[-1][0].id)
    assert engine.scheduler.tables[fork].salt == b"one"
    finish(engine)
    assert engine.scheduler.counts.hit_tokens == 60 + 20  # the fork waited, and found the same
    assert {tuple(request.output.token_ids) for request, _ in requests} == {
        tuple(naive(model, 21, 3))
    }


@pytest.mark.parametrize("size", [1, 4])
def test_blocks_of_an_errored_request_are_not_found_again(size, model):
    """Position 30 is NaN in the weights for a while: whoever gets there ends with an error, and nothing of it is kept."""
    engine = engine_of(model, 96 // size, size)
    beside = ask(engine, 8, 20)
    engine.step()
    good = model.wpe.weight[30].clone()
    with torch.no_grad():
        model.wpe.weight[30] = torch.nan
        try:
            sick = ask(engine, 35, 6)
            engine.step()
        finally:
            model.wpe.weight[30] = good
    assert (sick.output.finish_reason, sick.output.token_ids) == ("error", [])
    assert "NaN or infinite" in (sick.output.error or "")
    assert all(
        engine.cache.kv[:, :, :, block].isfinite().all()
        for block in engine.scheduler.pool.found.values()
    )
    finish(engine)
    hits = engine.scheduler.counts.hit_tokens
    again = ask(engine, 35, 6)
    finish(engine)
    # What the two had in common was the sick one's, too, so it went with it; what the other has said since was kept.
    assert engine.scheduler.counts.hit_tokens == hits
    assert again.output.token_ids == naive(model, 35, 6)
    assert beside.output.token_ids == naive(model, 8, 20)


@pytest.mark.parametrize("length", [5, 13], ids=["row before", "row behind"])
def test_a_row_that_is_sick_leaves_the_others_theirs(length, model):
    """Rows lie by length, so the sick one is the first or the last of a pass."""
    engine = engine_of(model, prefix_caching=False)
    sick, healthy = ask(engine, length, 8), ask(engine, 9, 8)
    engine.step()
    engine.cache.kv[:, :, :, engine.scheduler.tables[sick].blocks] = torch.nan
    finish(engine)
    assert (sick.output.finish_reason, len(sick.output.token_ids)) == ("error", 1)
    assert healthy.output.token_ids == naive(model, 9, 8)


# ---- copy-on-write --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [1, 3])
def test_a_write_to_a_shared_block_copies_it_first(forks, model):
    """Catches: a fork that writes into its sibling's past. All but the last holder copy, and only that block."""
    engine = engine_of(model, size=4)
    parent = ask(engine, 9, 8)
    engine.step()  # blocks of 4, 4 and 1 tokens
    first, second, partly = engine.scheduler.tables[parent].blocks
    past = engine.cache.kv[:, :, :, partly, :1].clone()
    children = [engine.fork(parent.id, drawn(8, seed)) for seed in range(forks)]
    assert engine.scheduler.pool.owned == 3 and engine.scheduler.pool.shared == 3
    engine.step()
    copies = [move for move in engine.steps[-1].moves if move.kind == "copy"]
    assert len(copies) == forks and {move.source for move in copies} == {partly}
    tables = [engine.scheduler.tables[each].blocks for each in (parent, *children)]
    assert all(table[:2] == [first, second] for table in tables)
    assert {table[2] for table in tables} == {
        partly,
        *(move.target for move in copies),
    }  # to each his own
    for table in tables:
        assert torch.equal(engine.cache.kv[:, :, :, table[2], :1], past)
    assert (engine.steps[-1].owned_blocks, engine.steps[-1].shared_blocks) == (3 + forks, 2)
    finish(engine)
    assert engine.scheduler.counts.copies == forks  # once
    assert parent.output.token_ids == naive(model, 9, 8)
    for seed, child in enumerate(children):
        assert child.output.token_ids == go_on(model, parent, 1, drawn(8, seed))
    assert len({tuple(each.output.token_ids) for each in (parent, *children)}) == forks + 1


def test_a_fork_at_a_border_copies_nothing(model):
    engine = engine_of(model, size=4)
    parent = ask(engine, 8, 6)
    engine.step()
    child = engine.fork(parent.id, drawn(6, 1))
    finish(engine)
    assert engine.scheduler.counts.copies == 0
    assert not any(move.kind == "copy" for record in engine.steps for move in record.moves)
    assert parent.output.token_ids == naive(model, 8, 6)
    assert child.output.token_ids == go_on(model, parent, 1, drawn(6, 1))


def test_the_last_holder_writes_in_place(model):
    """Whoever shares a block with nobody any more does not copy it."""
    engine = engine_of(model, size=4)
    parent = ask(engine, 9, 8)
    engine.step()
    child = engine.fork(parent.id, drawn(8, 1))
    engine.abort(parent.id)
    finish(engine)
    assert engine.scheduler.counts.copies == 0
    assert child.output.token_ids == go_on(model, parent, 1, drawn(8, 1))


def test_a_prompt_is_computed_once_for_all_its_samples(model, passes):
    engine = engine_of(model, size=4, max_chunk=6)
    samples = engine.add_samples(prompt_of(10), [drawn(4, seed) for seed in range(5)])
    assert [request.state for request in samples] == [State.WAITING] * 5
    finish(engine)
    assert shape(engine) == [(1, 6, 0, 4), (1, 4, 0, 0)] + [(5, 0, 5, 0)] * 3
    assert passes() == [(6, 0), (4, 1), (5, 5), (5, 5), (5, 5)]
    assert memory(engine)[2:] == [(2 + 5, 2, 0, 55), (2 + 5, 2, 0, 60), (2 + 10, 2, 0, 65)]
    assert engine.scheduler.counts.copies == 4
    assert [request.output.token_ids for request in samples] == [
        Naive(model).generate([prompt_of(10)], drawn(4, seed))[0].token_ids for seed in range(5)
    ]


def test_samples_for_which_there_is_no_room_begin_later(model):
    """Two at a time: the others have their first word already while they wait."""
    engine = engine_of(model, size=4, max_sequences=2)
    samples = engine.add_samples(prompt_of(10), [drawn(4, seed) for seed in range(5)])
    engine.step()
    assert [len(request.output.token_ids) for request in samples] == [1] * 5
    assert [request.state for request in samples] == [State.RUNNING] * 2 + [State.WAITING] * 3
    finish(engine)
    for seed, request in enumerate(samples):
        assert (
            request.output.token_ids
            == Naive(model).generate([prompt_of(10)], drawn(4, seed))[0].token_ids
        )


@pytest.mark.parametrize(
    "prompt, sampling, message",
    [
        ([], [words(3)] * 2, "prompt is empty"),
        ([1] * 9, [], "no samples to make"),
        ([1] * 9, [words(3), words(3), words(30)], "takes 10 blocks of 4 tokens, and there are 5"),
        ([1] * 9, [words(3), SamplingParams(stop_token_ids=(101,))], "stop_token_ids"),
    ],
    ids=["no prompt", "no samples", "one is too long", "one is unfit"],
)
def test_samples_are_taken_all_or_none(prompt, sampling, message, model):
    engine = engine_of(model, 5)
    with pytest.raises(UserError, match=message):
        engine.add_samples(prompt, sampling)
    assert nothing_is_held(engine)
    (request,) = engine.add_samples(prompt_of(9), [words(3)])
    finish(engine)
    assert request.output.token_ids == naive(model, 9, 3)


@pytest.mark.parametrize(
    "names, message",
    [
        (["taken", "new"], "request 'taken' in the engine already"),
        (["new", "taken"], "request 'taken' in the engine already"),
        (["new", "new"], "Two samples have the id 'new'"),
        (
            ["", "request-1"],
            "Two samples have the id 'request-1'",
        ),  # which is given to the first one
    ],
    ids=str,
)
def test_samples_whose_names_are_unfit_leave_no_trace(names, message, model):
    """Catches: the first one is in line already when the name of the second turns out to be taken."""
    engine = engine_of(model)
    ask(engine, 9, 3, "taken")
    with pytest.raises(UserError, match=message):
        engine.add_samples(prompt_of(5), [words(3)] * 2, ids=names)
    assert list(engine.requests) == ["taken"] and engine.scheduler.unfinished == 1
    finish(engine)
    assert nothing_is_held(engine)


def test_forks_that_cannot_be(model):
    engine = engine_of(model, 8)
    parent = engine.add(Request(prompt_of(9), words(6), "parent", priority=2))
    for _ in range(3):
        engine.step()
    for id, sampling, fork_id, message in (
        ("nobody", None, "", "no request 'nobody' in the engine"),
        ("parent", words(3), "", "'parent' has said 3 tokens already: let its fork say more"),
        ("parent", words(40), "", "takes 12 blocks of 4 tokens, and there are 8"),
        ("parent", None, "parent", "request 'parent' in the engine already"),
        ("parent", SamplingParams(stop_token_ids=(101,)), "", "stop_token_ids"),
    ):
        with pytest.raises(UserError, match=message):
            engine.fork(id, sampling, fork_id)
        assert list(engine.requests) == ["parent"] and engine.scheduler.unfinished == 1
    twin = engine.fork("parent")
    assert (twin.sampling, twin.priority, twin.output.token_ids) == (
        parent.sampling,
        2,
        parent.output.token_ids,
    )
    assert twin.output.token_ids is not parent.output.token_ids
    finish(engine)
    assert twin.output.token_ids == parent.output.token_ids == naive(model, 9, 6)
    with pytest.raises(UserError, match="no request 'parent' in the engine"):
        engine.fork("parent")


# ---- preemption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("swap_blocks", [0, 6], ids=["recompute", "swap"])
def test_a_preempted_request_resumes_on_its_own_prefix(swap_blocks, gone, model):
    """Of 5 full blocks and 1 token, the last `gone` blocks are evicted meanwhile. Catches: a request that goes on from the
    wrong length, or computes again what it could find."""
    engine = engine_of(model, 20, 4, swap_blocks, "swap" if swap_blocks else "recompute")
    request = ask(engine, 18, 8, "back")
    for _ in range(4):
        engine.step()
    assert (request.computed, request.token_count) == (21, 22)
    engine.scheduler.preempt(request)
    assert (request.state, request.computed) == (State.WAITING, 21 if swap_blocks else 0)
    assert engine.scheduler.pool.owned == 0
    evict(engine, gone)
    engine.step()
    found = 20 - 4 * gone
    (resumed,) = engine.steps[-1].sequences
    if swap_blocks:
        assert (resumed.prefill_tokens, resumed.decode_tokens) == (
            0,
            1,
        )  # what was evicted came back from the swap pool
        assert Counter(move.kind for move in engine.steps[-1].moves) == Counter(
            out=6, wipe=gone + 1
        ) + Counter({"in": gone + 1})
    else:
        assert (resumed.prefill_tokens, resumed.decode_tokens) == (
            max(0, 18 - found),
            22 - max(18, found),
        )
        assert engine.scheduler.pool.blocks_for(22) == engine.steps[-1].owned_blocks
    assert engine.scheduler.counts.hit_rate == 0  # its own blocks do not count
    finish(engine)
    assert request.output.token_ids == naive(model, 18, 8)
    counts = engine.scheduler.counts
    assert (counts.recomputed, counts.swapped_out, counts.swapped_in) == (
        (0, 1, 1) if swap_blocks else (1, 0, 0)
    )


def test_who_came_last_gives_way_and_comes_back_first(model):
    """Three grow until memory is short: the last goes, and goes on before anybody who came after it."""
    engine = engine_of(model, 9, 4, prefix_caching=False, watermark=0)
    requests = [ask(engine, 12, 8, id) for id in "abc"] + [ask(engine, 3, 2, "d")]
    engine.step()
    assert [each.id for each in engine.scheduler.running] == ["a", "b", "c"]
    engine.step()  # a and b need a fourth block, and there is none
    record = engine.steps[-1]
    assert (record.rows, record.preempted, record.owned_blocks) == (2, 1, 8)
    assert [each.id for each in engine.scheduler.waiting] == ["c", "d"]
    finish(engine)
    rows = [{each.request_id for each in record.sequences} for record in list(engine.steps)[1:]]
    back = next(number for number, row in enumerate(rows) if "c" in row)
    assert back > 1 and not any("d" in row for row in rows[:back])
    for request, length, count in zip(requests, (12, 12, 12, 3), (8, 8, 8, 2), strict=True):
        assert request.output.token_ids == naive(model, length, count)


def test_the_lowest_priority_gives_way_first(model):
    engine = engine_of(model, 9, 4, prefix_caching=False, watermark=0, policy="priority")
    for id, priority in (("low", 2), ("high", 0), ("middle", 1)):
        engine.add(Request(prompt_of(12), words(8), id=id, priority=priority))
    engine.step()
    engine.step()
    assert engine.steps[-1].preempted == 1
    assert [each.id for each in engine.scheduler.waiting] == ["low"]
    finish(engine)
    ended = [
        each.request_id
        for record in engine.steps
        for each in record.sequences
        if each.finish_reason
    ]
    assert ended == ["high", "middle", "low"]


@pytest.mark.parametrize("swap_blocks", [0, 2, 20], ids=["recompute", "mixed", "swap"])
def test_preemption_never_repeats_or_loses_a_streamed_token(swap_blocks, model):
    """Five streams in memory for two, some of them read late. Catches: a preemption that throws away what was already sent."""
    engine = engine_of(
        model, 9, 4, swap_blocks, "swap" if swap_blocks else "recompute", watermark=0
    )
    asked = [(5, 16), (12, 10), (2, 20), (14, 8), (7, 13)]
    streams = [engine.stream(prompt_of(length), words(count)) for length, count in asked]
    told: list[list[Token]] = []
    requests: list[Request] = []
    for stream in streams:
        told.append([next(stream)])
        requests.append(list(engine.requests.values())[-1])
    for number in range(200):
        for request, sent in zip(requests, told, strict=True):  # before anybody reads on
            assert request.output.token_ids[: len(sent)] == [token.id for token in sent]
        for late, (request, stream, sent) in enumerate(zip(requests, streams, told, strict=True)):
            if number % (late + 1) == 0 and len(sent) < len(request.output.token_ids):
                sent.append(next(stream))
        engine.step()
    for (length, count), stream, sent in zip(asked, streams, told, strict=True):
        sent += stream
        assert [token.id for token in sent] == naive(model, length, count)
        assert [token.finish_reason for token in sent] == [None] * (count - 1) + ["length"]
    counts = engine.scheduler.counts
    assert (
        counts.preemptions > 2
        and (counts.swapped_out > 0) == (swap_blocks > 0)
        and (counts.recomputed > 0) == (swap_blocks < 3)
    )
    assert any(record.swapped for record in engine.steps) == (swap_blocks > 0)
    assert all(record.swapped <= record.waiting for record in engine.steps)
    assert nothing_is_held(engine)


def test_run_tells_each_token_once_whoever_is_preempted(model):
    engine = engine_of(model, 9, 4, watermark=0)
    requests = [ask(engine, length, 10) for length in (5, 12, 2, 14)]
    told = finish(engine)
    assert engine.scheduler.counts.preemptions > 0
    for request in requests:
        assert [token.id for id, token in told if id == request.id] == request.output.token_ids
        assert request.output.token_ids == naive(model, len(request.output.prompt_ids), 10)


# ---- what preemption costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_blocks", [1, 7])
def test_costs_are_measured_on_this_engine_and_leave_no_trace(swap_blocks, model):
    engine = engine_of(model, 20, 4, swap_blocks, "auto")
    cost = engine.measure_cost()
    assert (cost.config, cost.dtype) == (model.config, torch.float64)
    assert (
        0 < cost.flops < float("inf")
        and 0 < cost.bandwidth < float("inf")
        and 0 < cost.overhead < float("inf")
    )
    assert cost.recompute(40) > cost.recompute(10) > 0 and cost.swap(40) > cost.swap(10) > 0
    assert nothing_is_held(engine) and not engine.scheduler.moves and not engine.steps
    request = ask(engine, 9, 6)
    finish(engine)
    assert request.output.token_ids == naive(model, 9, 6)


def test_no_more_blocks_are_moved_on_trial_than_a_sequence_can_have(model, monkeypatch):
    """Catches: a start that copies all memory there is, several times, and needs as much again to do so."""
    engine = engine_of(model, 500, 4, 400, "auto")
    most, move = [0], engine.cache.move

    def count(moves):
        most[0] = max(most[0], len(moves))
        move(moves)

    monkeypatch.setattr(engine.cache, "move", count)
    engine.measure_cost()
    assert most == [2 * 64 // 4]  # out and in, for the 64 positions of the model


@pytest.mark.parametrize(
    "flops, bandwidth, cheaper", [(1.0, 1e30, "swap"), (1e30, 1.0, "recompute")]
)
def test_auto_does_what_is_cheaper(flops, bandwidth, cheaper, model):
    engine = engine_of(model, 9, 4, 20, "auto", watermark=0)
    asked = []

    def cheaper_of(tokens):
        asked.append(tokens)
        return Cost(model.config, torch.float64, flops, bandwidth).cheaper(tokens)

    engine.scheduler.cheaper = cheaper_of
    requests = [ask(engine, length, 10) for length in (5, 12, 2, 14)]
    finish(engine)
    counts = engine.scheduler.counts
    assert len(asked) == counts.preemptions > 0
    assert counts.swapped_out == (counts.preemptions if cheaper == "swap" else 0)
    assert all(tokens > 0 for tokens in asked)
    assert [request.output.token_ids for request in requests] == [
        naive(model, length, 10) for length in (5, 12, 2, 14)
    ]


def test_only_auto_is_measured(model):
    """Whoever was told what to do need not try it out first."""
    assert isinstance(engine_of(model, 9, 4, 9, "auto").scheduler.cheaper.__self__, Cost)
    for swap_blocks, preemption in ((9, "swap"), (9, "recompute"), (0, "auto")):
        assert not hasattr(
            engine_of(model, 9, 4, swap_blocks, preemption).scheduler.cheaper, "__self__"
        )


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_default_pool_holds_eight_whole_contexts(model):
    engine = Engine(model, sanitize=True)
    pool = engine.scheduler.pool
    assert (pool.block_size, pool.count, engine.scheduler.max_sequences) == (16, 8 * 64 // 16, 8)
    assert engine.cache.bytes == 8 * 64 * CONFIG.kv_bytes_per_token(torch.float64)
    outputs = engine.generate([prompt_of(length) for length in (5, 9)], words(6))
    assert [output.token_ids for output in outputs] == [
        naive(model, length, 6) for length in (5, 9)
    ]


def test_the_default_pool_takes_no_more_than_half_of_what_is_free(model, monkeypatch):
    block = 16 * CONFIG.kv_bytes_per_token(torch.float64)
    monkeypatch.setattr("stage05_paged.engine.free_memory", lambda device: 20 * block)
    assert Engine(model).scheduler.pool.count == 10


def test_the_last_token_of_an_answer_needs_no_place(model):
    """13 tokens and 8 more are said, and the last of them is never computed: 20 positions, 5 blocks."""
    engine = engine_of(model, 5, 4)
    with pytest.raises(UserError) as error:
        ask(engine, 13, 9)
    assert str(error.value) == (
        "The prompt has 13 tokens and its answer up to 9: that takes 6 blocks of 4 tokens, and there are 5: ask for at most 8 "
        "tokens, or give more memory."
    )
    with pytest.raises(UserError, match="there are 5: shorten the prompt, or give more memory"):
        ask(engine, 21, 1)
    request = ask(engine, 13, 8)
    finish(engine)
    assert request.output.token_ids == naive(model, 13, 8)


def test_an_answer_is_not_counted_beyond_the_context(model):
    """A model of 64 positions says no more than fits, however much it is allowed to."""
    engine = engine_of(model, 16, 4)
    (output,) = engine.generate([prompt_of(60)], words(500))
    assert (output.token_ids, output.finish_reason) == (naive(model, 60, 500), "length")


# ---- what comes of it -----------------------------------------------------------------------------------------------


def test_run_yields_each_token_with_the_id_of_its_request(model):
    engine = engine_of(model, max_sequences=2)
    for id, length, count in (("a", 9, 4), ("b", 2, 1), ("c", 5, 3)):
        ask(engine, length, count, id)
    told = list(engine.run())
    for id, length, count in (("a", 9, 4), ("b", 2, 1), ("c", 5, 3)):
        mine = [token for whose, token in told if whose == id]
        assert [token.id for token in mine] == naive(model, length, count)
        assert [token.finish_reason for token in mine] == [None] * (count - 1) + ["length"]


def test_a_stop_gives_the_blocks_back_at_once(model):
    answer = naive(model, 9, 12)
    stop = answer[4]
    engine = engine_of(model, max_sequences=1)
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
    engine = Engine(model, eos_ids=(answer[3],), scheduler=Scheduler(BlockPool(20, 4)), sanitize=True)
    stops, goes_on = engine.generate(
        [prompt_of(9), prompt_of(9)], [SamplingParams(max_tokens=12), words(12)]
    )
    assert (stops.token_ids, stops.finish_reason) == (answer[: answer.index(answer[3]) + 1], "stop")
    assert (goes_on.token_ids, goes_on.finish_reason) == (answer, "length")


@pytest.mark.parametrize("length", [1, 62, 63])
def test_prompt_and_answer_fill_the_context_and_no_more(length, model):
    (output,) = engine_of(model).generate([prompt_of(length)], words(500))
    assert (output.token_ids, output.finish_reason) == (naive(model, length, 500), "length")
    assert len(output.token_ids) == 64 - length


def test_generate_keeps_the_order_of_the_prompts_and_drops_old_records(model):
    engine = engine_of(model, max_sequences=2, prefix_caching=False)
    engine.generate([prompt_of(3)], words(9))
    outputs = engine.generate([prompt_of(i) for i in (5, 1, 8)], [words(1), words(6), words(3)])
    assert [output.prompt_ids for output in outputs] == [prompt_of(i) for i in (5, 1, 8)]
    assert [len(output.token_ids) for output in outputs] == [1, 6, 3]
    assert sum(each.prefill_tokens for each in engine.steps) == 14


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
    "too much": (
        [1] * 9,
        SamplingParams(),
        "its answer up to 64: that takes 16 blocks of 4 tokens, and there are 12",
    ),
}


@pytest.mark.parametrize("prompt, params, message", BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_and_the_others_go_on(prompt, params, message, model):
    engine = engine_of(model, 12)
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
    first, bad, last = engine_of(model, 12).generate(prompts, [words(6), params, words(6)])
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


def test_without_chunks_a_prompt_over_the_budget(model):
    engine = engine_of(model, max_sequences=2, token_budget=8, chunked=False)
    bad, fits = engine.generate([prompt_of(9), prompt_of(8)], words(4))
    assert bad.finish_reason == "error" and "allow chunks, or raise the budget" in (bad.error or "")
    assert fits.token_ids == naive(model, 8, 4)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_id_is_taken_while_its_request_is_in_the_engine(steps, model):
    engine = engine_of(model)
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


def test_names_that_the_engine_gives_are_not_taken(model):
    engine = engine_of(model)
    ask(engine, 2, 1, "request-1")
    given = [ask(engine, 2, 1), *engine.add_samples(prompt_of(2), [words(2)] * 3)]
    given.append(engine.fork(given[1].id))
    assert len({"", "request-1", *(each.id for each in given)}) == 7


def test_a_request_that_has_ended_cannot_be_added_again(model):
    engine = engine_of(model)
    request = ask(engine, 2, 1)
    finish(engine)
    with pytest.raises(RuntimeError, match="from finished to waiting"):
        engine.add(request)
    assert nothing_is_held(engine)


# ---- abort ----------------------------------------------------------------------------------------------------------


def waits(engine):
    return ask(engine, 26, 8)


def is_in_the_middle_of_its_prompt(engine):
    victim = ask(engine, 26, 8)
    for _ in range(2):
        engine.step()
    assert 0 < victim.computed < 26
    return victim


def decodes(engine):
    victim = ask(engine, 26, 8)
    while len(victim.output.token_ids) < 3:
        engine.step()
    return victim


def is_preempted(engine):
    engine.scheduler.preemption = "recompute"
    victim = decodes(engine)
    engine.scheduler.preempt(victim)
    return victim


def is_swapped_out(engine):
    victim = decodes(engine)
    engine.scheduler.preempt(victim)
    engine.scheduler.max_sequences = 2  # no room for it
    engine.step()
    assert engine.scheduler.swapped[victim]
    return victim


def is_a_sample_that_waits(engine):
    return engine.add_samples(prompt_of(26), [drawn(8, seed) for seed in range(3)])[1]


def computes_the_prompt_of_samples(engine):
    victim, *_ = engine.add_samples(prompt_of(26), [drawn(8, seed) for seed in range(3)])
    for _ in range(2):
        engine.step()
    return victim


def shares_its_blocks(engine):
    victim = decodes(engine)
    engine.fork(victim.id, drawn(9, 1))
    return victim


@pytest.mark.parametrize(
    "get",
    [
        waits,
        is_in_the_middle_of_its_prompt,
        decodes,
        is_preempted,
        is_swapped_out,
        is_a_sample_that_waits,
        computes_the_prompt_of_samples,
        shares_its_blocks,
    ],
)
def test_abort_wherever_it_is(get, model):
    """What it has said is returned, its memory comes back, and nobody else notices."""
    engine = engine_of(model, 40, 4, 20, "swap", max_chunk=8)
    others = [ask(engine, 9, 20), ask(engine, 15, 20)]
    victim = get(engine)
    table, said = engine.scheduler.tables[victim], list(victim.output.token_ids)
    assert engine.abort(victim.id) is victim.output
    assert (victim.state, victim.output.finish_reason, victim.output.token_ids) == (
        State.FINISHED,
        "abort",
        said,
    )
    assert (
        table.blocks == []
        and victim not in engine.scheduler.tables
        and victim not in engine.scheduler.swapped
    )
    engine.scheduler.max_sequences = 9
    rest = [request for request in engine.requests.values() if request not in others]
    finish(engine)
    assert nothing_is_held(engine)
    assert [request.output.token_ids for request in others] == [
        naive(model, length, 20) for length in (9, 15)
    ]
    for request in rest:
        beginning = 3 if get is shares_its_blocks else 0
        assert request.output.token_ids == go_on(model, request, beginning, request.sampling)


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
    with pytest.raises(UserError, match=f"There is no request '{how}' in the engine"):
        engine.abort(how)
    finish(engine)
    assert other.output.token_ids == naive(model, 5, 6)


# ---- a pass that fails ----------------------------------------------------------------------------------------------


@pytest.fixture
def broken(model):
    """broken(): the next pass of the real model raises an error."""
    handles: list = []

    def fail(module, given):
        handles.pop().remove()
        raise RuntimeError("out of memory")

    yield lambda: handles.append(model.register_forward_pre_hook(fail))
    for handle in handles:
        handle.remove()


def test_a_pass_that_fails_ends_its_requests_and_no_other(model, broken):
    engine = engine_of(model, 12, 4, max_sequences=3)
    a = ask(engine, 9, 8, "a")
    samples = engine.add_samples(prompt_of(9), [words(8)] * 2, ids=["b", "c"])
    d, e = ask(engine, 5, 8, "d"), ask(engine, 7, 8, "e")
    broken()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    failed = engine.fail(UserError("The pass failed."))
    assert failed == [a, *samples, d]  # c waited for b
    assert {(each.output.finish_reason, each.output.error) for each in failed} == {
        ("error", "The pass failed.")
    }
    assert list(engine.requests) == ["e"] and engine.scheduler.pool.owned == 0
    finish(engine)
    assert e.output.token_ids == naive(model, 7, 8)
    assert engine.generate([prompt_of(9)], words(8))[0].token_ids == naive(model, 9, 8)
    assert nothing_is_held(engine)


@pytest.mark.parametrize("before", ["a pass", "a pass that failed"])
def test_a_failure_outside_of_a_pass_ends_everybody(before, model, broken, monkeypatch):
    """Here it is the wipe of a new block that fails."""
    engine = engine_of(model, 12, 4, max_sequences=1)
    asked = [ask(engine, 8, 8), ask(engine, 5, 8)]
    if before == "a pass":
        engine.step()
    else:
        broken()
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        assert engine.fail(UserError("The pass failed.")) == [asked.pop(0)]

    def fail(moves):
        assert moves
        raise RuntimeError("no memory to move to")

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "move", fail)
        with pytest.raises(RuntimeError, match="no memory to move to"):
            engine.step()
    assert engine.fail(UserError("Memory failed.")) == asked
    assert nothing_is_held(engine) and not engine.scheduler.moves
    assert engine.generate([prompt_of(9)], words(8))[0].token_ids == naive(model, 9, 8)


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_ends_with_the_reason(model):
    told = list(engine_of(model).stream(prompt_of(5), words(6)))
    assert [token.id for token in told] == naive(model, 5, 6)
    assert [token.finish_reason for token in told] == [None] * 5 + ["length"]


def test_several_streams_read_in_turn(model):
    """Whoever asks for a token moves all of them on, and nobody misses one."""
    engine = engine_of(model, max_sequences=2)
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
    assert nothing_is_held(engine)


def test_a_stream_that_was_moved_on_by_others_still_tells_all(model):
    engine = engine_of(model)
    slow = engine.stream(prompt_of(5), words(6))
    told = [next(slow).id]
    list(engine.stream(prompt_of(2), words(20)))  # by now the slow one has ended, too
    assert engine.requests == {}
    assert told + [token.id for token in slow] == naive(model, 5, 6)


def test_a_closed_stream_is_aborted(model):
    engine = engine_of(model, max_sequences=1)
    closed = engine.stream(prompt_of(5), words(30))
    next(closed)
    waits = ask(engine, 9, 4)
    assert len(engine.requests) == 2 and engine.scheduler.pool.owned == 2
    closed.close()
    assert list(engine.requests.values()) == [waits]
    assert engine.scheduler.pool.owned == 0
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
    engine = engine_of(model, prefix_caching=False)
    with pytest.raises(UserError, match="empty"):
        next(engine.stream([], words(3)))
    sick = engine.stream(prompt_of(4), words(30))
    next(sick)
    (request,) = engine.requests.values()
    engine.cache.kv[:, :, :, engine.scheduler.tables[request].blocks] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        next(sick)
    assert nothing_is_held(engine)

"""The proof: whatever comes and goes beside it, a request gets the tokens of the naive engine, to the last one.

All in float64, where the tokens must be equal. The crowds are random, and always the same random.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.checkpoint import Config
from shared.course import stages
from shared.course.testing import random_checkpoint
from shared.parity import random_prompt
from stage01_forward.attention import Recompute
from stage01_forward.engine import Engine as Naive
from stage01_forward.sampling import SamplingParams, sample
from stage03_batching.engine import Engine as Static
from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage04_continuous.scheduler import POLICIES, Scheduler

B = 16  # the size around which chunks are cut
GREEDY = SamplingParams(
    max_tokens=64, logprobs=0
)  # with the numbers behind each token: they move before a token does
SAMPLED = SamplingParams(
    max_tokens=24,
    temperature=0.9,
    top_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=11,
    logprobs=3,
)


@pytest.fixture(scope="module")
def model():
    """Weights so wide that an answer has many words: a model that says one word for ever proves nothing."""
    config = Config(101, 96, 24, 3, 2, name="longer")
    return stages.load_model(random_checkpoint(config, spread=24), dtype=torch.float64)


@pytest.fixture(scope="module")
def pool(model, prompts):
    """200 prompts of 1 to 30 tokens, and the 64 tokens that the naive engine says to each.

    It takes a pass over everything for each token, 12,800 of them. So a static batch answers, and then one pass over each prompt
    and its answer, whose rows are what the naive engine would see, must choose the same tokens; its log-probabilities are kept.
    """
    entries = Static(model, max_batch=200).generate(prompts(model.config, 200, 30), GREEDY)
    for entry in entries:
        tokens, entry.logprobs = in_one_pass(model, entry.prompt_ids, entry.token_ids)
        assert tokens == entry.token_ids
    return entries


@torch.inference_mode()
def in_one_pass(model, prompt, answer):
    """What the naive engine would say at each place of `answer`, given all before it: tokens and log-probabilities."""
    ids = torch.tensor(prompt + answer[:-1])
    hidden = model(ids, torch.arange(len(ids)), Recompute().attend)[len(prompt) - 1 :]
    count = len(answer)
    tokens, logprobs = sample(
        model.logits(hidden), [GREEDY] * count, [((), ())] * count, [None] * count
    )
    return tokens.tolist(), logprobs


def test_one_pass_over_an_answer_is_the_naive_engine(model, pool):
    for entry, naive in zip(
        pool, Naive(model).generate([entry.prompt_ids for entry in pool[:5]], GREEDY), strict=False
    ):
        assert entry.token_ids == naive.token_ids
        assert_close(entry.logprobs, naive.logprobs)


def engine_of(model, slots, budget=None, **options):
    return Engine(
        model, scheduler=Scheduler(slots, max(slots, 32) if budget is None else budget, **options)
    )


def random_engine(model, rng):
    slots = rng.randint(1, 9)
    return engine_of(
        model,
        slots,
        rng.choice([slots, slots + 1, slots + rng.randint(2, 40), 256]),
        max_chunk=rng.choice([None, None, 1, 3, B - 1, B]),
        policy=rng.choice(POLICIES),
        patience=rng.randint(1, 20),
    )


def drive(engine, arrivals, aborts=None):
    """Steps until everything has ended. Before step i, the requests `arrivals[i]` join and the ids `aborts[i]` leave, if they
    are still there."""
    aborts = aborts or {}
    last, step = max([*arrivals, *aborts]), 0
    while engine.scheduler.unfinished or step <= last:
        for request in arrivals.get(step, ()):
            engine.add(request)
        for id in aborts.get(step, ()):
            if id in engine.requests:
                assert engine.abort(id).finish_reason == "abort"
        engine.step()
        step += 1
    check(engine)


def check(engine):
    """What every record of every run must say."""
    scheduler = engine.scheduler
    slots = engine.cache.slots
    for record, following in zip(engine.steps, [*list(engine.steps)[1:], None], strict=True):
        assert 1 <= record.rows <= slots
        assert record.prefill_tokens + record.decode_tokens <= scheduler.token_budget
        assert record.wasted_tokens == 0
        assert record.rows == len(record.slots) == len({each.slot for each in record.slots})
        assert len({each.request_id for each in record.slots}) == record.rows
        assert record.prefill_tokens == sum(each.prefill_tokens for each in record.slots)
        assert record.decode_tokens == sum(each.decode_tokens for each in record.slots)
        assert all(each.prefill_tokens + each.decode_tokens >= 1 for each in record.slots)
        if record.waiting:  # then all slots are at work, or the budget is used up
            assert (
                record.rows == slots
                or record.prefill_tokens + record.decode_tokens == scheduler.token_budget
            )
        if following is not None:  # who shared a slot in turn: the first had ended
            owners = {each.slot: each for each in record.slots}
            for each in following.slots:
                before = owners.get(each.slot)
                if before is not None and before.finish_reason is not None:
                    assert before.request_id != each.request_id
    assert (scheduler.waiting, scheduler.running, engine.requests) == ([], [], {})
    assert sorted(scheduler.free_slots) == list(range(slots))
    assert not bool(engine.cache.kv.any())  # every slot is wiped


def request_of(entry, count, **options):
    """A request for the first `count` tokens of an entry of the pool."""
    return Request(entry.prompt_ids, replace(GREEDY, max_tokens=count), **options)


def assert_told(entry, request, count, reason="length"):
    """`request` has said the first `count` tokens of the entry, and with the same certainty."""
    assert (request.output.token_ids, request.output.finish_reason) == (
        entry.token_ids[:count],
        reason,
    )
    assert_close(request.output.logprobs, entry.logprobs[:count])


def assert_close(got, want):
    """Log-probabilities as the other engine gave them: two orders of adding lie some 1e-14 apart."""
    assert [[id for id, _ in each.top] for each in got] == [
        [id for id, _ in each.top] for each in want
    ]
    apart = [
        abs(a - b)
        for mine, its in zip(got, want, strict=True)
        for a, b in zip(numbers(mine), numbers(its), strict=True)
    ]
    assert max(apart, default=0.0) < 1e-9


def numbers(logprobs):
    return [logprobs.token, logprobs.highest, *(value for _, value in logprobs.top)]


# ---- parity ---------------------------------------------------------------------------------------------------------


def test_200_prompts_by_64_tokens_with_random_arrivals_and_aborts(model, pool):
    """240 requests join at random steps; 40 of them are aborted at random moments, and the 200 others get every token."""
    rng = random.Random(4)
    engine = engine_of(model, 13, 48, max_chunk=B)
    arrivals: dict[int, list[Request]] = {}
    aborts: dict[int, list[str]] = {}
    requests = []
    for number in range(240):
        request = request_of(pool[number % 200], 64, id=str(number))
        requests.append(request)
        step = rng.randrange(900)
        arrivals.setdefault(step, []).append(request)
        if number >= 200:
            aborts.setdefault(step + rng.randrange(60), []).append(request.id)
    drive(engine, arrivals, aborts)
    for entry, request in zip(pool, requests[:200], strict=True):
        assert_told(entry, request, 64)
    partly = [len(request.output.token_ids) for request in requests[200:]]
    for entry, request, said in zip(pool, requests[200:], partly, strict=False):
        assert_told(entry, request, said, "abort")
    assert 0 in partly and max(partly) > 30  # early and late
    assert (
        sum(record.prefill_tokens > 0 and record.decode_tokens > 0 for record in engine.steps) > 200
    )


@pytest.mark.parametrize("slots, budget", [(1, 1), (1, 32), (3, B), (7, 7), (8, 256), (40, 64)])
def test_all_at_once_with_any_slots_and_budget(slots, budget, model, pool):
    engine = engine_of(model, slots, budget)
    requests = [request_of(entry, 16) for entry in pool[:30]]
    drive(engine, {0: requests})
    for entry, request in zip(pool[:30], requests, strict=True):
        assert_told(entry, request, 16)


def test_solo(model, pool):
    engine = engine_of(model, 4)
    for entry in pool[:30]:
        (output,) = engine.generate([entry.prompt_ids], replace(GREEDY, max_tokens=16))
        assert (output.token_ids, output.finish_reason) == (entry.token_ids[:16], "length")
        assert [record.rows for record in engine.steps] == [1] * 16


@pytest.mark.parametrize("slots, budget", [(4, B), (9, 64)])
@pytest.mark.parametrize("max_chunk", [1, B - 1, B, B + 1])
def test_chunked_prefill_with_staggered_arrivals(max_chunk, slots, budget, model, pool):
    """Prompts of 1 to 30 tokens and of 3 * B and around, one more before each step, cut at every size around B."""
    rng = random.Random(max_chunk)
    long = [random_prompt(length, model.config, "long") for length in (3 * B - 1, 3 * B, 3 * B + 1)]
    entries = Naive(model).generate(long, replace(GREEDY, max_tokens=16)) + pool[:30]
    entries[1:] = rng.sample(entries[1:], len(entries) - 1)
    requests = [request_of(entry, 16) for entry in entries]
    engine = engine_of(model, slots, budget, max_chunk=max_chunk)
    drive(engine, {step: [request] for step, request in enumerate(requests)})
    for entry, request in zip(entries, requests, strict=True):
        assert_told(entry, request, 16)
    largest = max(each.prefill_tokens for record in engine.steps for each in record.slots)
    assert largest == min(max_chunk, budget)


def test_without_chunks(model, pool):
    engine = engine_of(model, 5, 30, chunked=False)
    requests = [request_of(entry, 16) for entry in pool[:30]]
    arrivals = {2 * step: [request] for step, request in enumerate(requests)}
    while (
        engine.scheduler.unfinished or arrivals
    ):  # records differ: a whole prompt may have to wait for budget
        for request in arrivals.pop(len(engine.steps), ()):
            engine.add(request)
        engine.step()
    for entry, request in zip(pool[:30], requests, strict=True):
        assert_told(entry, request, 16)
    lengths = {request.id: len(request.output.prompt_ids) for request in requests}
    chunks = [
        (each.request_id, each.prefill_tokens)
        for record in engine.steps
        for each in record.slots
        if each.prefill_tokens
    ]
    assert dict(chunks) == lengths and len(chunks) == 30


def test_abort_at_any_moment_changes_nobody_else(model, pool):
    """The same crowd again and again, and the victim leaves before another step each time: while it waits, between two
    chunks of its prompt, while it decodes."""
    found = set()
    for moment in range(22):
        engine = engine_of(model, 3, 12, max_chunk=5)
        others = [request_of(pool[i], 8) for i in (17, 29, 4, 11, 21)]
        victim = request_of(pool[25], 8, id="victim")  # 26 tokens
        prompt = len(victim.output.prompt_ids)
        for request in [*others[:3], victim, *others[3:]]:
            engine.add(request)
        for _ in range(moment):
            engine.step()
        if "victim" not in engine.requests:
            break
        state, computed, slot = victim.state.value, victim.computed, victim.slot
        found.add((state, computed and computed < prompt, bool(victim.output.token_ids)))
        free, waiting = (
            list(engine.scheduler.free_slots),
            [each for each in engine.scheduler.waiting if each is not victim],
        )
        output = engine.abort("victim")
        assert output is victim.output
        assert_told(pool[25], victim, len(output.token_ids), "abort")
        assert sorted(engine.scheduler.free_slots) == sorted(free + ([slot] if slot >= 0 else []))
        assert slot < 0 or not bool(engine.cache.kv[:, :, slot].any())
        engine.step()
        if slot >= 0 and waiting:
            assert min(engine.scheduler.free_slots, default=99) > slot  # filled again at once
        for _ in engine.run():
            pass
        check(engine)
        for i, request in zip((17, 29, 4, 11, 21), others, strict=True):
            assert_told(pool[i], request, 8)
        assert not any(
            each.request_id == "victim"
            for record in list(engine.steps)[moment:]
            for each in record.slots
        )
    assert found == {("waiting", 0, False), ("running", True, False), ("running", False, True)}
    assert "victim" not in engine.requests  # the loop saw it through to its end


# ---- batch invariance -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def needles(model):
    """(prompt, sampling, answer alone) of two needles: one greedy, one sampled with everything that a neighbour could upset."""
    found = []
    for length, params in ((23, replace(GREEDY, max_tokens=24, logprobs=3)), (9, SAMPLED)):
        prompt = random_prompt(length, model.config, "needle")
        (naive,) = Naive(model).generate([prompt], params)
        (alone,) = Engine(model).generate([prompt], params)
        assert (alone.token_ids, alone.finish_reason) == (naive.token_ids, naive.finish_reason)
        assert_close(alone.logprobs, naive.logprobs)
        found.append((prompt, params, naive))
    return found


def test_the_answers_are_worth_comparing(pool, needles):
    """Answers of one word repeated would be the same whatever was wrong."""
    assert sum(len(set(entry.token_ids)) for entry in pool) > 10 * len(pool)
    assert len({tuple(entry.token_ids[-8:]) for entry in pool}) > 150
    assert all(len(set(alone.token_ids)) > 8 for _, _, alone in needles)


@pytest.mark.parametrize("crowd", range(50))
def test_a_needle_says_the_same_alone_and_in_any_crowd(crowd, model, pool, needles):
    """Slots, chunks, budget, policy, neighbours, their sampling, arrivals and aborts are all random."""
    rng = random.Random(f"crowd {crowd}")
    engine = random_engine(model, rng)
    arrivals: dict[int, list[Request]] = {}
    aborts: dict[int, list[str]] = {}
    mine = []
    for prompt, params, _ in needles:
        request = Request(prompt, params, priority=rng.randint(-2, 2))
        mine.append(request)
        arrivals.setdefault(rng.randrange(15), []).append(request)
    for number in range(rng.randint(1, 14)):
        sampling = replace(
            rng.choice([GREEDY, SAMPLED]),
            max_tokens=rng.randint(1, 20),
            seed=rng.choice([None, 11, number]),
        )
        request = Request(
            rng.choice(pool).prompt_ids,
            sampling,
            id=f"neighbour {number}",
            priority=rng.randint(-2, 2),
        )
        step = rng.randrange(25)
        arrivals.setdefault(step, []).append(request)
        if rng.random() < 0.3:
            aborts.setdefault(step + rng.randrange(20), []).append(request.id)
    for requests in arrivals.values():
        rng.shuffle(requests)
    drive(engine, arrivals, aborts)
    for request, (_, _, alone) in zip(mine, needles, strict=True):
        assert (request.output.token_ids, request.output.finish_reason) == (
            alone.token_ids,
            alone.finish_reason,
        )
        assert_close(request.output.logprobs, alone.logprobs)


def test_what_a_neighbour_says_never_leaks_not_even_in_the_last_bit(model):
    """Another shape of the batch may round differently, which only float64 hides. The same shape must not: in float32, other
    neighbours of the same lengths leave every bit of the needle's logits as it was."""
    narrow = stages.load_model(random_checkpoint(model.config, spread=24), dtype=torch.float32)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=5)
    heard, others = [], set()
    for seed in range(4):
        engine = engine_of(narrow, 4, 12)
        neighbours = [
            random_prompt(length, model.config, f"other {seed}") for length in (5, 17, 9, 2, 12)
        ]
        first, needle, *_ = engine.generate(
            [neighbours[0], [7, 8, 9, 10, 11, 12, 13], *neighbours[1:]], params
        )
        heard.append((needle.token_ids, needle.logprobs))
        others.add(tuple(first.token_ids))
    assert heard == [heard[0]] * 4
    assert len(others) == 4


# ---- slots: nothing of the last tenant, nothing of a sick neighbour ----------------------------------------------------


@pytest.mark.parametrize(
    "when", [1, 2, 3, 6], ids=["first chunk", "second chunk", "end of prompt", "decoding"]
)
def test_poison_stays_with_its_request_and_goes_with_it(when, model, pool):
    """NaN in a request's keys and values: it alone ends with "error", and the next tenant of its slot never meets it."""
    engine = engine_of(model, 3, 32, max_chunk=10)
    sick = request_of(pool[25], 20, id="sick")  # 26 tokens: 3 chunks
    healthy = [request_of(pool[i], 20) for i in (8, 16)]
    later = [request_of(pool[i], 20) for i in (29, 3)]
    for request in (healthy[0], sick, healthy[1], *later):
        engine.add(request)
    for _ in range(when):
        engine.step()
    slot, said = sick.slot, len(sick.output.token_ids)
    engine.cache.kv[:, :, slot, :, : sick.computed] = torch.nan
    for _ in engine.run():
        pass
    check(engine)
    assert (sick.output.finish_reason, len(sick.output.token_ids)) == ("error", said)
    assert sick.output.error is not None and "NaN or infinite" in sick.output.error
    for i, request in zip((8, 16, 29, 3), healthy + later, strict=True):
        assert_told(pool[i], request, 20)
    tenants = [
        each.request_id for record in engine.steps for each in record.slots if each.slot == slot
    ]
    assert list(dict.fromkeys(tenants))[:2] == ["sick", later[0].id]


def test_everybody_sick_ends_everybody_and_the_engine_lives(model, pool):
    engine = engine_of(model, 2)
    sick = [engine.add(request_of(pool[i], 20)) for i in (4, 9)]
    engine.step()
    engine.cache.kv[:] = torch.nan
    assert engine.step() == []
    assert [request.output.finish_reason for request in sick] == ["error"] * 2
    engine.cache.kv[:] = (
        0  # NaN beyond what the two had used was planted too, and no tenant of a slot can do that
    )
    assert engine.generate([pool[3].prompt_ids], GREEDY)[0].token_ids == pool[3].token_ids


def test_positions_begin_anew_in_a_slot_used_again(model, pool):
    """One slot, one tenant after another, the longer before the shorter and the other way round."""
    engine = engine_of(model, 1)
    asked = []

    def spy(module, arguments):
        asked.append(arguments[1].tolist())

    handle = model.register_forward_pre_hook(spy)
    try:
        for i in (29, 0, 13, 29):
            asked.clear()
            request = engine.add(request_of(pool[i], 5))
            for _ in engine.run():
                pass
            assert_told(pool[i], request, 5)
            assert [p for passed in asked for p in passed] == list(
                range(len(pool[i].prompt_ids) + 4)
            )
    finally:
        handle.remove()


@pytest.mark.parametrize("slot_tokens", [2, 20, 31, 70])
def test_a_small_slot_ends_the_answer_and_changes_none_of_it(slot_tokens, model, pool):
    engine = Engine(model, scheduler=Scheduler(3, 32), slot_tokens=slot_tokens)
    entries = [entry for entry in pool[:30] if len(entry.prompt_ids) < slot_tokens]
    outputs = engine.generate([entry.prompt_ids for entry in entries], GREEDY)
    for entry, output in zip(entries, outputs, strict=True):
        assert output.token_ids == entry.token_ids[: slot_tokens - len(entry.prompt_ids)]
        assert output.finish_reason == "length"
    check(engine)


# ---- a second time: the cache is lost, as a preemption would lose it ------------------------------------------------


@pytest.mark.parametrize("max_chunk", [None, 1, 7, B])
@pytest.mark.parametrize("answered", [1, 2, 10])
def test_computing_again_goes_on_where_the_answer_was(answered, max_chunk, model, pool, needles):
    """Catches: a request that has an answer is taken for a decode, although its prompt must be computed again.

    The answer so far is part of what is computed, none of it is said twice, and a drawn answer goes on drawing.
    """
    engine = engine_of(model, 3, 24, max_chunk=max_chunk)
    neighbour = engine.add(request_of(pool[29], 40))
    prompt, params, alone = needles[1]
    greedy, drawn = engine.add(request_of(pool[6], 30)), engine.add(Request(prompt, params))
    while min(len(greedy.output.token_ids), len(drawn.output.token_ids)) < answered:
        engine.step()
    lost = (greedy, drawn)
    for request in lost:
        engine.cache.reset(request.slot, request.computed)
        request.computed = 0
        assert request.remaining == request.token_count
    before = len(engine.steps)
    for _ in engine.run():
        pass
    check(engine)
    assert_told(pool[6], greedy, 30)
    assert_told(pool[29], neighbour, 40)
    assert (drawn.output.token_ids, drawn.output.finish_reason) == (
        alone.token_ids,
        alone.finish_reason,
    )
    assert_close(drawn.output.logprobs, alone.logprobs)
    # The records call a prompt token a prompt token, the second time too, and every token is computed once more.
    for request in lost:
        after = [
            each
            for record in list(engine.steps)[before:]
            for each in record.slots
            if each.request_id == request.id
        ]
        assert sum(each.prefill_tokens for each in after) == len(request.output.prompt_ids)
        assert sum(each.decode_tokens for each in after) == len(request.output.token_ids) - 1

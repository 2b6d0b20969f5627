"""The proof: however memory is cut, shared, found again and taken away, a request gets the tokens of the naive engine.

All in float64, where the tokens must be equal and their log-probabilities too. The crowds are random, and always the same random.
Every engine here is watched by the sanitizer.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from shared.checkpoint import Config
from shared.course import stages
from shared.course.testing import random_checkpoint
from shared.parity import prove, random_prompt, scenarios
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import sampling_per_prompt
from stage01_forward.sampling import SamplingParams
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Scheduler

SIZES = (1, 3, 16, 128)
SMALL = (1, 3, 16)  # where a short answer crosses borders
SLOW = (
    pytest.mark.slow
)  # combinations of what a default run tries one by one: all of them take minutes
GREEDY = SamplingParams(
    max_tokens=12, logprobs=0
)  # with the numbers behind each token: they move before a token does
# Drawn tokens part a fork from its sibling at once. Of the penalties, only this one means the same to a fork, whose first tokens
# are an answer, as to the naive engine, which is given them as a prompt.
DRAWN = SamplingParams(
    max_tokens=12, temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=11, logprobs=3
)


class Oracle:
    """The naive engine, which works out each answer once."""

    def __init__(self, model):
        self.naive, self.said = Naive(model), {}

    def generate(self, prompts, sampling):
        return [
            self.answer(*each)
            for each in zip(prompts, sampling_per_prompt(prompts, sampling), strict=True)
        ]

    def answer(self, prompt, sampling):
        key = tuple(prompt), repr(sampling)
        if key not in self.said:
            (self.said[key],) = self.naive.generate([prompt], sampling)
        return self.said[key]


@pytest.fixture(scope="module")
def model():
    """Weights so wide that an answer has many words: a model that says one word for ever proves nothing."""
    config = Config(101, 288, 24, 2, 2, name="longer")
    return stages.load_model(random_checkpoint(config, spread=24), dtype=torch.float64)


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def tiny_oracle(tiny_model):
    return Oracle(tiny_model)


def engine_of(model, blocks, size, swap_blocks=0, preemption="recompute", **options):
    swap_pool = BlockPool(swap_blocks, size) if swap_blocks else None
    scheduler = Scheduler(
        BlockPool(blocks, size), preemption=preemption, swap_pool=swap_pool, **options
    )
    return Engine(model, scheduler=scheduler, sanitize=True)


def prompt_of(length, seed="prompt"):
    return [token % 101 for token in random_prompt(length, Config(101, 288, 24, 3, 2), seed)]


def blocks_for(tokens, size):
    return -(-tokens // size)


def fits(size, *requests):
    """Blocks that are enough for all `requests` at once."""
    return sum(
        blocks_for(len(each.output.prompt_ids) + each.sampling.max_tokens - 1, size)
        for each in requests
    )


def ask(engine, length, sampling=GREEDY, **options):
    return engine.add(Request(prompt_of(length), sampling, **options))


def finish(engine):
    """Run to the end."""
    drive(engine, {0: []})


def drive(engine, arrivals, aborts=None):
    """Steps until everything has ended. Before step i, the requests `arrivals[i]` join and the ids `aborts[i]` leave, if they
    are still there."""
    aborts = aborts or {}
    last, step = max([*arrivals, *aborts]), 0
    while engine.scheduler.unfinished or step <= last:
        assert step < 2000, "a live-lock: no crowd here has so many tokens"
        for request in arrivals.get(step, ()):
            engine.add(request)
        for id in aborts.get(step, ()):
            if id in engine.requests:
                assert engine.abort(id).finish_reason == "abort"
        engine.step()
        step += 1
    check(engine)


def check(engine):
    """What every record of every run must say, and that nothing is held when everybody has gone."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    for record in engine.steps:
        assert 1 <= record.rows == len(record.sequences) <= scheduler.max_sequences
        assert len({each.request_id for each in record.sequences}) == record.rows
        assert record.wasted_tokens == 0
        assert record.prefill_tokens == sum(each.prefill_tokens for each in record.sequences)
        assert record.decode_tokens == sum(each.decode_tokens for each in record.sequences)
        assert all(each.prefill_tokens + each.decode_tokens >= 1 for each in record.sequences)
        assert record.prefill_tokens + record.decode_tokens <= scheduler.token_budget
        assert (
            max(each.blocks for each in record.sequences)
            <= record.owned_blocks
            <= pool.count - record.cached_blocks
        )
        assert record.shared_blocks <= record.owned_blocks
        assert Counter(move.kind for move in record.moves)["copy"] <= record.rows
    for name in ("tables", "swapped", "samples", "moves", "waiting", "running", "_preempted"):
        assert not getattr(scheduler, name), name
    assert (pool.owned, pool.shared, pool.references) == (0, 0, [0] * pool.count)
    assert len(pool.free) + len(pool.cached) == pool.count
    if scheduler.swap_pool:
        assert len(scheduler.swap_pool.free) == scheduler.swap_pool.count
    assert not engine.requests


def assert_told(oracle, request, said=0):
    """`request` has said what the naive engine says, with the same certainty. A fork begins with `said` tokens of its parent's;
    one that was aborted may have said less."""
    output, given = request.output, request.output.token_ids[:said]
    answer = oracle.answer(
        output.prompt_ids + given,
        replace(request.sampling, max_tokens=request.sampling.max_tokens - said),
    )
    count = (
        len(output.token_ids) - said if output.finish_reason == "abort" else len(answer.token_ids)
    )
    assert output.token_ids[said:] == answer.token_ids[:count]
    assert output.finish_reason in ("abort", answer.finish_reason)
    assert_close(output.logprobs[said:], answer.logprobs[:count])


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


def evict(engine, count):
    """Memory is needed for something else: the `count` blocks whose use is longest ago are evicted from the prefix cache."""
    pool = engine.scheduler.pool
    for block in [pool.take() for _ in range(len(pool.free) + count)]:
        pool.give_back(block)


# ---- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, prefix_caching",
    [(size, True) for size in SIZES]
    + [(3, False), (128, False)]
    + [pytest.param(size, False, marks=SLOW) for size in (1, 16)],
)
def test_all_scenarios(size, prefix_caching, tiny_model, tiny_oracle):
    """With the prefix cache each of them twice: the second time, what was said is found again."""
    blocks = 3 * blocks_for(tiny_model.config.n_positions, size)
    engine = engine_of(tiny_model, blocks, size, prefix_caching=prefix_caching, max_sequences=48)
    for scenario in scenarios(tiny_model.config):
        for _ in range(1 + prefix_caching):
            parity = prove(engine, tiny_oracle, SamplingParams, [scenario.name])
            assert parity.sequences == len(scenario.prompts) and not parity.near_ties
    check(engine)
    assert (engine.scheduler.counts.hit_tokens > 0) == (
        prefix_caching and size < 128
    )  # these are never full


@pytest.mark.parametrize("size", SIZES)
def test_all_scenarios_in_memory_for_one(size, tiny_model, tiny_oracle):
    """The pool holds one context, so that neighbours preempt each other."""
    blocks = blocks_for(tiny_model.config.n_positions, size)
    engine = engine_of(tiny_model, blocks, size, max_sequences=48)
    assert prove(engine, tiny_oracle, SamplingParams).near_ties == []
    check(engine)
    assert (engine.scheduler.counts.preemptions > 0) == (size < 128)  # there is one block of 128


def test_the_answers_are_worth_comparing(oracle):
    """Answers of one word repeated would be the same whatever was wrong."""
    lengths = (1, 5, 9, 15, 16, 17, 23, 26)
    answers = [
        oracle.answer(prompt_of(length), replace(GREEDY, max_tokens=18)).token_ids
        for length in lengths
    ]
    answers += [
        oracle.answer(prompt_of(5), replace(DRAWN, max_tokens=18, seed=seed)).token_ids
        for seed in range(8)
    ]
    assert sum(len(set(answer)) for answer in answers) > 10 * len(answers)
    assert len({tuple(answer[-8:]) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    "size, max_chunk",
    [(size, None) for size in SIZES]
    + [(3, 7), (128, 7)]
    + [pytest.param(size, 7, marks=SLOW) for size in (1, 16)],
)
def test_lengths_around_a_block_border(size, max_chunk, model, oracle):
    """Prompts of 1, B - 1, B, B + 1 and 2B tokens, alone and together, then all of them again; the answers cross borders."""
    lengths = sorted({1, size - 1, size, size + 1, 2 * size} - {0})
    requests = [Request(prompt_of(length), GREEDY) for length in lengths]
    engine = engine_of(model, 2 * fits(size, *requests), size, max_chunk=max_chunk)
    for length in lengths:
        request = ask(engine, length)
        finish(engine)
        assert_told(oracle, request)
    for _ in range(2):
        requests = [ask(engine, length) for length in lengths]
        finish(engine)
        for request in requests:
            assert_told(oracle, request)
    crossed = [length // size < (length + GREEDY.max_tokens - 1) // size for length in lengths]
    assert any(crossed)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_taken_for_the_token_that_needs_it_and_not_before(size, model, oracle):
    """Catches: a block border that is off by one, which takes a block a token late or early."""
    for length in sorted({1, size - 1, size, size + 1, 2 * size} - {0}):
        engine = engine_of(
            model, 2 * blocks_for(length + GREEDY.max_tokens, size), size, prefix_caching=False
        )
        request = ask(engine, length)
        finish(engine)
        assert_told(oracle, request)
        tokens = [
            length + number for number in range(GREEDY.max_tokens)
        ]  # in the cache after each pass
        assert [record.used_tokens for record in engine.steps] == tokens
        assert [record.owned_blocks for record in engine.steps] == [
            blocks_for(count, size) for count in tokens
        ]


@pytest.mark.parametrize("size", SIZES)
def test_alone_in_the_smallest_pool_that_it_fits(size, model, oracle):
    """The last token of an answer is never computed, so it needs no place."""
    for length in (size, size + 1, 2 * size - 1):
        request = Request(prompt_of(length), replace(GREEDY, max_tokens=min(size, 16) + 1))
        engine = engine_of(model, fits(size, request), size)
        engine.add(request)
        finish(engine)
        assert_told(oracle, request)
        assert max(record.owned_blocks for record in engine.steps) == engine.scheduler.pool.count
        assert engine.scheduler.counts.preemptions == 0


# ---- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("running", [False, True], ids=["kept when free", "shared while in use"])
def test_any_common_beginning_is_found_in_whole_blocks(running, size, model, oracle):
    """Prompts that have their first 0 to all tokens in common with one that was there before."""
    first = prompt_of(35)
    for common in sorted({size - 1, size, size + 1, 2 * size, 33, 35}):
        engine = engine_of(model, blocks_for(150, size), size)
        sibling = engine.add(Request(first, GREEDY))
        engine.step()
        if not running:
            finish(engine)
        prompt = first[:common] + prompt_of(35, "another")[common:]
        request = engine.add(Request(prompt, DRAWN))
        before = len(engine.steps)
        finish(engine)
        assert_told(oracle, request)
        assert_told(oracle, sibling)
        found = min(common, 34) // size * size
        assert engine.scheduler.counts.hit_tokens == found
        assert engine.steps[before].prefill_tokens == 35 - found
        assert engine.steps[before].shared_blocks == (found // size if running else 0)


@pytest.mark.parametrize("size", SMALL)
def test_a_prefix_of_which_the_end_was_evicted_is_found_as_far_as_it_is_there(size, model, oracle):
    computed = 36 + GREEDY.max_tokens - 1
    for gone in range(0, computed // size, 1 + 8 // size):
        engine = engine_of(model, blocks_for(150, size), size)
        ask(engine, 36)
        finish(engine)
        evict(engine, gone)
        request = ask(engine, 36, DRAWN)
        finish(engine)
        assert_told(oracle, request)
        kept = (
            computed // size - gone
        )  # the answer was kept, too, but another one is said this time
        assert engine.scheduler.counts.hit_tokens == max(0, min(kept, 35 // size) * size)


@pytest.mark.parametrize("size", SMALL)
def test_what_an_aborted_request_had_computed_is_found(size, model, oracle):
    """Aborted before each of its steps: in the middle of its prompt, and of its answer."""
    for steps in (0, 1, 2, 4, 6, 9):
        engine = engine_of(model, blocks_for(120, size), size, max_chunk=5)
        victim = ask(engine, 26)
        for _ in range(steps):
            engine.step()
        computed = victim.computed
        engine.abort(victim.id)
        request = ask(engine, 26, DRAWN)
        finish(engine)
        assert_told(oracle, victim)
        assert_told(oracle, request)
        assert engine.scheduler.counts.hit_tokens == min(computed, 25) // size * size


@pytest.mark.parametrize("size", SMALL)
def test_a_conversation_finds_its_own_answers(size, model, oracle):
    """Each turn's prompt is the whole talk so far: the answers are found like the prompts."""
    engine = engine_of(model, blocks_for(200, size), size)
    talk = prompt_of(10)
    for turn in range(4):
        hits = engine.scheduler.counts.hit_tokens
        request = engine.add(Request(talk, GREEDY))
        finish(engine)
        assert_told(oracle, request)
        if (
            turn
        ):  # all but the last token of the last answer, which nobody computed, and the new words
            assert engine.scheduler.counts.hit_tokens - hits == (len(talk) - 4) // size * size
        talk = talk + request.output.token_ids + prompt_of(3, turn)


@pytest.mark.parametrize("size", SMALL)
def test_a_cache_smaller_than_what_it_could_keep(size, model, oracle):
    """Requests with a few beginnings in common go through a pool that evicts all the time."""
    rng = random.Random(f"evictions {size}")
    engine = engine_of(
        model, blocks_for(80, size), size, token_budget=max(64, blocks_for(80, size))
    )
    for _ in range(25):
        sampling = replace(rng.choice([GREEDY, DRAWN]), max_tokens=10)
        request = ask(engine, rng.choice((7, 16, 20, 33, 48)), sampling)
        if rng.random() < 0.5:
            for _ in range(rng.randrange(8)):
                engine.step()
        else:
            finish(engine)
        if request.state is State.FINISHED:
            assert_told(oracle, request)
    finish(engine)
    counts = engine.scheduler.counts
    assert counts.hit_tokens > 0 and engine.scheduler.pool.evictions > 10


# ---- samples and forks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 30])
@pytest.mark.parametrize("size", SIZES)
def test_samples_share_the_prompt_and_nothing_else(size, length, model, oracle):
    engine = engine_of(model, 600 // size + 5, size)
    samples = engine.add_samples(
        prompt_of(length), [replace(DRAWN, seed=seed) for seed in range(4)] + [GREEDY]
    )
    finish(engine)
    for request in samples:
        assert_told(oracle, request)
    assert sum(record.prefill_tokens for record in engine.steps) == length
    assert (
        max(record.shared_blocks for record in engine.steps) == length // size
    )  # from the second pass on
    assert engine.scheduler.counts.copies == (4 if length % size else 0)


@pytest.mark.parametrize("who", ["nobody", "parent", "fork"])
@pytest.mark.parametrize("size", SMALL)
def test_fork_at_any_moment(size, who, model, oracle):
    """The same request again and again, forked before another step each time; then `who` leaves at once."""
    found = set()
    for moment in range(0, 27, 1 if who == "nobody" and size > 1 else 4):
        engine = engine_of(model, blocks_for(130, size), size, max_chunk=5, max_sequences=3)
        others = [
            ask(engine, 4, replace(DRAWN, max_tokens=4)),
            ask(engine, 9, replace(GREEDY, max_tokens=12)),
        ]
        hurdle = ask(engine, 7, replace(GREEDY, max_tokens=3))
        parent = ask(engine, 26, replace(DRAWN, max_tokens=10), id="parent")
        for _ in range(moment):
            engine.step()
        if "parent" not in engine.requests:
            break
        said = len(parent.output.token_ids)
        phase = "waiting" if parent.state is State.WAITING else "decoding" if said else "prefill"
        found.add((phase, parent.computed % size == 0))
        child = engine.fork("parent", replace(DRAWN, max_tokens=12, seed=5))
        assert child.computed in (0, parent.computed)
        if who != "nobody":
            engine.abort({"parent": parent, "fork": child}[who].id)
        finish(engine)
        assert child.output.token_ids[:said] == parent.output.token_ids[:said]
        assert_told(oracle, child, said)
        for request in (parent, hurdle, *others):
            assert_told(oracle, request)
    if who == "nobody":
        assert "parent" not in engine.requests  # the loop saw it through to its end
        assert {phase for phase, _ in found} == {"waiting", "prefill", "decoding"}
        assert {border for phase, border in found if phase == "decoding"} == (
            {True, False} if size > 1 else {True}
        )


@pytest.mark.parametrize("first", ["parent", "child", "grandchild", "nobody"])
@pytest.mark.parametrize("size", SMALL)
def test_fork_of_a_fork(size, first, model, oracle):
    """Three generations over one partly filled block, and `first` leaves first."""
    for steps in (1, 2, 3, 4, 7):
        engine = engine_of(model, blocks_for(140, size), size)
        parent = ask(engine, 10, replace(GREEDY, max_tokens=12), id="parent")
        for _ in range(steps):
            engine.step()
        said = len(parent.output.token_ids)
        child = engine.fork("parent", replace(DRAWN, seed=1, max_tokens=12), "child")
        both = engine.fork("child", replace(DRAWN, seed=2, max_tokens=12), "grandchild")
        assert engine.scheduler.pool.owned == blocks_for(parent.computed, size)
        if steps % 2:
            engine.step()
        if first != "nobody":
            engine.abort(first)
        finish(engine)
        assert_told(oracle, parent)
        assert_told(oracle, child, said)
        assert_told(oracle, both, said)


@pytest.mark.parametrize("victim", [0, 1, pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize("size", SMALL)
def test_abort_of_a_sample_at_any_moment(size, victim, model, oracle):
    """Whoever leaves, the first that computes the prompt too, the others get their answers."""
    for moment in (0, 3, 5, 8):
        engine = engine_of(model, blocks_for(150, size), size, max_chunk=5, max_sequences=4)
        ask(engine, 8)
        samples = engine.add_samples(
            prompt_of(19), [replace(DRAWN, max_tokens=8, seed=seed) for seed in range(4)]
        )
        for _ in range(moment):
            engine.step()
        engine.abort(samples[victim].id)
        finish(engine)
        for request in samples:
            assert_told(oracle, request)
        again = sum(
            each.prefill_tokens
            for record in engine.steps
            for each in record.sequences
            if each.request_id != "request-1"
        )
        assert again >= 19


@pytest.mark.parametrize("size", SMALL)
def test_samples_and_forks_with_hardly_any_memory(size, model, oracle):
    """Sharers are preempted and come back, and what they shared is by then somebody else's."""
    engine = engine_of(
        model,
        blocks_for(45, size) + 1,
        size,
        token_budget=64,
        swap_blocks=blocks_for(20, size),
        preemption="swap",
    )
    samples = engine.add_samples(
        prompt_of(19), [replace(DRAWN, max_tokens=20, seed=seed) for seed in range(5)]
    )
    forks = []
    for steps in (2, 3, 5, 8):
        for _ in range(steps):
            engine.step()
        parent = samples[steps % 5]
        if parent.id in engine.requests:
            forks.append(
                (
                    len(parent.output.token_ids),
                    engine.fork(parent.id, replace(DRAWN, max_tokens=18, seed=50 + steps)),
                )
            )
    finish(engine)
    for request in samples:
        assert_told(oracle, request)
    for said, request in forks:
        assert_told(oracle, request, said)
    counts = engine.scheduler.counts
    assert len(forks) == 4 and counts.preemptions > 5 and (counts.copies > 0) == (size > 1)


# ---- crowds ---------------------------------------------------------------------------------------------------------


def random_engine(model, rng):
    """Any block size, and memory from hardly enough for one to plenty."""
    size = rng.choice((1, 2, 3, 5, 16, 128))
    blocks = blocks_for(72, size) + rng.choice(
        [0, 0, 1, blocks_for(40, size), blocks_for(400, size)]
    )
    sequences = min(rng.randint(1, 9), blocks)
    return engine_of(
        model,
        blocks,
        size,
        swap_blocks=rng.choice([0, 1, blocks_for(60, size), 2 * blocks]),
        preemption="auto",
        max_sequences=sequences,
        token_budget=rng.choice([sequences, sequences + 1, sequences + rng.randint(2, 40), 256]),
        max_chunk=rng.choice([None, None, 1, 3, size]),
        chunked=rng.random() < 0.8,
        policy=rng.choice(POLICIES),
        patience=rng.randint(1, 20),
        prefix_caching=rng.random() < 0.7,
        watermark=rng.choice([0, 0.01, 0.2]),
    )


CROWDS = [*range(4), *(pytest.param(crowd, marks=SLOW) for crowd in range(4, 300))]


@pytest.mark.parametrize("crowd", CROWDS)
def test_everybody_says_the_same_alone_and_in_any_crowd(crowd, model, oracle):
    """Memory, blocks, chunks, budget, policy, arrivals, samples, forks, aborts and preemptions are all random."""
    rng = random.Random(f"crowd {crowd}")
    engine = random_engine(model, rng)
    scheduler = engine.scheduler
    scheduler.cheaper = lambda tokens: rng.choice(
        ["swap", "recompute"]
    )  # the measured costs would differ each time
    longest = scheduler.token_budget if not scheduler.chunked else 48
    told: list[tuple[Request, int]] = []
    for _ in range(120):
        event = rng.random()
        here = list(engine.requests.values())
        sampling = replace(
            rng.choice([GREEDY, DRAWN]), max_tokens=rng.choice((3, 18)), seed=rng.randrange(3)
        )
        prompt = prompt_of(min(longest, rng.choice((1, 5, 16, 17, 30, 48))))
        if event < 0.08 and len(here) < 20:
            request = Request(prompt, sampling, priority=rng.randint(-2, 2))
            told.append((engine.add(request, rng.choice([b"", b"", b"tenant"])), 0))
        elif event < 0.11 and len(here) < 20:
            told += [
                (each, 0)
                for each in engine.add_samples(
                    prompt, [replace(DRAWN, seed=seed) for seed in range(3)]
                )
            ]
        elif event < 0.17 and 0 < len(here) < 20:
            parent = rng.choice(here)
            fork = engine.fork(parent.id, replace(DRAWN, max_tokens=25, seed=rng.randrange(3)))
            told.append((fork, len(parent.output.token_ids)))
        elif event < 0.2 and here:
            engine.abort(rng.choice(here).id)
        elif event < 0.24 and scheduler.running:
            scheduler.preempt(rng.choice(scheduler.running))
        elif event < 0.28:
            evict(engine, rng.randint(0, len(scheduler.pool.cached)))
        else:
            engine.step()
    finish(engine)
    for request, said in told:
        assert_told(oracle, request, said)


def test_what_a_neighbour_says_never_leaks_not_even_in_the_last_bit(model):
    """Another shape of the batch may round differently, which only float64 hides. The same shape must not: in float32, other
    neighbours of the same lengths leave every bit of the needle's logits as it was."""
    narrow = stages.load_model(random_checkpoint(model.config, spread=24), dtype=torch.float32)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=5)
    heard, others = [], set()
    for seed in range(4):
        engine = engine_of(narrow, 14, 5, max_sequences=4, token_budget=12)
        neighbours = [prompt_of(length, f"other {seed}") for length in (5, 17, 9, 2, 12)]
        first, needle, *_ = engine.generate(
            [neighbours[0], [7, 8, 9, 10, 11, 12, 13], *neighbours[1:]], params
        )
        heard.append((needle.token_ids, needle.logprobs))
        others.add(tuple(first.token_ids))
        assert engine.scheduler.counts.preemptions > 0
    assert heard == [heard[0]] * 4
    assert len(others) == 4


# ---- blocks: nothing of the last owner, nothing of a sick neighbour ----------------------------------------------------


@pytest.mark.parametrize(
    "when", [1, 2, 3, 6], ids=["first chunk", "second chunk", "end of prompt", "decoding"]
)
@pytest.mark.parametrize("size", SIZES)
def test_poison_stays_with_its_request_and_goes_with_it(size, when, model, oracle):
    """NaN in a request's keys and values: it alone ends with "error", and the next owners of its blocks never meet it."""
    blocks = 3 * blocks_for(50, size)
    engine = engine_of(
        model, blocks, size, max_sequences=3, token_budget=256, max_chunk=10, prefix_caching=False
    )
    healthy = [ask(engine, 9)]
    sick = ask(engine, 26, id="sick")
    healthy += [ask(engine, length) for length in (17, 26, 4)]
    for _ in range(when):
        engine.step()
    mine, said = list(engine.scheduler.tables[sick].blocks), len(sick.output.token_ids)
    engine.cache.kv[:, :, :, mine] = torch.nan
    finish(engine)
    assert (sick.output.finish_reason, len(sick.output.token_ids)) == ("error", said)
    assert sick.output.error is not None and "NaN or infinite" in sick.output.error
    for request in healthy:
        assert_told(oracle, request)
    assert set(mine) & {
        move.target for record in list(engine.steps)[when:] for move in record.moves
    }  # they were used again


def test_everybody_sick_ends_everybody_and_the_engine_lives(model, oracle):
    engine = engine_of(model, 12, 5, prefix_caching=False)
    sick = [ask(engine, length) for length in (5, 9)]
    engine.step()
    engine.cache.kv[:] = torch.nan
    assert engine.step() == []
    assert [request.output.finish_reason for request in sick] == ["error"] * 2
    request = ask(engine, 4)
    finish(engine)
    assert_told(oracle, request)


# ---- memory runs out ------------------------------------------------------------------------------------------------


STORMS = {
    "recompute": ("recompute", 0.0),
    "swap": ("swap", 1.0),
    "mixed": ("swap", 0.02),
}  # the last with hardly room to swap


def storm(size, policy="fcfs"):
    """64 requests that need a block more on their way, and how many blocks they need together."""
    rng = random.Random(f"storm {size}")
    lengths = [1 + i * 7 % 30 if size < 128 else 122 + i % 6 for i in range(64)]
    sampling = replace(GREEDY, max_tokens=14 if size < 128 else 8)
    priorities = [rng.randint(-3, 3) if policy == "priority" else 0 for _ in lengths]
    prompts = [prompt_of(length, i) for i, length in enumerate(lengths)]
    requests = [
        Request(prompt, sampling, priority=each)
        for prompt, each in zip(prompts, priorities, strict=True)
    ]
    return requests, fits(size, *requests)


@pytest.fixture(scope="module")
def ideal(model):
    """Steps that the storm of a block size takes with all the blocks that it needs."""
    steps = {}
    for size in SIZES:
        requests, needed = storm(size)
        engine = engine_of(model, needed, size, max_sequences=64)
        drive(engine, {0: requests})
        assert engine.scheduler.counts.preemptions == 0
        steps[size] = len(engine.steps)
    return steps


USUAL = {(size, how, True) for size in SIZES for how in ("recompute", "swap")}
USUAL |= {
    (3, "mixed", True),
    (128, "mixed", True),
    (1, "recompute", False),
    (16, "swap", False),
    (3, "mixed", False),
}


@pytest.mark.parametrize(
    "size, how, prefix_caching",
    [
        pytest.param(
            *each,
            id=f"{each[0]}-{each[1]}-{'' if each[2] else 'no '}prefix cache",
            marks=() if each in USUAL else SLOW,
        )
        for each in itertools.product(SIZES, STORMS, (True, False))
    ],
)
def test_storm_of_64_requests_on_a_tenth_of_their_blocks(
    size, how, prefix_caching, model, oracle, ideal
):
    requests, needed = storm(size)
    preemption, room = STORMS[how]
    swap_blocks = max(2, int(room * needed)) if room else 0
    engine = engine_of(
        model,
        needed // 10,
        size,
        swap_blocks,
        preemption,
        max_sequences=64,
        prefix_caching=prefix_caching,
    )
    drive(engine, {0: requests})
    for request in requests:
        assert_told(oracle, request)
    assert len(engine.steps) <= 20 * ideal[size]
    counts = engine.scheduler.counts
    assert sum(record.preempted for record in engine.steps) == counts.preemptions > 10
    assert (counts.recomputed > 0, counts.swapped_out > 0) == (how != "swap", how != "recompute")
    assert counts.swapped_in == counts.swapped_out
    # Whoever came first was never preempted: each of its tokens was computed once.
    first = sum(tokens_of(record, requests[0].id) for record in engine.steps)
    assert first == requests[0].token_count - 1


def tokens_of(record, id):
    return sum(
        each.prefill_tokens + each.decode_tokens
        for each in record.sequences
        if each.request_id == id
    )


@pytest.mark.parametrize(
    "size, how",
    [(1, "mixed"), (3, "recompute"), (16, "mixed"), (128, "recompute")]
    + [
        pytest.param(*each, marks=SLOW)
        for each in ((1, "recompute"), (3, "mixed"), (16, "recompute"), (128, "mixed"))
    ],
)
def test_storm_with_priorities_ends_too(size, how, model, oracle, ideal):
    """The most urgent is never preempted, and nobody waits for ever, though patience lets in whom priority throws out."""
    requests, needed = storm(size, "priority")
    preemption, room = STORMS[how]
    swap_blocks = max(2, int(room * needed)) if room else 0
    options = {"max_sequences": 64, "policy": "priority", "patience": 8}
    engine = engine_of(model, needed // 10, size, swap_blocks, preemption, **options)
    drive(engine, {0: requests[:48], 20: requests[48:]})
    for request in requests:
        assert_told(oracle, request)
    assert len(engine.steps) <= 20 * ideal[size]
    assert engine.scheduler.counts.preemptions > 10
    urgent = min(requests, key=lambda each: (each.priority, each.arrival))
    assert sum(tokens_of(record, urgent.id) for record in engine.steps) == urgent.token_count - 1


def test_storm_with_aborts(model, oracle):
    """A third leaves at random moments, some of them while their blocks are swapped out."""
    requests, needed = storm(3)
    rng = random.Random("aborts")
    engine = engine_of(model, needed // 10, 3, needed // 5, "swap", max_sequences=64)
    aborts: dict[int, list[str]] = {}
    for number, request in enumerate(requests):
        request.id = str(number)
        if number % 3 == 0:
            aborts.setdefault(rng.randrange(1, 100), []).append(request.id)
    drive(engine, {0: requests}, aborts)
    for request in requests:
        assert_told(oracle, request)
    counts = engine.scheduler.counts
    assert counts.swapped_in < counts.swapped_out  # somebody was aborted there
    assert sum(request.output.finish_reason == "abort" for request in requests) > 10


@pytest.mark.parametrize(
    "size, max_chunk",
    [
        (1, 7),
        (3, None),
        (3, 7),
        (16, None),
        pytest.param(1, None, marks=SLOW),
        pytest.param(16, 7, marks=SLOW),
    ],
)
@pytest.mark.parametrize("how", STORMS)
def test_preempted_again_and_again(size, how, max_chunk, model, oracle):
    """Catches: a request that has an answer is taken for a decode, although its prompt must be computed again; and one that
    draws differently the second time."""
    preemption, _ = STORMS[how]
    swap_blocks = {"recompute": 0, "swap": blocks_for(90, size), "mixed": blocks_for(28, size)}[how]
    for moment in (1, 5):
        engine = engine_of(
            model, blocks_for(150, size), size, swap_blocks, preemption, max_chunk=max_chunk
        )
        neighbour, greedy, drawn = (
            ask(engine, 30),
            ask(engine, 7),
            ask(engine, 26, replace(DRAWN, max_tokens=18)),
        )
        for _ in range(3):
            for _ in range(moment):
                engine.step()
            for request in (greedy, drawn):
                if request.state is State.RUNNING:
                    engine.scheduler.preempt(request)
                    assert not engine.scheduler.tables[request].blocks
        finish(engine)
        for request in (neighbour, greedy, drawn):
            assert_told(oracle, request)
        assert engine.scheduler.counts.preemptions >= 2

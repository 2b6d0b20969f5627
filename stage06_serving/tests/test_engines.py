"""Earlier engines behind the same server: each says what stage 01 says, in the order and beside whom its own stage decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from shared import peers
from shared.checkpoint import Checkpoint
from shared.course import stages
from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage04_continuous.engine import Engine as SlotEngine
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import Scheduler as SlotScheduler
from stage06_serving import __main__ as stage
from stage06_serving.async_engine import BROKEN, AsyncEngine
from stage06_serving.engines import Adapter, Batches, OneByOne, Slots, Static, Transformers
from stage06_serving.live import look
from stage06_serving.metrics import Metrics
from stage06_serving.settings import parse
from stage06_serving.tests.conftest import IDLE
from stage06_serving.tests.test_async_engine import Gate, error_of, run, said
from stage06_serving.tests.test_parity import alone, crowd, naive, requests

KINDS = ("continuous", "static", "sequential", "transformers")
ALONE = KINDS[2:]  # one request at a time
ROWS = 3  # of the other two
FREE = -1
PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=14, temperature=1, seed=1),
    SamplingParams(max_tokens=3, temperature=1.3, top_k=20, seed=2),
    SamplingParams(max_tokens=11, temperature=0.8, top_p=0.9, min_p=0.01, seed=3),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=40, temperature=1, stop_token_ids=tuple(range(20)), seed=4),
    SamplingParams(max_tokens=12, repetition_penalty=1.8, logprobs=2),
    SamplingParams(
        max_tokens=7,
        temperature=1,
        logit_bias={5: 3, 7: -100},
        min_tokens=3,
        seed=5,
        ignore_eos=True,
    ),
]

Make = Callable[..., Any]


def adapter(kind: str, checkpoint: Checkpoint, rows: int = ROWS) -> Adapter:
    """The engine behind `--engine kind`, in float64."""
    model = stages.load_model(checkpoint, dtype=torch.float64)
    if kind == "continuous":
        return Slots(SlotEngine(model, scheduler=SlotScheduler(rows, 32)))
    if kind == "static":
        return Batches(model, Static(model, rows), rows)
    if kind == "sequential":
        return Batches(model, OneByOne(model), 1)
    return Batches(
        model, Transformers(peers.transformers_model(checkpoint, torch.float64), model.config), 1
    )


@pytest.fixture
def make(tiny: Checkpoint) -> Make:
    """make(kind, rows=3): an engine."""
    return lambda kind, rows=ROWS: adapter(kind, tiny, rows)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """All of these tokens are in the vocabulary of the tiny model, and none of them ends a text."""
    return [1 + (7 * seed + 13 * place) % 99 for place in range(length)]


def words(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def ask(engine: Adapter, name: str, length: int, count: int) -> Request:
    """A request for `count` tokens that is in line."""
    return engine.add(Request(prompt_of(length, ord(name[0])), words(count), name))


def finish(engine: Adapter) -> list[set[str]]:
    """Make steps until nobody is left; who took part in each of them."""
    before = len(engine.steps)
    for _ in range(1000):
        if not engine.scheduler.unfinished:
            return [
                {each.request_id for each in record.sequences}
                for record in list(engine.steps)[before:]
            ]
        engine.step()
    raise AssertionError("the engine does not come to an end")


def answer(engine: Adapter, request: Request) -> list[int]:
    """What stage 01 says to it alone."""
    return Naive(engine.model).generate([request.prompt_ids], request.sampling)[0].token_ids


def nothing_is_held(engine: Adapter) -> bool:
    line = engine.scheduler
    return (
        not engine.requests
        and not line.running
        and not line.waiting
        and line.unfinished == line.pool.owned == 0
    )


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_first_stage(make, kind):
    """More requests than rows, with options of all kinds, and one that fills the context."""
    engine = make(kind)
    prompts = [
        random_prompt(1 + 5 * number % 17, engine.model.config, number)
        for number in range(len(PARAMS))
    ]
    made = [
        Request(prompt, params, f"r{number}")
        for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]
    made.append(Request(prompt_of(58), words(20), "long"))
    for request in made:
        assert engine.add(request) is request
    assert engine.scheduler.unfinished == len(made)
    told: dict[str, list[Any]] = {request.id: [] for request in made}
    while engine.scheduler.unfinished:
        for name, token in engine.step():
            told[name].append(token)
    for request in made:
        expected = Naive(engine.model).generate([request.prompt_ids], request.sampling)[0]
        assert (
            request.output.token_ids
            == [token.id for token in told[request.id]]
            == expected.token_ids
        )
        assert [token.finish_reason for token in told[request.id]] == [None] * (
            len(expected.token_ids) - 1
        ) + [expected.finish_reason]
        assert request.state is State.FINISHED
        scores = [logprobs.token for logprobs in request.output.logprobs]
        assert scores == pytest.approx([logprobs.token for logprobs in expected.logprobs])
    assert len(made[-1].output.token_ids) == 64 - 58
    assert max(record.rows for record in engine.steps) == (1 if kind in ALONE else ROWS)
    assert nothing_is_held(engine) and engine.step() == []


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_prompt(make, kind):
    """They are requests like any others; all of them are taken in, or none."""
    engine = make(kind)
    prompt = prompt_of(10)
    sampling = [SamplingParams(max_tokens=6, temperature=1, seed=seed) for seed in range(4)]
    added = engine.add_samples(prompt, sampling, b"salt", list("abcd"))
    assert [request.id for request in added] == list("abcd") == list(engine.requests)
    finish(engine)
    assert [request.output.token_ids for request in added] == [
        Naive(engine.model).generate([prompt], each)[0].token_ids for each in sampling
    ]
    unfit = [*sampling, SamplingParams(stop_token_ids=(101,))]
    with pytest.raises(UserError, match="stop_token_ids"):
        engine.add_samples(prompt, unfit, b"", list("abcde"))
    for bad, message in (
        ([], "empty"),
        ([1] * 64, "shorten the prompt"),
        ([101], "not in the vocabulary"),
    ):
        with pytest.raises(UserError, match=message):
            engine.check(Request(bad, words(1)))
        with pytest.raises(UserError, match=message):
            engine.add(Request(bad, words(1), "bad"))
    assert nothing_is_held(engine)


# ---- who runs when, and beside whom ---------------------------------------------------------------------------------


def test_nobody_joins_a_static_batch(make):
    """It is padded, and what has ended in it is computed on to its end."""
    engine = make("static", rows=2)
    first, second, third = ask(engine, "a", 5, 3), ask(engine, "b", 9, 7), ask(engine, "c", 4, 2)
    together = finish(engine)
    assert together == [{"a", "b"}] * 3 + [{"b"}] * 4 + [{"c"}] * 2
    assert [record.waiting for record in engine.steps] == [1] * 7 + [0] * 2
    assert [record.wasted_tokens for record in engine.steps] == [9 - 5, 0, 0, 1, 1, 1, 1, 0, 0]
    for request in (first, second, third):
        assert request.output.token_ids == answer(engine, request)


def test_who_leaves_a_static_batch_does_not_end_it(make):
    engine = make("static", rows=2)
    stays, leaves, waits, late = (
        ask(engine, "a", 5, 6),
        ask(engine, "b", 9, 9),
        ask(engine, "c", 4, 2),
        ask(engine, "d", 3, 2),
    )
    told = engine.step() + engine.step()
    assert engine.abort("b") is leaves.output and leaves.output.finish_reason == "abort"
    assert engine.abort("d").token_ids == []  # it has only waited
    assert (
        leaves.output.token_ids
        == answer(engine, leaves)[:2]
        == [token.id for name, token in told if name == "b"]
    )
    assert [request.id for request in engine.scheduler.running] == [
        "a"
    ] and engine.scheduler.pool.owned == 1
    rows = len(engine.steps)
    assert finish(engine) == [{"a"}] * 4 + [{"c"}] * 2
    assert [record.rows for record in list(engine.steps)[rows:]] == [2] * 4 + [
        1
    ] * 2  # its row is still computed
    assert len(leaves.output.token_ids) == 2 and late.state is State.FINISHED
    for request in (stays, waits):
        assert request.output.token_ids == answer(engine, request)


def test_a_batch_that_all_have_left_is_over(make):
    engine = make("static", rows=2)
    for name in "ab":
        ask(engine, name, 5, 30)
    waits = ask(engine, "c", 4, 3)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert finish(engine) == [{"c"}] * 3
    assert waits.output.token_ids == answer(engine, waits) and nothing_is_held(engine)


@pytest.mark.parametrize("kind", ALONE)
def test_one_request_at_a_time(make, kind):
    """In the order in which they came; who leaves makes room for the next."""
    engine = make(kind)
    made = [
        ask(engine, name, length, count)
        for name, length, count in (("a", 9, 3), ("b", 5, 30), ("c", 4, 2))
    ]
    assert [engine.step()[0][0] for _ in range(5)] == ["a"] * 3 + ["b"] * 2
    assert [request.id for request in engine.scheduler.running] == ["b"]
    engine.abort("b")
    assert finish(engine) == [{"c"}] * 2
    assert {record.rows for record in engine.steps} == {1}
    assert [request.output.finish_reason for request in made] == ["length", "abort", "length"]
    for request in made:
        assert request.output.token_ids == answer(engine, request)[: len(request.output.token_ids)]


def test_slots_are_taken_as_soon_as_they_are_free(make):
    engine = make("continuous", rows=2)
    made = [
        ask(engine, name, 5, count) for name, count in (("a", 3), ("b", 7), ("c", 2), ("d", 30))
    ]
    engine.step()
    assert [request.id for request in engine.scheduler.running] == [
        "a",
        "b",
    ] and engine.scheduler.pool.owned == 2
    assert [request.id for request in engine.scheduler.waiting] == ["c", "d"]
    assert finish(engine)[:4] == [{"a", "b"}] * 2 + [{"b", "c"}] * 2
    assert [request.output.token_ids for request in made] == [
        answer(engine, request) for request in made
    ]


# ---- what the metrics, the page and the reports read ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_records_of_the_steps_add_up(make, kind):
    engine = make(kind)
    asked = {"a": (9, 3), "b": (5, 7), "c": (40, 2), "d": (4, 5)}
    for name, (length, count) in asked.items():
        ask(engine, name, length, count)
    finish(engine)
    assert engine.step() == []
    records = list(engine.steps)
    for record in records:
        assert sum(each.prefill_tokens for each in record.sequences) == record.prefill_tokens
        assert sum(each.decode_tokens for each in record.sequences) == record.decode_tokens
        assert record.rows == len(record.sequences) == record.owned_blocks
        assert {each.blocks for each in record.sequences} == {1}
        assert record.seconds > 0 and record.bookkeeping_seconds <= record.seconds
    for name, (length, count) in asked.items():
        own = [each for record in records for each in record.sequences if each.request_id == name]
        assert sum(each.prefill_tokens for each in own) == length
        assert sum(each.decode_tokens for each in own) == count - 1
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + ["length"]
    assert [record.started for record in records] == sorted(record.started for record in records)
    assert (
        records[0].waiting == len(asked) - (1 if kind in ALONE else ROWS)
        and records[-1].waiting == 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_view_shows_who_has_a_slot(make, kind):
    """To the page a slot is a block, and it has the number of its request."""
    engine = make(kind)
    ask(engine, "a", 5, 2)
    ask(engine, "b", 5, 4)
    rows = engine.scheduler.max_sequences
    assert (engine.scheduler.pool.count, engine.scheduler.pool.block_size) == (rows, 64)
    seen = []
    while engine.scheduler.unfinished:
        engine.step()
        view = look(engine)
        states = [state for state, count in view["map"] for _ in range(count)]
        assert len(states) == rows and [state for state in states if state != FREE] == [
            number for _, number in view["running"]
        ]
        assert view["hit_rate"] == view["preemptions"] == 0
        seen.append((dict(view["running"]), view["waiting"]))
    if kind in ALONE:
        assert seen == [({"a": 0}, 1), ({}, 1), *[({"b": 1}, 0)] * 3, ({}, 0)]
    else:
        assert seen == [({"a": 0, "b": 1}, 0), *[({"b": 1}, 0)] * 2, ({}, 0)]
    assert view["map"] == [(FREE, rows)]


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_those_who_run_and_the_others_go_on(make, kind):
    engine = make(kind)
    made = [ask(engine, name, 5, 30) for name in "abcd"]
    engine.step()
    rows = 1 if kind in ALONE else ROWS
    failed = engine.fail(UserError("it broke"))
    assert failed == made[:rows] and all(request.output.error == "it broke" for request in failed)
    assert all(
        request.output.finish_reason == "error" and request.id not in engine.requests
        for request in failed
    )
    assert not engine.scheduler.running and engine.scheduler.pool.owned == 0
    made.append(ask(engine, "e", 7, 6))
    finish(engine)
    for request in made[rows:]:
        assert (
            request.output.token_ids == answer(engine, request)
            and request.output.finish_reason == "length"
        )
    assert nothing_is_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nobody_ran_a_failure_ends_all(make, kind):
    """Else the next step would fail in the same way, and the one after it."""
    engine = make(kind)
    made = [ask(engine, name, 5, 30) for name in "ab"]
    assert engine.fail(UserError("it broke")) == made and nothing_is_held(engine)


def test_who_was_let_in_by_a_pass_that_failed_ends_with_it(make, monkeypatch):
    """Stage 04 lets requests in at the beginning of a step: the line must know of it though the step raises."""
    engine = make("continuous")
    made = [ask(engine, name, 5, 30) for name in "abcd"]

    def faulty(work: Any) -> Any:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(engine.engine, "_forward", faulty)
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.fail(UserError("it broke")) == made[:ROWS] and list(engine.requests) == ["d"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_ends_its_request_alone(tiny, kind):
    """Position 30 is NaN in the weights: one of the requests gets there with its seventh token."""
    sick = Checkpoint(tiny.config, {name: tensor.clone() for name, tensor in tiny.tensors.items()})
    sick.tensors["wpe.weight"][30] = torch.nan
    engine = adapter(kind, sick, rows=2)
    before, reaches, beside, after = (
        ask(engine, *asked) for asked in (("a", 5, 4), ("b", 25, 30), ("c", 8, 10), ("d", 3, 5))
    )
    together = finish(engine)
    assert (reaches.output.finish_reason, len(reaches.output.token_ids)) == ("error", 6)
    assert "NaN or infinite" in (reaches.output.error or "")
    healthy = adapter(kind, tiny)
    assert reaches.output.token_ids == answer(healthy, reaches)[:6]
    for request in (before, beside, after):
        assert (
            request.output.token_ids == answer(healthy, request)
            and request.output.finish_reason == "length"
        )
    assert sum("b" in each for each in together) in (6, 7) and nothing_is_held(engine)
    assert sum(record.prefill_tokens for record in engine.steps) == 5 + 25 + 8 + 3
    assert (
        sum(each.prefill_tokens for record in engine.steps for each in record.sequences)
        == 5 + 25 + 8 + 3
    )


# ---- on its thread --------------------------------------------------------------------------------------------------


def gauges(metrics: Metrics) -> dict[str, float]:
    """Those that must be zero when nothing is in hand."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name in IDLE
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_async_engine_runs_it(make, monkeypatch, kind):
    """Tokens, an abort of one that runs and of one that waits, and gauges that go up and come back."""
    engine = make(kind)
    step = engine.step
    gate = Gate(lambda _: step())
    monkeypatch.setattr(engine, "step", lambda: gate(None))
    prompts = [prompt_of(3 + number, number) for number in range(7)]

    async def script(running: AsyncEngine) -> list[list[int]]:
        metrics = Metrics(running, "tiny")
        assert running.capacity == engine.scheduler.max_sequences + 64
        runs = running.submit([prompts[0]], [words(50)])[0][0]
        gate.allow(2)
        while gate.count < 3:  # two passes are made, and the thread stands before the third
            await asyncio.sleep(0.001)
        tickets = [
            running.submit([prompt], [words(5 + number)])[0][0]
            for number, prompt in enumerate(prompts)
        ]
        assert gauges(metrics) == {
            IDLE[0]: 1,
            IDLE[1]: 7,
            IDLE[2]: 1 / engine.scheduler.max_sequences,
        }
        running.abort(runs)
        running.abort(tickets[6])
        gate.allow()
        assert len(await said(running, runs)) == 3 and runs.reason == "abort"
        answers = [await said(running, ticket) for ticket in tickets]
        assert [ticket.reason for ticket in tickets] == ["length"] * 6 + [
            "abort"
        ] and answers.pop() == []
        assert gauges(metrics) == dict.fromkeys(IDLE, 0.0) and not running.in_flight
        return answers

    answers = run(engine, script)
    assert answers == [
        Naive(engine.model).generate([prompts[number]], words(5 + number))[0].token_ids
        for number in range(6)
    ]
    assert nothing_is_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_pass_is_told_and_the_next_request_is_served(make, monkeypatch, kind):
    engine = make(kind)
    passing: dict[str, Any] = {
        "continuous": lambda: (engine.engine, "_forward"),
        "static": lambda: (engine.runner.engine, "_forward"),
        "sequential": lambda: (engine.runner.engine, "_forward"),
        "transformers": lambda: (peers.TransformersSequence, "feed"),
    }
    place, name = passing[kind]()
    forward, count = getattr(place, name), 0

    def faulty(*work: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("a planted fault")
        return forward(*work)

    monkeypatch.setattr(place, name, faulty)

    async def script(running: AsyncEngine) -> None:
        ticket = running.submit([prompt_of(5)], [words(9)])[0][0]
        assert await error_of(running, ticket) == BROKEN and ticket.generated == 2
        ticket = running.submit([prompt_of(6)], [words(9)])[0][0]
        assert (
            await said(running, ticket)
            == Naive(engine.model).generate([prompt_of(6)], words(9))[0].token_ids
        )
        while engine.requests:  # the probe of the failure
            await asyncio.sleep(0.001)

    run(engine, script)
    assert nothing_is_held(engine)


# ---- the command line -----------------------------------------------------------------------------------------------

CONTEXT = 64 * 1024  # bytes of one whole context of the tiny folder's model in float32


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_for_whole_contexts(tiny_folder, kind):
    def line(*options: str) -> tuple[int, int, int]:
        arguments = ["--model", str(tiny_folder), "--linear", "plain", "--engine", kind, *options]
        engine, loaded = stage.make_engine(parse(arguments))
        assert isinstance(engine, Adapter) and loaded.config.name == "tiny"
        pool = engine.scheduler.pool
        return engine.scheduler.max_sequences, pool.count, pool.block_size

    rows = [1, 1, 1] if kind in ALONE else [2, 3, 5]
    assert line("--kv-memory", str(2 * CONTEXT + 5000), "--max-sequences", "7") == (
        rows[0],
        rows[0],
        256,
    )
    assert line("--kv-memory", str(9 * CONTEXT), "--max-sequences", "3") == (rows[1], rows[1], 256)
    assert line("--max-sequences", "5", "--block-size", "8") == (rows[2], rows[2], 256)
    with pytest.raises(UserError, match="block"):
        line("--kv-memory", str(CONTEXT - 1))


@pytest.mark.parametrize("option", [("--sanitize",), ("--swap-memory", "1MiB")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_for_blocks_is_refused(tiny_folder, kind, option):
    with pytest.raises(
        UserError, match=f"--sanitize and --swap-memory are for blocks, which '{kind}' has not"
    ):
        stage.make_engine(parse(["--model", str(tiny_folder), "--engine", kind, *option]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_it(house, wait_idle, tiny_folder, kind):
    """A crowd gets the tokens of stage 01; samples, log-probabilities of the prompt, and the page's frames are there too."""
    oracle = naive(str(tiny_folder))
    made = requests(300, 14, 60)
    options = (
        "--dtype",
        "float64",
        "--kv-memory",
        str(8 * CONTEXT),
        "--max-sequences",
        "6",
        "--no-sanitize",
    )  # 4 contexts
    running = house("--model", str(tiny_folder), "--engine", kind, *options)
    rows = 1 if kind in ALONE else 4
    assert (
        f"\n  engine  {kind}\n" in running.stderr()
        and f" in {rows} blocks of 256 tokens" in running.stderr()
    )
    found = crowd(running.url, "tiny", made)
    with openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        extra = {"return_token_ids": True}
        prompt = [5, 6, 7, 8]
        samples: Any = client.completions.create(
            model="tiny",
            prompt=prompt,
            n=3,
            seed=40,
            max_tokens=10,
            echo=True,
            logprobs=1,
            extra_body=extra,
        )
    numbers = wait_idle(running.url)
    with httpx2.stream("GET", f"{running.url}/live", timeout=60, trust_env=False) as live:
        frame = json.loads(next(each for each in live.iter_lines() if each).removeprefix("data: "))
    for (tokens, reason), (ids, fields) in zip(found, made, strict=True):
        expected = alone(oracle, ids, fields)
        assert (tokens, reason) == (expected.token_ids, expected.finish_reason), fields
    for number, choice in enumerate(samples.choices):
        assert (
            choice.token_ids
            == alone(
                oracle, prompt, {"temperature": 1, "seed": 40 + number, "max_tokens": 10}
            ).token_ids
        )
        assert choice.logprobs.token_logprobs[:4] == [
            None,
            *samples.choices[0].logprobs.token_logprobs[1:4],
        ]
    assert numbers["vllm:generation_tokens_total"] == sum(len(tokens) for tokens, _ in found) + sum(
        len(choice.token_ids) for choice in samples.choices
    )
    assert numbers["vllm:prompt_tokens_total"] == sum(len(ids) for ids, _ in made) + 3 * len(prompt)
    assert (
        frame["alive"]
        and frame["map"] == [[FREE, rows]]
        and (frame["blocks"], frame["block_size"]) == (rows, 256)
    )
    assert (
        frame["running"] == []
        and frame["waiting"] == 0
        and frame["step"] == frame["steps"][-1]["number"] > 10
    )
    assert max(len(step["rows"]) for step in frame["steps"]) <= rows and frame["steps"][-1]["rows"]

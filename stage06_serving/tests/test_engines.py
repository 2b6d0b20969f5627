"""Earlier engines behind the same server: stage 01's tokens, in the order of their own stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from shared import peers
from shared.checkpoint import Checkpoint
from shared.errors import UserError
from stage01_forward.model import load_model
from stage04_continuous.make import make as make_slots
from stage04_continuous.request import Request, State
from stage04_continuous.tests.oracle import the_model
from stage04_continuous.tests.steps import StepContract
from stage05_paged.blockmap import FREE
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving import __main__ as stage
from stage06_serving.async_engine import BROKEN, AsyncEngine
from stage06_serving.engines import Batches, OneByOne, Paged, Slots, Static, Transformers
from stage06_serving.live import look
from stage06_serving.metrics import Metrics
from stage06_serving.settings import parse
from stage06_serving.status import AnyEngine
from stage06_serving.tests import test_parity as parity
from stage06_serving.tests.conftest import IDLE
from stage06_serving.tests.tools import (
    Failing,
    Gate,
    alone,
    error_of,
    is_empty,
    prompt_of,
    run,
    said,
    submit,
    until,
    words,
)

KINDS = ("continuous", "static", "sequential", "transformers")
ALONE = KINDS[2:]  # one request at a time
ROWS = 3  # of the other two
Make = Callable[..., AnyEngine]


def adapter(kind: str, checkpoint: Checkpoint, rows: int = ROWS) -> AnyEngine:
    """The engine behind `--engine kind`, in float64."""
    model = load_model(checkpoint, dtype=torch.float64)
    if kind == "continuous":
        return Slots(make_slots(model, rows, token_budget=32))
    if kind == "static":
        return Batches(Static(model, rows), rows, 1000)
    if kind == "sequential":
        return Batches(OneByOne(model), 1, 1000)
    theirs = peers.transformers_model(checkpoint, torch.float64)
    return Batches(Transformers(theirs, model.config), 1, 1000)


@pytest.fixture
def make(tiny: Checkpoint) -> Make:
    """make(kind, rows=3): an engine."""
    return lambda kind, rows=ROWS: adapter(kind, tiny, rows)


@pytest.fixture
def model(tiny: Checkpoint) -> Any:
    return load_model(tiny, dtype=torch.float64)


def ask(engine: AnyEngine, name: str, length: int, count: int) -> Request:
    """Queue a request for `count` tokens."""
    return engine.add(Request(prompt_of(length, ord(name[0])), words(count), name))


def ids(engine: AnyEngine) -> list[str]:
    return [name for name, _ in engine.status.running]


def finish(engine: AnyEngine) -> list[set[str]]:
    """Step until no request is left; the ids in each of these steps."""
    before = len(engine.steps)
    for _ in range(1000):
        if is_empty(engine):
            steps = list(engine.steps)[before:]
            return [{each.request_id for each in step.sequences} for step in steps]
        engine.step()
    raise AssertionError("the engine does not come to an end")


# ---- the contract of all engines ----------------------------------------------------------------


class Adapted(StepContract):
    """Engines whose requests have all their tokens computed in the pass that admits them."""

    phases = {("waiting", False, False), ("running", False, True)}

    def assert_idle(self, engine: Any) -> None:
        assert engine.requests == {} and is_empty(engine) and engine.step() == []


class TestPaged(Adapted):
    phases = StepContract.phases

    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        options |= {"max_sequences": sequences, "token_budget": budget}
        return Paged(make_paged(the_model(), pool=BlockPool(64, 8), **options))


class TestSlots(Adapted):
    phases = StepContract.phases

    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        return Slots(make_slots(the_model(), sequences, token_budget=budget, **options))


class TestStatic(Adapted):
    def engine(self, sequences: int = 4, *_: Any, **options: Any) -> Any:
        return Batches(Static(the_model(), sequences), sequences, 1000)


class TestSequential(Adapted):
    together = 1
    test_abort_at_any_moment_changes_no_other_request: Any = None  # test_one_request_at_a_time

    def engine(self, *_: Any, **options: Any) -> Any:
        return Batches(OneByOne(the_model()), 1, 1000)


# ---- which requests run when, and together with which -------------------------------------------


def test_no_request_joins_a_static_batch(make, model):
    """It is padded, and a row that has ended is computed on to its end."""
    engine = make("static", rows=2)
    requests = [ask(engine, *each) for each in (("a", 5, 3), ("b", 9, 7), ("c", 4, 2))]
    assert finish(engine) == [{"a", "b"}] * 3 + [{"b"}] * 4 + [{"c"}] * 2
    assert [record.waiting for record in engine.steps] == [1] * 7 + [0] * 2
    wasted = [record.wasted_tokens for record in engine.steps]
    assert wasted == [9 - 5, 0, 0, 1, 1, 1, 1, 0, 0]
    for request in requests:
        assert request.output.token_ids == alone(model, request.prompt_ids, request.sampling)


def test_an_abort_does_not_end_its_static_batch(make, model):
    engine = make("static", rows=2)
    stays, leaves, waits, late = (
        ask(engine, *each) for each in (("a", 5, 6), ("b", 9, 9), ("c", 4, 2), ("d", 3, 2))
    )
    tokens = engine.step() + engine.step()
    assert engine.abort("b") is leaves.output and leaves.output.finish_reason == "abort"
    assert engine.abort("d").token_ids == []  # it only waited
    emitted = [token.id for name, token in tokens if name == "b"]
    assert leaves.output.token_ids == emitted
    assert emitted == alone(model, leaves.prompt_ids, leaves.sampling)[:2]
    assert ids(engine) == ["a"] and engine.status.owned == 1
    before = len(engine.steps)
    assert finish(engine) == [{"a"}] * 4 + [{"c"}] * 2
    rows = [record.rows for record in list(engine.steps)[before:]]
    assert rows == [2] * 4 + [1] * 2  # its row is still computed
    assert len(leaves.output.token_ids) == 2 and late.state is State.FINISHED
    for request in (stays, waits):
        assert request.output.token_ids == alone(model, request.prompt_ids, request.sampling)


def test_a_batch_of_aborted_requests_is_over(make, model):
    engine = make("static", rows=2)
    for name in "ab":
        ask(engine, name, 5, 30)
    waits = ask(engine, "c", 4, 3)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert finish(engine) == [{"c"}] * 3
    assert waits.output.token_ids == alone(model, waits.prompt_ids, waits.sampling)


@pytest.mark.parametrize("kind", ALONE)
def test_one_request_at_a_time(make, model, kind):
    """In order of arrival; an abort makes room for the next."""
    engine = make(kind)
    requests = [ask(engine, *each) for each in (("a", 9, 3), ("b", 5, 30), ("c", 4, 2))]
    assert [engine.step()[0][0] for _ in range(5)] == ["a"] * 3 + ["b"] * 2
    assert ids(engine) == ["b"]
    engine.abort("b")
    assert finish(engine) == [{"c"}] * 2
    assert {record.rows for record in engine.steps} == {1}
    assert [request.output.finish_reason for request in requests] == ["length", "abort", "length"]
    for request in requests:
        expected = alone(model, request.prompt_ids, request.sampling)
        assert request.output.token_ids == expected[: len(request.output.token_ids)]


# ---- what the metrics and the page read ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_records_of_the_steps_add_up(make, kind):
    engine = make(kind)
    asked = {"a": (9, 3), "b": (5, 7), "c": (40, 2), "d": (4, 5)}
    for name, (length, count) in asked.items():
        ask(engine, name, length, count)
    finish(engine)
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
    started = [record.started for record in records]
    assert started == sorted(started) and records[-1].waiting == 0
    assert records[0].waiting == len(asked) - (1 if kind in ALONE else ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_map_shows_the_slots(make, kind):
    """To the page a slot is a block, and it has the number of its request."""
    engine = make(kind)
    ask(engine, "a", 5, 2)
    ask(engine, "b", 5, 4)
    rows = engine.status.max_sequences
    assert (engine.status.blocks, engine.status.block_size) == (rows, 64)
    seen = []
    while not is_empty(engine):
        engine.step()
        status, runs = look(engine)
        states = [state for state, count in runs for _ in range(count)]
        numbers = [number for _, number in status.running]
        assert len(states) == rows and [state for state in states if state != FREE] == numbers
        assert status.hit_rate == status.preemptions == 0
        seen.append((dict(status.running), status.waiting))
    if kind in ALONE:
        assert seen == [({"a": 0}, 1), ({}, 1), *[({"b": 1}, 0)] * 3, ({}, 0)]
    else:
        assert seen == [({"a": 0, "b": 1}, 0), *[({"b": 1}, 0)] * 2, ({}, 0)]
    assert runs == [(FREE, rows)]


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_without_running_requests_ends_all(make, kind):
    """The next step would fail in the same way, and the one after it."""
    engine = make(kind)
    requests = [ask(engine, name, 5, 30) for name in "ab"]
    assert engine.fail(UserError("it broke")) == requests and is_empty(engine)


def test_a_failed_pass_is_in_the_status_until_its_requests_end(make):
    """/metrics shows the requests that a pass admitted though the pass raised."""
    engine = make("continuous")
    requests = [ask(engine, name, 5, 30) for name in "abcd"]
    engine.engine.runner.run = Failing(engine.engine.runner.run, {1})
    with pytest.raises(RuntimeError):
        engine.step()
    assert len(engine.status.running) == ROWS
    assert engine.fail(UserError("it broke")) == requests[:ROWS]
    assert (engine.status.running, engine.status.waiting) == ((), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_ends_its_request_alone(tiny, model, kind):
    """Position 30 is NaN in the weights: one request gets there with its seventh token."""
    sick = Checkpoint(tiny.config, {name: tensor.clone() for name, tensor in tiny.tensors.items()})
    sick.tensors["wpe.weight"][30] = torch.nan
    engine = adapter(kind, sick, rows=2)
    before, reaches, beside, after = (
        ask(engine, *asked) for asked in (("a", 5, 4), ("b", 25, 30), ("c", 8, 10), ("d", 3, 5))
    )
    together = finish(engine)
    assert reaches.output.finish_reason == "error"
    assert "NaN or infinite" in (reaches.output.error or "")
    expected = alone(model, reaches.prompt_ids, reaches.sampling)
    assert reaches.output.token_ids == expected[:6]
    for request in (before, beside, after):
        assert request.output.token_ids == alone(model, request.prompt_ids, request.sampling)
    assert sum("b" in names for names in together) in (6, 7)
    prompts = 5 + 25 + 8 + 3
    assert sum(record.prefill_tokens for record in engine.steps) == prompts
    sequences = [each for record in engine.steps for each in record.sequences]
    assert sum(each.prefill_tokens for each in sequences) == prompts


# ---- on its thread ------------------------------------------------------------------------------


def gauges(metrics: Metrics) -> dict[str, float]:
    """Those that are zero when nothing is in flight."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.name in IDLE}


@pytest.mark.parametrize("kind", KINDS)
def test_the_async_engine_runs_it(make, model, kind):
    """Tokens, aborts of a running and of a waiting request, and gauges that go up and back."""
    engine: Any = make(kind)
    gate = Gate(engine.step)
    engine.step = gate
    rows = engine.status.max_sequences
    prompts = [prompt_of(3 + number, number) for number in range(7)]

    async def script(running: AsyncEngine) -> list[list[int]]:
        metrics = Metrics(running, "tiny")
        assert running.capacity == rows + 64
        runs = submit(running, [7, 8, 9], 50)
        gate.allow(2)
        await until(lambda: gate.count == 3)  # two passes are made, and the thread waits
        tickets = [submit(running, prompt, 5 + n) for n, prompt in enumerate(prompts)]
        assert gauges(metrics) == {IDLE[0]: 1, IDLE[1]: 7, IDLE[2]: 1 / rows}
        running.abort(runs)
        running.abort(tickets[6])
        gate.allow()
        assert len(await said(running, runs)) == 3 and runs.reason == "abort"
        answers = [await said(running, ticket) for ticket in tickets]
        assert [ticket.reason for ticket in tickets] == ["length"] * 6 + ["abort"]
        assert answers.pop() == []
        assert gauges(metrics) == dict.fromkeys(IDLE, 0.0) and not running.in_flight
        return answers

    answers = run(engine, script)
    assert answers == [alone(model, prompts[n], words(5 + n)) for n in range(6)]
    assert is_empty(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_pass_is_reported_and_the_next_request_is_served(make, model, monkeypatch, kind):
    engine: Any = make(kind)
    place, name = {
        "continuous": lambda: (engine.engine.runner, "run"),
        "static": lambda: (engine.engine.engine, "_forward"),
        "sequential": lambda: (engine.engine.engine, "_forward"),
        "transformers": lambda: (peers.TransformersSequence, "feed"),
    }[kind]()
    if kind == "transformers":  # a method of a class: the sequence is its first argument
        failing = Failing(place.feed, {3})
        monkeypatch.setattr(place, name, lambda *arguments: failing(*arguments))
    else:
        monkeypatch.setattr(place, name, Failing(getattr(place, name), {3}))

    async def script(running: AsyncEngine) -> None:
        ticket = submit(running, prompt_of(5), 9)
        assert await error_of(running, ticket) == BROKEN and ticket.generated == 2
        answer = await said(running, submit(running, prompt_of(6), 9))
        assert answer == alone(model, prompt_of(6), words(9))
        await until(lambda: is_empty(engine))  # the probe of the failure has ended

    run(engine, script)


# ---- the command line ---------------------------------------------------------------------------

CONTEXT = 64 * 1024  # bytes of one whole context of the tiny folder's model in float32


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_for_whole_contexts(tiny_folder, kind):
    def rows(*options: str) -> int:
        arguments = ["--model", str(tiny_folder), "--linear", "plain", "--engine", kind, *options]
        engine, loaded = stage.make_engine(parse(arguments))
        status = engine.status
        assert loaded.config.name == "tiny" and status.block_size == 256
        assert status.blocks == status.max_sequences
        return status.blocks

    expected = [1, 1, 1] if kind in ALONE else [2, 3, 5]
    assert expected == [
        rows("--kv-memory", str(2 * CONTEXT + 5000), "--max-sequences", "7"),
        rows("--kv-memory", str(9 * CONTEXT), "--max-sequences", "3"),
        rows("--max-sequences", "5", "--block-size", "8"),
    ]
    with pytest.raises(UserError, match="block"):
        rows("--kv-memory", str(CONTEXT - 1))


@pytest.mark.parametrize("option", [("--sanitize",), ("--swap-memory", "1MiB")])
@pytest.mark.parametrize("kind", KINDS)
def test_options_for_blocks_are_refused(tiny_folder, kind, option):
    with pytest.raises(UserError, match=f"blocks, which the engine '{kind}' does not have"):
        stage.make_engine(parse(["--model", str(tiny_folder), "--engine", kind, *option]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_it(house, wait_idle, tiny_folder, kind):
    """A crowd gets the tokens of stage 01; samples, an echo, and the page's frames work too."""
    oracle = parity.naive(str(tiny_folder))
    options = ("--dtype", "float64", "--kv-memory", str(8 * CONTEXT), "--max-sequences", "6")
    running = house("--model", str(tiny_folder), "--engine", kind, *options, "--no-sanitize")
    rows = 1 if kind in ALONE else 4  # contexts
    start = running.stderr()
    assert f"\n  engine  {kind}\n" in start and f" in {rows} blocks of 256 tokens" in start
    requests, prompt = parity.requests(300, 14, 60), [5, 6, 7, 8]
    answers = parity.assert_parity(oracle, running.url, "tiny", requests)
    scored = {"echo": True, "logprobs": 1}
    samples = parity.assert_samples(oracle, running.url, "tiny", prompt, **scored).choices
    first = samples[0].logprobs.token_logprobs
    assert all(each.logprobs.token_logprobs[:4] == [None, *first[1:4]] for each in samples)
    numbers = wait_idle(running.url)
    with httpx2.stream("GET", f"{running.url}/live", timeout=60, trust_env=False) as live:
        frame = json.loads(next(each for each in live.iter_lines() if each).removeprefix("data: "))
    generated = [tokens for tokens, _ in answers] + [each.token_ids for each in samples]
    assert numbers["vllm:generation_tokens_total"] == sum(map(len, generated))
    prompts = sum(len(ids) for ids, _ in requests) + 3 * len(prompt)
    assert numbers["vllm:prompt_tokens_total"] == prompts
    assert frame["alive"] and frame["map"] == [[FREE, rows]]
    assert (frame["blocks"], frame["block_size"]) == (rows, 256)
    assert frame["running"] == [] and frame["waiting"] == 0
    assert frame["step"] == frame["steps"][-1]["number"] > 10
    assert max(len(step["rows"]) for step in frame["steps"]) <= rows and frame["steps"][-1]["rows"]

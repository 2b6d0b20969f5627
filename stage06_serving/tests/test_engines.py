"""Earlier engines behind the same server: stage 01's tokens, in the order of their own stage."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx2
import openai
import pytest
import torch

from shared import peers
from shared.checkpoint import Checkpoint, load
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Output
from stage01_forward.model import load_model
from stage01_forward.params import SamplingParams
from stage04_continuous.make import make as make_slots
from stage04_continuous.request import Request, State
from stage04_continuous.tests.oracle import CONFIG, the_model
from stage04_continuous.tests.steps import StepContract
from stage05_paged.blockmap import FREE, blockmap
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving import __main__ as stage
from stage06_serving.engines import Batches, OneByOne, Paged, Slots, Static, Transformers
from stage06_serving.live import look
from stage06_serving.settings import parse
from stage06_serving.status import AnyEngine
from stage06_serving.tests.tools import Failing, alone, is_empty, prompt_of, words

KINDS = ("continuous", "static", "sequential", "transformers")
ALONE = KINDS[2:]  # one request at a time
ROWS = 3  # of the other two


def make(kind: str, checkpoint: Checkpoint, rows: int = ROWS) -> AnyEngine:
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


def ask(engine: AnyEngine, name: str, length: int, count: int) -> Request:
    """Queue a request for `count` tokens."""
    return engine.add(Request(prompt_of(length, ord(name[0])), words(count), name))


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


class TestTransformers(TestSequential):
    @pytest.fixture
    def broken(self, monkeypatch):
        kind = peers.TransformersSequence
        feed = Failing(kind.feed, {1}, RuntimeError("out of memory"))
        return lambda: monkeypatch.setattr(kind, "feed", lambda *arguments: feed(*arguments))

    def engine(self, *_: Any, **options: Any) -> Any:
        model = peers.transformers_model(random_checkpoint(CONFIG, spread=24), torch.float64)
        return Batches(Transformers(model, CONFIG), 1, 1000)


# ---- which requests run when, and together with which -------------------------------------------


def test_no_request_joins_a_static_batch(tiny, tiny_model):
    """It is padded, and a row that has ended is computed on to its end."""
    engine = make("static", tiny, 2)
    requests = [ask(engine, *each) for each in (("a", 5, 3), ("b", 9, 7), ("c", 4, 2))]
    assert finish(engine) == [{"a", "b"}] * 3 + [{"b"}] * 4 + [{"c"}] * 2
    assert [record.waiting for record in engine.steps] == [1] * 7 + [0] * 2
    wasted = [record.wasted_tokens for record in engine.steps]
    assert wasted == [9 - 5, 0, 0, 1, 1, 1, 1, 0, 0]
    for request in requests:
        assert request.output.token_ids == alone(tiny_model, request.prompt_ids, request.sampling)


def test_an_abort_does_not_end_its_static_batch(tiny, tiny_model):
    engine = make("static", tiny, 2)
    stays, leaves, waits, late = (
        ask(engine, *each) for each in (("a", 5, 6), ("b", 9, 9), ("c", 4, 2), ("d", 3, 2))
    )
    engine.step()
    engine.step()
    assert engine.abort("b") is leaves.output and leaves.output.finish_reason == "abort"
    assert engine.abort("d").token_ids == []  # it only waited
    assert [name for name, _ in engine.status.running] == ["a"] and engine.status.owned == 1
    assert finish(engine) == [{"a"}] * 4 + [{"c"}] * 2
    assert [record.rows for record in engine.steps] == [2] * 6 + [1] * 2  # b is still computed
    assert late.state is State.FINISHED
    for request in (stays, leaves, waits):
        tokens = alone(tiny_model, request.prompt_ids, request.sampling)
        assert request.output.token_ids == (tokens[:2] if request is leaves else tokens)


@pytest.mark.parametrize("kind", ALONE)
def test_one_request_at_a_time(tiny, tiny_model, kind):
    """In order of arrival; an abort makes room for the next."""
    engine = make(kind, tiny)
    requests = [ask(engine, *each) for each in (("a", 9, 3), ("b", 5, 30), ("c", 4, 2))]
    assert [engine.step()[0][0] for _ in range(5)] == ["a"] * 3 + ["b"] * 2
    engine.abort("b")
    assert finish(engine) == [{"c"}] * 2
    assert {record.rows for record in engine.steps} == {1}
    assert [request.output.finish_reason for request in requests] == ["length", "abort", "length"]
    for request in requests:
        expected = alone(tiny_model, request.prompt_ids, request.sampling)
        assert request.output.token_ids == expected[: len(request.output.token_ids)]


# ---- what the metrics and the page read ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_records_of_the_steps_add_up(tiny, kind):
    """To the page a slot is a block, and it has the number of its request."""
    engine = make(kind, tiny)
    asked = {"a": (9, 3), "b": (5, 7), "c": (40, 2), "d": (4, 5)}
    for name, (length, count) in asked.items():
        ask(engine, name, length, count)
    rows, waiting = engine.status.max_sequences, []
    assert (engine.status.blocks, engine.status.block_size) == (rows, 64)
    while not is_empty(engine):
        engine.step()
        status, runs = look(engine)
        states = [state for state, count in runs for _ in range(count)]
        numbers = [number for _, number in status.running]
        assert len(states) == rows and [state for state in states if state != FREE] == numbers
        assert dict(status.running).items() <= {"a": 0, "b": 1, "c": 2, "d": 3}.items()
        assert status.owned == len(numbers) and status.hit_rate == status.preemptions == 0
        waiting.append(status.waiting)
    assert runs == [(FREE, rows)] and waiting[0] == len(asked) - rows and waiting[-1] == 0
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
    assert started == sorted(started) and [record.waiting for record in records] == waiting


def test_the_map_of_the_paged_engine_is_its_scheduler_s(tiny_model):
    """Three sequences in memory for two: after each step the scheduler's own tables and counts."""
    options: dict[str, Any] = {"max_sequences": 3, "token_budget": 16, "sanitize": True}
    engine = Paged(make_paged(tiny_model, pool=BlockPool(6, block_size=4), **options))
    scheduler = engine.engine.scheduler
    for number in range(3):
        engine.add(Request([1, 2, 3, 4, number], words(12), f"sequence-{number}"))
    waited = []
    while scheduler.unfinished:
        engine.step()
        status, runs = look(engine)
        assert [state for state, count in runs for _ in range(count)] == blockmap(scheduler)
        running = tuple((request.id, request.arrival) for request in scheduler.running)
        assert (status.running, status.owned) == (running, scheduler.pool.owned)
        counts = scheduler.counts
        assert (status.preemptions, status.hit_rate) == (counts.preemptions, counts.hit_rate)
        waited.append(status.waiting)
    assert status.preemptions > 0 and status.hit_rate > 0 and max(waited) > 0 and waited[-1] == 0


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_without_running_requests_ends_all(tiny, kind):
    """The next step would fail in the same way, and the one after it."""
    engine = make(kind, tiny)
    requests = [ask(engine, name, 5, 30) for name in "ab"]
    assert engine.fail(UserError("it broke")) == requests and is_empty(engine)


def test_a_failed_pass_is_in_the_status_until_its_requests_end(tiny):
    """/metrics shows the requests that a pass admitted though the pass raised."""
    engine: Any = make("continuous", tiny)
    requests = [ask(engine, name, 5, 30) for name in "abcd"]
    engine.engine.runner.run = Failing(engine.engine.runner.run, {1})
    with pytest.raises(RuntimeError):
        engine.step()
    assert len(engine.status.running) == ROWS
    assert engine.fail(UserError("it broke")) == requests[:ROWS]
    assert (engine.status.running, engine.status.waiting) == ((), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_ends_its_request_alone(tiny, tiny_model, kind):
    """Position 30 is NaN in the weights: one request gets there with its seventh token."""
    sick = Checkpoint(tiny.config, {name: tensor.clone() for name, tensor in tiny.tensors.items()})
    sick.tensors["wpe.weight"][30] = torch.nan
    engine = make(kind, sick, 2)
    asked = (("a", 5, 4), ("b", 25, 30), ("c", 8, 10), ("d", 3, 5))
    requests = [ask(engine, *each) for each in asked]
    together = finish(engine)
    reaches = requests[1]
    assert reaches.output.finish_reason == "error"
    assert "NaN or infinite" in (reaches.output.error or "")
    for request in requests:
        tokens = alone(tiny_model, request.prompt_ids, request.sampling)
        assert request.output.token_ids == (tokens[:6] if request is reaches else tokens)
    assert sum("b" in names for names in together) in (6, 7)
    sequences = [each for record in engine.steps for each in record.sequences]
    for records in (engine.steps, sequences):
        assert sum(each.prefill_tokens for each in records) == 5 + 25 + 8 + 3


# ---- over HTTP -----------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 1, "logit_bias": {"5": 3, "7": -100}, "min_tokens": 3},
    {"temperature": 1, "stop_token_ids": list(range(20))},
]


def naive(model: str) -> Naive:
    return Naive(load_model(load(model), dtype=torch.float64))


def answer_of(engine: Naive, prompt: list[int], fields: dict[str, Any]) -> Output:
    """The answer of stage 01 to the fields of a body."""
    bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
    stops = tuple(fields.get("stop_token_ids", ()))
    options = fields | {"logit_bias": bias, "stop_token_ids": stops}
    return engine.generate([prompt], SamplingParams(**options))[0]


def crowd_of(vocabulary: int, count: int, longest: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts as ids, many of them with a common beginning, and options of all kinds."""
    rng = random.Random("parity")
    beginning = [rng.randrange(vocabulary) for _ in range(longest // 2)]
    made = []
    for number in range(count):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest // 2))]
        fields = OPTIONS[number % len(OPTIONS)] | {"max_tokens": rng.randint(4, 30), "seed": number}
        made.append((beginning + own if number % 2 else own, fields))
    return made


def crowd(url: str, model: str, made: list[Any]) -> list[tuple[list[int], str]]:
    """Tokens and finish reasons of all requests, sent at once, every other one as a stream."""

    async def ask(client: Any, number: int) -> tuple[list[int], str]:
        prompt, fields = made[number]
        extra = fields | {"return_token_ids": True}
        options = {"model": model, "prompt": prompt, "extra_body": extra}
        if number % 2 == 0:
            choice = (await client.completions.create(**options)).choices[0]
            return choice.token_ids, choice.finish_reason
        stream = await client.completions.create(**options, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        tokens = [token for choice in choices for token in choice.token_ids]
        return tokens, choices[-1].finish_reason

    async def ask_all() -> list[tuple[list[int], str]]:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(len(made))))

    return asyncio.run(ask_all())


def assert_parity(engine: Naive, url: str, model: str, made: list[Any]) -> list[Any]:
    """A crowd gets the answers of stage 01; its answers."""
    answers = crowd(url, model, made)
    for answer, (prompt, fields) in zip(answers, made, strict=True):
        expected = answer_of(engine, prompt, fields)
        assert answer == (expected.token_ids, expected.finish_reason), fields
    return answers


def assert_samples(engine: Naive, url: str, model: str, prompt: list[int], **fields: Any) -> Any:
    """Three samples of one prompt have the tokens of stage 01 for their seeds; the answer."""
    extra = {"return_token_ids": True, "seed": 40, "n": 3, "max_tokens": 10, **fields}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer: Any = client.completions.create(model=model, prompt=prompt, extra_body=extra)
    for number, choice in enumerate(answer.choices):
        options = {"temperature": 1, "seed": 40 + number, "max_tokens": 10}
        assert choice.token_ids == answer_of(engine, prompt, options).token_ids
    return answer


@pytest.mark.parametrize("preemption", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_a_crowd_with_little_memory(house, metrics, tiny_folder, preemption):
    """Memory for 2 whole contexts, and 8 sequences: prompts share blocks, and requests lose
    them."""
    folder = str(tiny_folder)
    options = ("--dtype", "float64", "--block-size", "4", "--kv-memory", "72KiB")
    swap = ("--swap-memory", "1MiB") if preemption == "swap" else ()
    limits = ("--max-sequences", "8", "--token-budget", "48")
    running = house("--model", folder, *options, "--preemption", preemption, *swap, *limits)
    answers = assert_parity(naive(folder), running.url, "tiny", crowd_of(300, 45, 60))
    numbers = metrics(running.url)
    assert numbers["vllm:num_preemptions_total"] > 0 and numbers["vllm:prefix_cache_hits_total"] > 0
    assert {reason for _, reason in answers} == {"stop", "length"}


def test_the_embedded_model(house):
    """Samples of one prompt, which share its blocks, are those of single requests with their
    seeds."""
    engine = naive("stories")
    running = house("--dtype", "float64", "--kv-memory", "6MiB", "--max-sequences", "6")
    made = crowd_of(load("stories").config.vocab_size, 9, 40)
    made = [(prompt, fields | {"max_tokens": 10}) for prompt, fields in made]
    assert_parity(engine, running.url, "stories", made)
    assert_samples(engine, running.url, "stories", [5, 6, 7, 8, 9, 10] * 4)


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
    oracle = naive(str(tiny_folder))
    options = ("--dtype", "float64", "--kv-memory", str(8 * CONTEXT), "--max-sequences", "6")
    running = house("--model", str(tiny_folder), "--engine", kind, *options, "--no-sanitize")
    rows = 1 if kind in ALONE else 4  # contexts
    start = running.stderr()
    assert f"\n  engine  {kind}\n" in start and f" in {rows} blocks of 256 tokens" in start
    requests, prompt = crowd_of(300, 14, 60), [5, 6, 7, 8]
    answers = assert_parity(oracle, running.url, "tiny", requests)
    scored = {"echo": True, "logprobs": 1}
    samples = assert_samples(oracle, running.url, "tiny", prompt, **scored).choices
    first = samples[0].logprobs.token_logprobs
    assert all(each.logprobs.token_logprobs[:4] == [None, *first[1:4]] for each in samples)
    numbers = wait_idle(running.url)
    with httpx2.stream("GET", f"{running.url}/live", timeout=60, trust_env=False) as live:
        frame = json.loads(next(each for each in live.iter_lines() if each).removeprefix("data: "))
    generated = [tokens for tokens, _ in answers] + [each.token_ids for each in samples]
    assert numbers["vllm:generation_tokens_total"] == sum(map(len, generated))
    prompts = sum(len(ids) for ids, _ in requests) + 3 * len(prompt)
    assert numbers["vllm:prompt_tokens_total"] == prompts
    assert frame["map"] == [[FREE, rows]] and frame["running"] == [] and frame["waiting"] == 0
    assert (frame["blocks"], frame["block_size"]) == (rows, 256)
    assert frame["step"] == frame["steps"][-1]["number"] > 10
    assert max(len(step["rows"]) for step in frame["steps"]) <= rows

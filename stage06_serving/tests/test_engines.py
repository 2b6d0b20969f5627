"""Earlier engines behind the same server: stage 01's tokens, in the order of their own stage."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from shared import peers
from shared.checkpoint import Checkpoint, load
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from stage01_forward.engine import Engine as Naive
from stage01_forward.model import load_model
from stage04_continuous.make import make as make_slots
from stage04_continuous.request import Request, State
from stage04_continuous.tests.contract import StepContract
from stage04_continuous.tests.oracle import CONFIG, the_model
from stage05_paged.blockmap import FREE
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving import __main__ as stage
from stage06_serving.engines import Batches, OneByOne, Paged, Slots, Static, Transformers
from stage06_serving.live import look
from stage06_serving.protocol import CompletionBody
from stage06_serving.settings import parse

from .asking import events, first_frame, post, read_metrics
from .tools import Passes, alone, is_empty, prompt_of, words

KINDS = ("continuous", "static", "sequential", "transformers")
ALONE = KINDS[2:]  # one request at a time
ROWS = 3  # of the other two


def make(kind, checkpoint, rows=ROWS):
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


def ask(engine, name, length, count):
    """Queue a request for `count` tokens."""
    return engine.add(Request(prompt_of(length, ord(name[0])), words(count), name))


def finish(engine):
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

        def fail(*arguments):
            monkeypatch.undo()
            raise RuntimeError("out of memory")

        return lambda: monkeypatch.setattr(kind, "feed", fail)

    def engine(self, *_: Any, **options: Any) -> Any:
        model = peers.transformers_model(random_checkpoint(CONFIG, spread=24), torch.float64)
        return Batches(Transformers(model, CONFIG), 1, 1000)


# ---- which requests run when, and together with which -------------------------------------------


def test_no_request_joins_a_static_batch_and_an_abort_does_not_end_it(tiny, tiny_model):
    """It is padded, and a row that has ended is computed on to its end."""
    engine = make("static", tiny, 2)
    stays, leaves, waits, late = (
        ask(engine, *each) for each in (("a", 5, 6), ("b", 9, 9), ("c", 4, 2), ("d", 3, 2))
    )
    engine.step()
    engine.step()
    assert [record.waiting for record in engine.steps] == [2, 2]
    assert engine.abort("b") is leaves.output and leaves.output.finish_reason == "abort"
    assert engine.abort("d").token_ids == []  # it only waited
    assert [name for name, _ in engine.status.running] == ["a"] and engine.status.owned == 1
    short = ask(engine, "e", 7, 1)
    assert finish(engine) == [{"a"}] * 4 + [{"c", "e"}] + [{"c"}]
    assert [record.rows for record in engine.steps] == [2] * 7 + [1]  # b is still computed
    wasted = [record.wasted_tokens for record in engine.steps]
    assert wasted == [9 - 5, *[0] * 5, 7 - 4, 1]
    assert late.state is short.state is State.FINISHED
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
    for name, lengths in asked.items():
        ask(engine, name, *lengths)
    rows, waiting = engine.status.max_sequences, []
    assert (engine.status.blocks, engine.status.block_size) == (rows, 64)
    while not is_empty(engine):
        engine.step()
        status, runs = look(engine)
        states = [state for state, count in runs for _ in range(count)]
        numbers = [number for _, number in status.running]
        assert states == numbers + [FREE] * (rows - status.owned)
        assert dict(status.running).items() <= {"a": 0, "b": 1, "c": 2, "d": 3}.items()
        waiting.append(status.waiting)
    assert runs == [(FREE, rows)] and waiting[0] == len(asked) - rows and waiting[-1] == 0
    records = list(engine.steps)
    for record in records:
        parts = [(one.prefill_tokens, one.decode_tokens, one.blocks) for one in record.sequences]
        assert [*map(sum, zip(*parts, strict=True))] == [
            *(record.prefill_tokens, record.decode_tokens, record.rows)
        ]
        assert record.rows == len(parts) == record.owned_blocks
        assert record.seconds > 0 and record.bookkeeping_seconds <= record.seconds
    for name, (length, count) in asked.items():
        own = [each for record in records for each in record.sequences if each.request_id == name]
        tokens = [sum(one.prefill_tokens for one in own), sum(one.decode_tokens for one in own)]
        assert tokens == [length, count - 1]
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + ["length"]
    started = [record.started for record in records]
    assert started == sorted(started) and [record.waiting for record in records] == waiting


# ---- failures -----------------------------------------------------------------------------------


def test_a_failed_pass_is_in_the_status_until_its_requests_end(tiny):
    """/metrics shows the requests that a pass admitted though the pass raised. A failure without
    running requests ends all: the next step would fail in the same way."""
    for kind in KINDS:
        idle = make(kind, tiny)
        requests = [ask(idle, name, 5, 30) for name in "ab"]
        assert idle.fail(UserError("it broke")) == requests and is_empty(idle)
    engine = make("continuous", tiny)
    requests = [ask(engine, name, 5, 30) for name in "abcd"]
    Passes(engine.engine.runner, {1})
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


def crowd_of(count):
    """Bodies with prompts as ids, many of them with a common beginning, and options of all kinds;
    every other one for a stream."""
    rng = random.Random("parity")
    beginning = [rng.randrange(300) for _ in range(30)]
    made = []
    for number in range(count):
        own = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
        fields = OPTIONS[number % len(OPTIONS)] | {"max_tokens": rng.randint(4, 30), "seed": number}
        fields |= {"return_token_ids": True, "stream": number % 2 == 1}
        made.append(fields | {"prompt": beginning + own if number % 2 else own})
    return made


def answer_of(running, body):
    """Tokens and finish reason."""
    answer = post(running, json=body)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text) if body["stream"] else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return tokens, choices[-1]["finish_reason"]


def expected_of(engine, body):
    """The answer of stage 01 to a body."""
    params = CompletionBody(**body).params(body["max_tokens"], None, 0)
    return engine.generate([body["prompt"]], params)[0]


def assert_parity(folder, running, count):
    """A crowd gets the answers of stage 01, and so do samples of one prompt; the answers."""
    engine, bodies = Naive(load_model(load(str(folder)), dtype=torch.float64)), crowd_of(count)
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(partial(answer_of, running), bodies))
    for answer, body in zip(answers, bodies, strict=True):
        expected = expected_of(engine, body)
        assert answer == (expected.token_ids, expected.finish_reason), body
    body = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 10, "temperature": 1}
    samples = {"n": 3, "seed": 40, "return_token_ids": True, "echo": True, "logprobs": 1}
    choices = post(running, json=body | samples).json()["choices"]
    for seed, choice in enumerate(choices, 40):
        assert choice["token_ids"] == expected_of(engine, body | {"seed": seed}).token_ids
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[:24] == [None, *choices[0]["logprobs"]["token_logprobs"][1:24]]
    return answers


@pytest.mark.parametrize("preemption", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_a_crowd_with_little_memory(house, tiny_folder, preemption):
    """Memory for 2 whole contexts, and 8 sequences: prompts share blocks, and requests lose
    them."""
    options = ("--dtype", "float64", "--block-size", "4", "--kv-memory", "72KiB")
    swap = ("--swap-memory", "1MiB") if preemption == "swap" else ()
    limits = ("--max-sequences", "8", "--token-budget", "48")
    options += ("--preemption", preemption, *swap, *limits)
    running = house("--model", str(tiny_folder), *options)
    answers = assert_parity(tiny_folder, running, 45)
    numbers = read_metrics(running)
    assert numbers["vllm:num_preemptions_total"] > 0 and numbers["vllm:prefix_cache_hits_total"] > 0
    assert {reason for _, reason in answers} == {"stop", "length"}


CONTEXT = 64 * 1024  # bytes of one whole context of the tiny folder's model in float32


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_for_whole_contexts_and_there_are_no_blocks(tiny_folder, kind):
    def rows(*options):
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
    for option in (("--sanitize",), ("--swap-memory", "1MiB")):
        with pytest.raises(UserError, match=f"blocks, which the engine '{kind}' does not have"):
            rows(*option)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_it(house, tiny_folder, kind):
    options = ("--dtype", "float64", "--kv-memory", str(8 * CONTEXT), "--max-sequences", "6")
    running = house("--model", str(tiny_folder), "--engine", kind, *options, "--no-sanitize")
    rows = 1 if kind in ALONE else 4  # contexts
    start = running.stderr()
    assert f"\n  engine  {kind}\n" in start and f" in {rows} blocks of 256 tokens" in start
    assert_parity(tiny_folder, running, 14)
    frame = first_frame(running)
    assert (frame["map"], frame["blocks"], frame["block_size"]) == ([[FREE, rows]], rows, 256)
    assert max(len(step["rows"]) for step in frame["steps"]) <= rows

"""Earlier engines behind the same server: stage 01's tokens, in the order of their own stage."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from pytest import approx

from shared import peers
from shared.checkpoint import load
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from stage01_forward.engine import Engine as Naive
from stage01_forward.model import load_model
from stage04_continuous.make import make as make_slots
from stage04_continuous.request import State
from stage04_continuous.tests import oracle
from stage04_continuous.tests.contract import StepContract
from stage04_continuous.tests.oracle import answer, ask, assert_answered, finish, the_model
from stage05_paged.blockmap import FREE
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving import __main__ as stage
from stage06_serving.engines import Batches, OneByOne, Paged, Slots, Static, Transformers
from stage06_serving.live import look
from stage06_serving.protocol import CompletionBody
from stage06_serving.settings import parse

from .asking import events, first_frame, post, read_metrics
from .tools import is_empty

KINDS = ("continuous", "static", "sequential", "transformers")
ALONE = KINDS[2:]  # one request at a time


def model_of(weights):
    return the_model() if weights is None else load_model(weights, dtype=torch.float64)


class Adapted(StepContract):
    def assert_idle(self, engine: Any) -> None:
        assert engine.requests == {} and is_empty(engine) and engine.step() == []


class TestPaged(Adapted):
    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        options |= {"max_sequences": sequences, "token_budget": budget}
        return Paged(make_paged(the_model(), pool=BlockPool(64, 8), **options))


class Slotted(Adapted):
    """Engines whose requests have a slot each. The page shows a slot as a block, with the number
    of its request."""

    def names(self, engine: Any) -> list[set[str]]:
        """The requests in each step."""
        return [{row[0] for row in self.shares(record)} for record in engine.steps]

    def test_the_records_of_the_steps_add_up(self):
        engine, rows, waiting = self.engine(3), self.together, []
        asked = {"a": (9, 3), "b": (5, 7), "c": (40, 2), "d": (4, 5)}
        for name, lengths in asked.items():
            ask(engine, *lengths, name)
        status = engine.status
        assert (status.max_sequences, status.blocks, status.block_size) == (rows, rows, 64)
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
            parts = [
                (one.prefill_tokens, one.decode_tokens, one.blocks) for one in record.sequences
            ]
            sums = record.prefill_tokens, record.decode_tokens, record.rows
            assert tuple(map(sum, zip(*parts, strict=True))) == sums
            assert record.rows == len(parts) == record.owned_blocks
            assert record.seconds > 0 and record.bookkeeping_seconds <= record.seconds
        for name, (length, count) in asked.items():
            own = [one for record in records for one in record.sequences if one.request_id == name]
            tokens = [sum(one.prefill_tokens for one in own), sum(one.decode_tokens for one in own)]
            assert tokens == [length, count - 1]
            assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + ["length"]
        started = [record.started for record in records]
        assert started == sorted(started) and [record.waiting for record in records] == waiting

    def test_a_failed_pass_is_in_the_status_until_its_requests_end(self, broken):
        """/metrics shows the requests that a pass admitted though the pass raised. A failure
        without running requests ends all: the next step would fail in the same way."""
        idle, engine = self.engine(3), self.engine(3)
        requests = [ask(idle, 5, 30) for _ in range(2)]
        assert idle.fail(UserError("it broke")) == requests and is_empty(idle)
        requests = [ask(engine, 5, 30) for _ in range(5)]
        broken()
        with pytest.raises(RuntimeError):
            engine.step()
        assert len(engine.status.running) == self.together
        assert engine.fail(UserError("it broke")) == requests[: self.together]
        assert (engine.status.running, engine.status.waiting) == ((), 5 - self.together)

    def test_a_row_that_is_not_finite_ends_its_request_alone(self):
        """Position 30 is NaN in the weights: one request gets there with its seventh token."""
        sick = random_checkpoint(oracle.SHAPES[-1], spread=24)
        sick.tensors["wpe.weight"][30] = torch.nan
        engine = self.engine(2, weights=sick)
        requests = [ask(engine, *lengths) for lengths in ((5, 4), (25, 30), (8, 10), (3, 5))]
        finish(engine)
        reaches = requests.pop(1)
        assert (reaches.output.finish_reason, reaches.output.token_ids) == ("error", answer(25, 6))
        assert "NaN or infinite" in (reaches.output.error or "")
        assert_answered(*requests)
        assert sum(reaches.id in names for names in self.names(engine)) in (6, 7)
        sequences = [one for record in engine.steps for one in record.sequences]
        for records in (engine.steps, sequences):
            assert sum(one.prefill_tokens for one in records) == 5 + 25 + 8 + 3


class TestSlots(Slotted):
    def engine(self, sequences: int = 4, budget: int = 32, weights: Any = None, **more: Any) -> Any:
        return Slots(make_slots(model_of(weights), sequences, token_budget=budget, **more))


class TestStatic(Slotted):
    phases = {("waiting", False, False), ("running", False, True)}  # no prompt in parts

    def engine(self, sequences: int = 4, *_: Any, weights: Any = None, **options: Any) -> Any:
        return Batches(Static(model_of(weights), sequences), sequences, 1000)

    def test_no_request_joins_a_batch_and_an_abort_does_not_end_it(self):
        """The batch is padded, and a row that has ended is still computed until the batch ends."""
        engine = self.engine(2)
        asked = ((5, 6, "a"), (9, 9, "b"), (4, 2, "c"), (3, 2, "d"))
        stays, leaves, waits, late = (ask(engine, *each) for each in asked)
        engine.step()
        engine.step()
        assert [record.waiting for record in engine.steps] == [2, 2]
        assert engine.abort("b") is leaves.output and leaves.output.finish_reason == "abort"
        assert engine.abort("d").token_ids == []  # it only waited
        assert [name for name, _ in engine.status.running] == ["a"] and engine.status.owned == 1
        short = ask(engine, 7, 1, "e")
        finish(engine)
        assert self.names(engine) == [{"a", "b"}] * 2 + [{"a"}] * 4 + [{"c", "e"}, {"c"}]
        assert [record.rows for record in engine.steps] == [2] * 7 + [1]  # b is still computed
        wasted = [record.wasted_tokens for record in engine.steps]
        assert wasted == [9 - 5, *[0] * 5, 7 - 4, 1]
        assert late.state is short.state is State.FINISHED and len(leaves.output.token_ids) == 2
        assert_answered(stays, leaves, waits, short, aborted=True)


class TestSequential(Slotted):
    phases, together = TestStatic.phases, 1
    test_abort_at_any_moment_changes_no_other_request: Any = None  # test_one_request_at_a_time

    def engine(self, *_: Any, weights: Any = None, **options: Any) -> Any:
        return Batches(OneByOne(model_of(weights)), 1, 1000)

    def test_one_request_at_a_time(self):
        """Requests run in order of arrival; an abort makes room for the next."""
        engine = self.engine()
        requests = [ask(engine, *each) for each in ((9, 3, "a"), (5, 30, "b"), (4, 2, "c"))]
        for _ in range(5):
            engine.step()
        engine.abort("b")
        finish(engine)
        assert self.names(engine) == [{"a"}] * 3 + [{"b"}] * 2 + [{"c"}] * 2
        assert {record.rows for record in engine.steps} == {1}
        assert_answered(*requests, aborted=True)


class TestTransformers(TestSequential):
    @pytest.fixture
    def broken(self, monkeypatch):
        kind = peers.TransformersSequence

        def fail(*arguments):
            monkeypatch.undo()
            raise RuntimeError("out of memory")

        return lambda: monkeypatch.setattr(kind, "feed", fail)

    def engine(self, *_: Any, weights: Any = None, **options: Any) -> Any:
        weights = weights or random_checkpoint(oracle.CONFIG, spread=24)
        model = peers.transformers_model(weights, torch.float64)
        return Batches(Transformers(model, oracle.CONFIG), 1, 1000)


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


CONTEXT = 128 * 1024  # bytes of one whole context of the tiny folder's model in float64
MEMORY = "--block-size 4 --kv-memory 72KiB --max-num-seqs 8 --token-budget 48 --preemption"
CROWDS = {
    "recompute": f"{MEMORY} recompute",
    "swap": f"{MEMORY} swap --swap-memory 1MiB",
    "static": f"--engine static --kv-memory {4 * CONTEXT} --max-num-seqs 6 --no-sanitize",
}


@pytest.mark.parametrize(
    "name", ["recompute", pytest.param("swap", marks=pytest.mark.slow), "static"]
)
def test_a_crowd_gets_the_answers_of_stage_01(house, tiny_folder, name):
    """And so do samples of one prompt. With memory for 2 whole contexts and 8 sequences, prompts
    share blocks, and requests lose them."""
    naive = Naive(load_model(load(str(tiny_folder)), dtype=torch.float64))
    bodies = crowd_of(14 if name == "static" else 45)
    running = house("--model", str(tiny_folder), "--dtype", "float64", *CROWDS[name].split())
    start = running.stderr()

    def expected(body: dict[str, Any]) -> tuple[list[int], str | None]:
        params = CompletionBody(**body).params(body["max_tokens"], None, 0)
        output = naive.generate([body["prompt"]], params)[0]
        return output.token_ids, output.finish_reason

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(partial(answer_of, running), bodies))
    for got, body in zip(answers, bodies, strict=True):
        assert got == expected(body), body
    body = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 10, "temperature": 1}
    samples = {"n": 3, "seed": 40, "return_token_ids": True}
    scored = {"echo": True, "logprobs": 1}
    if name == "static":
        assert "cannot score" in post(running, json=body | scored).json()["error"]["message"]
        scored = {}
    choices = post(running, json=body | samples | scored).json()["choices"]
    for seed, choice in enumerate(choices, 40):
        assert choice["token_ids"] == expected(body | {"seed": seed})[0]
        if scored:
            scores = choice["logprobs"]["token_logprobs"]
            assert scores[:24] == [None, *choices[0]["logprobs"]["token_logprobs"][1:24]]
    if name == "static":
        assert "\n  engine  static, float" in start and " in 4 blocks of 256 tokens" in start
        frame = first_frame(running)
        assert (frame["map"], frame["blocks"], frame["block_size"]) == ([[FREE, 4]], 4, 256)
        assert max(len(step["rows"]) for step in frame["steps"]) <= 4
    else:
        assert {reason for _, reason in answers} == {"stop", "length"}
        numbers = read_metrics(running)
        assert numbers["vllm:num_preemptions_total"] > 0
        assert numbers["vllm:prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_of_the_command_line_answers_as_stage_01(tiny_folder, kind):
    """Its memory holds whole contexts, without blocks."""

    def made(*options: str) -> Any:
        arguments = ["--model", str(tiny_folder), "--linear", "plain", "--dtype", "float64"]
        engine, loaded = stage.make_engine(parse([*arguments, "--engine", kind, *options]))
        assert loaded.config.name == "tiny" and engine.status.block_size == 256
        assert engine.status.blocks == engine.status.max_sequences
        return engine

    engines = [
        made("--kv-memory", str(2 * CONTEXT + 5000), "--max-num-seqs", "7"),
        made("--kv-memory", str(9 * CONTEXT), "--max-num-seqs", "3"),
        made("--max-num-seqs", "5", "--block-size", "8"),
    ]
    rows = [1, 1, 1] if kind in ALONE else [2, 3, 5]
    assert [engine.status.blocks for engine in engines] == rows
    naive = Naive(load_model(load(str(tiny_folder)), dtype=torch.float64))
    requests = [ask(engines[1], *lengths) for lengths in ((9, 30), (40, 9), (5, 4))]
    finish(engines[1])
    assert max(record.rows for record in engines[1].steps) == rows[1]
    for request in requests:
        (output,) = naive.generate([request.prompt_ids], request.sampling)
        assert request.output.token_ids == output.token_ids
        scores = [one.token for one in output.logprobs]
        assert [one.token for one in request.output.logprobs] == approx(scores, abs=1e-9)
    with pytest.raises(UserError, match="block"):
        made("--kv-memory", str(CONTEXT - 1))
    for option in (("--sanitize",), ("--swap-memory", "1MiB")):
        with pytest.raises(UserError, match=f"blocks, which the engine '{kind}' does not have"):
            made(*option)

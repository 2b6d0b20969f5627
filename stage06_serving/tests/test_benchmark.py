"""The benchmark measures a small model through and through, in processes like those of a real run; its two sides do the same
work, and its figures add up."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared import charts, measure
from shared.bench import benchmarks
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from stage02_kv_cache.benchmark import greedy
from stage03_batching.benchmark import Subject
from stage04_continuous.engine import Engine
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make
from stage05_paged.memory import block_bytes, parse_memory
from stage05_paged.records import BlocksRecord
from stage06_serving import benchmark
from stage06_serving.__main__ import SWITCH
from stage06_serving.benchmark import (
    FULL,
    HTTP,
    LOSE,
    NULL,
    OFFLINE,
    PARTS,
    QUICK,
    REST,
    SERVER,
    Helper,
    Load,
    Plan,
    Run,
)
from stage06_serving.tests.conftest import Running

TINY = Plan(
    subjects=(("stories", "float32"),), max_sequences=4, kv_memory="8MiB", options=("--sanitize",), streams=((1, 2), (3, 5)),
    prompt=5, answer=12, repeats=1, null_answer=20, null_repeats=1, lose_requests=7, lose_prompt=3,
)  # fmt: skip
LIMITS = measure.Limits("cpu", 1, 30.0, {"float32": 100.0, "bfloat16": 200.0})
WATCHED = [benchmark.watched_name(SWITCH), benchmark.watched_name(TINY.switches[0])]


class Near(Helper):
    """A helper whose work is done by a thread of this process: it starts at once."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=target, args=(theirs, *arguments), daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # that ends it
        self.thread.join()


@pytest.fixture(
    scope="module",
    params=[Near, pytest.param(Helper, marks=pytest.mark.slow)],
    ids=["threads", "processes"],
)
def measured(request: pytest.FixtureRequest) -> tuple[dict[str, Any], int]:
    """The results, as they will be read back, and how far the progress bar came. The server is a process of its own, as always;
    engine and client are, as in a real run, in the slow form."""
    bars: list[Any] = []

    class Counting(benchmark.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the teams of four processes on a few cores would mostly wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(benchmark, "Helper", request.param)
        patch.setattr(benchmark, "FULL", TINY)
        patch.setattr(benchmark, "tqdm", Counting)
        patch.setattr(measure, "limits", lambda **_: LIMITS)
        patch.setenv(
            "STAIRCASE_API_KEY", "secret"
        )  # somebody's own settings are not what is measured
        patch.setenv("STAIRCASE_MAX_SEQUENCES", "1")
        results = benchmarks.unsaved(*benchmark.run(quick=False))
    torch.set_num_threads(threads)
    return json.loads(json.dumps(results, allow_nan=False)), bars[0].n


@pytest.fixture(scope="module")
def results(measured: tuple[dict[str, Any], int]) -> dict[str, Any]:
    return measured[0]


@pytest.fixture
def engine(tiny_model: Any) -> Engine:
    return make(tiny_model, pool=BlockPool(64, 4), sanitize=True, max_sequences=8, token_budget=64)


def every_row(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for case in (HTTP, NULL, LOSE) for row in results["results"][case]]


def test_every_table_is_whole(results: dict[str, Any]) -> None:
    found = benchmark.tables(results)
    assert list(found) == ["limits", "http", "tokens", "null", "lose"]
    for name, text in found.items():
        for block in text.split("\n\n"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, name
    rows = {
        name: [len(block.splitlines()) - 2 for block in text.split("\n\n")]
        for name, text in found.items()
    }
    assert (rows["http"], rows["null"], rows["lose"]) == ([4], [2], [2])
    assert rows["tokens"][0] == len(PARTS) + 3


def test_every_chart_is_drawn_and_the_headline_has_its_number(results: dict[str, Any]) -> None:
    drawn = benchmark.charts(results)
    assert list(drawn) == ["http", "where"]
    for function in drawn.values():
        assert charts.render(function()).endswith(b"</svg>\n")
    assert "% of the offline engine's tok/s behind HTTP, 3 streams (" in benchmark.headline(results)


def test_the_progress_bar_knows_how_many_runs_there_are(
    measured: tuple[dict[str, Any], int],
) -> None:
    assert measured[1] == TINY.runs


def test_both_sides_did_the_same_work_and_every_answer_was_proved(results: dict[str, Any]) -> None:
    for row in every_row(results):
        assert list(row["runs"])[:2] == [OFFLINE, SERVER]
        assert list(row["runs"])[2:] == {HTTP: WATCHED, NULL: [], LOSE: WATCHED[:1]}[row["case"]]
        assert {proof["tokens"] for proof in row["proof"].values()} == {
            row["requests"] * row["answer"]
        }
        assert (
            set(row["same"].values()) == {row["requests"]}
            and row["same"].keys() == row["runs"].keys()
        )


def test_a_single_stream_makes_the_same_passes_with_and_without_http(
    results: dict[str, Any],
) -> None:
    """Nobody comes too late for a pass when there is only one."""
    for row in every_row(results):
        if row["streams"] == 1:
            passes = {
                run["steps"]["passes"]
                for name, runs in row["runs"].items()
                if name != SERVER
                for run in runs
            }
            assert passes == {row["requests"] * row["answer"]}


def test_times_and_shares_of_a_run_fit_together(results: dict[str, Any]) -> None:
    for row in every_row(results):
        for name, runs in row["runs"].items():
            for run in runs:
                assert 0 < run["ttft"][0] <= run["ttft"][1] < run["seconds"]
                assert (run["itl"] is None) == (row["case"] == LOSE)
                assert run["cpu"].keys() == (
                    {"engine"} if name == OFFLINE else {"engine", "loop", "client"}
                )
                assert min(run["cpu"].values()) >= 0
        assert benchmark.python_seconds(row, "client") > 0
        assert (
            benchmark.python_seconds(row, "loop") > 0 or row["case"] == NULL
        )  # the system counts hundredths of a second
        least, most = benchmark.predicted(results, row)
        assert 0 < least <= most < 1


def test_a_token_s_way_is_measured_in_all_its_parts(results: dict[str, Any]) -> None:
    found = benchmark.loop_parts(results)
    assert list(found) == [*PARTS, REST]
    row = benchmark.main_row(results)
    assert row["streams"] == 3 and sum(found.values()) * row["requests"] * row[
        "answer"
    ] / 1e6 == pytest.approx(benchmark.python_seconds(row, "loop"))
    assert results["results"]["parts"][PARTS[0]] > 0  # the others are differences


def test_a_prediction_is_between_a_halt_and_a_fair_share() -> None:
    runs = {
        OFFLINE: [{"seconds": 8.0}], SERVER: [{"seconds": 9.0}], WATCHED[0]: [{"cpu": {"loop": 1.5, "client": 0.5}}],
        WATCHED[1]: [{"cpu": {"loop": 70.0, "client": 70.0}}],
    }  # fmt: skip
    least, most = benchmark.predicted({"machine": {"cpus": 4}}, {"runs": runs})
    assert (least, most) == (8 / 10, 8 / 8.5)
    assert benchmark.share({"runs": runs}).median == pytest.approx(8 / 9)


def test_passes_that_do_something_else_are_not_compared() -> None:
    """A prompt in a pass, or a stream that is missing, would make it another one."""

    def record(started: float, seconds: float, decode: int, prefill: int = 0) -> BlocksRecord:
        return BlocksRecord(
            decode, prefill, decode, seconds, started=started, bookkeeping_seconds=seconds / 10
        )

    records = [
        record(0, 9, 2, 5),
        record(10, 2, 3),
        record(12.5, 4, 3),
        record(17, 1, 2),
        record(18, 3, 3),
    ]
    found = benchmark.steps_of(records, 3)
    assert found == {
        "passes": 5,
        "seconds": 3,
        "bookkeeping": pytest.approx(0.3),
        "between": pytest.approx(0.5),
    }
    assert benchmark.steps_of(records[:1], 3) == {
        "passes": 1,
        "seconds": None,
        "bookkeeping": None,
        "between": None,
    }
    assert benchmark.pass_of([{"steps": found}, {"steps": found}]) == benchmark.Pass(
        3, found["bookkeeping"], found["between"]
    )
    assert benchmark.pass_of([{"steps": found}, {"steps": benchmark.steps_of([], 3)}]) is None


def test_offline_the_next_request_follows_as_soon_as_one_has_ended(engine: Engine) -> None:
    load = Load(HTTP, streams=3, requests=7, prompt=4, answer=6)
    prompts = [random_prompt(load.prompt, engine.config, i) for i in range(load.requests)]
    run = benchmark.run_offline(engine, load, prompts)
    rows = [record.rows for record in engine.steps]
    assert rows == [3] * 12 + [1] * 6  # three times three streams would be nine requests
    assert run.steps["passes"] == len(rows)
    assert [len(times) for times in run.times] == [load.answer] * load.requests
    assert run.sent == sorted(run.sent) and run.sent[3] >= run.times[0][-1]
    assert run.ids == [output.token_ids for output in engine.generate(prompts, greedy(load.answer))]


def test_over_http_too(server: Running) -> None:
    load = Load(HTTP, streams=2, requests=5, prompt=4, answer=6)
    prompts = [random_prompt(load.prompt, PRESETS["stories"], i) for i in range(load.requests)]
    run = asyncio.run(benchmark.run_client(server.url, load, prompts))
    assert [len(ids) for ids in run.ids] == [load.answer] * load.requests
    for number, sent in enumerate(run.sent):
        in_hand = sum(
            one <= sent < times[-1] for one, times in zip(run.sent, run.times, strict=True)
        )
        assert in_hand <= load.streams, number
    one_by_one = Load(HTTP, streams=1, requests=5, prompt=4, answer=6)
    assert asyncio.run(benchmark.run_client(server.url, one_by_one, prompts)).ids == run.ids


def test_what_is_told_of_a_run() -> None:
    run = Run(9.0, [1.0, 2.0], [[1.5, 2.5, 4.5], [4.0, 5.0]], [[], []], {"engine": 1.0}, {})
    assert run.told() == {
        "seconds": 9.0,
        "cpu": {"engine": 1.0},
        "steps": {},
        "ttft": [0.5, 2.0],
        "itl": [1.0, 2.0],
    }
    assert Run(9.0, [1.0], [[1.5]], [[]], {}, {}).told()["itl"] is None


def test_an_answer_that_is_an_error_stops_the_benchmark(server: Running) -> None:
    load = Load(HTTP, streams=1, requests=1, prompt=2000, answer=1)
    with pytest.raises(RuntimeError, match="the server answered HTTP/1.1 400"):
        asyncio.run(benchmark.run_client(server.url, load, [[1] * load.prompt]))
    good = b'5c\r\ndata: {"choices":[{"token_ids":[3,4]}]}\n\n'
    assert benchmark.ids_of([good, good]) == [3, 4, 3, 4]
    with pytest.raises(RuntimeError, match="broke an answer off: it is over"):
        benchmark.ids_of([good, b'data: {"error":{"message":"it is over"}}\n\n'])


def test_a_wrong_token_and_a_short_answer_stop_the_benchmark(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage03_batching.benchmark.PROMPT", 6)
    subject = Subject(tiny, torch.float32)
    pool = BlockPool(64, 4)
    engine = make(subject.model, pool=pool, sanitize=True, max_sequences=8, token_budget=64)
    load = Load(HTTP, streams=2, requests=2, prompt=4, answer=5)
    prompts = [random_prompt(load.prompt, tiny.config, i) for i in range(load.requests)]
    ids = benchmark.run_offline(engine, load, prompts).ids
    assert benchmark.prove(subject, load, prompts, ids)["tokens"] == 10
    with pytest.raises(AssertionError, match="1 answers of 4 tokens"):
        benchmark.prove(subject, load, prompts, [ids[0], ids[1][:-1]])
    ids[1][2] = (ids[1][2] + 1) % tiny.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        benchmark.prove(subject, load, prompts, ids)


def test_a_process_that_ends_stops_the_benchmark() -> None:
    with Helper(os._exit) as helper, pytest.raises(RuntimeError, match="_exit has ended"):
        helper.answer()


def test_the_engine_alone_is_made_by_the_server_s_own_command_line() -> None:
    from stage06_serving.settings import parse

    for model, dtype in FULL.subjects:
        settings = parse(benchmark.options(FULL, model, dtype, "packed"))
        assert (settings.model, settings.dtype, settings.linear) == (model, dtype, "packed")
        assert (
            settings.random_weights == (model != "stories")
            and settings.threads == torch.get_num_threads()
        )
        assert (
            not settings.prefix_caching
        )  # a repeat must not find what the run before has computed


def test_the_plans_can_show_what_they_are_for() -> None:
    assert QUICK.runs < FULL.runs / 2
    for plan in (FULL, QUICK):
        most = plan.streams[-1][0]
        assert (
            most == max(streams for streams, _ in plan.streams) <= plan.max_sequences
        )  # nobody waits for a place
        for model, dtype in plan.subjects:
            config, kind = PRESETS[model], getattr(torch, dtype)
            blocks = parse_memory(plan.kv_memory, 2**40) // block_bytes(config, kind, 16)
            for load in plan.loads((model, dtype)):
                assert (
                    load.requests >= load.streams
                    and load.prompt + load.answer <= config.n_positions
                )
                assert (
                    load.streams * -(-(load.prompt + load.answer) // 16) <= blocks
                )  # and nobody is preempted
        assert [load.case for load in plan.loads(plan.subjects[0])] == [HTTP] * len(
            plan.streams
        ) + [NULL, LOSE]
    assert (FULL.streams[-1][0], FULL.prompt, FULL.answer) == (32, 64, 64)

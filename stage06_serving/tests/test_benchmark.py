"""The benchmark measures a small model for real, in processes; its two sides do the same work, and
its figures add up."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.bench.kit import Subject, greedy
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import LIMITS, check_drawn, measured
from shared.parity import random_prompt
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make
from stage06_serving import benchmark
from stage06_serving.benchmark import FULL, HTTP, LOSE, NULL, OFFLINE, SERVER, WATCHED, Load
from stage06_serving.settings import parse

TINY = replace(
    FULL, subjects=(("stories", "float32"),), max_sequences=4, kv_memory="8MiB",
    options=("--sanitize",), repeats=1,
    loads=((HTTP, 1, 2, 5, 12), (HTTP, 3, 5, 5, 12), (NULL, 1, 1, 5, 20), (LOSE, 3, 7, 3, 1)),
)  # fmt: skip


def thread(initial: Any = None, *arguments: Any) -> Executor:
    """In place of a process: it starts at once."""
    return ThreadPoolExecutor(1, initializer=initial, initargs=arguments)


@pytest.fixture(
    scope="module",
    params=[thread, pytest.param(benchmark.process, marks=pytest.mark.slow)],
    ids=["threads", "processes"],
)
def results(request: pytest.FixtureRequest) -> Results:
    """The server is a process of its own, as always; engine and client in the slow form too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # four teams of threads on a few cores would mostly wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(benchmark, "process", request.param)
        patch.setenv("STAIRCASE_API_KEY", "secret")  # the user's settings are not measured
        patch.setenv("STAIRCASE_MAX_SEQUENCES", "1")
        content = measured(benchmark.BENCHMARK, TINY)
    torch.set_num_threads(threads)
    return Results(content)


def groups(results: Results) -> list[Row]:
    return [row for case in (HTTP, NULL, LOSE) for row in results.groups(case)]


def test_everything_is_drawn(results):
    counts = check_drawn(benchmark.BENCHMARK, dict(results.content))
    assert [counts[name] for name in (HTTP, NULL, LOSE)] == [2, 1, 1]
    assert counts["tokens"] == len(benchmark.PARTS) + 3
    assert (counts["latency"], counts["loop"]) == (8, 3)


def test_both_sides_did_the_same_work_and_every_answer_was_proved(results):
    for row in groups(results):
        variants = list(row["seconds"])
        assert variants == [OFFLINE, SERVER, WATCHED][: 2 if row["case"] == NULL else 3]
        assert {proof["tokens"] for proof in row["proof"].values()} == {row.tokens}
        assert list(row["proof"]) == variants and set(row["same"].values()) == {row["requests"]}
        if row["streams"] == 1:  # with one, no request comes too late for a pass
            own = [one for one in row.variants if one.variant != SERVER]
            assert {passes for one in own for passes in one["passes"]} == {row.tokens}


def test_times_and_shares_fit_together(results):
    for group in groups(results):
        for row in group.variants:
            runs = zip(row["seconds"], row["ttft"], row["itl"], row["cpu"], strict=True)
            for seconds, (first, last), between, cpu in runs:
                assert 0 < first <= last < seconds
                assert (between is None) == (group["case"] == LOSE)
                mine = {"engine"} if row.variant == OFFLINE else {"engine", "loop", "client"}
                assert cpu.keys() == mine and min(cpu.values()) >= 0
        assert benchmark.python_seconds(group, "client") > 0
        least, most = benchmark.predicted(group)
        assert 0 < least <= most < 100


def test_the_parts_of_a_token_s_way_make_the_whole(results):
    parts = benchmark.token_costs(results)
    row, client = results.groups(HTTP)[-1], parts.pop("client")
    assert list(parts) == [*benchmark.PARTS, benchmark.REST] and all(parts.values())
    assert client * row.tokens / 1e6 == pytest.approx(benchmark.python_seconds(row, "client"))
    whole = benchmark.python_seconds(row, "loop")
    assert row["streams"] == 3
    assert sum(parts.values()) * row.tokens / 1e6 == pytest.approx(whole)


def test_a_prediction_is_between_a_halt_and_a_fair_share():
    cpu = {WATCHED: [{"loop": 1.5, "client": 0.5}], SERVER: [{"loop": 70, "client": 70}]}
    seconds = {OFFLINE: [8.0], SERVER: [9.0], WATCHED: [9.0]}
    content = {"machine": {"cpus": 4}, "configuration": {}, "limits": vars(LIMITS), "results": {}}
    row = Row(Results(content), {"seconds": seconds, "cpu": cpu})
    assert benchmark.predicted(row) == pytest.approx((80, 100 * 8 / 8.5))
    assert benchmark.share(row).median == pytest.approx(100 * 8 / 9)


def test_offline_the_next_request_follows_as_soon_as_one_has_ended(tiny_model):
    pool = BlockPool(64, 4)
    engine = make(tiny_model, pool=pool, max_sequences=8, token_budget=64, sanitize=True)
    load = Load(HTTP, streams=3, requests=7, prompt=4, answer=6)
    prompts = [random_prompt(load.prompt, engine.config, i) for i in range(load.requests)]
    run = benchmark.run_offline(engine, load, prompts)
    rows = [record.rows for record in engine.steps]
    assert rows == [3] * 12 + [1] * 6 and run.passes == len(rows)
    assert [len(answer.times) for answer in run.answers] == [load.answer] * load.requests
    sent = [answer.sent for answer in run.answers]
    assert sent == sorted(sent) and sent[3] >= run.answers[0].times[-1]
    outputs = engine.generate(prompts, greedy(load.answer))
    assert run.ids == [output.token_ids for output in outputs]


def test_an_answer_that_is_an_error_stops_the_benchmark(server):
    load = Load(HTTP, streams=1, requests=1, prompt=2000, answer=1)
    with pytest.raises(RuntimeError, match="the server answered HTTP/1.1 400"):
        asyncio.run(benchmark.run_client(server.url, load, [[1] * load.prompt]))
    good = b'5c\r\ndata: {"choices":[{"token_ids":[3,4]}]}\n\n'
    assert benchmark.ids_of([good, good]) == [3, 4, 3, 4]
    with pytest.raises(RuntimeError, match="broke an answer off: it is over"):
        benchmark.ids_of([good, b'data: {"error":{"message":"it is over"}}\n\n'])


def test_a_wrong_token_and_a_short_answer_stop_the_benchmark(tiny):
    subject = Subject(tiny, torch.float32)
    engine = make(subject.model, pool=BlockPool(64, 4), max_sequences=8, token_budget=64)
    load = Load(HTTP, streams=2, requests=2, prompt=4, answer=5)
    prompts = subject.prompts([load.prompt] * 2)
    ids = benchmark.run_offline(engine, load, prompts).ids
    assert benchmark.prove(subject, load, prompts, ids)["tokens"] == 10
    with pytest.raises(AssertionError, match="1 answers have another length than 5, such as 4"):
        benchmark.prove(subject, load, prompts, [ids[0], ids[1][:-1]])
    ids[1][2] = (ids[1][2] + 1) % tiny.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        benchmark.prove(subject, load, prompts, ids)


def test_the_engine_alone_is_made_by_the_server_s_own_command_line():
    for model, dtype in FULL.subjects:
        settings = parse(benchmark.options(FULL, model, dtype, "packed"))
        assert (settings.model, settings.dtype, settings.linear) == (model, dtype, "packed")
        assert settings.random_weights == (model != "stories")
        assert settings.threads == torch.get_num_threads()
        assert not settings.prefix_caching  # a repeat must not find what the run before computed

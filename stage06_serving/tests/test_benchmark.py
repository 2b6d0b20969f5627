"""The benchmark measures a small model for real, in processes; its two sides do the same work, and
its figures add up."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from shared import measure
from shared.bench.kit import Subject
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import LIMITS, check_drawn, measured
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage06_serving import benchmark
from stage06_serving.benchmark import FULL, HTTP, LOSE, NULL, OFFLINE, SERVER, WATCHED, Load
from stage06_serving.settings import parse

TINY = replace(
    FULL, subjects=(("stories", "float32", "paged"),), max_num_seqs=4, kv_memory="3MiB",
    options=("--sanitize",), repeats=1,
    loads=((HTTP, 1, 2, 5, 12), (HTTP, 3, 5, 5, 12), (NULL, 1, 1, 5, 20), (LOSE, 3, 7, 3, 1)),
)  # fmt: skip


def thread(initial=None, *arguments):
    """A thread instead of a process: it starts at once."""
    return ThreadPoolExecutor(1, initializer=initial, initargs=arguments)


@pytest.fixture(
    scope="module",
    params=[thread, pytest.param(measure.process, marks=pytest.mark.slow)],
    ids=["threads", "processes"],
)
def results(request, house):
    """All in a few processes, and in the slow form each in one of its own, as always."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # four teams of threads on a few cores would mostly wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(measure, "process", request.param)
        if request.param is thread:
            started = lambda words, quiet: nullcontext(house(*words))  # noqa: E731
            patch.setattr(benchmark, "own_server", started)
        patch.setenv("STAIRCASE_API_KEY", "secret")  # the user's settings are not measured
        patch.setenv("STAIRCASE_MAX_SEQUENCES", "1")
        content = measured(benchmark.BENCHMARK, TINY)
    torch.set_num_threads(threads)
    return Results(content)


def test_both_sides_did_the_same_work_and_every_answer_was_proved(results):
    counts = check_drawn(benchmark.BENCHMARK, dict(results.content))
    assert [counts[name] for name in (HTTP, NULL, LOSE)] == [2, 1, 1]
    passes = []
    for group in (group for case in (HTTP, NULL, LOSE) for group in results.groups(case)):
        variants = list(group["seconds"])
        assert variants == [OFFLINE, SERVER, WATCHED][: 2 if group["case"] == NULL else 3]
        assert {proof["tokens"] for proof in group["proof"].values()} == {group.tokens}
        assert list(group["proof"]) == variants
        assert set(group["same"].values()) == {group["requests"]}
        passes += group.of(OFFLINE)["passes"]
        for row in group.variants:
            runs = zip(row["seconds"], row["ttft"], row["itl"], row["cpu"], strict=True)
            for seconds, (first, last), between, cpu in runs:
                assert 0 < first <= last < seconds
                assert (between is None) == (group["case"] == LOSE)
                mine = {"engine"} if row.variant == OFFLINE else {"engine", "loop", "client"}
                assert cpu.keys() == mine and min(cpu.values()) >= 0
        least, most = benchmark.predicted(group)
        assert 0 < least <= most < 100
    # Offline, the next request starts as soon as one has ended.
    assert passes == [2 * 12, 2 * 12, 20, 3]


def test_the_parts_of_a_token_s_way_make_the_whole(results):
    row, parts = results.groups(HTTP)[-1], results["parts"]
    assert list(parts) == [*benchmark.PARTS, benchmark.REST] and min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(1)
    *_, loop, client = (float(line["us a token"]) for line in benchmark.token_lines(results))
    for name, us in (("loop", loop), ("client", client)):
        whole = benchmark.python_seconds(row, name) * 1e6
        assert us == pytest.approx(whole / row.tokens, abs=0.05)


def test_a_prediction_is_between_a_halt_and_a_fair_share():
    cpu = {WATCHED: [{"loop": 1.5, "client": 0.5}], SERVER: [{"loop": 70, "client": 70}]}
    seconds = {OFFLINE: [8.0], SERVER: [9.0], WATCHED: [9.0]}
    content = {"machine": {"cpus": 4}, "configuration": {}, "limits": vars(LIMITS), "results": {}}
    row = Row(Results(content), {"seconds": seconds, "cpu": cpu})
    assert benchmark.predicted(row) == pytest.approx((80, 100 * 8 / 8.5))
    assert benchmark.share(row).median == pytest.approx(100 * 8 / 9)


def test_a_wrong_answer_stops_the_benchmark(server, tiny):
    """An error instead of an answer, one in the middle of a stream, too few tokens, another."""
    load = Load(HTTP, streams=1, requests=1, prompt=2000, answer=1)
    with pytest.raises(RuntimeError, match="the server answered HTTP/1.1 400"):
        asyncio.run(benchmark.run_client(server.url, load, [[1] * load.prompt]))
    good = b'5c\r\ndata: {"choices":[{"token_ids":[3,4]}]}\n\n'
    assert benchmark.ids_of([good, good]) == [3, 4, 3, 4]
    with pytest.raises(RuntimeError, match="broke an answer off: it is over"):
        benchmark.ids_of([good, b'data: {"error":{"message":"it is over"}}\n\n'])
    subject, load, counts = Subject(tiny, torch.float32), Load(HTTP, 2, 2, 4, 5), [5, 5]
    prompts = subject.prompts([load.prompt] * 2)
    engine = make(subject.model, pool=BlockPool(64, 4), max_sequences=8, token_budget=64)
    ids = benchmark.run_offline(engine, load, prompts).ids
    assert subject.prove_lengths(prompts, ids, counts)["tokens"] == 10
    with pytest.raises(AssertionError, match="another length than requested: .5, 4."):
        subject.prove_lengths(prompts, [ids[0], ids[1][:-1]], counts)
    ids[1][2] = (ids[1][2] + 1) % tiny.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        subject.prove_lengths(prompts, ids, counts)


def test_the_engine_alone_is_made_by_the_server_s_own_command_line():
    for model, dtype, engine in FULL.subjects:
        settings = parse(benchmark.options(FULL, model, dtype, engine))
        assert (settings.model, settings.dtype) == (model, dtype)
        assert settings.engine == engine
        assert settings.random_weights == (model != "stories")
        assert settings.threads == torch.get_num_threads()
        assert not settings.enable_prefix_caching  # a repeat must not find an earlier run's

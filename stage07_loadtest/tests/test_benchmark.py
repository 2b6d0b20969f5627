"""The benchmark loads real servers with a small model and proves them first; and its tables, charts
and predictions of results that are known by heart are right. Its cross-check: the figures of other
tools in our units."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch

from shared import measure
from shared.bench.claims import ROUND
from shared.bench.kit import Subject, shape
from shared.bench.rows import Results
from shared.bench.tests.tools import LIMITS, check_drawn, check_sums, lines, measured
from shared.checkpoint import PRESETS
from shared.errors import UserError
from shared.server import own_server
from stage06_serving.settings import parse
from stage07_loadtest import benchmark, crosscheck, workload
from stage07_loadtest.crosscheck import GUIDELLM, OURS, VLLM
from stage07_loadtest.load import Point
from stage07_loadtest.metrics import summarize
from stage07_loadtest.results import to_json
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import Counters
from stage07_loadtest.workload import LENGTHS

from .helpers import mocked, record, refused

FULL, QUICK = benchmark.FULL, benchmark.BENCHMARK.quick
TRANSFORMERS, SEQUENTIAL, STATIC, CONTINUOUS, PAGED = ENGINES = tuple(benchmark.ENGINES)
TINY = replace(
    FULL, models=("stories",), dtypes=("float32",), contexts=2, sequences=4, main_users=2,
    users={
        SEQUENTIAL: {"short": (1, 2)}, STATIC: {"short": (2,)}, CONTINUOUS: {"short": (2,)},
        PAGED: {"short": (1, 2), "mixed": (2,)},
    },
    seconds=0.2, flood=(2.0, 4), open_requests=4, slices=2, burst=(2, 0.2, 3), prove_prompts=1,
)  # fmt: skip
WORDS = 8  # tokens of an answer of the real run


def test_a_tiny_plan_is_proved_measured_in_turn_kept_and_drawn(tmp_path, monkeypatch):
    """One real server takes the place of all engines; what the options of each do is tested in
    stage 06."""
    started: list[Any] = []
    file = tmp_path / "machine" / f"{benchmark.STAGE}.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # three teams of threads on a few cores would mostly wait
    monkeypatch.setenv("STAIRCASE_MAX_SEQUENCES", "1")  # the user's settings are not measured
    with own_server(benchmark.options(TINY, PAGED, "float32"), quiet=True) as server:

        def start(arguments, quiet, module):
            assert (module is None) == (PAGED in arguments)
            started.append(arguments)
            return nullcontext(server)

        ruler = partial(benchmark.check_ruler, 0.02, 0.001)
        for name, value in (("own_server", start), ("FULL", TINY), ("check_ruler", ruler)):
            monkeypatch.setattr(benchmark, name, value)
        for module in (benchmark, workload):
            monkeypatch.setattr(module, "ANSWER", WORDS)
        monkeypatch.setattr(workload, "MIXED_ANSWER", (WORDS, 0.8, 4, 12))
        monkeypatch.setattr(measure, "results_file", lambda *_: file)
        results = Results(measured(benchmark.BENCHMARK, TINY))
    assert started == [benchmark.options(TINY, name, "float32") for name in TINY.users]
    torch.set_num_threads(threads)

    points, ruler, proofs = results["points"], results["ruler"], results["proof"]
    main = [(name, "short", 2) for name in TINY.users]
    rest = [(SEQUENTIAL, "short", 1), (PAGED, "short", 1), (PAGED, "mixed", 2)]
    found = [(one["server"], one["workload"], one["users"]) for one in points if one["users"]]
    assert found == [*main, *main[1:], main[0], *rest]
    opened = [one for one in points if not one["users"]]
    kinds = [(one["server"], one["kind"], one["requests"]) for one in opened]
    assert kinds == [(PAGED, "poisson", 4)] * (1 + len(TINY.shares)) + [(PAGED, "bursts", 6)]
    closed = [one for one in points if (one["server"], one["workload"]) == (PAGED, "short")]
    best = max(one["request_rate"] for one in closed if one["users"])
    rates = [2 * best, *(share * benchmark.capacity(points) for share in TINY.shares)]
    assert [one["rate"] for one in opened[:-1]] == pytest.approx(rates, abs=1e-5)
    assert [len(waits) for waits in results["waits"]] == [TINY.slices] * len(rates)
    for one in points:
        assert one["succeeded"] == one["requests"] > 0, one
        assert one["tokens_match"] and one["blocks_back"], one
    # Nothing is sent earlier by the server of known latencies.
    assert ruler["known"] == {"ttft": 0.02, "itl": 0.001, "e2e": pytest.approx(0.02 + 7 * 0.001)}
    assert ruler["measured"]["ttft"] >= 0.02 and ruler["measured"]["e2e"] >= ruler["known"]["e2e"]

    kept = gzip.decompress(file.with_suffix(".requests.jsonl.gz").read_bytes()).decode()
    requests = [json.loads(line) for line in kept.splitlines()]
    counted = Counter(each["point"] for each in requests)
    assert list(counted.values()) == [one["requests"] for one in points]
    assert list(proofs) == list(TINY.users) and results["naive"] > 0
    assert {proof["tokens"] for proof in proofs.values()} == {len(LENGTHS) * WORDS}
    counts = check_drawn(benchmark.BENCHMARK, dict(results.content))
    assert counts["load"] == 7 and counts["open"] == len(TINY.shares) + 2
    assert f"0 of {len(requests)} requests failed (stories" in benchmark.headline(results)


@pytest.mark.parametrize("steady", [None, {"output_rate": 0.0}])
def test_a_flood_too_short_for_a_steady_part_is_counted_whole(steady):
    flood = {"kind": "poisson", "steady": steady, "output_rate": 2.0 * benchmark.ANSWER}
    assert benchmark.capacity([flood]) == 2
    assert benchmark.capacity([flood | {"steady": {"output_rate": benchmark.ANSWER}}]) == 1


def test_a_server_that_answers_otherwise_stops_the_benchmark(monkeypatch):
    async def ask_all(url, prompts, counts):
        return {"ids": [[0] * WORDS for _ in prompts]}

    monkeypatch.setattr(benchmark, "ask_all", ask_all)
    with pytest.raises(AssertionError, match="below the best"):
        benchmark.prove(Subject(shape("stories"), torch.float32), "", 1)


def test_all_servers_have_the_same_memory_threads_and_room():
    for engine in ENGINES:
        words = benchmark.options(FULL, engine, "bfloat16")
        place = words.index("--engine")  # which the earlier ones' program takes itself
        assert words[place + 1] == engine
        found = parse(words[:place] + words[place + 2 :])
        assert (found.dtype, found.random_weights) == ("bfloat16", True)
        assert int(found.kv_memory) == FULL.contexts * 1024 * 12 * 2 * 768 * 2
        assert found.max_num_seqs == FULL.sequences and found.max_queue >= 128
        assert found.threads == torch.get_num_threads()


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_the_plans_compare_the_engines_where_batches_differ(plan):
    compared = {engine for engine, name, users in benchmark.turns(plan) if users == plan.main_users}
    assert compared >= {STATIC, CONTINUOUS, PAGED} and set(plan.users) >= {SEQUENTIAL, *compared}
    rows = partial(benchmark.rows_of, asdict(plan), PRESETS["gpt2"])
    assert rows(STATIC, "short", plan.main_users) < rows(PAGED, "short", plan.main_users)
    turns = [
        benchmark.turns(FULL).count((name, "short", 64)) for name in (PAGED, f"{PAGED}, bfloat16")
    ]
    assert turns == [FULL.repeats, 1]  # the second dtype is no engine to compare


def made(server, rate, users=None, name="short", failed=0, offered=None):
    """A point of ten requests, some of them failed, with two tokens each and `rate` tok/s."""
    good = 10 - failed
    records = [record(i, gaps=(0.5, 0.1)) if i < good else refused(i) for i in range(10)]
    when = Schedule("closed" if users else "poisson", users, None if users else [0.0] * 10, offered)
    seconds = 2 * good / rate
    counted = Counters(0, 2 * good, 0, 0, 0, 0.0)
    point = Point(name, when, records, 0.0, seconds, rate / 1000, counted, [])
    return {"server": server} | to_json(summarize(point, benchmark.SLO))


@pytest.fixture
def known():
    """Rates whose quotients are obvious, on the machine of the lesson."""
    loads = [
        *((TRANSFORMERS, 5, 8), (SEQUENTIAL, 10, 64), (SEQUENTIAL, 10, 8, "mixed")),
        *((STATIC, 30, 64), (STATIC, 40, 64), (STATIC, 20, 64, "mixed"), (CONTINUOUS, 42, 64)),
        *((CONTINUOUS, 40, 64, "mixed"), (PAGED, 84, 64), (PAGED, 60, 64, "mixed")),
        *((PAGED, 90, 128, "short", 1), (PAGED, 2250, None, "short", 0, 90.0)),
        (PAGED, 80, None, "short", 0, 49.5),
    ]
    proof = {name: {"tokens": 450, "near_ties": int(name == PAGED)} for name in ENGINES}
    ruler = {"known": {"ttft": 0.2}, "measured": {"ttft": 0.2041}, "client_cpu": 0.04}
    points = [made(*load) for load in loads]
    results = {"points": points, "waits": [], "proof": proof, "naive": 5.0, "ruler": ruler}
    content = measure.content(benchmark.STAGE, {"plan": asdict(FULL)}, results, ROUND)
    return Results(json.loads(json.dumps(content)))


def test_the_split_is_the_quotient_of_neighbours_and_their_product_the_whole(known):
    assert "8.4x the tok/s of one request at a time, and 1 of 130 req" in benchmark.headline(known)
    assert [[line[0], *line[2:]] for line in lines(benchmark.TABLES["split"](known))] == [
        ["none: stage 01, offline", "5.0", "", "0.50x"],
        [TRANSFORMERS, "5.0", "", "0.50x"],
        [SEQUENTIAL, "10.0", "2.00x", "1.00x"],  # the cache, over stage 01
        [STATIC, "35.0", "3.50x", "3.50x"],  # the median of two repeats
        [CONTINUOUS, "42.0", "1.20x", "4.20x"],
        [PAGED, "84.0", "2.00x", "8.40x"],
    ]
    steps = [line[3:] for line in lines(benchmark.TABLES["split_mixed"](known))]
    assert steps == [["", "1.00x"], ["2.00x", "2.00x"], ["2.00x", "4.00x"], ["1.50x", "6.00x"]]
    times = lines(benchmark.TABLES["load_latency"](known))
    assert {line[4] for line in times if line[2] == "128"} == {"inf"}  # one of ten was refused
    trust = dict(lines(benchmark.TABLES["trust"](known)))
    assert trust["tokens proved"] == "2,250, of 5 servers; near ties: 1"
    assert trust["points with a mark against them"].startswith("13; 13 are short")


def test_the_lesson_s_predictions_stand_beside_what_was_measured(known):
    found = {what: cells for what, *cells, _ in lines(benchmark.TABLES["loop"](known))}
    assert found["one request at a time"][2:] == ["10.0 tok/s", "**missed**, 12% of the limit"]
    assert found["eight slots"][0] == "583 tok/s"
    assert found["blocks"] == [
        "735 tok/s",
        "735 tok/s",
        "84.0 tok/s",
        "**missed**, 11% of the limit",
    ]
    assert found["batching"] == ["7.24x", "7.24x", "4.20x", "**missed**"]
    assert found["continuity, equal lengths"] == ["1.00x", "1.00x", "1.20x", "held"]
    assert found["paging"] == ["1.26x", "1.26x", "2.00x", "**missed**"]
    assert found["knee"] == ["10.0 users", "10.0 users", "128 users", "**missed**"]
    late = found["TTFT p95 above the capacity"]
    assert late[1:] == ["0.06 s waited", "0.50 s waited", "**missed**"]
    sums = ("583 / 81 = 7.2", "735 / 583 = 1.26", f"{735 / 50:.1f} requests a second")
    check_sums("stage07_loadtest", "81 tok/s", "583 tok/s", "735 tok/s", *sums)


def test_the_wait_is_by_the_order_in_which_requests_were_due():
    due = ((3, 9), (1, 1), (4, 5), (2, 2))
    records = [record(0, intended, gaps=(wait, 0.1)) for intended, wait in due]
    records.append(refused(4, 0))
    assert benchmark.waiting(records, 2) == [1.5, 7.0]


def test_how_many_rows_a_step_can_have():
    for engine, users, name, contexts, rows in (
        *((TRANSFORMERS, 64, "long", 8, 1), (STATIC, 4, "short", 8, 4)),
        *((CONTINUOUS, 64, "short", 8, 8), (PAGED, 128, "short", 8, 64)),
        (PAGED, 128, "long", 1, 8),  # a context is 64 blocks; 114 tokens take 8 of them
    ):
        plan = asdict(replace(FULL, contexts=contexts))
        assert benchmark.rows_of(plan, PRESETS["gpt2"], engine, name, users) == rows


# ---- the cross-check ----------------------------------------------------------------------------

CROSS = replace(crosscheck.FULL, users=2, requests=6, prompt=5, answer=4)
LOW, HIGH = {"p50": 0.1, "p90": 0.2, "p99": 0.3}, {"p50": 0.11, "p90": 0.21, "p99": 0.304}


def guidellm(count):
    """What guidellm 0.8.1 writes, as far as it is read."""
    values = {"time_to_first_token_ms": 100.0, "inter_token_latency_ms": 20.0}
    values |= {"output_tokens_per_second": 170.0, "prompt_token_count": 32.0}
    figures: dict[str, Any] = {"text": {"a": 1}}
    for name, value in (values | {"request_latency": 1.08}).items():
        percentiles = {f"p{percent}": value for percent in (50, 90, 99)}
        read = {"percentiles": percentiles, "mean": value, "median": value, "count": count}
        figures[name] = {"successful": read}
    return {"metrics": figures}


def test_their_figures_are_read_in_seconds_and_none_may_be_missing():
    found = crosscheck.read(guidellm(6), CROSS)
    figures = [found[name]["p99"] for name in ("TTFT", "TPOT", "E2E")]
    assert (*figures, found["rate"], found["prompt"]) == pytest.approx((0.1, 0.02, 1.08, 170, 32))
    with pytest.raises(UserError, match="1 requests of guidellm failed"):
        crosscheck.read(guidellm(5), CROSS)
    vllm = {"completed": 6, "output_throughput": 170.0, "total_input_tokens": 192}
    vllm |= {f"p{p}_{key}_ms": 100.0 for p in (50, 90, 99) for key in ("ttft", "tpot", "e2el")}
    found = crosscheck.read_vllm(vllm, CROSS)
    assert (found["rate"], found["prompt"], found["E2E"]["p90"]) == (170.0, 32.0, 0.1)
    with pytest.raises(UserError, match="2 requests of vLLM failed"):
        crosscheck.read_vllm(vllm | {"completed": 4}, CROSS)


def test_ours_has_the_same_figures_of_the_same_load():
    with mocked(ttft=0.02, itl=0.001) as running:
        found = crosscheck.ours(running.url, CROSS, 0)
        lengths = {(len(body["prompt"]), body["max_tokens"]) for body in running.bodies}
    assert lengths == {(5, 4)} and found["prompt"] == 5 and running.requests == 2 + 6
    assert 0.02 <= found["TTFT"]["p50"] <= found["TTFT"]["p99"] <= found["E2E"]["p99"]


def test_all_tools_are_compared_by_the_medians_of_their_rounds():
    ours = ((100.0, LOW), (999.0, HIGH), (100.0, LOW))
    rounds = {OURS: ours, GUIDELLM: ((90.0, HIGH),) * 3, VLLM: ((100.0, LOW),) * 3}
    runs = [
        {"server": "mock", "tool": tool, "rate": rate, "prompt": 32}
        | dict.fromkeys(("TTFT", "TPOT", "E2E"), times)
        for tool, own in rounds.items()
        for rate, times in own
    ]
    results = Results(measure.content("x", {}, {"runs": runs}, LIMITS))
    rows = list(crosscheck.compared(results))
    cells = [[row[name] for name in (OURS, GUIDELLM, VLLM, "difference", "agree")] for row in rows]
    assert cells[:3] == cells[3:6] == cells[6:9]
    assert cells[0] == ["100.0", "110.0", "100.0", "+10.0%, +0.0%", "no, yes"]
    assert [cell[4] for cell in cells[1:3]] == ["yes, yes"] * 2  # 5 %, 1.3 %
    assert cells[9] == ["100.0", "90.0", "100.0", "-10.0%, +0.0%", "no, yes"]
    assert "in 16 of 20 figures" in crosscheck.headline(results)

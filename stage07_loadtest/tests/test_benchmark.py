"""The benchmark loads real servers with a small model and proves them first; and its tables, charts
and predictions of results that are known by heart are right."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from shared import measure
from shared.bench.kit import Subject, shape
from shared.bench.rows import Results
from shared.bench.tests.tools import check_drawn, lines, measured
from shared.checkpoint import PRESETS
from shared.errors import UserError
from shared.server import own_server
from stage06_serving.settings import parse
from stage07_loadtest import benchmark, mock, workload
from stage07_loadtest.__main__ import SHARES
from stage07_loadtest.benchmark import (
    CONTINUOUS,
    ENGINES,
    FULL,
    PAGED,
    QUICK,
    SEQUENTIAL,
    STATIC,
    TRANSFORMERS,
)
from stage07_loadtest.load import Point, ServerDelta
from stage07_loadtest.metrics import Summary, summarize
from stage07_loadtest.mock import Behaviour
from stage07_loadtest.results import from_json, to_json
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.tests.test_main import mocked
from stage07_loadtest.tests.test_metrics import record, refused
from stage07_loadtest.workload import LENGTHS

TINY = replace(
    FULL,
    models=("stories",),
    dtypes=("float32",),
    contexts=2,
    sequences=4,
    main_users=2,
    seconds=0.2,
    users={SEQUENTIAL: {"short": (1, 2)}, PAGED: {"short": (1, 2), "mixed": (2,)}},
    open_requests=4,
    burst=(2, 0.2),
    prove_prompts=1,
)
WORDS = 8  # tokens of an answer of the real run
RULER = {
    "known": {"ttft": 0.2, "itl": 0.05},
    "measured": {"ttft": 0.2041, "itl": 0.05},
    "client_cpu": 0.04,
}
ROUND = measure.Limits("cpu", 1, 40.0, {"float32": 200.0, "bfloat16": 400.0})  # of the lessons


# ---- a real run ----------------------------------------------------------------------------------


@dataclass
class Real:
    """A run: its results, and the requests that were kept."""

    results: Results
    requests: list[dict[str, Any]]

    @property
    def points(self) -> list[tuple[str, Summary]]:
        """Server and summary of every point, as they were measured."""
        every = self.results["points"]
        return [(one["server"], from_json(benchmark.summary(one))) for one in every]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """One real server takes the place of both engines; which options each has is looked at here,
    and what they do is tested in stage 06."""
    started: list[Sequence[str]] = []
    file = tmp_path_factory.mktemp("reports") / "machine" / f"{benchmark.STAGE}.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # three teams of threads on a few cores would mostly wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAIRCASE_MAX_SEQUENCES", "1")  # the user's settings are not measured
        with own_server(benchmark.options(TINY, PAGED, "float32"), quiet=True) as server:

            @contextmanager
            def start(arguments: Sequence[str], quiet: bool) -> Iterator[Any]:
                started.append(arguments)
                yield server

            for name, value in {
                "own_server": start,
                "FULL": TINY,
                "check_ruler": lambda: RULER,
                "ANSWER": WORDS,
            }.items():
                patch.setattr(benchmark, name, value)
            patch.setattr(workload, "ANSWER", WORDS)
            patch.setattr(workload, "MIXED_ANSWER", (WORDS, 0.8, 4, 12))
            patch.setattr(measure, "results_file", lambda *_: file)
            results = Results(measured(benchmark.BENCHMARK, TINY))
        assert started == [benchmark.options(TINY, name, "float32") for name in (SEQUENTIAL, PAGED)]
    torch.set_num_threads(threads)
    kept = gzip.decompress(file.with_suffix(".requests.jsonl.gz").read_bytes()).decode()
    return Real(results, [json.loads(line) for line in kept.splitlines()])


def test_every_point_of_the_plan_is_measured_in_turn(real: Real) -> None:
    closed = [(server, p.workload, p.users) for server, p in real.points if p.users]
    main = [(SEQUENTIAL, "short", 2), (PAGED, "short", 2), (PAGED, "mixed", 2)]
    assert closed == [*main, *main[1:], main[0], (SEQUENTIAL, "short", 1), (PAGED, "short", 1)]
    opened = [(server, p.kind, p.requests) for server, p in real.points if not p.users]
    assert opened == [(PAGED, "poisson", 4)] * len(SHARES) + [(PAGED, "bursts", 6)]
    rates = [p.rate for _, p in real.points if p.kind == "poisson"]
    most = benchmark.capacity(real.points)
    assert rates == pytest.approx([share * most for share in SHARES], abs=1e-5)


def test_nothing_failed_and_both_sides_have_counted_the_same_tokens(real: Real) -> None:
    for server, point in real.points:
        assert point.succeeded == point.requests > 0, (server, point.load)
        assert point.tokens_match and point.blocks_back, (server, point.load)
        if point.workload != "mixed":
            assert point.completion_tokens == WORDS * point.requests
    counted = Counter(each["point"] for each in real.requests)
    assert list(counted.values()) == [point.requests for _, point in real.points]
    assert all(sum(each["chunk_tokens"]) == each["completion_tokens"] for each in real.requests)


def test_each_server_was_proved_first_and_everything_is_drawn(real: Real) -> None:
    proofs = real.results["proof"]
    assert list(proofs) == [SEQUENTIAL, PAGED] and real.results["naive"] > 0
    assert {proof["tokens"] for proof in proofs.values()} == {len(LENGTHS) * WORDS}
    counts = check_drawn(benchmark.BENCHMARK, dict(real.results.content))
    assert counts["load"] == 5 and counts["open"] == len(SHARES) + 1
    requests = sum(point.requests for _, point in real.points)
    assert f"0 of {requests} requests failed (stories" in benchmark.headline(real.results)


def test_the_ruler_is_checked_by_a_server_of_known_latencies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []

    @contextmanager
    def process(*arguments: str) -> Iterator[str]:
        given.extend(arguments)
        with mocked(ttft=0.02, itl=0.001) as running:
            yield running.url

    known = {"ttft": 0.02, "itl": 0.001, "users": 2, "rounds": 1}
    monkeypatch.setattr(benchmark, "RULER", known)
    monkeypatch.setattr(mock, "process", process)
    found = benchmark.check_ruler()
    assert given == ["--ttft", "0.02", "--itl", "0.001"]
    assert found["known"] == {"ttft": 0.02, "itl": 0.001, "e2e": pytest.approx(0.069)}
    assert found["measured"].keys() == found["known"].keys() and found["client_cpu"] > 0
    # The mock sends nothing earlier.
    assert found["measured"]["ttft"] >= 0.02 and found["measured"]["e2e"] >= 0.069


# ---- servers and their proof ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "token", "short"])
def test_a_server_that_answers_otherwise_stops_the_benchmark(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(shape("stories"), torch.float32)
    engine = benchmark.stages.oracle(subject.model)

    async def answers(url: str, asks: Sequence[workload.Ask]) -> list[list[int]]:
        found = [
            engine.generate([benchmark.token_ids(ask)], benchmark.greedy(WORDS)) for ask in asks
        ]
        ids = [output.token_ids for (output,) in found]
        if fault == "token":
            ids[1][5] = (ids[1][5] + 1) % subject.config.vocab_size
        return [*ids[:-1], ids[-1][:-1]] if fault == "short" else ids

    monkeypatch.setattr(workload, "ANSWER", WORDS)
    monkeypatch.setattr(benchmark, "answers", answers)
    if not fault:
        assert benchmark.prove(subject, "", 1)["tokens"] == len(LENGTHS) * WORDS
    else:
        words = {"token": "below the best", "short": "1 answers have another length, such as 7"}
        with pytest.raises(AssertionError, match=words[fault]):
            benchmark.prove(subject, "", 1)


@pytest.mark.parametrize("fault", ["refused", "500"])
def test_a_server_that_does_not_answer_stops_the_benchmark(fault: str) -> None:
    async def ask() -> list[list[int]]:
        async with mock.serving(Behaviour(ttft=0, itl=0, fault=fault)) as server:
            return await benchmark.answers(server.url, workload.make("short", 2, 0))

    with pytest.raises(UserError, match="did not answer .*: try its command line by hand"):
        asyncio.run(ask())


def test_all_servers_have_the_same_memory_threads_and_room() -> None:
    config = PRESETS["gpt2"]
    for dtype in FULL.dtypes:
        context = config.n_positions * config.kv_bytes_per_token(getattr(torch, dtype))
        for engine in ENGINES:
            settings = parse(benchmark.options(FULL, engine, dtype))
            assert (settings.engine, settings.dtype, settings.random_weights) == (
                engine,
                dtype,
                True,
            )
            assert int(settings.kv_memory) == FULL.contexts * context
            assert settings.max_sequences == FULL.sequences
            assert settings.threads == torch.get_num_threads()
            assert settings.max_queue >= 128  # none of the most users is refused
    assert "--random-weights" not in benchmark.options(TINY, PAGED, "float32")


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_the_plans_can_show_what_they_are_for(plan: Any) -> None:
    compared = [engine for engine, name, users in plan.turns if users == plan.main_users]
    assert set(compared) >= {STATIC, CONTINUOUS, PAGED} and all(map(plan.points, ENGINES))
    rows = {
        name: benchmark.rows_of(asdict(plan), PRESETS["gpt2"], name, "short", plan.main_users)
        for name in ENGINES
    }
    assert rows[SEQUENTIAL] == rows[TRANSFORMERS] == 1
    assert 1 < rows[STATIC] == rows[CONTINUOUS] < rows[PAGED]
    assert max(users for *_, users in FULL.points(PAGED)) == 128 and FULL.main_users == 64


# ---- results that are known ----------------------------------------------------------------------


def made(
    server: str,
    rate: float,
    users: int | None = None,
    name: str = "short",
    offered: float = 0.0,
    kind: Any = "poisson",
    failed: int = 0,
) -> dict[str, Any]:
    """A point of ten requests, some of them failed, with two tokens each and `rate` tok/s."""
    good = 10 - failed
    records = [record(i, gaps=(0.5, 0.1)) for i in range(good)]
    records += [refused(i) for i in range(good, 10)]
    when = Schedule("closed", users, None) if users else Schedule(kind, None, [0.0] * 10, offered)
    seconds = 2 * good / rate
    # 3 in flight: 5/s that stay for 0.6 s
    samples = [(seconds * i / 200, 3) for i in range(200)] if seconds == 2 else []
    counted = ServerDelta(0, 2 * good, 0, 0, 0, 0.0)
    more: dict[str, Any] = {"client_cpu": rate / 1000, "server": counted, "in_flight": samples}
    point = Point(name, when, records, 0.0, seconds, **more)
    return {"server": server} | to_json(summarize(point, benchmark.SLO))


@pytest.fixture
def known() -> Results:
    """Rates whose quotients are obvious."""
    found = [
        made(TRANSFORMERS, 5, 1),
        made(TRANSFORMERS, 5, 8),
        made(SEQUENTIAL, 8, 1),
        made(SEQUENTIAL, 10, 64),
        made(STATIC, 30, 64),
        made(STATIC, 40, 64),
        made(CONTINUOUS, 42, 64),
        made(PAGED, 9, 1),
        made(PAGED, 30, 8),
        made(PAGED, 84, 64),
        made(PAGED, 90, 128, failed=1),
        made(SEQUENTIAL, 10, 8, "mixed"),
        made(STATIC, 20, 64, "mixed"),
        made(CONTINUOUS, 40, 64, "mixed"),
        made(PAGED, 60, 64, "mixed"),
        made(PAGED, 22, offered=11.25),
        made(PAGED, 44, offered=22.5),
        made(PAGED, 80, offered=49.5),
        made(PAGED, 30, offered=9.0, kind="bursts"),
        made(f"{SEQUENTIAL}, bfloat16", 16, 1),
        made(f"{PAGED}, bfloat16", 18, 1),
        made(f"{PAGED}, bfloat16", 160, 64),
    ]
    proof = {
        name: {"tokens": 450, "near_ties": int(name == PAGED), "widest_gap": 0} for name in ENGINES
    }
    results = {"points": found, "proof": proof, "naive": 5.0, "ruler": RULER}
    content = measure.content(benchmark.STAGE, {"plan": asdict(FULL)}, results, ROUND)
    return Results(json.loads(json.dumps(content)))


Lines = Callable[[str], list[list[str]]]


@pytest.fixture
def table(known: Results) -> Lines:
    return lambda name: lines(benchmark.TABLES[name](known))


def test_everything_is_drawn_of_known_results(known: Results) -> None:
    check_drawn(benchmark.BENCHMARK, dict(known.content))
    title = benchmark.split_chart(known).axes[0].get_title(loc="left")
    assert title == "64 users: 8.4x one request at a time"
    assert benchmark.headline(known) == (
        "64 users get 8.4x the tok/s of one request at a time, and 1 of 220 requests failed "
        "(GPT-2 124M shape, float32)"
    )


def test_the_split_is_the_quotient_of_neighbours_and_their_product_the_whole(table: Lines) -> None:
    assert [[line[0], *line[2:]] for line in table("split")] == [
        ["none: stage 01, offline", "5.0", "", "0.50x"],
        [TRANSFORMERS, "5.0", "", "0.50x"],
        [SEQUENTIAL, "10.0", "2.00x", "1.00x"],  # the cache, over stage 01
        [STATIC, "35.0", "3.50x", "3.50x"],  # the median of two repeats
        [CONTINUOUS, "42.0", "1.20x", "4.20x"],
        [PAGED, "84.0", "2.00x", "8.40x"],
    ]
    steps = [line[3:] for line in table("split_mixed")]
    assert steps == [["", "1.00x"], ["2.00x", "2.00x"], ["2.00x", "4.00x"], ["1.50x", "6.00x"]]


def test_the_load_tables_have_a_line_for_each_load(table: Lines) -> None:
    found = {tuple(line[:3]): line[3:] for line in table("load")}
    assert len(found) == 14  # two repeats are one line; other dtypes have a table of their own
    static = ["20", "100.0%", "35.0 (30.0 to 40.0)", "583", "3.5x"]
    assert found[STATIC, "short", "64"][:5] == static
    assert found[PAGED, "short", "128"][1] == "90.0%" and found[PAGED, "short", "64"][4] == "8.4x"
    assert found[PAGED, "mixed", "64"][3] == ""  # no prediction for lengths that vary
    times = {tuple(line[:3]): line[3:] for line in table("load_latency")}
    assert times[PAGED, "short", "64"][:6] == ["500", "500", "100", "100", "600", "600"]
    assert times[PAGED, "short", "128"][1] == "inf"  # one of ten was refused: p95 of the TTFT


def test_arrivals_and_dtypes_are_shown_beside_their_base(table: Lines, known: Results) -> None:
    arrivals = [["bursts", "20%"], ["poisson", "25%"], ["poisson", "50%"], ["poisson", "110%"]]
    assert [line[:2] for line in table("open")] == arrivals
    rates = [["9.00", "15.00"], ["11.25", "11.00"], ["22.50", "22.00"], ["49.50", "40.00"]]
    assert [line[4:6] for line in table("open_latency")] == rates
    found = {tuple(line[1:3]): line[3:5] for line in table("dtype") if line[0].startswith(PAGED)}
    assert found["float32", "64"] == ["100.0%", "84.0"] and found["bfloat16", "64"][1] == "160.0"
    assert len(table("dtype")) == 7 and not any(line[0] == STATIC for line in table("dtype"))
    # A burst is no repeat of other arrivals at its rate.
    known["points"].append(made(PAGED, 30, offered=11.25, kind="bursts"))
    assert [line[0] for line in table("open")] == ["bursts"] * 2 + ["poisson"] * 3


def test_trust_is_shown_for_all_points_together(table: Lines, known: Results) -> None:
    found = dict(table("trust"))
    assert found["tokens proved"] == "2,250, of 5 servers; near ties: 1"
    assert found["requests, and those that failed"] == "220; 1"
    assert found["client CPU, share of a core, at most"] == "16%"
    assert found["Little's law, L over lambda W"] == "1.000 to 1.000, 2 points"
    counted = found["tokens received = counted by the server; blocks back to zero"]
    assert counted == "22 and 22 of 22 points"
    ruler = found["a server of known latencies, p50"]
    assert ruler == "TTFT 200 ms: 204.1; ITL 50 ms: 50.0; client CPU 4%"
    short = "22; 22 are short: fewer than 100 requests, in less than 30 s"
    assert found["points with a mark against them"] == short
    known["points"][3]["flags"].append("client took 83% of a core")
    marks = dict(table("trust"))["points with a mark against them"]
    assert marks == f"{short}; sequential, short, 64 users: client took 83% of a core"


# ---- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "users", "name", "contexts", "rows"),
    [
        (TRANSFORMERS, 64, "short", 8, 1),
        (SEQUENTIAL, 64, "long", 8, 1),
        (STATIC, 4, "short", 8, 4),
        (CONTINUOUS, 64, "short", 8, 8),
        (PAGED, 32, "short", 8, 32),
        (PAGED, 128, "short", 8, 64),
        # A context of 1,024 is 64 blocks; a long prompt and its answer, 114 tokens, take 8 of them.
        (PAGED, 128, "long", 8, 64),
        (PAGED, 128, "long", 1, 8),
    ],
)
def test_how_many_rows_a_pass_can_have(
    engine: str, users: int, name: str, contexts: int, rows: int
) -> None:
    plan = asdict(replace(FULL, contexts=contexts))
    assert benchmark.rows_of(plan, PRESETS["gpt2"], engine, name, users) == rows


def test_a_prediction_by_hand(known: Results) -> None:
    """One request at a time: 50 passes that read 494 MB of weights at 40 GB/s; keys and values
    hardly count."""
    predict = benchmark.predicted
    alone, bound = predict(known, SEQUENTIAL, "short", 64, "float32"), 1 / (494.128e6 / 40e9)
    assert alone is not None and alone == pytest.approx(bound, rel=0.01) and alone < bound
    assert predict(known, SEQUENTIAL, "short", 1, "bfloat16") == pytest.approx(2 * alone)
    crowd = [predict(known, PAGED, "short", users, "float32") for users in (64, 128)]
    assert crowd == [pytest.approx(735, abs=1)] * 2
    assert predict(known, PAGED, "mixed", 64, "float32") is None

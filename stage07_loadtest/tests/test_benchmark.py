"""The benchmark loads real servers with a small model and proves them first; and what it makes of results that are known, its
tables, charts and predictions, is what they say."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from shared import charts, measure, parity
from shared.bench import benchmarks
from shared.checkpoint import PRESETS
from shared.errors import UserError
from shared.server import OwnServer, own_server
from stage07_loadtest import benchmark, mock, workload
from stage07_loadtest.__main__ import SHARES
from stage07_loadtest.benchmark import (
    CONTINUOUS,
    ENGINES,
    FULL,
    PAGED,
    SEQUENTIAL,
    STATIC,
    TRANSFORMERS,
    Oracle,
    Plan,
    Said,
)
from stage07_loadtest.load import Point, ServerDelta
from stage07_loadtest.metrics import summarize
from stage07_loadtest.mock import Behaviour
from stage07_loadtest.results import from_json, to_json
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.tests.test_main import mocked
from stage07_loadtest.tests.test_metrics import record, refused
from stage07_loadtest.workload import LENGTHS, Ask

TINY = Plan(
    model="stories", contexts=2, sequences=4, users={SEQUENTIAL: {"short": (1, 2)}, PAGED: {"short": (1, 2), "mixed": (2,)}},
    main_users=2, rounds=2, seconds=0.2, open_requests=4, burst=(2, 0.2), other_dtype=None, prove_prompts=1,
)  # fmt: skip
WORDS = 8  # tokens of an answer of the real run
RULER = {
    "known": {"ttft": 0.2, "itl": 0.05},
    "measured": {"ttft": 0.2041, "itl": 0.05},
    "client_cpu": 0.04,
}
LIMITS = measure.Limits(
    "cpu", 1, 40.0, {"float32": 200.0, "bfloat16": 400.0}
)  # the round machine of the lessons


# ---- a real run --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What a run gave: its results, as they will be read back, and what was seen on the way."""

    results: dict[str, Any]
    requests: list[dict[str, Any]]  # as they were written down
    bar: Any
    oracle: Oracle
    started: list[Sequence[str]]  # the options of each server


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One real server stands for both engines: which options each is started with is looked at, and what they are good for is
    tested in stage 06."""
    bars: list[Any] = []
    oracles: list[Oracle] = []
    started: list[Sequence[str]] = []

    class Counting(benchmark.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    class Kept(Oracle):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            oracles.append(self)

    @contextmanager
    def start(arguments: Sequence[str], quiet: bool) -> Iterator[OwnServer]:
        started.append(arguments)
        yield server

    file = tmp_path_factory.mktemp("reports") / "machine" / f"{benchmark.STAGE}.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the teams of three processes on a few cores would mostly wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "STAIRCASE_MAX_SEQUENCES", "1"
        )  # somebody's own settings are not what is measured
        with own_server(benchmark.options(TINY, PAGED, "float32", PRESETS[TINY.model])) as server:
            patch.setattr(benchmark, "own_server", start)
            patch.setattr(benchmark, "FULL", TINY)
            patch.setattr(benchmark, "ENGINES", (SEQUENTIAL, PAGED))
            patch.setattr(benchmark, "tqdm", Counting)
            patch.setattr(benchmark, "Oracle", Kept)
            patch.setattr(benchmark, "check_ruler", lambda: RULER)
            patch.setattr(benchmark, "ANSWER", WORDS)
            patch.setattr(workload, "ANSWER", WORDS)
            patch.setattr(workload, "MIXED_ANSWER", (WORDS, 0.8, 4, 12))
            patch.setattr(measure, "limits", lambda **_: LIMITS)
            patch.setattr(measure, "results_file", lambda stage: file)
            results = benchmarks.unsaved(*benchmark.run(quick=False))
    torch.set_num_threads(threads)
    lines = (
        gzip.decompress((file.parent / f"{benchmark.STAGE}.requests.jsonl.gz").read_bytes())
        .decode()
        .splitlines()
    )
    return Measured(
        json.loads(json.dumps(results, allow_nan=False)),
        [json.loads(line) for line in lines],
        bars[0],
        oracles[0],
        started,
    )


@pytest.fixture(scope="module")
def real(measured: Measured) -> dict[str, Any]:
    return measured.results


def points(results: dict[str, Any]) -> list[tuple[str, Any]]:
    """Server and summary of every point, in the order in which they were measured."""
    return [
        (each["server"], from_json({key: value for key, value in each.items() if key != "server"}))
        for each in results["results"]["points"]
    ]


def test_every_point_of_the_plan_is_measured_in_turn(real: dict[str, Any]) -> None:
    closed = [
        (server, point.workload, point.users)
        for server, point in points(real)
        if point.users is not None
    ]
    main = [(SEQUENTIAL, "short", 2), (PAGED, "short", 2), (PAGED, "mixed", 2)]
    assert closed == [*main, *main[1:], main[0], (SEQUENTIAL, "short", 1), (PAGED, "short", 1)]
    opened = [
        (server, point.kind, point.requests)
        for server, point in points(real)
        if point.users is None
    ]
    assert opened == [(PAGED, "poisson", 4)] * len(SHARES) + [(PAGED, "bursts", 6)]


def test_rates_are_shares_of_what_the_closed_loops_got(real: dict[str, Any]) -> None:
    capacity = max(
        point.request_rate
        for server, point in points(real)
        if server == PAGED and point.workload == "short" and point.users
    )
    rates = [point.rate for _, point in points(real) if point.kind == "poisson"]
    assert rates == pytest.approx([share * capacity for share in SHARES], abs=1e-5)


def test_nothing_failed_and_both_sides_have_counted_the_same_tokens(real: dict[str, Any]) -> None:
    for server, point in points(real):
        assert point.succeeded == point.requests > 0, (server, point.load)
        assert point.tokens_match and point.blocks_back, (server, point.load)
        if point.workload != "mixed":
            assert point.completion_tokens == WORDS * point.requests


def test_each_server_was_proved_first(real: dict[str, Any]) -> None:
    proofs = real["results"]["proof"]
    assert list(proofs) == [SEQUENTIAL, PAGED] and real["results"]["naive"] > 0
    for proof in proofs.values():
        assert (proof["sequences"], proof["tokens"]) == (len(LENGTHS), len(LENGTHS) * WORDS)


def test_each_engine_is_started_once_with_its_own_options(measured: Measured) -> None:
    config = PRESETS[TINY.model]
    assert measured.started == [
        benchmark.options(TINY, engine, "float32", config) for engine in (SEQUENTIAL, PAGED)
    ]


def test_every_request_is_written_down_beside_the_results(measured: Measured) -> None:
    counted = Counter(each["point"] for each in measured.requests)
    assert [counted[number] for number in range(len(counted))] == [
        point.requests for _, point in points(measured.results)
    ]
    assert all(sum(each["chunk_tokens"]) == each["completion_tokens"] for each in measured.requests)


def test_the_progress_bar_knows_how_many_points_there_are(measured: Measured) -> None:
    assert measured.bar.n == measured.bar.total


def test_the_ruler_is_held_against_a_server_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def process(*arguments: str) -> Iterator[str]:
        told.extend(arguments)
        with mocked(ttft=0.02, itl=0.001) as running:
            yield running.url

    for name, value in {"TTFT": 0.02, "ITL": 0.001, "USERS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(benchmark, f"RULER_{name}", value)
    monkeypatch.setattr(mock, "process", process)
    found = benchmark.check_ruler()
    assert told == ["--ttft", "0.02", "--itl", "0.001"]
    assert found["known"] == {"ttft": 0.02, "itl": 0.001, "e2e": pytest.approx(0.069)}
    assert found["measured"].keys() == found["known"].keys() and found["client_cpu"] > 0
    assert (
        found["measured"]["ttft"] >= 0.02 and found["measured"]["e2e"] >= 0.069
    )  # the mock sends nothing earlier


def test_a_real_run_has_tables_charts_and_a_headline(real: dict[str, Any]) -> None:
    whole(benchmark.tables(real))
    assert all(draw().axes for draw in benchmark.charts(real).values())
    assert (
        f"and 0 of {sum(point.requests for _, point in points(real))} requests failed (stories"
        in benchmark.headline(real)
    )


# ---- servers and their proof ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(measured: Measured) -> Oracle:
    return measured.oracle


def said(oracle: Oracle) -> list[Said]:
    return [
        Said(list(output.token_ids), output.finish_reason) for output in oracle.expected["float32"]
    ]


def prove(
    oracle: Oracle, answers: Sequence[Said], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    async def answer(url: str, asks: Sequence[Ask]) -> Sequence[Said]:
        return answers

    monkeypatch.setattr(benchmark, "answers", answer)
    return oracle.prove("a server", "http://nowhere", "float32")


def test_a_server_that_says_the_same_is_proved(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [len(ask.prompt) for ask in oracle.asks] == list(LENGTHS.values())
    assert oracle.naive > 0 and list(oracle.expected) == ["float32"]
    found = prove(oracle, said(oracle), monkeypatch)
    assert (found["sequences"], found["near_ties"]) == (len(LENGTHS), [])


def test_a_server_that_says_something_else_stops_the_benchmark(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = said(oracle)
    wrong[1].token_ids[7] = (wrong[1].token_ids[7] + 1) % PRESETS["stories"].vocab_size
    with pytest.raises(parity.ParityError, match="a server, sequence 1, token 7"):
        prove(oracle, wrong, monkeypatch)


@pytest.mark.parametrize("fault", ["refused", "500"])
def test_a_server_that_does_not_answer_stops_the_benchmark(fault: str) -> None:
    async def ask() -> list[Said]:
        async with mock.serving(Behaviour(ttft=0, itl=0, fault=fault)) as server:
            return await benchmark.answers(server.url, workload.make("short", 2, 0))

    with pytest.raises(UserError, match="did not answer .*: try its command line by hand"):
        asyncio.run(ask())


def test_all_servers_have_the_same_memory_threads_and_room() -> None:
    from stage06_serving.settings import parse

    config = PRESETS[FULL.model]
    for dtype in ("float32", "bfloat16"):
        for engine in ENGINES:
            settings = parse(benchmark.options(FULL, engine, dtype, config))
            assert (settings.engine, settings.dtype, settings.random_weights) == (
                engine,
                dtype,
                True,
            )
            whole_context = config.n_positions * config.kv_bytes_per_token(getattr(torch, dtype))
            assert int(settings.kv_memory) == FULL.contexts * whole_context
            assert (
                settings.max_sequences == FULL.sequences
                and settings.threads == torch.get_num_threads()
            )
            assert settings.max_queue >= 128  # nobody of the most users is refused
    assert "--random-weights" not in benchmark.options(TINY, PAGED, "float32", PRESETS["stories"])


@pytest.mark.parametrize("plan", [FULL, benchmark.QUICK])
def test_the_plans_can_show_what_they_are_for(plan: Plan) -> None:
    compared = benchmark.comparison(plan)
    assert {engine for engine, name, _ in compared if name == "short"} >= {
        STATIC,
        CONTINUOUS,
        PAGED,
    }
    assert all(plan.loads(engine) for engine in ENGINES)
    config, fields = PRESETS[plan.model], asdict(plan)
    rows = {
        engine: benchmark.rows_of(fields, config, engine, "short", plan.main_users)
        for engine in ENGINES
    }
    assert (
        rows[SEQUENTIAL] == rows[TRANSFORMERS] == 1 < rows[STATIC] == rows[CONTINUOUS] < rows[PAGED]
    )
    assert max(users for _, users in FULL.loads(PAGED)) == 128 and FULL.main_users == 64


# ---- results that are known ------------------------------------------------------------------------------------------------


def made(
    server: str,
    rate: float,
    users: int | None = None,
    name: str = "short",
    offered: float | None = None,
    kind: Any = "poisson",
    failed: int = 0,
) -> dict[str, Any]:
    """A point of ten requests, of which some failed, with two tokens each and `rate` tok/s."""
    good = 10 - failed
    records = [record(i, gaps=(0.5, 0.1)) for i in range(good)] + [
        refused(i) for i in range(good, 10)
    ]
    when = Schedule("closed", users, None) if users else Schedule(kind, None, [0.0] * 10, offered)
    seconds = 2 * good / rate
    samples = (
        [(seconds * i / 200, 3) for i in range(200)] if seconds == 2 else []
    )  # 3 in flight: 5/s that stay for 0.6 s
    counted = ServerDelta(0, 2 * good, 0, 0, 0, 0.0)
    point = Point(
        name, when, records, 0.0, seconds, client_cpu=rate / 1000, server=counted, in_flight=samples
    )
    return {"server": server} | to_json(summarize(point, benchmark.SLO))


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Rates of which every quotient can be told at sight."""
    found = [
        made(TRANSFORMERS, 5, 1), made(TRANSFORMERS, 5, 8), made(SEQUENTIAL, 8, 1), made(SEQUENTIAL, 10, 64),
        made(STATIC, 30, 64), made(STATIC, 40, 64), made(CONTINUOUS, 42, 64), made(PAGED, 9, 1), made(PAGED, 30, 8),
        made(PAGED, 84, 64), made(PAGED, 90, 128, failed=1), made(SEQUENTIAL, 10, 8, "mixed"), made(STATIC, 20, 64, "mixed"),
        made(CONTINUOUS, 40, 64, "mixed"), made(PAGED, 60, 64, "mixed"), made(PAGED, 22, offered=11.25),
        made(PAGED, 44, offered=22.5), made(PAGED, 80, offered=49.5), made(PAGED, 30, offered=9.0, kind="bursts"),
        made(f"{SEQUENTIAL}, bfloat16", 16, 1), made(f"{PAGED}, bfloat16", 18, 1), made(f"{PAGED}, bfloat16", 160, 64),
    ]  # fmt: skip
    proof = {
        name: {"sequences": 9, "tokens": 450, "near_ties": [{"gap": 0.0001}] * (name == PAGED)}
        for name in ENGINES
    }
    results = {"points": found, "proof": proof, "naive": 5.0}
    return json.loads(
        json.dumps(benchmarks.unsaved({"quick": False, "plan": asdict(FULL)}, results, LIMITS))
    )


def rows(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def whole(tables: dict[str, str]) -> None:
    assert list(tables) == ["limits", "load", "split", "open", "dtype", "trust"]
    for name, text in tables.items():
        assert len({line.count("|") for line in text.splitlines()}) == 1, name
        assert rows(text), name


def test_every_table_is_whole(known: dict[str, Any]) -> None:
    whole(benchmark.tables(known))


def test_the_split_is_the_quotient_of_neighbours_and_their_product_is_the_whole(
    known: dict[str, Any],
) -> None:
    found = [
        (name, server, rate, step, over)
        for name, server, _, rate, step, over in rows(benchmark.split_table(known))
    ]
    assert found == [
        ("short", "none: stage 01, offline", "5.0", "", "0.50x"),
        ("short", TRANSFORMERS, "5.0", "", "0.50x"),
        ("short", SEQUENTIAL, "10.0", "2.00x", "1.00x"),  # the cache, over stage 01
        ("short", STATIC, "35.0", "3.50x", "3.50x"),  # the median of two repeats
        ("short", CONTINUOUS, "42.0", "1.20x", "4.20x"),
        ("short", PAGED, "84.0", "2.00x", "8.40x"),
        ("mixed", SEQUENTIAL, "10.0", "", "1.00x"),
        ("mixed", STATIC, "20.0", "2.00x", "2.00x"),
        ("mixed", CONTINUOUS, "40.0", "2.00x", "4.00x"),
        ("mixed", PAGED, "60.0", "1.50x", "6.00x"),
    ]
    assert pytest.approx(84 / 10) == 3.5 * 1.2 * 2


def test_the_load_table_has_a_line_for_each_load_with_its_success(known: dict[str, Any]) -> None:
    found = {(row[0], row[1], row[2]): row[3:] for row in rows(benchmark.load_table(known))}
    assert len(found) == 14  # two repeats are one line; other dtypes have a table of their own
    requests, success, rate, most, ratio, *_ = found[STATIC, "short", "64"]
    assert (requests, success, rate, most, ratio) == (
        "20",
        "100.0%",
        "35.0 (30.0 to 40.0)",
        "583",
        "3.5x",
    )
    assert found[PAGED, "short", "128"][1] == "90.0%" and found[PAGED, "short", "64"][4] == "8.4x"
    assert found[PAGED, "mixed", "64"][3] == ""  # no prediction for lengths that vary
    latencies = found[PAGED, "short", "64"][5:11]
    assert latencies == ["500", "500", "100", "100", "600", "600"]
    assert found[PAGED, "short", "128"][6] == "inf"  # one of ten was refused: p95 of the TTFT


def test_arrivals_stand_beside_their_share_of_the_capacity(known: dict[str, Any]) -> None:
    found = [(row[0], row[1], row[4], row[5]) for row in rows(benchmark.open_table(known))]
    assert found == [
        ("bursts", "20%", "9.00", "15.00"), ("poisson", "25%", "11.25", "11.00"), ("poisson", "50%", "22.50", "22.00"),
        ("poisson", "110%", "49.50", "40.00"),
    ]  # fmt: skip


def test_the_other_dtype_stands_beside_the_first(known: dict[str, Any]) -> None:
    found = {(row[0], row[1]): tuple(row[2:4]) for row in rows(benchmark.dtype_table(known))}
    assert found[f"{PAGED}, float32", "64"] == ("100.0%", "84.0") and found[
        f"{PAGED}, bfloat16", "64"
    ] == ("100.0%", "160.0")
    assert len(found) == 7 and not any(engine.startswith(STATIC) for engine, _ in found)


def test_trust_is_told_for_all_points_together(known: dict[str, Any]) -> None:
    found = dict(rows(benchmark.trust_table(known)))
    assert (
        found["tokens proved against stage 01"]
        == "2,250, of 5 servers; answers that parted at a near tie: 1"
    )
    assert found["requests, and those that failed"] == "220; 1"
    assert found["client CPU, share of a core, at most"] == "16%"
    assert found["Little's law, L over lambda W"] == "1.000 to 1.000, 2 points"
    assert (
        found["tokens received = tokens the server counts"]
        == found["blocks back to zero"]
        == "22 of 22 points"
    )
    assert (
        found["points with a mark against them"]
        == "22; 22 are short: fewer than 100 requests, in less than 30 s"
    )
    assert "a server of known latencies" not in " ".join(found)  # nobody has measured it


def test_marks_other_than_shortness_are_told_one_by_one(known: dict[str, Any]) -> None:
    marked = json.loads(json.dumps(known))
    marked["results"]["points"][3]["flags"].append("client took 83% of a core")
    marked["results"]["ruler"] = RULER
    found = dict(rows(benchmark.trust_table(marked)))
    assert found["points with a mark against them"].startswith("22; 22 are short: ")
    assert found["points with a mark against them"].endswith(
        "; sequential, short, 64 users: client took 83% of a core"
    )
    ruler = found["a server of known latencies, as measured (p50)"]
    assert ruler == "TTFT 200 ms: 204.1; ITL 50 ms: 50.0; client CPU 4%"


def test_a_burst_is_no_repeat_of_other_arrivals_at_its_rate(known: dict[str, Any]) -> None:
    same = json.loads(json.dumps(known))
    same["results"]["points"].append(made(PAGED, 30, offered=11.25, kind="bursts"))
    found = [row[0] for row in rows(benchmark.open_table(same))]
    assert found == ["bursts", "bursts", "poisson", "poisson", "poisson"]


def test_the_headline_has_the_number_and_the_failures(known: dict[str, Any]) -> None:
    assert benchmark.headline(known) == (
        "64 users get 8.4x the tok/s of one request at a time, and 1 of 220 requests failed (GPT-2 124M shape, float32)"
    )


def test_every_chart_is_drawn(known: dict[str, Any]) -> None:
    drawn = {name: charts.render(draw()) for name, draw in benchmark.charts(known).items()}
    assert list(drawn) == ["split", "throughput", "latency", "offered", "goodput", "ttft", "itl"]
    assert all(picture.endswith(b"</svg>\n") for picture in drawn.values())
    assert b"64 users: 8.4x one request at a time" in drawn["split"]


# ---- predictions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "users", "name", "rows"),
    [
        (TRANSFORMERS, 64, "short", 1), (SEQUENTIAL, 64, "long", 1), (STATIC, 4, "short", 4), (CONTINUOUS, 64, "short", 8),
        (PAGED, 32, "short", 32), (PAGED, 128, "short", 64), (PAGED, 128, "long", 64),
    ],
)  # fmt: skip
def test_how_many_rows_a_pass_can_have(engine: str, users: int, name: str, rows: int) -> None:
    assert benchmark.rows_of(asdict(FULL), PRESETS["gpt2"], engine, name, users) == rows


def test_blocks_limit_the_rows_too() -> None:
    """A context of 1,024 is 64 blocks of 16; a long prompt and its answer, 114 tokens, take 8 of them."""
    assert (
        benchmark.rows_of(asdict(replace(FULL, contexts=1)), PRESETS["gpt2"], PAGED, "long", 128)
        == 8
    )


def test_a_prediction_by_hand(known: dict[str, Any]) -> None:
    """One request at a time: 50 passes that read 494 MB of weights, and keys and values that hardly count, at 40 GB/s."""
    alone = benchmark.predicted(known, SEQUENTIAL, "short", 64, "float32")
    assert alone is not None
    assert alone == pytest.approx(1 / (494.128e6 / 40e9), rel=0.01) and alone < 1 / (
        494.128e6 / 40e9
    )
    halved = benchmark.predicted(known, SEQUENTIAL, "short", 1, "bfloat16")
    assert halved == pytest.approx(2 * alone)
    crowd = benchmark.predicted(known, PAGED, "short", 64, "float32")
    assert (
        crowd
        == benchmark.predicted(known, PAGED, "short", 128, "float32")
        == pytest.approx(735, abs=1)
    )
    assert benchmark.predicted(known, PAGED, "mixed", 64, "float32") is None

"""The numbers of the lesson's trace are what its server and these formulas give, in milliseconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from stage07_loadtest import benchmark, metrics
from stage07_loadtest.client import Record
from stage07_loadtest.mock import Behaviour
from stage07_loadtest.workload import ANSWER, LENGTHS

REPORT = (Path(__file__).parents[1] / "REPORT.md").read_text(encoding="utf-8")
LESSON = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SERVER = Behaviour(
    ttft=50, itl=0, stall=600, stall_every=1000
)  # its seconds are the trace's milliseconds: all exact
END, EVERY, COLUMN = 2000, 200, 50


def asked(intended: float, sent: float) -> Record:
    end = SERVER.due(sent, SERVER.ttft)
    return Record(0, intended, 1, sent=sent, chunks=[end], end=end, completion_tokens=1)


def one_user() -> list[Record]:
    """A closed loop: the next request when the last answer has ended."""
    records, free = [], 0.0
    while free < END:
        records.append(asked(free, free))
        free = records[-1].end
    return records


def one_connection() -> list[Record]:
    """A schedule, and a connection that one request at a time may use."""
    records, free = [], 0.0
    for start in range(0, END, EVERY):
        records.append(asked(start, max(start, free)))
        free = records[-1].end
    return records


def open_loop() -> list[Record]:
    return [asked(start, start) for start in range(0, END, EVERY)]


def row(words: str, latencies: Sequence[float | None]) -> str:
    """A line of the lesson's table."""
    values = [value for value in latencies if value is not None]
    percentiles = " | ".join(
        f"{metrics.percentile(values, percent):.0f}" for percent in (50, 80, 90)
    )
    slow = sum(value > 100 for value in values) / len(values)
    return f"| {words} | {len(values)} | {percentiles} | {sum(values) / len(values):.1f} | {100 * slow:.0f} % |"


@pytest.mark.parametrize(
    ("words", "latencies"),
    [
        ("closed loop, from sending", [*map(metrics.e2e, one_user())]),
        ("one connection, from sending", [*map(metrics.e2e, one_connection())]),
        ("one connection, from the intended start", [*map(metrics.e2e_intended, one_connection())]),
        ("open loop, from the intended start", [*map(metrics.e2e_intended, open_loop())]),
    ],
)
def test_the_table_is_what_the_trace_gives(words: str, latencies: list[float | None]) -> None:
    assert f"\n{row(words, latencies)}\n" in LESSON


def drawn(record: Record) -> str:
    assert record.sent is not None
    columns = round((record.end - record.sent) / COLUMN)
    return "|" if columns == 1 else f"[{'=' * (columns - 2)}]"


def column(record: Record) -> int:
    assert record.sent is not None
    return round(record.sent / COLUMN)


@pytest.mark.parametrize(
    ("name", "records"),
    [("closed loop, one user", one_user()), ("one connection", one_connection())],
)
def test_the_picture_is_the_trace(name: str, records: list[Record]) -> None:
    line = ""
    for record in records:
        line = line.ljust(column(record)) + drawn(record)
    assert f"\n{name:<25}{line}\n" in LESSON


def test_the_picture_of_the_open_loop() -> None:
    """Requests that overlap stand in lines of their own."""
    start = LESSON.index("\nopen loop   ") + 1
    picture = [line[25:] for line in LESSON[start:].split("\n```", 1)[0].split("\n")]
    marks = sorted(
        (mark.start(), mark[0]) for line in picture for mark in re.finditer(r"\S+", line)
    )
    assert marks == [(column(record), drawn(record)) for record in open_loop()]
    columns = sum(len(mark) for _, mark in marks)
    assert (
        f"Count the columns of the open loop: {columns} in {END // COLUMN}, {columns * COLUMN / END:.2f}"
        in LESSON
    )


def test_littles_law_in_the_trace() -> None:
    records = open_loop()
    stays = [stay for record in records if (stay := metrics.e2e(record)) is not None]
    stay = sum(stays) / len(stays)
    assert (1000 * len(records) / END, stay) == (5, 170)
    assert (
        f"ten requests in 2 s are 5 a second, and they stay {stay:.0f} ms on average: 5 * 0.17 = 0.85"
        in " ".join(LESSON.split())
    )


def test_the_one_request_that_is_worked_out() -> None:
    chunks = [120.0, 140.0, 760.0, 780.0, 800.0]
    one = Record(
        0, 0.0, 5, sent=20.0, chunks=chunks, chunk_tokens=[1] * 5, end=800.0, completion_tokens=5
    )
    assert (metrics.ttft(one), metrics.ttft_intended(one)) == (100, 120)
    assert (metrics.e2e(one), metrics.e2e_intended(one)) == (780, 800)
    assert (metrics.client_queue(one), metrics.tpot(one), metrics.itl(one)) == (
        20,
        170,
        [20, 620, 20, 20],
    )


def test_the_prediction_is_what_the_roofline_gives() -> None:
    """The round machine of stage 02, and the workload "short" in the memory of 8 contexts, as the benchmark predicts them."""
    limits = {"device": "cpu", "threads": 1, "bandwidth_gb_s": 40.0, "gflops": {"float32": 200.0}}
    results = {"configuration": {"plan": asdict(benchmark.FULL)}, "limits": limits}
    found = {
        (engine, users): benchmark.predicted(results, engine, "short", users, "float32")
        for engine in (benchmark.SEQUENTIAL, benchmark.CONTINUOUS, benchmark.PAGED)
        for users in (10, 64)
    }
    assert (LENGTHS["short"], ANSWER, benchmark.FULL.contexts) == (8, 50, 8)
    rates = {key: round(value or 0) for key, value in found.items()}
    assert rates[benchmark.SEQUENTIAL, 64] == 81 and rates[benchmark.CONTINUOUS, 64] == 583
    assert rates[benchmark.PAGED, 64] == 735 and rates[benchmark.PAGED, 10] == 708
    for words in (
        "81 tok/s",
        "583 tok/s",
        "735 tok/s",
        "583 / 81 = 7.2",
        "735 / 583 = 1.26",
        f"{735 / 50:.1f} requests a second",
    ):
        assert words in LESSON
    assert all(f"{rate} tok/s" in REPORT for rate in (81, 583, 735))

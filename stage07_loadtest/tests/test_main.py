"""The command line: a short run against the real server, plans, Ctrl-C, and what is refused before anything is sent."""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared import cli
from shared.paths import ROOT
from stage07_loadtest import __main__ as program
from stage07_loadtest import charts, mock, results
from stage07_loadtest.__main__ import Plan, plan_of, server_options
from stage07_loadtest.metrics import Slo
from stage07_loadtest.mock import Behaviour, Mock

QUICK: dict[str, Any] = {"ttft": 0.005, "itl": 0.0005}
SMALL = ("--", "--linear", "plain", "--kv-memory", "8MiB", "--threads", "1")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from the environment of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("STAIRCASE_")]:
        monkeypatch.delenv(name)


@contextmanager
def mocked(**behaviour: Any) -> Iterator[Mock]:
    """The mock on a thread of its own, for a program that has its own event loop."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[tuple[Mock, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with mock.serving(Behaviour(**QUICK | behaviour)) as running:
            found.append((running, asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0][0]
    finally:
        found[0][1].call_soon_threadsafe(over.set)
        thread.join()


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    """Exit status, standard output and standard error of a command line."""
    with pytest.raises(SystemExit) as exit:
        cli.run(program.main, list(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out, err


def rows(out: str) -> list[list[str]]:
    """The table below its header, by cells: the load is one of them."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("load")) + 1
    return [
        [line[:18].strip(), *line[18:].split()] for line in itertools.takewhile(bool, lines[first:])
    ]


# ---- the real server ----------------------------------------------------------------------------------------------------


def test_a_short_run_against_the_real_server(capsys, tmp_path):
    """Ours, as a process of its own: every request succeeds, client and server count the same tokens, every block comes back."""
    out = tmp_path / "run"
    load = (
        "--users",
        "2",
        "--rates",
        "40",
        "--bursts",
        "3x0.2",
        "--requests",
        "6",
        "--warmup",
        "2",
    )
    status, printed, err = ended(capsys, *load, "--out", str(out), *SMALL)
    assert status == 0, err
    table = rows(printed)
    assert [cells[0] for cells in table] == ["2 users", "poisson, 40/s", "bursts, 15/s"]
    assert all(cells[1:3] == ["6", "100.0%"] and "inf" not in cells for cells in table)
    run = results.load(out)
    assert [point.kind for point in run.points] == ["closed", "poisson", "bursts"]
    for point in run.points:
        assert (point.requests, point.succeeded, point.completion_tokens, point.prompt_tokens) == (
            6,
            6,
            300,
            48,
        )
        assert (
            point.tokens_match is True and point.server_tokens == 300 and point.blocks_back is True
        )
    records = results.load_requests(out)
    assert [len(each) for each in records] == [6, 6, 6]
    assert all(
        sum(record.chunk_tokens) == 50 for each in records for record in each
    )  # each chunk says what it brings
    assert "stories" in err  # what the server said of itself
    assert list(out.glob("*.svg")) and f"Written: {out}" in printed
    assert run.about["configuration"]["server"].endswith(
        "--linear plain --kv-memory 8MiB --threads 1"
    )


def test_this_stage_knows_a_server_by_http_alone():
    for path in sorted((ROOT / "stage07_loadtest").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not [
                name
                for name in names
                if name.startswith("stage") and not name.startswith("stage07")
            ], path.name


# ---- other servers ----------------------------------------------------------------------------------------------------------


def test_rates_follow_from_the_measured_capacity(capsys):
    with mocked() as running:
        load = ("--users", "1,4", "--rates", "auto", "--requests", "8", "--warmup", "0")
        status, out, _ = ended(capsys, "--url", running.url, *load)
    table = rows(out)
    assert status == 0 and [cells[0] for cells in table[:2]] == ["1 user", "4 users"]
    capacity = max(float(cells[3]) for cells in table[:2])
    rates = [float(cells[0].removeprefix("poisson, ").removesuffix("/s")) for cells in table[2:]]
    assert [rate / capacity for rate in rates] == pytest.approx(
        [0.25, 0.5, 0.75, 0.9, 1.1], rel=0.01
    )


def test_failures_stand_beside_every_latency(capsys):
    with mocked(fault="503", fault_every=3) as running:
        arguments = (
            "--url",
            running.url,
            "--users",
            "1",
            "--requests",
            "9",
            "--warmup",
            "0",
            "--slo",
            "ttft=5,e2e=20",
        )
        status, out, _ = ended(capsys, *arguments)
        assert running.requests == 10  # one to see whether anybody is there
    ((_, requests, success, *cells),) = rows(out)
    assert status == 0 and (requests, success) == ("9", "66.7%") and "inf" in cells
    assert "1 user: 3 http_503" in out and "TTFT 5,000 ms, E2E 20,000 ms" in out


def test_a_trace_is_replayed(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"prompt": "Once", "max_tokens": 3, "at": 0.1},
        {"prompt_tokens": 5, "max_tokens": 2, "at": 0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with mocked() as running:
        status, out, _ = ended(
            capsys, "--url", running.url + "/v1/", "--trace", str(file), "--warmup", "1"
        )
        bodies = [(body["max_tokens"], body["model"]) for body in running.bodies]
    assert status == 0 and [cells[:3] for cells in rows(out)] == [["trace", "2", "100.0%"]]
    assert bodies == [
        (50, "mock"),
        (50, "mock"),
        (2, "mock"),
        (3, "mock"),
    ]  # the first one, one to warm up, and the trace


def test_a_trace_of_lengths_has_other_prompts_in_each_repeat(capsys, tmp_path):
    """Catches a replay that a prefix cache answers. What the trace says word for word cannot be changed, so it is said."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"prompt": "Once", "max_tokens": 3, "at": 0},
        {"prompt_tokens": 5, "max_tokens": 2, "at": 0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with mocked() as running:
        arguments = ("--url", running.url, "--trace", str(file), "--warmup", "0", "--repeats", "2")
        status, _, err = ended(capsys, *arguments)
        prompts = [body["prompt"] for body in list(running.bodies)[1:]]
    words, ids = ([each for each in prompts if isinstance(each, kind)] for kind in (str, list))
    assert status == 0 and words == ["Once", "Once"] and "sent again in each repeat" in err
    assert [len(each) for each in ids] == [5, 5] and ids[0] != ids[1]


def test_a_loop_that_ran_out_of_requests_says_so(capsys, monkeypatch):
    monkeypatch.setattr(
        program, "MOST_A_SECOND", 0.1
    )  # 3 for twenty seconds; an answer takes a thirtieth of one
    with mocked() as running:
        arguments = ("--url", running.url, "--users", "1", "--seconds", "20", "--warmup", "0")
        status, out, err = ended(capsys, *arguments)
    assert status == 0 and rows(out)[0][1] == "3" and "1 user: all 3 requests" in err


def test_no_prompt_comes_twice_in_a_run(capsys):
    """What a point has asked, the prefix cache of a server knows at the next one."""
    with mocked() as running:
        assert (
            ended(
                capsys, "--url", running.url, "--users", "1,2", "--requests", "4", "--repeats", "2"
            )[0]
            == 0
        )
        prompts = [tuple(body["prompt"]) for body in running.bodies]
    assert len(prompts) == len({*prompts}) == 1 + 2 * (4 + 1 + 4 + 2)


def test_a_key_is_used_and_not_written_down(capsys, tmp_path):
    with mocked(api_key="s3cret") as running:
        arguments = (
            "--url",
            running.url,
            "--users",
            "1",
            "--requests",
            "2",
            "--out",
            str(tmp_path),
        )
        assert ended(capsys, *arguments, "--api-key", "s3cret")[0] == 0
        status, _, err = ended(capsys, "--url", running.url)
    assert all("s3cret" not in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert status == cli.EXIT_ERROR and "http_other" in err and "401" in err


def test_a_server_that_is_not_there(capsys):
    with mocked(fault="refused") as running:
        status, out, err = ended(capsys, "--url", running.url)
    assert (
        status == cli.EXIT_ERROR
        and out == ""
        and f"{running.url} cannot be reached" in err
        and "leave --url out" in err
    )


INTERRUPTIBLE = (  # a program that was started in the background of a shell ignores SIGINT, and so do its children
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('stage07_loadtest', run_name='__main__', alter_sys=True)"
)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_control_c_keeps_what_was_measured(tmp_path):
    with mocked() as running:
        load = (
            "--url",
            running.url,
            "--users",
            "2",
            "--requests",
            "100000",
            "--out",
            str(tmp_path),
        )
        environment = os.environ | {
            "PYTHONHASHSEED": "7"
        }  # the order of a set must not show in the charts
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, *load], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        ) as process:  # fmt: skip
            try:
                while running.requests < 30 and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == cli.EXIT_INTERRUPTED and "Traceback" not in err
    (point,) = results.load(tmp_path).points
    assert 10 <= point.requests < 100_000 and point.succeeded == point.requests
    assert "interrupted" in point.flags and "2 users: interrupted" in out
    again = charts.draw([point], tmp_path / "again")
    assert again and all(path.read_bytes() == (tmp_path / path.name).read_bytes() for path in again)


# ---- plans --------------------------------------------------------------------------------------------------------------


def planned(*arguments: str) -> tuple[Plan, argparse.Namespace]:
    options = program.parser().parse_args(arguments)
    return plan_of(options), options


def test_what_is_measured_if_nobody_says():
    assert (
        planned()[0].users == program.USERS and planned("--rates", "auto")[0].users == program.USERS
    )
    assert (
        planned("--rates", "auto", "--bursts", "8x2")[0].users == program.USERS
    )  # they are what the rates are taken from
    for load in (("--rates", "2,4"), ("--bursts", "8x2")):
        plan, _ = planned(*load)
        assert plan.users == ()
    plan, options = planned("--users", "3", "--rates", "2,4.5", "--bursts", "8x2,1x0.5")
    assert (plan.users, plan.rates, plan.auto, plan.bursts) == (
        (3,),
        (2.0, 4.5),
        False,
        ((8, 2.0), (1, 0.5)),
    )
    assert options.slo == Slo(ttft=1.0, tpot=0.2)


def test_how_many_requests_there_are():
    def counts(*arguments: str) -> list[int]:
        return [
            count
            for _, count in planned(
                "--users", "1,32", "--rates", "3", "--bursts", "8x2", *arguments
            )[0].schedules([])
        ]

    assert counts() == [20, 128, 50, 56]
    assert counts("--requests", "10") == [10, 32, 10, 10]
    assert counts("--seconds", "10") == [201, 32 * 201, 30, 40]
    assert (
        counts("--seconds", "86400")[:2] == [program.MOST_MADE] * 2
    )  # not a list of 55 million prompts


def test_rounds_begin_with_another_point_each():
    plan, _ = planned("--users", "1,2,3", "--rates", "5,6", "--repeats", "3")
    order = [str(schedule) for schedule, _ in plan.schedules([])]
    users = [
        "1 user",
        "2 users",
        "3 users",
        "2 users",
        "3 users",
        "1 user",
        "3 users",
        "1 user",
        "2 users",
    ]
    assert order == users + [
        "poisson, 5/s",
        "poisson, 6/s",
        "poisson, 6/s",
        "poisson, 5/s",
        "poisson, 5/s",
        "poisson, 6/s",
    ]


def test_our_server_has_room_for_all_users():
    def given(*arguments: str) -> list[str]:
        plan, options = planned(*arguments)
        return server_options(options, plan, ["--max-sequences", "4"])

    assert given() == ["--max-queue", "64", "--max-sequences", "4"]
    assert given("--users", "1,128", "--model", "gpt2") == [
        "--max-queue",
        "128",
        "--model",
        "gpt2",
        "--max-sequences",
        "4",
    ]
    assert given("--bursts", "200x1")[:2] == ["--max-queue", "200"]


# ---- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--users", "0"), "'0' is not a whole number from 1"),
        (("--users", "1,,2"), "'' is not a whole number"),
        (("--rates", "fast"), "'fast' is not a number above 0"),
        (("--rates", "0"), "'0' is not a number above 0"),
        (("--bursts", "8"), "write 8x2 for eight requests every two seconds"),
        (("--bursts", "8x0"), "write 8x2"),
        (("--slo", "speed=3"), "write ttft=1,tpot=0.2"),
        (("--slo", "ttft=-1"), "'-1' is not a number above 0"),
        (("--url", "localhost:8000"), "write it as http://127.0.0.1:8000"),
        (("--url", "http://127.0.0.1:8000?x=1"), "write it as http"),
        (("--url", "http://127.0.0.1:99999"), "write it as http"),
        (("--url", "http://[::1"), "write it as http"),
        (("--url", "http://me:secret@127.0.0.1"), "write it as http"),
        (("--api-key", "secret\n"), "a line end or another control character"),
        (
            ("--rates", "1000", "--seconds", "86400"),
            "86,400,000 requests are too many for one point",
        ),
        (("--bursts", "100x0.1", "--seconds", "86400"), "are too many for one point"),
        (("--workload", "huge"), "invalid choice"),
        (("--trace", "absent.jsonl"), "The trace absent.jsonl cannot be read"),
        (("--url", "http://127.0.0.1:1", "--", "--threads", "1"), "leave one of them out"),
        (("--user", "3"), "--help lists every option"),
    ],
)
def test_nonsense_is_refused_before_a_server_starts(
    capsys, monkeypatch, arguments: tuple[str, ...], words: str
):
    monkeypatch.setattr(program, "own_server", lambda *_: pytest.fail("a server was started"))
    status, out, err = ended(capsys, *arguments)
    assert status == cli.EXIT_ERROR and out == "" and words in err and err.startswith("error: ")


def test_a_run_is_not_written_over(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(program, "own_server", lambda *_: pytest.fail("a server was started"))
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    status, _, err = ended(capsys, "--out", str(tmp_path))
    assert status == cli.EXIT_ERROR and "holds a run already" in err
    assert (tmp_path / "summary.json").read_text(encoding="utf-8") == "{}"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert ended(capsys, "--out", str(tmp_path / "file"))[0] == cli.EXIT_ERROR


def test_rates_of_a_server_that_never_answers(capsys):
    with mocked(fault="503") as running:
        status, out, err = ended(
            capsys, "--url", running.url, "--users", "1", "--rates", "auto", "--requests", "2"
        )
    assert status == cli.EXIT_ERROR and "give rates in numbers" in err
    ((_, requests, success, *_),) = rows(out)  # what was measured before is told all the same
    assert (requests, success) == ("2", "0.0%")


def test_help(capsys):
    status, out, _ = ended(capsys, "--help")
    assert status == 0
    for option in (
        "--url",
        "--users",
        "--rates",
        "--bursts",
        "--trace",
        "--workload",
        "--slo",
        "--out",
        "--repeats",
    ):
        assert option in out
    assert Path(ROOT / program.SERVER).is_dir()

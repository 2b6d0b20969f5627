"""The command line: a short run against the real server, plans, Ctrl-C, and invalid options."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from itertools import takewhile
from typing import Any

import pytest
from pytest import approx

from shared import cli
from shared.paths import ROOT
from stage07_loadtest import __main__ as program
from stage07_loadtest import charts, results, workload
from stage07_loadtest.__main__ import plan_of, server_options
from stage07_loadtest.metrics import Slo

from .helpers import SMALL_RUN, mocked


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("STAIRCASE_")]:
        monkeypatch.delenv(name)


def ended(capsys, arguments):
    """Exit status, standard output and standard error of a command line."""
    with pytest.raises(SystemExit) as exit:
        cli.run(program.main, shlex.split(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out, err


def rows(out):
    """The cells of the table below its header, with the load first."""
    lines = iter(out.splitlines())
    assert any(line.startswith("load") for line in lines)
    return [[line[:18].strip(), *line[18:].split()] for line in takewhile(bool, lines)]


def loaded(capsys, arguments, **behaviour):
    """Exit status and both outputs of a load on the mock, and the bodies that it received."""
    with mocked(**behaviour) as running:
        ending = ended(capsys, f"--url {running.url}/v1/ {arguments}")
        return *ending, list(running.bodies)


def test_a_short_run_against_the_real_server(capsys, tmp_path):
    """The lengths are those that the server's usage counts, and the tokens those of its metrics."""
    texts = {"prompt": "5:11", "answer": "lognormal:6:0.7"}
    load = "--users 2 --rates 40 --bursts 3x0.2 --requests 6 --warmup 2"
    load += "".join(f" --{name}-tokens {text}" for name, text in texts.items())
    out, own = tmp_path / "run", "--linear plain --kv-memory 8MiB --threads 1"
    status, printed, err = ended(capsys, f"{load} --out {out} -- {own}")
    assert status == 0, err
    names = ("2 users", "poisson, 40/s", "bursts, 15/s")
    assert [cells[:3] for cells in rows(printed)] == [[name, "6", "100.0%"] for name in names]
    run, (prompts, answers) = results.load(out), map(workload.lengths, texts.values())
    for number, sent in enumerate(results.load_requests(out)):
        asks = workload.make("short", 8, f"0 {number + 1}", prompts=prompts, answers=answers)[2:]
        wanted = [(len(ask.prompt), ask.max_tokens) for ask in asks]
        assert [(one.prompt_tokens, one.completion_tokens) for one in sent] == wanted
        assert [sum(one.chunk_tokens) for one in sent] == [tokens for _, tokens in wanted]
        point = run.points[number]
        assert point.server_tokens == sum(tokens for _, tokens in wanted)
        assert point.tokens_match is True and point.blocks_back is True
        assert point.workload == "prompts 5:11, answers lognormal:6:0.7"
    assert "stories" in err and list(out.glob("*.svg")) and f"Written: {out}" in printed
    recorded = run.about["configuration"]
    assert {name: recorded[f"{name}_tokens"] for name in texts} == texts
    assert recorded["server"].endswith(own)


def test_this_stage_knows_a_server_by_http_alone():
    for path in (ROOT / "stage07_loadtest").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("from stage", "import stage"))], path


def test_failures_stand_beside_every_latency_and_rates_follow_from_the_capacity(capsys):
    load = "--users 1,4 --rates auto --requests 9 --warmup 0 --slo ttft=5,e2e=20"
    status, out, *_ = loaded(capsys, load, fault="503", fault_every=3)
    one, four, *others = rows(out)
    assert status == 0 and one[:3] == ["1 user", "9", "66.7%"] and "inf" in one
    assert "1 user: 3 http_503" in out and "TTFT 5,000 ms, E2E 20,000 ms" in out
    capacity = max(float(one[3]), float(four[3]))
    shares = [float(cells[0][len("poisson, ") : -len("/s")]) / capacity for cells in others]
    assert shares == approx([0.25, 0.5, 0.75, 0.9, 1.1], rel=0.01)
    status, out, err, _ = loaded(capsys, "--users 1 --rates auto --requests 2", fault="503")
    assert status == cli.EXIT_ERROR and "give the rates as numbers" in err
    assert [cells[1:3] for cells in rows(out)] == [["2", "0.0%"]], "shown all the same"


def test_a_server_that_fails_the_first_request_as_it_would_all_is_not_loaded(capsys):
    for behaviour, kind in (
        ({"fault": "500"}, "http_other: 500"),
        ({"api_key": "s3cret"}, "http_other: 401"),
        ({"fault": "garbage"}, "protocol"),
    ):
        status, out, err, bodies = loaded(capsys, "--users 1", **behaviour)
        assert (status, out) == (cli.EXIT_ERROR, "") and kind in err and len(bodies) <= 1


def test_a_trace_is_replayed_with_other_random_prompts_in_each_repeat(capsys, tmp_path):
    """A prefix cache must not answer it. Prompts that are spelled out cannot change: a note."""
    file, once = tmp_path / "trace.jsonl", {"prompt": "Once", "max_tokens": 3, "at": 0.1}
    first = {"prompt_tokens": 5, "max_tokens": 2, "at": 0}
    file.write_text(f"{json.dumps(once)}\n{json.dumps(first)}\n", encoding="utf-8")
    status, out, err, bodies = loaded(capsys, f"--trace {file} --warmup 1 --repeats 2")
    assert status == 0 and [cells[:3] for cells in rows(out)] == [["trace", "2", "100.0%"]] * 2
    # One to check the server, then twice: one to warm up, and the trace.
    assert [body["max_tokens"] for body in bodies] == [50, 50, 2, 3, 50, 2, 3]
    ids, again = bodies[2]["prompt"], bodies[5]["prompt"]
    assert len(ids) == len(again) == 5 and ids != again
    assert {body["model"] for body in bodies} == {"mock"}
    assert bodies[3]["prompt"] == bodies[6]["prompt"] == "Once"
    assert "each repeat sends the trace's prompts again" in err


def test_no_prompt_comes_twice_in_a_run_and_too_few_are_noted(capsys, monkeypatch):
    """A prefix cache would know it from an earlier point."""
    status, _, _, bodies = loaded(capsys, "--users 1,2 --requests 4 --repeats 2")
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert status == 0 and len(prompts) == len(bodies) == 1 + 2 * (4 + 1 + 4 + 2)
    monkeypatch.setattr(program, "MOST_A_SECOND", 0.1)  # 3 in 20 s; an answer takes 1/20 s
    status, out, err, _ = loaded(capsys, "--users 1 --seconds 20 --warmup 0")
    assert status == 0 and rows(out)[0][1] == "3" and "1 user: all 3 requests" in err


def test_a_key_is_used_and_not_written(capsys, tmp_path):
    load, key = f"--users 1 --requests 2 --out {tmp_path}", "s3cret"
    assert loaded(capsys, f"{load} --api-key {key}", api_key=key)[0] == 0
    assert all(key not in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())


INTERRUPTIBLE = (  # processes in the background of a shell ignore SIGINT, and their children do
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('stage07_loadtest', run_name='__main__', alter_sys=True)"
)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_control_c_keeps_what_was_measured(tmp_path):
    with mocked() as running:
        load = f"--url {running.url} --users 2 --requests 100000 --out {tmp_path}"
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", INTERRUPTIBLE, *load.split()]
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
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
    assert {path.stem for path in tmp_path.glob("*.svg")} == {*charts.figures([point])} != set()


def planned(arguments=""):
    options = program.parser().parse_args(arguments.split())
    return plan_of(options), options


def test_the_points_of_a_load_and_their_requests():
    """The closed loops are left out for another load, unless it takes its rates from them."""
    found = [planned(load)[0].users for load in ("", "--rates auto", "--rates 2,4", "--bursts 8x2")]
    assert found == [program.USERS, program.USERS, (), ()]
    plan, options = planned("--users 3 --rates 2,4.5 --bursts 8x2,1x0.5")
    assert (plan.users, plan.rates, plan.auto) == ((3,), (2.0, 4.5), False)
    assert plan.bursts == ((8, 2.0), (1, 0.5)) and options.slo == Slo(ttft=1.0, tpot=0.2)
    assert planned("--slo e2e=10")[1].slo == Slo(e2e=10.0)
    for arguments, counts in (
        ("", [20, 128, 50, 56]),
        ("--requests 10", [10, 32, 10, 10]),
        ("--seconds 10", [201, 32 * 201, 30, 40]),
        ("--seconds 86400", [program.MOST_MADE] * 2),  # not a list of 55 million prompts
    ):
        plan, _ = planned(f"--users 1,32 --rates 3 --bursts 8x2 {arguments}")
        assert [count for _, count in plan.schedules([])][: len(counts)] == counts
    # Rounds begin with another point each.
    plan, _ = planned("--users 1,2,3 --rates 5,6 --repeats 3")
    order = [schedule.users or schedule.rate for schedule, _ in plan.schedules([])]
    assert order == [1, 2, 3, 2, 3, 1, 3, 1, 2, 5, 6, 6, 5, 5, 6]


def test_our_server_has_room_for_all_users():
    for arguments, given in {
        "": "--max-queue 64 --threads 4",
        "--users 1,128 --model gpt2": "--max-queue 128 --model gpt2 --threads 4",
        "--bursts 200x1": "--max-queue 200 --threads 4",
        "--rates 2": "--max-queue 64 --threads 4",
    }.items():
        plan, options = planned(arguments)
        assert server_options(options, plan, ["--threads", "4"]) == given.split()


INVALID = ("0", "many", "9:8", "1:2:3", "lognormal:64", "lognormal:0:1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--users 0", "'0' is not a whole number from 1"),
        ("--rates fast", "'fast' is not a number above 0"),
        ("--bursts 8", "write 8x2 for eight requests every two seconds"),
        ("--slo speed=3", "write ttft=1,tpot=0.2"),
        ("--url localhost:8000", "write it as http://127.0.0.1:8000"),
        ("--api-key 'secret\n'", "a line end or another control character"),
        ("--rates 1000 --seconds 86400", "86,400,000 requests are too many for one point"),
        ("--trace absent.jsonl --answer-tokens 5", "The lengths of a trace are in its file"),
        *((f"--prompt-tokens {n}", f"invalid lengths '{n}': write 128, 16:256") for n in INVALID),
        ("--url http://127.0.0.1:1 -- --threads 1", "leave one of them out"),
        ("--url http://127.0.0.1:1", "http://127.0.0.1:1 cannot be reached (connection refused): "),
        (f"--out {SMALL_RUN}", "already holds a run"),
    ],
)
def test_invalid_options_are_rejected_before_a_server_starts(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(program, "own_server", lambda *_: pytest.fail("a server was started"))
    status, out, err = ended(capsys, arguments)
    assert status == cli.EXIT_ERROR and out == "" and words in err and err.startswith("error: ")

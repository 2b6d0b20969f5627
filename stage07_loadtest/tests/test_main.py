"""The command line: a short run against the real server, what is measured, Ctrl-C, and invalid
options."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import takewhile
from typing import Any

import pytest

from shared import cli
from shared.paths import ROOT
from stage07_loadtest import __main__ as program
from stage07_loadtest import results, workload

from .helpers import mocked


def rows(out):
    """The cells of the table below its header, with the load first."""
    lines = iter(out.splitlines())
    assert any(line.startswith("load") for line in lines)
    return [[line[:18].strip(), *line[18:].split()] for line in takewhile(bool, lines)]


def loaded(run, arguments, **behaviour):
    """Exit status and both outputs of a load on the mock, and the bodies that it received."""
    with mocked(**behaviour) as running:
        ending = run(program.main, *f"--url {running.url}/v1/ {arguments}".split())
        return *ending, list(running.bodies)


def test_a_short_run_against_the_real_server(run, tmp_path):
    """The lengths are those that the server's usage counts, and the tokens those of its metrics."""
    load = "--users 2 --rates 40 --requests 6 --workload mixed --prompt-tokens 5 --answer-tokens 6"
    out, own = tmp_path / "run", "--engine paged --kv-memory 8MiB --threads 1"
    status, printed, err = run(program.main, *f"{load} --out {out} -- {own}".split())
    assert status == 0, err
    names = ("2 users", "poisson, 40/s")
    assert [cells[:3] for cells in rows(printed)] == [[name, "6", "100.0%"] for name in names]
    content = json.loads((out / results.SUMMARY).read_text(encoding="utf-8"))
    lines = (out / results.REQUESTS).read_text(encoding="utf-8").splitlines()
    sent = [json.loads(line) for line in lines]
    for number, point in enumerate(content["results"]):
        warmup, seed = (2, program.WARMUP)[number], f"0 {number + 1}"
        asks = workload.make("mixed", warmup + 6, seed, prompt=5, answer=6)[warmup:]
        mine = [one for one in sent if one["point"] == number]
        assert [one["prompt_tokens"] for one in mine] == [len(ask.prompt) for ask in asks]
        assert [one["completion_tokens"] for one in mine] == [ask.max_tokens for ask in asks]
        assert point["tokens_match"] is True and point["blocks_back"] is True
    assert "stories" in err and (out / results.CHART).exists() and f"Written: {out}" in printed
    status, _, err = run(program.main, *f"--url http://127.0.0.1:1 --out {out}".split())
    assert status == cli.EXIT_ERROR and "already holds a run" in err


def test_failures_stand_beside_every_latency(run, tmp_path):
    """Infinite in the table and on disk, and no bar in the chart."""
    load = f"--users 1 --requests 9 --slo ttft=5,e2e=20 --out {tmp_path}"
    status, out, *_ = loaded(run, load, fault=503, fault_every=3)
    (one,) = rows(out)
    assert status == 0 and one[:3] == ["1 user", "9", "66.7%"] and "inf" in one
    assert "1 user: 3 http_503" in out and "TTFT 5,000 ms, E2E 20,000 ms" in out
    (point,) = json.loads((tmp_path / results.SUMMARY).read_text(encoding="utf-8"))["results"]
    assert point["latency"]["e2e"]["adjusted"]["p95"] == "inf" and "Written" in out


def test_a_server_that_fails_the_first_request_as_it_would_all_is_not_loaded(run):
    status, out, err, bodies = loaded(run, "--users 1", fault=500)
    assert (status, out) == (cli.EXIT_ERROR, "") and "http_other: 500" in err and len(bodies) == 1


def test_no_prompt_comes_twice_in_a_run(run):
    """A prefix cache would know it from an earlier point."""
    status, _, _, bodies = loaded(run, "--users 1,2 --requests 4")
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert status == 0 and len(prompts) == len(bodies) == 1 + 4 + 1 + 4 + 2
    assert {body["model"] for body in bodies} == {"mock"}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_control_c_keeps_what_was_measured(interruptible, tmp_path):
    with mocked() as running:
        load = f"--url {running.url} --users 2 --requests 100000 --out {tmp_path}"
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "stage07_loadtest", *load.split()]
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
            try:
                while len(running.bodies) < 30 and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == cli.EXIT_INTERRUPTED and "Traceback" not in err
    content = json.loads((tmp_path / results.SUMMARY).read_text(encoding="utf-8"))
    (point,) = content["results"]
    assert 10 <= point["requests"] < 100_000 and point["succeeded"] == point["requests"]
    assert "interrupted" in point["flags"] and "2 users: interrupted" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--users 0", "'0' is not a whole number from 1"),
        ("--slo speed=3", "write ttft=1,tpot=0.2"),
        ("--url http://127.0.0.1:1 -- --threads 1", "leave one of them out"),
        ("--url http://127.0.0.1:1", "start a server there"),
    ],
)
def test_invalid_options_are_rejected_before_a_server_starts(run, monkeypatch, arguments, words):
    monkeypatch.setattr(program, "own_server", lambda *_: pytest.fail("a server was started"))
    status, out, err = run(program.main, *arguments.split())
    assert status == cli.EXIT_ERROR and out == "" and words in err and err.startswith("error: ")

"""One workload through every stage: each answers as stage 01 does, a wrong token stops it, and the table says what was found."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from aiohttp import web

from shared import charts, checkpoint, measure, parity
from shared.bench import staircase
from shared.bench.staircase import BATCH, FIRST, MODULE, ONE_BY_ONE, Job, Peer, Plan, Run
from shared.checkpoint import PRESETS
from shared.course import stages
from shared.errors import UserError
from stage07_loadtest import mock
from stage07_loadtest.mock import Behaviour, Mock

TINY = Plan(model="stories", dtype="float64", requests=5, prompts=(2, 9), answers=(2, 7), rounds=1)
WORDS = PRESETS[TINY.model].vocab_size


def by(variant: str, plan: Plan = TINY) -> Run:
    return staircase.work(Job(variant, plan, torch.get_num_threads()))


@pytest.fixture(scope="module")
def right() -> Run:
    return by(FIRST)


# ---- the workload and the runs -------------------------------------------------------------------------------------------


def test_the_workload_is_of_the_plan_and_the_same_for_all() -> None:
    prompts, counts = staircase.workload(TINY)
    assert (prompts, counts) == staircase.workload(replace(TINY, rounds=9))
    assert len(prompts) == len(counts) == TINY.requests
    assert {len(prompt) for prompt in prompts} <= set(range(2, 10)) and len(
        {len(prompt) for prompt in prompts}
    ) > 1
    assert (
        set(counts) <= set(range(2, 8)) and len(set(counts)) > 1
    )  # of one length, nobody would leave before the others
    assert all(0 <= token < WORDS for prompt in prompts for token in prompt)


@pytest.mark.parametrize("plan", [Plan(), staircase.QUICK])
def test_every_plan_fits_the_model(plan: Plan) -> None:
    assert plan.prompts[1] + plan.answers[1] <= PRESETS[plan.model].n_positions
    assert staircase.read_plan(json.loads(json.dumps(asdict(plan)))) == plan


def test_there_is_a_variant_for_each_stage_and_transformers_beside_them() -> None:
    assert staircase.variants(Plan()) == [ONE_BY_ONE, BATCH, *stages.engines(), MODULE]
    assert staircase.variants(Plan(device="mps")) == [*stages.engines(), MODULE]


@pytest.mark.parametrize("variant", [ONE_BY_ONE, BATCH, *list(stages.engines())[1:]])
def test_each_variant_says_what_the_first_stage_says(variant: str, right: Run) -> None:
    run = by(variant)
    assert run.tokens == right.tokens
    assert [len(ids) for ids in run.tokens] == staircase.workload(TINY)[1]
    assert len(run.ends) == TINY.requests and 0 < min(run.ends) <= max(run.ends) <= run.seconds


def test_who_takes_one_at_a_time_ends_in_order_and_who_takes_all_does_not(right: Run) -> None:
    counts = staircase.workload(TINY)[1]
    assert counts != sorted(counts)
    assert right.ends == sorted(right.ends)
    ends = by("stage04_continuous").ends
    for one, other in pairwise(sorted(zip(counts, ends, strict=True))):
        assert one[0] == other[0] or one[1] < other[1]


def test_the_server_says_what_the_first_stage_says(right: Run) -> None:
    run = by(MODULE)
    assert run.tokens == right.tokens
    assert run.server_bytes > 2**26  # PyTorch alone is more
    assert 0 < min(run.ends) <= max(run.ends) <= run.seconds


# ---- proof ---------------------------------------------------------------------------------------------------------------


def test_equal_tokens_are_proved_without_asking_again(
    right: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "oracle", lambda _: pytest.fail("nothing differs"))
    found = staircase.prove(TINY, right.tokens, right.tokens)
    assert (found.sequences, found.tokens, found.near_ties) == (
        TINY.requests,
        sum(staircase.workload(TINY)[1]),
        [],
    )


def test_a_wrong_token_is_found(right: Run) -> None:
    wrong = [list(ids) for ids in right.tokens]
    wrong[3][1] = (wrong[3][1] + 1) % WORDS
    with pytest.raises(parity.ParityError, match="sequence 0, token 1"):
        staircase.prove(TINY, right.tokens, wrong)


def test_an_answer_that_ends_too_soon_is_found(right: Run) -> None:
    short = [*right.tokens[:-1], right.tokens[-1][:-1]]
    with pytest.raises(parity.ParityError):
        staircase.prove(TINY, right.tokens, short)


def test_a_near_tie_is_counted(right: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = stages.oracle(stages.load_model(checkpoint.load(TINY.model), dtype=torch.float64))
    sampling = stages.sampling_params()(max_tokens=1, ignore_eos=True, logprobs=2)
    (said,) = oracle.generate(staircase.workload(TINY)[0][:1], sampling)
    (_, (second, _)) = said.logprobs[0].top
    other = [[second, *right.tokens[0][1:]], *right.tokens[1:]]
    with pytest.raises(parity.ParityError, match="sequence 0, token 0"):
        staircase.prove(TINY, right.tokens, other)
    monkeypatch.setattr(parity, "near_tie", lambda *_: math.inf)
    assert len(staircase.prove(TINY, right.tokens, other).near_ties) == 1


# ---- other servers -------------------------------------------------------------------------------------------------------


def ask(behaviour: Behaviour, prompts: list[list[int]], counts: list[int]) -> tuple[Run, Mock]:
    async def talk() -> tuple[Run, Mock]:
        async with mock.serving(behaviour) as server:
            return await staircase.ask_all(server.url, prompts, counts), server

    return asyncio.run(talk())


def test_a_peer_is_asked_all_at_once_over_http() -> None:
    prompts, counts = staircase.workload(TINY)
    run, server = ask(Behaviour(ttft=0.6, itl=0.001), prompts, counts)
    measured = list(server.bodies)[2:]  # two were to warm up
    assert server.most_running == TINY.requests
    assert sorted((body["prompt"], body["max_tokens"]) for body in measured) == sorted(
        zip(prompts, counts, strict=True)
    )
    assert {body["model"] for body in measured} == {mock.MODEL}
    assert len(run.ends) == TINY.requests and 0.6 <= min(run.ends) <= max(run.ends) <= run.seconds


@pytest.mark.parametrize(
    ("fault", "words"),
    [("503", "answered 503: .*no room"), ("wrong_count", "tokens, and 2 were asked for")],
)
def test_a_peer_that_does_not_answer_stops_everything(fault: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask(Behaviour(ttft=0, itl=0, fault=fault), [[1], [2], [3]], [2, 2, 2])


@pytest.mark.parametrize("answer", ["<html>", "{}", '{"data": []}', '{"data": [{"id": "m"}]}'])
def test_a_peer_that_is_no_such_server_is_said(answer: str) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(
            text=answer, content_type="text/html" if answer.startswith("<") else "application/json"
        )

    async def talk() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", handle)
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await staircase.ask_all("http://{}:{}".format(*runner.addresses[0][:2]), [[1]], [2])
        finally:
            await runner.cleanup()

    with pytest.raises(UserError, match="does not serve completions .*: ask it by hand first"):
        asyncio.run(talk())


def test_a_peer_that_is_not_there_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "limits", lambda *_, **__: pytest.fail("something was measured"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match="does not serve completions"):
            staircase.measure_all(TINY, [Peer("peer", url, "run it")])


def test_a_run_that_fails_is_said_by_name(
    in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_fresh(module: str, arguments: list[str]) -> measure.FreshRun:
        raise RuntimeError("-m shared.bench.staircase ended with status 1: no room")

    monkeypatch.setattr(measure, "run_fresh", run_fresh)
    with pytest.raises(UserError, match=f"{FIRST} could not be measured: .* no room"):
        staircase.measure_all(TINY)


def test_a_peer_is_a_name_an_address_and_how_it_was_started() -> None:
    assert staircase.peer("llama.cpp=http://127.0.0.1:8080/=server -m x -c=4") == Peer(
        "llama.cpp", "http://127.0.0.1:8080", "server -m x -c=4"
    )
    for text in (
        "",
        "name",
        "name=http://a",
        "name=ftp://a=command",
        "=http://a=command",
        "name=http://a=",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="is no peer: write NAME=URL=COMMAND"):
            staircase.peer(text)


# ---- all of it -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs in this process and without the server, for a start takes seconds; the names in the order in which they ran."""
    ran: list[str] = []

    def run_fresh(module: str, arguments: list[str]) -> measure.FreshRun:
        assert module == "shared.bench.staircase" and arguments[0] == "--job"
        fields = json.loads(arguments[1])
        job = Job(**fields | {"plan": staircase.read_plan(fields["plan"])})
        ran.append(job.variant)
        return measure.FreshRun(
            2**20 * len(ran), "noise\n" + json.dumps(asdict(staircase.work(job))) + "\n"
        )

    monkeypatch.setattr(measure, "run_fresh", run_fresh)
    monkeypatch.setattr(
        measure, "limits", lambda *_, **__: measure.Limits("cpu", 1, 30.0, {"float32": 100.0})
    )
    monkeypatch.setattr(staircase, "variants", lambda _: [FIRST, "stage05_paged"])
    return ran


def test_all_is_measured_in_turn_and_proved(in_process: list[str]) -> None:
    configuration, results, limits = staircase.measure_all(replace(TINY, rounds=2))
    assert in_process == [FIRST, "stage05_paged", "stage05_paged", FIRST]
    assert {name: len(runs) for name, runs in results["runs"].items()} == {
        FIRST: 2,
        "stage05_paged": 2,
    }
    assert (
        list(results["proof"]) == ["stage05_paged"]
        and results["proof"]["stage05_paged"]["sequences"] == TINY.requests
    )
    assert [run["bytes"] for run in results["runs"]["stage05_paged"]] == [2 * 2**20, 3 * 2**20]
    assert staircase.read_plan(json.loads(json.dumps(configuration))["plan"]) == replace(
        TINY, rounds=2
    )


def test_nothing_comes_of_it_if_a_token_differs(
    in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: Callable[[Job], Run] = staircase.work

    def work(job: Job) -> Run:
        run = honest(job)
        if job.variant != FIRST:
            run.tokens[1][0] = (run.tokens[1][0] + 1) % WORDS
        return run

    monkeypatch.setattr(staircase, "work", work)
    with pytest.raises(parity.ParityError):
        staircase.measure_all(TINY)


# ---- tables and charts ---------------------------------------------------------------------------------------------------


def results() -> dict[str, Any]:
    """Hand-made: stage 01 takes 8 s and the others less, each stage half of the one before; the server was measured twice."""
    tokens = sum(staircase.workload(TINY)[1])
    names = [ONE_BY_ONE, *stages.engines(), MODULE, "peer"]
    seconds = {name: tokens / 2.0**power for power, name in enumerate(names)}
    runs = {
        name: [{"seconds": each, "ends": [each / 2] * 4 + [each], "bytes": 2**30}]
        for name, each in seconds.items()
    }
    runs[MODULE].append({"seconds": 2 * seconds[MODULE], "ends": [1.0] * 5, "bytes": 2**30})
    proof = {
        name: {"sequences": 5, "tokens": tokens, "near_ties": []}
        for name in names
        if name not in (FIRST, "peer")
    }
    proof[MODULE]["near_ties"] = [{"gap": 0.0001}]
    return {
        "configuration": {"plan": json.loads(json.dumps(asdict(TINY))), "peers": [asdict(Peer("peer", "http://a", "run it"))]},
        "results": {"runs": runs, "proof": proof},
        "limits": {"device": "cpu", "threads": 1, "bandwidth_gb_s": 30.0, "gflops": {"float32": 100.0}},
        "machine": measure.machine(), "versions": measure.versions(), "threads": 1,
    }  # fmt: skip


def rows(table: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    return {row[0]: row[1:] for row in cells}


def test_the_table_has_a_line_for_each_with_its_mark() -> None:
    found = rows(staircase.steps_table(results()))
    assert list(found) == [staircase.TITLES[ONE_BY_ONE], *stages.engines(), MODULE, "peer"]
    rate, gain, mean, slowest, memory, mark = found[list(stages.engines())[1]]
    each = sum(staircase.workload(TINY)[1]) / 4
    assert (rate, gain, memory) == ("4.0 (4.0 to 4.0)", "2.0x", "1,024")
    assert (mean, slowest) == (
        f"{statistics.fmean([each / 2] * 4 + [each]):.1f}",
        f"{each:.1f}",
    ) and mark == "all equal"
    assert found[FIRST][1] == "1.0x" and found[FIRST][-1] == "the oracle"
    assert found[MODULE][-1] == "equal, but 1 of 5 answers part at a near tie"
    assert found["peer"][-1] == "not compared"


def test_all_tables_and_the_headline_are_whole() -> None:
    for name, text in staircase.tables(results()).items():
        assert len({line.count("|") for line in text.splitlines()}) == 1, name
    assert list(staircase.tables(results())) == ["limits", "workload", "steps"]
    last = list(stages.engines())[-1]
    assert (
        staircase.headline(results())
        == f"{2 ** (len(stages.engines()) - 1)}x from {FIRST} to {last}"
    )


def test_the_chart_is_the_same_every_time() -> None:
    (draw,) = staircase.charts(results()).values()
    first = charts.render(draw())
    assert first == charts.render(draw()) and first.endswith(b"</svg>\n")
    assert b"The staircase: 16x the naive engine" in first
    changed = results()
    changed["results"]["runs"][FIRST][0]["seconds"] *= 2
    assert charts.render(staircase.steps_chart(changed)) != first

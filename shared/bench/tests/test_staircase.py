"""One workload through every stage: each answers as stage 01 does, and a wrong token stops it."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from aiohttp import web

from shared import measure
from shared.bench import staircase
from shared.bench.staircase import BATCH, FIRST, MODULE, ONE_BY_ONE, Plan, Run
from shared.bench.tests.tools import LIMITS, check_drawn, lines
from shared.checkpoint import PRESETS
from shared.course import stages
from shared.errors import UserError
from stage07_loadtest import mock
from stage07_loadtest.mock import Behaviour, Mock

TINY = Plan(model="stories", dtype="float64", requests=5, prompts=(2, 9), answers=(2, 7), rounds=1)
PAGED = "stage05_paged"


def by(variant: str) -> Run:
    return staircase.work(variant, TINY, torch.get_num_threads())


@pytest.fixture(scope="module")
def right() -> Run:
    return by(FIRST)


def test_all_variants_have_one_workload_whose_answers_differ_in_length() -> None:
    prompts, counts = staircase.workload(TINY)
    assert (prompts, counts) == staircase.workload(replace(TINY, rounds=9))
    assert len(prompts) == len(counts) == TINY.requests
    assert Plan().prompts[1] + Plan().answers[1] <= PRESETS["gpt2"].n_positions
    assert {len(prompt) for prompt in prompts} <= set(range(2, 10))
    assert set(counts) <= set(range(2, 8)) and len(set(counts)) > 1 and counts != sorted(counts)
    peer = ("peer", "http://a", "run it")
    names = [*stages.engines(), MODULE]
    assert list(staircase.variants(Plan(peers=(peer,)))) == [ONE_BY_ONE, BATCH, *names, "peer"]
    assert list(staircase.variants(Plan(device="mps"))) == names


@pytest.mark.parametrize("variant", [ONE_BY_ONE, BATCH, *list(stages.engines())[1:], MODULE])
def test_each_variant_answers_as_the_first_stage(variant: str, right: Run) -> None:
    run = by(variant)
    assert run.tokens == right.tokens
    assert [len(ids) for ids in run.tokens] == staircase.workload(TINY)[1]
    assert len(run.ends) == TINY.requests and 0 < min(run.ends) <= max(run.ends) <= run.seconds
    assert (run.server_bytes > 2**26) == (variant == MODULE)  # PyTorch alone is more


def test_one_at_a_time_ends_in_order_and_all_together_does_not(right: Run) -> None:
    assert right.ends == sorted(right.ends)
    ends = by("stage04_continuous").ends
    for one, other in pairwise(sorted(zip(staircase.workload(TINY)[1], ends, strict=True))):
        assert one[0] == other[0] or one[1] < other[1]


# ---- other servers -------------------------------------------------------------------------------


def ask(behaviour: Behaviour, prompts: list[list[int]], counts: list[int]) -> tuple[Run, Mock]:
    async def talk() -> tuple[Run, Mock]:
        async with mock.serving(behaviour) as server:
            return await staircase.ask_all(server.url, prompts, counts), server

    return asyncio.run(talk())


def test_a_peer_gets_all_requests_at_once_over_http() -> None:
    prompts, counts = staircase.workload(TINY)
    run, server = ask(Behaviour(ttft=0.6, itl=0.001), prompts, counts)
    measured = list(server.bodies)[2:]  # two warm up
    assert server.most_running == TINY.requests
    asked = sorted((body["prompt"], body["max_tokens"]) for body in measured)
    assert asked == sorted(zip(prompts, counts, strict=True))
    assert {body["model"] for body in measured} == {mock.MODEL}
    assert len(run.ends) == TINY.requests and 0.6 <= min(run.ends) <= max(run.ends) <= run.seconds


def test_a_peer_that_does_not_answer_stops_everything() -> None:
    faults = {"503": "answered 503: .*no room", "wrong_count": "tokens where 2 were requested"}
    for fault, words in faults.items():
        with pytest.raises(UserError, match=words):
            ask(Behaviour(ttft=0, itl=0, fault=fault), [[1], [2], [3]], [2, 2, 2])


@pytest.mark.parametrize("answer", ["<html>", "{}", '{"data": []}', '{"data": [{"id": "m"}]}'])
def test_a_peer_that_is_no_such_server_is_named(answer: str) -> None:
    kind = "text/html" if answer.startswith("<") else "application/json"

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text=answer, content_type=kind)

    async def talk() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", handle)
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await staircase.ask_all("http://{}:{}".format(*runner.addresses[0][:2]), [[1]], [2])
        finally:
            await runner.cleanup()

    with pytest.raises(UserError, match="does not serve completions .*: try a request by hand"):
        asyncio.run(talk())


def test_an_absent_peer_stops_the_run_before_anything_is_measured() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match="does not serve completions"):
            staircase.run(replace(TINY, peers=(("peer", url, "run it"),)))


def test_a_peer_is_a_name_an_address_and_how_it_was_started() -> None:
    found = staircase.peer("llama.cpp=http://127.0.0.1:8080/=server -m x -c=4")
    assert found == ("llama.cpp", "http://127.0.0.1:8080", "server -m x -c=4")
    for text in ("", "name", "name=http://a", "name=ftp://a=do", "=http://a=do", "name=http://a="):
        with pytest.raises(argparse.ArgumentTypeError, match="not a peer: write NAME=URL=COMMAND"):
            staircase.peer(text)


# ---- all of it -----------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs in this process and without the server, whose start takes seconds; the names of the
    variants in the order in which they ran."""
    ran: list[str] = []

    def run_fresh(module: str, arguments: list[str]) -> measure.FreshRun:
        assert module == "shared.bench.staircase" and arguments[0] == "--job"
        variant, plan, threads = json.loads(arguments[1])
        ran.append(variant)
        done = staircase.work(variant, Plan(**plan), threads)
        return measure.FreshRun(2**20 * len(ran), f"noise\n{json.dumps(asdict(done))}\n")

    monkeypatch.setattr(measure, "run_fresh", run_fresh)
    monkeypatch.setattr(measure, "limits", lambda *_, **__: LIMITS)
    monkeypatch.setattr(staircase, "variants", lambda _: {FIRST: FIRST, PAGED: PAGED})
    return ran


def test_all_is_measured_in_turn_proved_and_drawn(in_process: list[str]) -> None:
    content = staircase.BENCHMARK.run(replace(TINY, dtype="float32", rounds=2))
    assert in_process == [FIRST, PAGED, PAGED, FIRST]
    (group,) = content["results"]["steps"]
    tokens = sum(staircase.workload(TINY)[1])
    proved = {name: proof["tokens"] for name, proof in group["proof"].items()}
    assert proved == {FIRST: tokens, PAGED: tokens}
    assert group["bytes"] == {FIRST: [2**20, 4 * 2**20], PAGED: [2 * 2**20, 3 * 2**20]}
    group["seconds"] |= {FIRST: [8.0, 8.0], PAGED: [1.0, 4.0], "a peer": [2.0, 2.0]}
    group["ends"] |= {PAGED: [[1.0, 3.0]] * 2, "a peer": [[1.0]]}
    group["bytes"]["a peer"] = [2**30]
    read = json.loads(json.dumps(content))
    assert check_drawn(staircase.BENCHMARK, read) == {"limits": 1, "workload": 1, "steps": 3}
    first, paged, peer = lines(staircase.BENCHMARK.tables(read)["steps"])
    assert first[2] == "1.0x" and paged[2:6] == ["3.2x", "2.0", "3.0", "2"]
    assert peer[-1] == "not compared" and paged[-1] == f"all {tokens}"
    assert staircase.BENCHMARK.headline(read) == f"3x from {FIRST} to {PAGED}"


def failing(tokens: list[list[int]]) -> None:
    raise RuntimeError("-m shared.bench.staircase ended with status 1: no room")


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda tokens: tokens[1].pop(), AssertionError, "another length"),
        (lambda tokens: tokens[1].insert(0, tokens[1].pop()), AssertionError, "below the best"),
        (failing, UserError, f"{PAGED} could not be measured: .* no room"),
    ],
)
def test_a_wrong_token_a_short_answer_and_a_run_that_fails_stop_it(
    spoil: Any, error: Any, words: str, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: Callable[..., Run] = staircase.work

    def work(variant: str, *arguments: Any) -> Run:
        run = honest(variant, *arguments)
        if variant != FIRST:
            spoil(run.tokens)
        return run

    monkeypatch.setattr(staircase, "work", work)
    with pytest.raises(error, match=words):
        staircase.run(TINY)

"""One workload through every stage: each answers as stage 01 does, and a wrong token stops it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from reports import stages, staircase
from reports.staircase import BATCH, FIRST, FULL, MODULE, ONE_BY_ONE, Run
from shared import measure
from shared.bench.tests.tools import LIMITS, check_drawn, lines
from shared.errors import UserError
from stage07_loadtest import mock
from stage07_loadtest.mock import Behaviour

TINY = replace(
    FULL, model="stories", dtype="float64", requests=5, prompts=(2, 9), answers=(2, 7), rounds=1
)
PAGED = "stage05_paged"


def by(variant: str) -> Run:
    return staircase.work(variant, vars(TINY), torch.get_num_threads())


@pytest.fixture(scope="module")
def right() -> Run:
    return by(FIRST)


def test_all_variants_have_one_workload_whose_answers_differ_in_length() -> None:
    prompts, counts = staircase.workload(TINY)
    assert (prompts, counts) == staircase.workload(replace(TINY, rounds=9))
    assert {len(prompt) for prompt in prompts} <= set(range(2, 10))
    assert set(counts) <= set(range(2, 8)) and len(set(counts)) > 1 and counts != sorted(counts)
    names = [*stages.engines(), MODULE]
    assert staircase.variants(FULL) == [ONE_BY_ONE, BATCH, *names]
    assert staircase.variants(replace(FULL, device="mps")) == names


@pytest.mark.parametrize("variant", [ONE_BY_ONE, BATCH, *list(stages.engines())[1:], MODULE])
def test_each_variant_answers_as_the_first_stage(variant: str, right: Run) -> None:
    run = by(variant)
    assert run.tokens == right.tokens
    assert [len(ids) for ids in run.tokens] == staircase.workload(TINY)[1]
    assert len(run.ends) == TINY.requests and 0 < min(run.ends) <= max(run.ends) <= run.seconds
    assert run.bytes > 2**26  # PyTorch alone is more


@pytest.mark.parametrize(
    ("fault", "words"),
    [("503", "answered 503: .*no room"), ("wrong_count", "tokens where 2 were requested")],
)
def test_a_server_that_does_not_answer_as_requested_stops_everything(
    fault: str, words: str
) -> None:
    async def talk() -> None:
        async with mock.serving(Behaviour(ttft=0, itl=0, fault=fault)) as server:
            await staircase.ask_all(server.url, [[1], [2], [3]], [2, 2, 2])

    with pytest.raises(UserError, match=words):
        asyncio.run(talk())


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs in this process and without the server, whose start takes seconds; the names of the
    variants in the order in which they ran."""
    ran: list[str] = []
    honest: Callable[..., Run] = staircase.work

    def work(variant: str, *arguments: Any) -> Run:
        ran.append(variant)
        run = honest(variant, *arguments)
        run.bytes = 2**20 * len(ran)
        return run

    def process() -> Executor:
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(measure, "process", process)
    monkeypatch.setattr(staircase, "work", work)
    monkeypatch.setattr(measure, "limits", lambda *_, **__: LIMITS)
    monkeypatch.setattr(staircase, "variants", lambda _: [FIRST, PAGED])
    return ran


def test_all_is_measured_in_turn_proved_and_drawn(in_process: list[str]) -> None:
    content = staircase.BENCHMARK.run(replace(TINY, dtype="float32", rounds=2))
    assert in_process == [FIRST, PAGED, PAGED, FIRST]
    (group,) = content["results"]["steps"]
    tokens = sum(staircase.workload(TINY)[1])
    proved = {name: proof["tokens"] for name, proof in group["proof"].items()}
    assert proved == {FIRST: tokens, PAGED: tokens}
    assert group["bytes"] == {FIRST: [2**20, 4 * 2**20], PAGED: [2 * 2**20, 3 * 2**20]}
    group["seconds"] |= {FIRST: [8.0, 8.0], PAGED: [1.0, 4.0]}
    group["ends"] |= {PAGED: [[1.0, 3.0]] * 2}
    read = json.loads(json.dumps(content))
    assert check_drawn(staircase.BENCHMARK, read) == {"limits": 1, "workload": 1, "steps": 2}
    first, paged = lines(staircase.BENCHMARK.tables(read)["steps"])
    assert first[2] == "1.0x" and paged[2:] == ["3.2x", "2.0", "3.0", "2", f"all {tokens}"]
    assert staircase.BENCHMARK.headline(read) == f"3x from {FIRST} to {PAGED}"


def failing(tokens: list[list[int]]) -> None:
    raise BrokenExecutor("its process ended")


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda tokens: tokens[1].pop(), AssertionError, "another length"),
        (lambda tokens: tokens[1].insert(0, tokens[1].pop()), AssertionError, "below the best"),
        (failing, UserError, f"{PAGED} could not be measured: its process ended"),
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

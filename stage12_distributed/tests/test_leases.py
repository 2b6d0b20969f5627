"""Prefill and decode apart: the same tokens, and none from blocks that were taken for another."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import models
from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.engine import make

from ..bench import apart
from ..disaggregated import leases
from ..disaggregated.leases import (
    ENDED,
    EXPIRED,
    OTHER,
    SILENT,
    Disaggregated,
    MappedCache,
    Memory,
    Prefill,
)
from ..disaggregated.processes import Job, disaggregated
from ..simulation.passes import greedy

SIZE = 4  # tokens in a block


def tiny(weights: str = "auto") -> Any:
    loaded = models.load("tiny", random_weights=True, weights=weights)
    return models.load_model(loaded, dtype=torch.float64)


def sides(
    folder: Path,
    blocks: int = 64,
    dtype: torch.dtype | None = None,
    other: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Prefill, Disaggregated]:
    """Both, in this process: they share nothing but the files and the pipe. other: what differs in
    the engine that decodes."""
    memory, (ours, theirs) = Memory(folder, blocks, 200), Pipe()
    options: dict[str, Any] = {
        "model": tiny(),
        "make_cache": partial(MappedCache, memory),
        "dtype": dtype,
    }
    first, second = (
        make(**(options | more), pool=memory.pool(decode, SIZE))
        for decode, more in ((False, {}), (True, other or {}))
    )
    decode = Disaggregated(second, ours)
    decode.post = ours.send  # the same thread reads what is sent
    return Prefill(first, theirs, **settings), decode


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(101), k=rng.randint(2, 40)) for _ in range(count)]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PATIENCE", 0)


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_the_tokens_are_those_of_one_engine(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Also with a cache in int8, whose scales travel with the codes."""
    prefill, decode = sides(tmp_path, dtype=dtype)
    asked = prompts(12)
    asked += [asked[3] + [1, 2, 3], asked[5]]  # beginnings that both sides have already
    requests = [decode.add(Request(prompt, greedy(n % 8 + 1))) for n, prompt in enumerate(asked)]
    while decode.requests:
        prefill.turn()
        decode.step()
    engine = make(tiny(), contexts=4, dtype=dtype)
    alone = engine.generate(asked, [request.sampling for request in requests])
    assert [request.output for request in requests] == alone
    prefill.turn()
    assert not prefill.leases and prefill.pool.owned == 0
    assert decode.pool.owned == 64  # the other process's blocks
    computed = sum(step.prefill_tokens for step in decode.steps)
    assert computed < SIZE * len(asked)  # only the tokens outside full blocks


@pytest.mark.parametrize("other", [{"dtype": torch.int8}, {"model": "int8"}], ids=str)
def test_a_lease_of_another_model_or_format_is_refused(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Its bytes would pass for this side's numbers, and the answer would be nonsense."""
    if "model" in other:
        other = {"model": tiny(other["model"])}
    prefill, decode = sides(tmp_path, other=other)
    request = decode.add(Request([1] * 20, greedy(4)))
    prefill.turn()
    assert decode.step() == [] and not decode.requests and decode.expired == 0
    assert request.output.error == OTHER
    prefill.turn()
    assert prefill.pool.owned == 0


def test_a_lease_that_has_expired_fails_its_request(tmp_path: Path) -> None:
    prefill, decode = sides(tmp_path, seconds=0.0)
    request = decode.add(Request([1] * 20, greedy(4)))
    prefill.turn()
    decode.step()
    assert request.output.error == EXPIRED and decode.expired == 1
    prefill.turn()
    assert prefill.pool.owned == 0


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_answer_comes_from_blocks_that_were_freed(tmp_path: Path, count: int) -> None:
    """Leases expire before, while and after their blocks are copied, and the prefill process takes
    these blocks for other prompts. The decode process has a clock that stands still, so only the
    generations protect it."""
    now, rng = [0.0], random.Random(count)
    prefill, decode = sides(tmp_path, blocks=12)
    prefill.clock, decode.clock = lambda: now[0], lambda: 0.0
    move = decode.cache.move

    def go_on(turns: int) -> None:
        for _ in range(turns):
            now[0] += rng.choice((0, 2 * leases.LEASE))
            prefill.turn()

    def slowly(moves: Any) -> None:
        for one_move in moves:
            go_on(rng.choice((0, 0, 0, 8)))
            move([one_move])

    decode.cache.move = slowly
    requests, sampling = list[Request](), replace(greedy(4), logprobs=0)
    source = iter(prompts(50 * count, count))
    while decode.expired < count:
        while len(decode.requests) < 6:  # some prompts whose blocks were not copied, again
            failed = [list(r.prompt_ids) for r in requests[-20:] if r.output.error]
            again = failed and rng.random() < 0.3
            prompt = rng.choice(failed) if again else next(source)
            requests.append(decode.add(Request(prompt, sampling)))
        go_on(rng.choice((1, 2, 20)))
        decode.step()
    ended = [request for request in requests if request.output.finish_reason]
    whole = [request for request in ended if request.output.finish_reason == "length"]
    assert {request.output.error for request in ended} == {None, EXPIRED}
    assert len(whole) > count / 10
    expected = make(tiny(), contexts=4).generate([list(r.prompt_ids) for r in whole], sampling)
    for got, right in zip([request.output for request in whole], expected, strict=True):
        assert got.token_ids == right.token_ids
        # Every number that the blocks hold has a part in these; the first token comes without.
        assert [scores.token for scores in got.logprobs] == pytest.approx(
            [scores.token for scores in right.logprobs[1:]], abs=1e-9
        )


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    prefill, decode = sides(tmp_path, blocks=4)
    with pytest.raises(UserError, match="greedy"):
        decode.add(Request([1], SamplingParams(temperature=1.0)))
    request = decode.add(Request([1] * 30, greedy(4)))  # there is no room to compute its prompt
    prefill.turn()
    decode.step()
    assert "give more memory" in str(request.output.error)
    gone = decode.add(Request([1] * 8, greedy(4)))
    assert decode.abort(gone.id).finish_reason == "abort" and not decode.requests
    prefill.turn()
    decode.step()
    prefill.turn()
    assert not prefill.leases


def test_a_silent_prefill_process_fails_what_waits_for_it(tmp_path: Path) -> None:
    """Streams go on; what comes too late is given back."""
    now = [0.0]
    prefill, decode = sides(tmp_path)
    decode.clock = lambda: now[0]
    stream = decode.add(Request([1] * 20, greedy(8)))
    prefill.turn()
    decode.step()
    now[0] = leases.DEADLINE
    late = decode.add(Request([2] * 20, greedy(4)))
    now[0] += leases.DEADLINE
    decode.step()
    assert late.output.error is None
    now[0] += 0.1
    decode.step()
    assert late.output.error == SILENT.format(leases.DEADLINE) and stream.output.error is None
    while decode.requests:
        decode.step()
    assert len(stream.output.token_ids) == 8
    for _ in range(3):
        prefill.turn()
        decode.step()
    assert prefill.pool.owned == 0 and not prefill.leases


def test_two_processes_answer_as_one_and_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test in which two processes share the memory: a process takes seconds to start.
    Prompts for a process that stands still fill its pipe, and nothing waits for that."""
    asked = prompts(4)
    formats: Any = {"weights": "int8", "kv_dtype": "int8"}
    job = Job("tiny", True, "float64", prefill=2, decode=2, **formats)
    with disaggregated(job) as engine:
        answers = engine.generate(asked, greedy(5))
        together = make(tiny("int8"), contexts=4, dtype=torch.int8)
        assert answers == together.generate(asked, greedy(5))
        assert engine.engine.runner.cache.dtype == torch.int8
        if hasattr(signal, "SIGSTOP"):
            (process,) = multiprocessing.active_children()
            os.kill(int(process.pid or 0), signal.SIGSTOP)
            engine.deadline = 0.1
            silent = [engine.add(Request([1] * 40, greedy(5))) for _ in range(2000)]
            while engine.requests:
                engine.step()
            assert {request.output.error for request in silent} == {SILENT.format(0.1)}
            monkeypatch.setattr(apart, "VOCABULARY", 100)
            with pytest.raises(UserError, match="has not answered"):  # no figures of failures
                apart.run(engine, apart.Load(streams=2, long=0))
            os.kill(int(process.pid or 0), signal.SIGCONT)
            engine.deadline = leases.DEADLINE
        engine.post("no message")  # ends the prefill process with an error
        request = engine.add(Request(asked[0], greedy(5)))
        for _ in engine.run():
            pass
        assert request.output.error == ENDED

"""The server's earlier engines: stage 01's tokens, in the order of their own stage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from reports.peers.earlier import CONTINUOUS, ENGINES, STATIC, Maker
from shared.checkpoint import load
from shared.errors import UserError
from stage01_forward.engine import Engine as Naive
from stage01_forward.model import load_model
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.blockmap import FREE
from stage06_serving.__main__ import make_engine
from stage06_serving.async_engine import AsyncEngine
from stage06_serving.scoring import ScoredRequest
from stage06_serving.settings import parse
from stage06_serving.tests.conftest import checkpoint

CONTEXT = 64 * 512  # bytes of a whole context in float64: 64 positions, 2 layers of 16
ASKED = {"a": (5, 6), "b": (9, 9), "c": (4, 2), "d": (3, 2), "e": (7, 1)}  # prompt, answer
ONE_BY_ONE = [{"a"}] * 6 + [{"c"}] * 2 + [{"e"}]
PASSES = {  # who is in each: b is aborted after two steps, and d before it runs
    CONTINUOUS: [{"a", "b"}] * 2 + [{"a", "c"}] * 2 + [{"a", "e"}, {"a"}],
    STATIC: [{"a", "b"}] * 2 + [{"a"}] * 4 + [{"c", "e"}, {"c"}],  # b is still computed
    **dict.fromkeys({*ENGINES} - {CONTINUOUS, STATIC}, ONE_BY_ONE),
}


@pytest.fixture
def folder(tmp_path):
    return str(checkpoint(tmp_path / "tiny", n_positions=64))


def made(folder: str, name: str, *options: str) -> Any:
    arguments = ["--model", folder, "--linear", "plain", "--dtype", "float64", *options]
    return make_engine(parse(arguments), Maker(name))[0]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_answers_as_stage_01_in_its_own_order(folder, name):
    """An abort changes no other request; the page shows a slot as a block."""
    engine = made(folder, name, "--kv-memory", str(2 * CONTEXT + 5000))
    rows, waiting = 2 if name in (CONTINUOUS, STATIC) else 1, []
    assert (engine.status.max_sequences, engine.map()) == (rows, [FREE] * rows)
    requests = {}
    for id, (size, count) in ASKED.items():
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        requests[id] = engine.enqueue(Request(list(range(10, 10 + size)), params, id))
    while engine.requests:
        engine.step()
        running = [number for _, number in engine.status.running]
        assert engine.map() == running + [FREE] * (rows - len(running))
        waiting.append(engine.status.waiting)
        if len(engine.steps) == 2:
            for id in ("b", "d"):
                assert engine.abort(id).finish_reason == "abort"
    assert engine.step() == [] and waiting[-1] == 0 == engine.status.owned
    records = list(engine.steps)
    assert [{one.request_id for one in record.sequences} for record in records] == PASSES[name]
    naive = Naive(load_model(load(folder), dtype=torch.float64))
    for id, request in requests.items():
        (output,) = naive.generate([request.prompt_ids], request.sampling)
        aborted = request.output.finish_reason == "abort"
        length = len(request.output.token_ids) if aborted else None
        assert aborted == (id in "bd") and request.output.token_ids == output.token_ids[:length]
        own = [one for record in records for one in record.sequences if one.request_id == id]
        tokens = [sum(one.prefill_tokens for one in own), sum(one.decode_tokens for one in own)]
        assert aborted or tokens == [ASKED[id][0], ASKED[id][1] - 1]


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_that_fails_ends_its_requests_and_no_other(folder, name):
    with pytest.raises(UserError, match="no whole context"):
        made(folder, name, "--kv-memory", str(CONTEXT - 1))
    engine, params = made(folder, name, "--max-num-seqs", "2"), SamplingParams(max_tokens=9)
    requests = [engine.enqueue(Request([5, 6, 7], params, id)) for id in "abc"]
    engine.step()
    failed = engine.fail(UserError("it broke"))
    assert failed == requests[: len(failed)] and failed and engine.status.waiting == 3 - len(failed)
    while engine.requests:
        engine.step()
    assert requests[-1].output.error is None and len(requests[-1].output.token_ids) > 0


@pytest.mark.parametrize("name", ENGINES)
def test_what_a_batch_cannot_do_is_refused(folder, name):
    """Forms and scores need rows and passes; an answer that was to have a form never comes
    without."""

    async def submit() -> None:
        engine = AsyncEngine(made(folder, name))
        engine.start()
        for wish in ({"prepare": lambda request: None}, {"wants": ScoredRequest}):
            if name == CONTINUOUS:
                assert engine.submit([[5, 6]], [SamplingParams(max_tokens=1)], **wish)
                continue
            with pytest.raises(UserError, match="neither score or embed a prompt nor keep"):
                engine.submit([[5, 6]], [SamplingParams(max_tokens=1)], **wish)
        await engine.stop()

    asyncio.run(submit())

"""Ranks in processes: the embedded models, orders, and ranks that die, hang or disagree."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import Any

import httpx2
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UserError
from shared.parity import random_prompt
from shared.server import python
from stage01_forward.params import SamplingParams
from stage04_continuous.tests.oracle import CONFIG
from stage05_paged.blocks import BlockPool, Move
from stage05_paged.make import make as make_paged
from stage06_serving.async_engine import LOST, AsyncEngine, EngineDead
from stage06_serving.tests.asking import HANG
from stage06_serving.tests.conftest import environment
from stage12_distributed.gang import ROOM, Gang, Setup, make, pack, unpack
from stage12_distributed.parallel import cuts
from stage12_distributed.served import Served
from stage12_distributed.tests import parts

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gang():
    """The embedded model, whose 3 heads are on 2 ranks as 2 and 1."""
    made = Gang(Setup(partial(parts.stored, "stories"), timeout=2.0))
    yield made
    made.close()


def pool() -> BlockPool:
    return BlockPool(300, 16)


def prompts(config, count=4):
    return [random_prompt(5 + 31 * number, config, number) for number in range(count)]


def same_answers(model, ranked):
    """Greedy and drawn answers of stage 05, whole and on ranks, with a prefix that is found, and
    with an order that takes two broadcasts."""
    asked = [*prompts(ranked.config), random_prompt(900, ranked.config, "long")]
    asked.append(asked[3][:70] + asked[0])
    options = [SamplingParams(max_tokens=30, temperature=t, seed=7) for t in (0, 0.8, 0, 0.8, 0, 0)]
    sizes: dict[str, Any] = {"max_sequences": 5, "token_budget": 1200}
    ours: Any = make(ranked, pool=pool(), **sizes)
    theirs: Any = make_paged(model, pool=pool(), **sizes)
    got, want = (engine.generate(asked, options) for engine in (ours, theirs))
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert max(record.prefill_tokens for record in ours.steps) > ROOM
    assert ours.scheduler.counts.hit_tokens == theirs.scheduler.counts.hit_tokens > 0
    smaller = ours.runner.cache.bytes < theirs.runner.cache.bytes
    assert smaller == (model.config.n_kv_head > 1)  # a single head is copied


def test_stories_on_two_ranks(gang):
    same_answers(parts.stored("stories"), gang.model)


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("stories", 3),
        pytest.param("stories-chat", 2, marks=pytest.mark.slow),
        pytest.param("stories-chat", 3, marks=pytest.mark.slow),
    ],
)
def test_embedded_models_on_ranks(gang, name, ranks):
    """stories-chat is a Llama with one head of keys and values, which every rank copies."""
    others = Gang(Setup(partial(parts.stored, name), ranks))
    try:
        same_answers(parts.stored(name), others.model)
    finally:
        others.close()
    assert gang.epoch == 1  # its ranks wait longer for work than for a sum


numbers = st.integers(0, 2**40)
lists = st.lists(numbers, max_size=9)


@given(
    st.lists(st.builds(Move, st.sampled_from(("wipe", "copy", "out", "in")), numbers, numbers)),
    lists,
    st.lists(st.tuples(st.lists(st.integers(-1, 2**40), max_size=9), numbers, numbers)),
    lists,
    lists,
)
def test_an_order_holds_a_whole_pass(moves, ids, shares, rows, adapters):
    order = pack(moves, ids, shares, rows, adapters)
    assert all(type(number) is int for number in order)
    assert unpack(order) == (moves, ids, shares, rows, adapters)


async def first_tokens(running, tickets):
    """Until each of `tickets` has a token."""
    while not all(ticket.generated for ticket in tickets):
        await asyncio.sleep(0.01)


async def until(running, health):
    while running.health != health:
        await asyncio.sleep(0.005)


async def answer(running, prompt):
    (group,) = running.submit([prompt], [SHORT])
    return [token.id async for _, tokens in running.tokens(group) for token in tokens]


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_ends_all_requests_and_no_later_one(gang, how):
    """Those in the pass, those beyond its budget and those that wait get an error; after the
    restart no prefix is found that the new ranks never computed."""
    if not hasattr(signal, how):
        pytest.skip(f"this system has no {how}")
    config = gang.model.config
    (want,) = make_paged(parts.stored("stories"), pool=pool()).generate(prompts(config)[3:], SHORT)

    async def run():
        engine = make(gang.model, pool=pool(), max_sequences=4, token_budget=8)
        running = AsyncEngine(Served(engine))
        running.start()
        assert running.health == "ok"
        assert await answer(running, want.prompt_ids) == want.token_ids
        groups = running.submit(prompts(config, 6), [LONG])
        await first_tokens(running, groups[0])
        os.kill(gang.workers[0].pid, getattr(signal, how))
        for (ticket,) in groups:
            with pytest.raises(EngineDead) as error:
                async for _ in running.tokens([ticket]):
                    pass
            assert str(error.value) == LOST
        await until(running, "restarting")
        assert await answer(running, want.prompt_ids) == want.token_ids
        assert running.health == "ok" and running.alive
        assert engine.scheduler.pool.owned == 0
        await running.stop()

    asyncio.run(asyncio.wait_for(run(), HANG))


def test_a_rank_that_dies_between_requests_costs_none(gang):
    config = gang.model.config
    prompt = prompts(config)[3]
    (want,) = make_paged(parts.stored("stories"), pool=pool()).generate([prompt], SHORT)

    async def run():
        running = AsyncEngine(Served(make(gang.model, pool=pool())))
        running.start()
        assert await answer(running, prompt) == want.token_ids
        gang.workers[0].kill()
        await until(running, "restarting")
        await until(running, "ok")
        assert await answer(running, prompt) == want.token_ids
        await running.stop()

    asyncio.run(asyncio.wait_for(run(), HANG))


def test_ranks_must_agree_on_the_model():
    with pytest.raises(UserError, match="Rank 1 has another model than rank 0: give all ranks"):
        Gang(Setup(partial(parts.another, CONFIG)))


def test_the_server_and_its_ranks(tmp_path):
    """Two models in one; a rank is killed in the middle of a stream. Later the server is killed,
    and no rank outlives it."""
    shapes = {name: cut.shape for name, cut in cuts(parts.stored("stories"), 0, 1).items()}
    parts.write_adapter(tmp_path / "fable", shapes)
    words = ("-m", "stage12_distributed", "tp", "--port", "0", "--adapters", str(tmp_path))
    more = ("--linear", "plain", "--kv-memory", "64MiB")
    with python([*words, *more], environment()) as server:
        server.wait()
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
        with httpx2.Client(base_url=server.url, trust_env=False, timeout=HANG) as http:

            def post(**fields):
                return http.post("/v1/completions", json=body | fields)

            def both():
                answers = [post(model=name).json() for name in ("stories", "fable")]
                assert [answer["model"] for answer in answers] == ["stories", "fable"]
                return [answer["choices"][0]["text"] for answer in answers]

            before = both()
            assert before[0] != before[1]
            models = http.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["stories", "fable"]
            assert post(model="tale").status_code == 404
            for model, message in (("stories", "take one rank"), ("fable", "scored by the model")):
                scored = post(model=model, echo=True, logprobs=1)
                assert scored.status_code == 400 and message in scored.text
            (rank,) = ranks_of(server.pid)
            long = body | {"stream": True, "max_tokens": 900, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=long) as stream:
                lines = filter(None, stream.iter_lines())
                next(lines)
                rank.kill()
                *_, error, done = lines
            assert LOST in error and done == "data: [DONE]"
            assert http.get("/health").json() == {"status": "restarting"}
            assert http.get("/ready").status_code == 503
            assert both() == before
            assert http.get("/ready").json() == {"status": "ok"}
        (rank,) = ranks_of(server.pid)
        server.process.kill()
        gone, alive = psutil.wait_procs([rank], HANG)
        assert gone and not alive


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that a server has started for its ranks."""
    children = psutil.Process(pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

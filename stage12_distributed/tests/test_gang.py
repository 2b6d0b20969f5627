"""Ranks in processes: the embedded models, orders, and ranks that die, hang or disagree."""

from __future__ import annotations

import os
import signal
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import httpx2
import psutil
import pytest
import torch

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage01_forward.scoring import ROWS, prompt_logprobs
from stage04_continuous.tests.oracle import CONFIG
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving.async_engine import LOST, EngineDead
from stage06_serving.tests.asking import HANG, get, post
from stage06_serving.tests.conftest import serving
from stage06_serving.tests.tools import error_of, said, started, submit, until, words
from stage12_distributed.gang import ROOM, Gang, Served, Setup, make
from stage12_distributed.parallel import cuts
from stage12_distributed.tests import parts


@pytest.fixture(scope="module", autouse=True)
def gang():
    """The embedded model, whose 3 heads are on 2 ranks as 2 and 1, with a thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with closing(Gang(Setup(partial(parts.stored, "stories"), timeout=2.0))) as made:
        yield made
    torch.set_num_threads(before)


def pool() -> BlockPool:
    return BlockPool(300, 16)


def prompts(config, count=4):
    return [random_prompt(5 + 31 * number, config, number) for number in range(count)]


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("stories", 2),
        ("stories", 3),
        pytest.param("stories-chat", 2, marks=pytest.mark.slow),
        pytest.param("stories-chat", 3, marks=pytest.mark.slow),
    ],
)
def test_embedded_models_on_ranks(gang, name, ranks):
    """Greedy and drawn answers of stage 05, whole and on ranks, with a prefix that is found, and
    with an order that takes two broadcasts. stories-chat is a Llama with one head of keys and
    values, which every rank copies."""
    model, load = parts.stored(name), partial(parts.stored, name)
    asked = [*prompts(model.config), random_prompt(900, model.config, "long")]
    asked.append(asked[3][:70] + asked[0])
    options = [SamplingParams(max_tokens=30, temperature=t, seed=7) for t in (0, 0.8, 0, 0.8, 0, 0)]
    sizes: dict[str, Any] = {"max_sequences": 5, "token_budget": 1200}
    first = (name, ranks) == ("stories", 2)
    with nullcontext(gang) if first else closing(Gang(Setup(load, ranks))) as others:
        ours: Any = make(others.model, pool=pool(), **sizes)
        theirs: Any = make_paged(model, pool=pool(), **sizes)
        got, want = (engine.generate(asked, options) for engine in (ours, theirs))
        assert [output.token_ids for output in got] == [output.token_ids for output in want]
        assert 4 * max(record.prefill_tokens for record in ours.steps) > ROOM  # "12, "
        assert ours.scheduler.counts.hit_tokens == theirs.scheduler.counts.hit_tokens > 0
        smaller = ours.runner.cache.bytes < theirs.runner.cache.bytes
        assert smaller == (model.config.n_kv_head > 1)
    assert gang.epoch == 1  # its ranks wait for work longer than a sum may take


async def answer(running, prompt):
    return await said(running, submit(running, prompt, 8))


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSTOP"])
async def test_a_rank_that_dies_or_hangs_ends_all_requests_and_no_later_one(gang, how):
    """Requests in the pass, beyond its budget, and waiting all get an error. After the restart,
    no prefix is found that the new ranks never computed."""
    if not hasattr(signal, how):
        pytest.skip(f"this system has no {how}")
    asked = prompts(gang.model.config, 6)
    (want,) = make_paged(parts.stored("stories"), pool=pool()).generate(asked[3:4], words(8))
    engine = make(gang.model, pool=pool(), max_sequences=4, token_budget=8)
    async with started(Served(engine)) as running:
        assert running.health == "ok"
        assert await answer(running, asked[3]) == want.token_ids
        tickets = [submit(running, prompt, 850) for prompt in asked]
        await until(lambda: tickets[0].generated)
        os.kill(gang.workers[0].pid, getattr(signal, how))
        assert [await error_of(running, ticket) for ticket in tickets] == [LOST] * 6
        await until(lambda: running.health == "restarting")
        assert await answer(running, asked[3]) == want.token_ids
        assert running.health == "ok" and running.alive


async def test_a_rank_that_dies_between_requests_costs_none(gang):
    prompt = prompts(gang.model.config)[3]
    (want,) = make_paged(parts.stored("stories"), pool=pool()).generate([prompt], words(8))
    async with started(Served(make(gang.model, pool=pool()))) as running:
        assert await answer(running, prompt) == want.token_ids
        gang.workers[0].kill()
        await until(lambda: running.health == "restarting")
        await until(lambda: running.health == "ok", HANG)
        assert await answer(running, prompt) == want.token_ids


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system has no SIGSTOP")
async def test_a_rank_that_hangs_between_two_orders_is_noticed(gang):
    """If the rank has already asked for the first order, that one is sent. No pass is under way, so
    no sum would reveal the hang."""
    runner: Any = make(gang.model, pool=pool()).runner
    os.kill(gang.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="(?i)timed out"):
        for _ in range(2):
            gang.hold(runner.cache)
    async with started(Served(make(gang.model, pool=pool()))) as running:
        assert len(await answer(running, prompts(gang.model.config)[3])) == 8


async def test_prompts_are_scored_on_all_ranks(gang):
    """The scores are the whole model's. A pass that fails ends the ranks: no pass begins with the
    remaining ranks, or with new ones before all requests have lost their keys and values."""
    ids = random_prompt(2 * ROWS + 9, gang.model.config, 0)
    model, tokens = parts.stored("stories"), torch.tensor(ids)
    with torch.inference_mode():
        hidden = model(tokens, torch.arange(len(ids)), Recompute(model.config).attend)
        want = model.logits(hidden[:-1]).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    def score(engine):
        return engine.score(gang.model, ids, 1)

    def dies(engine):
        with gang._condition:  # so the death is noticed in the pass, not before
            gang.workers[0].kill()
            for _ in range(2):
                with pytest.raises(EngineDead, match="send the request again"):
                    score(engine)
                assert not gang.up

    async with started(Served(make(gang.model, pool=pool()))) as running:
        before = await running.call(score)
        ticket = submit(running, ids[:9], 850)
        await until(lambda: ticket.generated)
        await running.call(dies)
        assert await error_of(running, ticket) == LOST
        assert await running.call(score) == before
        gang.workers[0].kill()
        await until(lambda: not gang.up)
        assert await running.call(score) == before  # nothing was lost
    assert [one.token for one in before[1:]] == pytest.approx(want.tolist(), abs=1e-5)
    with closing(Gang(Setup(partial(parts.another, CONFIG), ranks=1))) as alone:
        with pytest.raises(ZeroDivisionError), alone.passing():
            raise ZeroDivisionError
        assert alone.up  # nothing else would restart it


def test_ranks_must_agree_on_the_model():
    with pytest.raises(UserError, match="Rank 1 has another model than rank 0: give all ranks"):
        Gang(Setup(partial(parts.another, CONFIG)))


def test_the_server_and_its_ranks(tmp_path):
    """Two models in one; a rank is killed in the middle of a stream. Later the server is killed,
    and no rank outlives it."""
    shapes = {name: cut.shape for name, cut in cuts(parts.stored("stories"), 0, 1).items()}
    parts.write_adapter(tmp_path / "fable", shapes)
    options = ("--adapters", str(tmp_path), "--kv-memory", "8MiB")
    with serving(*options, module="stage12_distributed.tp") as server:
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}

        def both():
            answers = [post(server, json=body | {"model": name}).json() for name in names]
            assert [answer["model"] for answer in answers] == names
            return [answer["choices"][0]["text"] for answer in answers]

        names = [model["id"] for model in get(server, "/v1/models").json()["data"]]
        before = both()
        assert names == ["stories", "fable"] and before[0] != before[1]
        assert post(server, json=body | {"model": "tale"}).status_code == 404
        echo = body | {"echo": True, "logprobs": 1, "max_tokens": 0}
        refused = post(server, json=echo | {"model": "fable"})
        assert refused.status_code == 400 and "Only the model itself scores" in refused.text
        assert refused.json()["error"]["param"] == "logprobs"
        assert both() == before  # the last pass had an adapter
        ids = post(server, "/tokenize", json={"prompt": echo["prompt"]}).json()["tokens"]
        want = prompt_logprobs(parts.stored("stories"), ids, 1)
        (choice,) = post(server, json=echo | {"model": "stories"}).json()["choices"]
        scores = [score and pytest.approx(score.token, abs=1e-3) for score in want]
        assert choice["logprobs"]["token_logprobs"] == scores
        (rank,) = ranks_of(server.pid)
        long = body | {"stream": True, "max_tokens": 900, "ignore_eos": True}
        asked: Any = {"json": long, "trust_env": False, "timeout": HANG}
        with httpx2.stream("POST", f"{server.url}/v1/completions", **asked) as stream:
            lines = filter(None, stream.iter_lines())
            next(lines)
            rank.kill()
            *_, error, done = lines
        assert LOST in error and done == "data: [DONE]"
        assert get(server, "/health").json() == {"status": "restarting"}
        assert get(server, "/ready").status_code == 503
        assert both() == before
        assert get(server, "/ready").json() == {"status": "ok"}
        (rank,) = ranks_of(server.pid)
        server.process.kill()
        gone, alive = psutil.wait_procs([rank], HANG)
        assert gone and not alive


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that a server has started for its ranks."""
    children = psutil.Process(pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

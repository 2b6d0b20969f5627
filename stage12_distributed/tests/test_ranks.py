"""Ranks in processes: the embedded models, commands, and ranks that die, stand still or
disagree."""

from __future__ import annotations

import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import httpx2
import psutil
import pytest
import torch

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.params import SamplingParams
from stage01_forward.scoring import prompt_logprobs
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import CONFIG
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make as make_paged
from stage06_serving.scoring import ScoredRequest
from stage06_serving.tests.asking import HANG, get, post
from stage06_serving.tests.asking import until as wait_until
from stage06_serving.tests.conftest import serving
from stage06_serving.tests.tools import said, started, submit, until, words
from stage12_distributed.router.replicas import CHECK
from stage12_distributed.tensor.collectives import BLOCK
from stage12_distributed.tensor.group import MEET, PING, STILL, RankGroup, RankLost, Setup, make
from stage12_distributed.tensor.server import Served
from stage12_distributed.tensor.shard import shards
from stage12_distributed.tests import parts

needs_stop = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this system")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A rank has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    parts.close_groups()


@pytest.fixture
def group():
    """The embedded model, whose 3 heads are on 2 ranks as 2 and 1."""
    return parts.group_of(stories_on(2))


def stories_on(ranks: int) -> Setup:
    return Setup(partial(parts.stored, "stories"), ranks, timeout=2.0)


def pool() -> BlockPool:
    return BlockPool(300, 16)


def prompts(config, count=4):
    return [random_prompt(5 + 31 * number, config, number) for number in range(count)]


@pytest.mark.parametrize(
    "name, ranks, dtype",
    [
        ("stories", 3, None),
        ("stories", 2, None),
        ("stories", 2, torch.int8),
        pytest.param("stories-chat", 2, None, marks=pytest.mark.slow),
        pytest.param("stories-chat", 3, None, marks=pytest.mark.slow),
    ],
)
def test_embedded_models_on_ranks(name, ranks, dtype):
    """Greedy and drawn answers of stage 05, whole and on ranks, with a prefix that is cached, and
    with a command that takes two broadcasts. stories-chat is a Llama with one head of keys and
    values, which every rank copies. dtype: of the cache on all ranks; in int8 each has the scales
    of its own heads."""
    model = parts.stored(name)
    group = parts.group_of(Setup(partial(parts.stored, name), ranks, timeout=2.0))
    asked = [*prompts(model.config), random_prompt(900, model.config, "long")]
    asked.append(asked[3][:70] + asked[0])
    options = [SamplingParams(max_tokens=12, temperature=t, seed=7) for t in (0, 0.8, 0, 0.8, 0, 0)]
    sizes: dict[str, Any] = {"max_sequences": 5, "token_budget": 1200, "dtype": dtype}
    ours: Any = make(group.model, pool=pool(), **sizes)
    theirs: Any = make_paged(model, pool=pool(), **sizes)
    got, want = (engine.generate(asked, options) for engine in (ours, theirs))
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert 4 * max(record.prefill_tokens for record in ours.steps) > BLOCK  # "12, "
    assert ours.scheduler.counts.hit_tokens == theirs.scheduler.counts.hit_tokens > 0
    smaller = ours.runner.cache.bytes < theirs.runner.cache.bytes
    assert smaller == (model.config.n_kv_head > 1)
    assert group.up


@needs_stop
async def test_an_idle_rank_that_stands_still_is_not_ready_until_it_goes_on(group, monkeypatch):
    """Meanwhile it is not given up."""
    monkeypatch.setattr(group.collectives, "_timeout", timedelta(seconds=HANG))
    async with started(Served(make(group.model, pool=pool()))) as running:
        os.kill(group.workers[0].pid, signal.SIGSTOP)
        await until(lambda: running.health == "waiting for a rank")
        os.kill(group.workers[0].pid, signal.SIGCONT)
        await until(lambda: running.health == "ok")
        assert await said(running, submit(running, [1, 2, 3], 8))


def test_a_router_notices_an_idle_rank_that_stands_still_within_a_second():
    """At worst, rank 0 has just asked, and the router looks just before rank 0 knows."""
    assert PING + STILL + CHECK <= 0.8


async def test_prompts_are_scored_on_all_ranks(group):
    """The scores are the whole model's."""
    ids = random_prompt(300, group.model.config, 0)
    async with started(Served(make(group.model, pool=pool()))) as running:
        ((ticket,),) = running.submit([ids], [words(1)], wants=partial(ScoredRequest, top=1))
        scores = await running.result(ticket)
    want = prompt_logprobs(parts.stored("stories"), ids, 1)
    got, right = ([score.token for score in all_scores if score] for all_scores in (scores, want))
    assert len(right) == 299 and got == pytest.approx(right, abs=1e-4)


@needs_stop
def test_a_rank_that_stands_still_between_two_commands_is_noticed(group):
    """If the rank has already asked for the first command, that one is sent. No pass is under way,
    so no sum would reveal that the rank stands still."""
    ended = threading.Event()
    group.on_end = ended.set
    runner: Any = make(group.model, pool=pool()).runner

    def send() -> None:
        for _ in range(2):
            group.collectives.send_command(MEET)

    with group._lock, ThreadPoolExecutor() as thread:  # no sign of life is asked for meanwhile
        os.kill(group.workers[0].pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            thread.submit(send).result(HANG / 2)
    assert ended.wait(HANG) and group.health == "restarting"
    with pytest.raises(RankLost):
        group.hold(runner.cache)


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSTOP"])
def test_a_rank_that_dies_or_stands_still_in_a_pass_ends_the_group(group, how):
    """Once, whatever is tried afterwards."""
    if not hasattr(signal, how):
        pytest.skip(f"this system has no {how}")
    ended: Any = queue.SimpleQueue()
    group.on_end = partial(ended.put, None)
    engine: Any = make(group.model, pool=pool())
    engine.add(Request([1, 2, 3], words(850)))
    engine.step()
    os.kill(group.workers[0].pid, getattr(signal, how))
    with pytest.raises(RankLost):
        while True:
            engine.step()
    ended.get(timeout=HANG)
    with pytest.raises(RankLost):
        engine.step()
    group.close()
    assert ended.empty() and group.health == "restarting"


def test_one_rank_goes_on_after_an_error():
    """No other rank can wait for it in vain."""
    with closing(RankGroup(Setup(partial(parts.another, CONFIG), ranks=1))) as alone:
        with pytest.raises(ZeroDivisionError), alone.passing():
            raise ZeroDivisionError
        assert alone.health == "ok"


def test_ranks_must_agree_on_the_model():
    parts.close_groups()
    with pytest.raises(UserError, match="Rank 1 has another model than rank 0: give all ranks"):
        RankGroup(Setup(partial(parts.another, CONFIG)))


def test_the_server_and_its_ranks(tmp_path):
    """Two models in one, behind the router. A rank is killed in the middle of a stream, while
    another request waits: the stream ends with an error, the other one is repeated. The router is
    not ready while the new rank stands still. When the router is killed, no rank outlives it."""
    shapes = {name: part.shape for name, part in shards(parts.stored("stories"), 0, 1).items()}
    parts.write_adapter(tmp_path / "fable", shapes)
    options = ("--adapters", str(tmp_path), "--kv-memory", "8MiB", "--max-num-seqs", "1")
    with serving(*options, module="stage12_distributed.tensor.tp") as server:
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}

        def text(name: str) -> str:
            answer = post(server, json=body | {"model": name}).json()
            assert answer["model"] == name
            return answer["choices"][0]["text"]

        names = [model["id"] for model in get(server, "/v1/models").json()["data"]]
        before = [text(name) for name in names]
        assert names == ["stories", "fable"] and before[0] != before[1]
        assert post(server, json=body | {"model": "tale"}).status_code == 404
        echo = body | {"echo": True, "logprobs": 1, "max_tokens": 0}
        (other,) = post(server, json=echo | {"model": "fable"}).json()["choices"]
        assert [text(name) for name in names] == before  # the last pass had an adapter
        ids = post(server, "/tokenize", json={"prompt": echo["prompt"]}).json()["tokens"]
        want = prompt_logprobs(parts.stored("stories"), ids, 1)
        (choice,) = post(server, json=echo | {"model": "stories"}).json()["choices"]
        scores = [score and pytest.approx(score.token, abs=1e-3) for score in want]
        assert choice["logprobs"]["token_logprobs"] == scores != other["logprobs"]["token_logprobs"]
        (rank,) = ranks_of(server.pid)
        long = body | {"stream": True, "max_tokens": 900, "ignore_eos": True}
        asked: Any = {"json": long, "trust_env": False, "timeout": HANG}
        with (
            httpx2.stream("POST", f"{server.url}/v1/completions", **asked) as stream,
            ThreadPoolExecutor() as pool,
        ):
            lines = filter(None, stream.iter_lines())
            next(lines)
            waiting = pool.submit(text, "stories")
            wait_until(
                lambda: get(server, "/health").json()["replicas"]["replica-0"]["requests"] == 2
            )
            rank.kill()
            *_, error, done = lines
            assert "try again" in error and done == "data: [DONE]"
            assert waiting.result() == before[0]
        assert get(server, "/ready").json()["status"] == "ok"
        (rank,) = ranks_of(server.pid)
        if hasattr(signal, "SIGSTOP"):  # the router notices an idle rank that stands still
            rank.suspend()
            wait_until(lambda: get(server, "/ready").status_code == 503)
            rank.resume()
            wait_until(lambda: get(server, "/ready").status_code == 200)
        server.process.kill()
        gone, alive = psutil.wait_procs([rank], HANG)
        assert gone and not alive


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that a router's servers have started for their ranks."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

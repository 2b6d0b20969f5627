"""Ranks in processes: the embedded models, commands, and ranks that die, stand still or
disagree."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import CONFIG, finish
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make as make_paged
from stage05_paged.fork import add_samples
from stage05_paged.tests.engines import preempt
from stage12_distributed.__main__ import main
from stage12_distributed.tensor.collectives import BLOCK
from stage12_distributed.tensor.group import RankGroup, RankLost, Setup, make
from stage12_distributed.tensor.shard import shards
from stage12_distributed.tests import parts


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A rank has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def group_of(name: str, ranks: int, timeout: float) -> Any:
    """The caller must close it: torch.distributed has one group in a process."""
    return closing(RankGroup(Setup(partial(parts.stored, name), ranks, timeout)))


def life(engine: Any, asked: list[list[int]], options: list[SamplingParams]) -> list[list[int]]:
    """Answers to requests and to two samples of a prompt; a request is swapped out and in again."""
    requests = [engine.add(Request(*pair)) for pair in zip(asked, options, strict=True)]
    requests += add_samples(engine, asked[1], options[1:3])
    for _ in range(3):
        engine.step()
    preempt(engine, requests[0])
    finish(engine)
    return [request.output.token_ids for request in requests]


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("stories", 2),
        pytest.param("stories", 3, marks=pytest.mark.slow),
        pytest.param("stories-chat", 2, marks=pytest.mark.slow),
    ],
)
def test_embedded_models_on_ranks(name, ranks):
    """Greedy and drawn answers of stage 05, whole and on ranks, with all kinds of moves, with a
    prefix that is cached, and with a command that takes two broadcasts. Three heads on two ranks
    are two and one; stories-chat is a Llama with one head of keys and values, which every rank
    copies."""
    model = parts.stored(name)
    asked = [random_prompt(5 + 31 * number, model.config, number) for number in range(4)]
    asked += [random_prompt(900, model.config, "long"), asked[3][:70] + asked[0]]
    options = [SamplingParams(max_tokens=12, temperature=t, seed=7) for t in (0, 0.8, 0, 0.8, 0, 0)]
    sizes: dict[str, Any] = {"max_sequences": 5, "token_budget": 1200}
    with group_of(name, ranks, 20.0) as group:
        engines: list[Any] = [
            make_engine(it, pool=BlockPool(300, 16), swap_pool=BlockPool(9, 16), **sizes)
            for make_engine, it in ((make, group.model), (make_paged, model))
        ]
        got, want = (life(engine, asked, options) for engine in engines)
    ours, theirs = engines
    counts = ours.scheduler.counts
    assert got == want and counts == theirs.scheduler.counts
    assert counts.hit_tokens and counts.copies and counts.swapped_in
    assert 4 * max(record.prefill_tokens for record in ours.steps) > BLOCK  # "12, "
    bytes_of = [engine.runner.cache.memory.read([0]).nbytes for engine in (ours, theirs)]
    assert (bytes_of[0] < bytes_of[1]) == (model.config.n_kv_head > 1)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stands_still_ends_the_group(how):
    """A pass raises, and so does every later one."""
    if not hasattr(signal, how):
        pytest.skip(f"this system has no {how}")
    with group_of("stories", 2, 2.0) as group:
        engine: Any = make(group.model, 1)
        engine.add(Request([1, 2, 3], SamplingParams(max_tokens=850, ignore_eos=True)))
        engine.step()
        os.kill(group.workers[0].pid, getattr(signal, how))
        with pytest.raises(RankLost):
            while True:
                engine.step()
        with pytest.raises(RankLost):
            engine.step()
        assert not group.up and not any(worker.is_alive() for worker in group.workers)


def test_one_rank_goes_on_after_an_error():
    """No other rank can wait for it in vain."""
    with closing(RankGroup(Setup(partial(parts.random_model, CONFIG), ranks=1))) as alone:
        with pytest.raises(ZeroDivisionError), alone.passing():
            raise ZeroDivisionError
        assert alone.up


def test_the_command_speaks_with_and_without_an_adapter(tmp_path, capsys):
    shapes = {name: part.shape for name, part in shards(parts.stored("stories"), 0, 1).items()}
    parts.write_adapter(tmp_path / "fable", shapes)
    text = ["tp", "Once upon a time", "--temperature", "0", "--max-tokens", "8", "--threads", "1"]
    answers = []
    for more in (
        ["--ranks", "1"],
        ["--ranks", "2"],
        ["--ranks", "1", "--adapters", str(tmp_path)],
        ["--ranks", "1", "--adapters", str(tmp_path), "--adapter", "fable"],
    ):
        assert main([*text, *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2] != answers[3]
    assert all(answer.startswith("Once upon a time") for answer in answers)
    with pytest.raises(UserError, match="no adapter tale: --adapters has fable"):
        main([*text, "--ranks", "1", "--adapters", str(tmp_path), "--adapter", "tale"])

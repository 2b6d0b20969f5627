"""The seams carry what comes next: each toy is plugged in without an edit of stages 01 to 06.

A runner in another process, and a step that proposes several tokens. The second model family is
stage 08, the cache of another layout stage 09. All answers are the naive engine's.
"""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import torch

from stage04_continuous.engine import Engine
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.runner import Runner
from stage04_continuous.tests.oracle import (
    CONFIG,
    DRAWN,
    answer,
    ask,
    assert_answered,
    finish,
    prompt_of,
    the_model,
)
from stage05_paged.blocks import BlockPool, Move
from stage05_paged.cache import PagedCache
from stage05_paged.engine import make
from stage05_paged.records import Recorder
from stage05_paged.scheduler import Scheduler

BLOCKS, SIZE, SWAP = 14, 4, 8


def crowded_engine(runner):
    """Stage 05's engine in little memory, over any runner that has BLOCKS and SWAP blocks."""
    scheduler = Scheduler(
        BlockPool(BLOCKS, SIZE),
        swap_pool=BlockPool(SWAP, SIZE),
        preemption="swap",
        longest=64,
        max_chunk=7,
    )
    return Engine(runner, scheduler, recorder=Recorder(scheduler, 1000))


def assert_crowd_is_answered(engine):
    """Prefix hits, swaps, copies for samples and drawn tokens among them."""
    requests = [ask(engine, length, 14) for length in (9, 21, 13, 21, 2)]
    engine.step()
    prompt = prompt_of(10, "samples")
    parent = engine.add(Request(prompt, DRAWN))
    requests += [parent, engine.add(Request(prompt, replace(DRAWN, seed=3), parent=parent))]
    finish(engine)
    assert_answered(*requests)
    counts = engine.scheduler.counts
    assert min(counts.swapped_in, counts.copies, counts.hit_tokens) > 0


def serve(pipe):
    """The other process: a model and a cache that obey messages of plain integers."""
    torch.set_num_threads(1)
    cache = PagedCache(CONFIG, BLOCKS, SIZE, SWAP, torch.float64)
    runner = Runner(the_model(), cache)
    while message := pipe.recv():
        name, *arguments = json.loads(message)
        if name == "move":
            runner.move([Move(*move) for move in arguments[0]])
        else:
            pipe.send(runner.run(*arguments).numpy())


class Remote:
    """A runner that sends its arguments to another process, as tensor parallelism will."""

    def __init__(self, config, pipe):
        self.config, self.pipe = config, pipe

    def move(self, moves):
        self.pipe.send(json.dumps(["move", [(m.kind, m.source, m.target) for m in moves]]))

    def run(self, ids, shares, rows):
        if not ids:
            return torch.empty(0, self.config.vocab_size)
        self.pipe.send(json.dumps(["run", ids, shares, rows]))
        return torch.from_numpy(np.asarray(self.pipe.recv()))


def test_a_runner_in_another_process():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()  # so that a failure of the process ends `recv` here
    try:
        assert_crowd_is_answered(crowded_engine(Remote(CONFIG, here)))
    finally:
        here.send("")
        process.join(10)
        process.kill()


def test_a_step_may_propose_several_tokens_and_take_some_back():
    """Speculation: drafts are computed beside the newest token; rejected ones leave no trace."""
    engine = make(the_model(), pool=BlockPool(40, 4))
    runner, scheduler = engine.runner, engine.scheduler
    asked = {request.id: request for request in (ask(engine, n, 20) for n in (5, 9, 14))}
    want = {id: answer(len(asked[id].output.prompt_ids), 20) for id in asked}
    steps = 0
    while unfinished := [request for request in asked.values() if request.id in engine.requests]:
        for request in unfinished:  # two right guesses, and then one wrong
            done = len(request.output.token_ids)
            right = want[request.id][done : done + 2]
            request.drafts = [*right, (right[-1] + 1) % 101] if done and done < 17 else []
        plan: Plan = scheduler.schedule()
        runner.move(plan.moves)
        best: list[int] = runner.run(*plan.tokens()).argmax(-1).tolist()
        row = 0
        scheduler.advance(plan)
        for work in plan.work:
            request, chosen = work.request, best[row : (row := row + work.rows)]
            good = 0
            while good < len(request.drafts) and request.drafts[good] == chosen[good]:
                good += 1
            request.drafts = []
            request.output.token_ids += chosen[: good + 1]
            request.computed = request.verified - 1
            scheduler.tables[request].shrink(request.verified)
            if len(request.output.token_ids) == 20:
                engine.abort(request.id)
        steps += 1
    assert {id: request.output.token_ids for id, request in asked.items()} == want
    assert steps < 12  # of 20 tokens: three at a time
    again = ask(engine, 14, 20)  # what was published is what was verified
    finish(engine)
    assert_answered(again)
    assert scheduler.counts.hit_tokens > 0

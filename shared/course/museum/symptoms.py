"""How each bug shows: programs of a few lines that run a stage and print what a user would see.

Each runs twice in processes of its own, once with the reference and once with the student's copy, see show.py. Its docstring is
what the reader is told: what is run, and never what is wrong. Stages are reached by name when a symptom runs: the copy must be
laid over its stage before.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shared import checkpoint
from shared.course import stages
from shared.tokenizer import AnyTokenizer, load_tokenizer

from .inside import Inside

ONCE = "Once upon a time"
CROWD = (
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
    ONCE,
)
WIDTH = 96


def load(module: str) -> Any:
    """A module of a stage, by its name."""
    return importlib.import_module(module)


@functools.cache
def stories() -> tuple[Any, AnyTokenizer]:
    """The embedded model and its tokenizer."""
    found = checkpoint.load("stories")
    return stages.load_model(found), load_tokenizer(found.folder)


def greedy(count: int, **options: Any) -> Any:
    return stages.sampling_params()(max_tokens=count, **options)


def encode(text: str) -> list[int]:
    return stories()[1].encode(text)


def decode(ids: Sequence[int]) -> str:
    return stories()[1].decode(list(ids)).strip()


def say(text: str, indent: str = "") -> None:
    """Print at once: what has been said stays, should the rest never come."""
    for line in text.splitlines() or [""]:
        print(
            textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent), flush=True
        )


def bars(values: Iterable[tuple[str, float]], unit: str, scale: float = 1.0) -> None:
    """A bar for each named value, of so many signs a unit: the two sides of a symptom must be to one scale."""
    for name, value in values:
        print(f"{name:>16} {'#' * min(60, round(scale * value))} {value:g} {unit}", flush=True)


def tell(prompts: Sequence[str], outputs: Sequence[Any]) -> None:
    """Each prompt with its answer."""
    for prompt, output in zip(prompts, outputs, strict=True):
        ended = (
            output.error or f"{len(output.token_ids)} tokens, finish reason {output.finish_reason}"
        )
        say(f"{prompt} / {decode(output.token_ids)}")
        say(f"[{ended}]", "    ")


# ---- stages 01 to 03 ----


def the_end_of_the_context() -> None:
    """Stage 01 is given a text of 1,020 tokens, of the 1,024 that the model can see, and asked for 10 more."""
    engine = load("stage01_forward.engine").Engine(stories()[0])
    prompt = (encode(ONCE) * 1020)[:1020]
    for token in engine.stream(prompt, greedy(10, ignore_eos=True)):
        say(
            f"token {len(prompt) + len(engine.steps)}: {decode([token.id])!r}, finish reason {token.finish_reason}"
        )


def a_story() -> None:
    """Stage 02 tells two stories."""
    engine = load("stage02_kv_cache.engine").Engine(stories()[0])
    for prompt in (ONCE, CROWD[0]):
        tell([prompt], engine.generate([encode(prompt)], greedy(40)))


def a_batch() -> None:
    """Stage 03 continues three prompts of different lengths as one batch."""
    engine = load("stage03_batching.engine").Engine(stories()[0])
    tell(CROWD, engine.generate([encode(each) for each in CROWD], greedy(30)))


def a_batch_by_hand() -> None:
    """Stage 03 continues three prompts of different lengths as one batch, on a machine without fused attention: softmax is
    written out."""

    def plain(q: Any, keys: Any, values: Any, mask: Any) -> Any:
        scores = q @ keys.mT / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(
            -1
        ) @ values

    load("stage03_batching.cache").masked_attention = plain
    a_batch()


def answers_that_end() -> None:
    """Stage 03 continues three prompts as one batch, each until its story ends."""
    engine = load("stage03_batching.engine").Engine(stories()[0])
    outputs = engine.generate([encode(each) for each in CROWD], greedy(400))
    for prompt, output in zip(CROWD, outputs, strict=True):
        say(f"{prompt} / ... {decode(output.token_ids[-12:])}")
        say(f"[{len(output.token_ids)} tokens, finish reason {output.finish_reason}]", "    ")


# ---- stage 04 ----


def slots() -> None:
    """Stage 04 answers six requests in four slots. Each column is a pass; a letter is a request that is computed in it."""
    engine = load("stage04_continuous.engine").Engine(
        stories()[0], scheduler=load("stage04_continuous.scheduler").Scheduler(4)
    )
    request = load("stage04_continuous.request").Request
    lengths = (12, 5, 9, 7, 8, 6)
    for name, count in zip("abcdef", lengths, strict=True):
        engine.add(request(encode(CROWD[1]), greedy(count, ignore_eos=True), name))
    for _ in engine.run():
        pass
    for slot in range(4):
        rows = [{each.slot: each.request_id for each in step.slots} for step in engine.steps]
        print(f"slot {slot} |{''.join(row.get(slot, '.') for row in rows)}|", flush=True)
    say(f"{sum(lengths)} tokens in {len(engine.steps)} passes")


def neighbours() -> None:
    """Stage 04 continues one prompt alone, and then again beside two others."""
    engine = load("stage04_continuous.engine").Engine(stories()[0])
    prompts = (ONCE, "There was once a merry boy named", "Long ago there")
    for together in ([ONCE], prompts):
        tell(together[:1], engine.generate([encode(each) for each in together], greedy(40))[:1])


def computed_again() -> None:
    """Two requests on stage 05's engine, with memory for hardly more than one: the second is preempted and computed again later.
    Request, which says what there is to compute, is stage 04's."""
    paged([ONCE, CROWD[0]], 60, blocks=6)


# ---- stage 05 ----


def paged_engine(blocks: int, block_size: int = 16, sequences: int = 8, **options: Any) -> Any:
    pool = load("stage05_paged.blocks").BlockPool(blocks, block_size)
    scheduler = load("stage05_paged.scheduler").Scheduler(
        pool, min(sequences, blocks), 256, **options
    )
    return load("stage05_paged.engine").Engine(stories()[0], scheduler=scheduler)


def paged(prompts: Sequence[str], count: int, **options: Any) -> Any:
    engine = paged_engine(**options)
    tell(prompts, engine.generate([encode(each) for each in prompts], greedy(count)))
    say(f"preemptions: {engine.scheduler.counts.preemptions}")
    return engine


def block_borders() -> None:
    """Stage 05 writes 40 tokens of one request into blocks of 8. A line is a pass: the tokens that have keys and values after
    it, and a box for each block that the request holds."""
    engine = paged_engine(8, block_size=8)
    request = engine.add(
        load("stage04_continuous.request").Request(encode(ONCE), greedy(32, ignore_eos=True))
    )
    for _ in engine.run():
        step = engine.steps[-1]
        if step.used_tokens % 8 in (7, 0, 1):
            print(f"{step.used_tokens:4} tokens {'[8]' * step.owned_blocks}", flush=True)
    say(decode(request.output.token_ids))


def asked_twice() -> None:
    """Stage 05 is asked the same question twice. Its prompt has 32 tokens: two blocks exactly."""
    engine = paged_engine(16)
    prompt = (encode(CROWD[0]) * 3)[:32]
    for number in (1, 2):
        output = engine.generate([prompt], greedy(20))[0]
        say(f"{number}: {decode(output.token_ids)}")
        say(f"[found in the prefix cache: {engine.scheduler.counts.hit_tokens} tokens]", "    ")


def a_small_prefix_cache() -> None:
    """Stage 05 with ten blocks answers three prompts, one after the other, and then the first one again."""
    engine = paged_engine(10)
    prompts = [(encode(each) * 4)[:36] for each in CROWD]
    for prompt in (*prompts, prompts[0]):
        output = engine.generate([prompt], greedy(70, ignore_eos=True))[0]
        say(f"{decode(prompt[:12])} ... / {decode(output.token_ids[:30])}")


def resumed() -> None:
    """Two requests on stage 05's engine, with memory for hardly more than one: one is preempted, and finds some of its own blocks
    again when it comes back."""
    paged([ONCE, CROWD[0]], 80, blocks=8)


def a_block_given_back() -> None:
    """Stage 05 answers a prompt, then two others that begin as the first one did, both at once."""
    engine = paged_engine(12)
    prompt = (encode(CROWD[0]) * 3)[:40]
    first = engine.generate([prompt], greedy(20, ignore_eos=True))[0]
    say(f"... / {decode(first.token_ids)}")
    ends = [encode(" and his friend"), encode(" but one day the")]
    for end, output in zip(
        ends, engine.generate([prompt + end for end in ends], greedy(25)), strict=True
    ):
        say(f"...{decode(end)} / {decode(output.token_ids)}")


def a_loss_to_be_found() -> None:
    """Somebody takes a block from the pool behind everybody's back, and never gives it back. Stage 05's sanitizer looks after
    every step."""
    engine = paged_engine(16)
    engine.sanitizer = load("stage05_paged.sanitizer").Sanitizer(engine.scheduler, engine.cache)
    engine.add(load("stage04_continuous.request").Request(encode(ONCE), greedy(20)))
    engine.step()
    engine.scheduler.pool.take()
    try:
        for _ in engine.run():
            pass
    except AssertionError as error:
        say(f"{type(error).__name__}: {error}")
        return
    say(f"{len(engine.steps)} steps, and the sanitizer has said nothing.")
    say(
        f"{engine.scheduler.pool.owned} block is owned, and there are {len(engine.requests)} requests."
    )


def what_the_client_has_heard() -> None:
    """Two clients read their answers as stage 05 makes them, with memory for hardly more than one: the second is preempted. This
    is what each has received."""
    engine = paged_engine(6)
    request = load("stage04_continuous.request").Request
    heard: dict[str, list[int]] = {}
    for name, prompt in (("first", ONCE), ("second", CROWD[0])):
        engine.add(request(encode(prompt), greedy(60, ignore_eos=True), name))
        heard[name] = []
    for name, token in engine.run():
        heard[name].append(token.id)
    for name, ids in heard.items():
        say(f"{name}: {decode(ids)}")
        say(f"[{len(ids)} tokens received, 60 asked for]", "    ")


def a_fork() -> None:
    """Stage 05 begins a story, forks it after 12 tokens, and bids the fork go on another way. The original is then what it would
    have been without a fork."""
    engine = paged_engine(32)
    request = load("stage04_continuous.request").Request
    first = engine.add(request(encode(CROWD[0]), greedy(40)))
    while len(first.output.token_ids) < 12:
        engine.step()
    child = engine.fork(first.id, greedy(40, temperature=1.5, seed=3))
    for _ in engine.run():
        pass
    say(f"the original: {decode(first.output.token_ids)}")
    say(f"the fork:     {decode(child.output.token_ids)}")


def who_is_let_in() -> None:
    """Four requests come to stage 05's engine, which has 64 free blocks. Each may say 1,100 tokens and will say a sentence.
    A line tells what is going on after 1, 10, 100, ... steps."""
    engine = paged_engine(64)
    request = load("stage04_continuous.request").Request
    stop = encode(".")
    for prompt in (*CROWD, "There was once a timid girl named"):
        engine.add(request(encode(prompt), greedy(1100, stop_token_ids=tuple(stop))))
    step, said = 0, 0
    while engine.scheduler.unfinished:
        said += len(engine.step())
        step += 1
        if step == 10 ** (len(str(step)) - 1):
            scheduler = engine.scheduler
            blocks = f"{scheduler.pool.owned} of {scheduler.pool.count} blocks owned"
            say(
                f"step {step}: {len(scheduler.running)} run, {len(scheduler.waiting)} wait; {blocks}; {said} tokens said"
            )
    say(f"step {step}: all have ended; {said} tokens said")


# ---- stage 06 ----


def letters() -> None:
    """A stream of stage 06 is given the tokens of a text, one after the other. This is what the client reads."""
    tokenizer = stories()[1]
    stream = load("stage06_serving.text").TextStream(tokenizer, ())
    for text in ("A caf\u00e9 in Z\u00fcrich, 5 \u20ac.", "\u4f60\u597d"):
        say("".join(stream.push(each) for each in tokenizer.encode(text)) + stream.flush())


def no_stream() -> None:
    """A client of stage 06 asks for an answer in one piece, "stream": false, and reads it as JSON."""

    async def script(inside: Inside) -> None:
        for fields in ({}, {"stream": False}):
            answer = await inside.ask(
                "/v1/completions", {"prompt": ONCE, "max_tokens": 8, "temperature": 0, **fields}
            )
            say(
                f"{fields or 'nothing said of it'}: status {answer.status}, {answer.headers['content-type']}"
            )
            try:
                say(answer.json()["choices"][0]["text"].strip(), "    ")
            except ValueError as error:
                say(f"{type(error).__name__}: {error}", "    ")

    Inside.run(script)


def watch(inside: Inside, steps: list[int], since: float) -> None:
    """A line on what the engine holds now."""
    pool = inside.engine.scheduler.pool
    made = len(inside.engine.steps) - steps[-1]
    say(
        f"{time.monotonic() - since:4.1f} s later: {pool.owned} of {pool.count} blocks owned, {made} passes more"
    )
    steps.append(len(inside.engine.steps))


async def afterwards(inside: Inside) -> None:
    """What the engine does in the next half second, when there should be nothing to do."""
    since, steps = time.monotonic(), [len(inside.engine.steps)]
    for _ in range(3):
        await asyncio.sleep(0.2)
        watch(inside, steps, since)


def a_client_that_leaves() -> None:
    """A client of stage 06 asks for 1,000 tokens in one piece, and hangs up after the first of them were made."""

    async def script(inside: Inside) -> None:
        body = {"prompt": ONCE, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        asking = inside.begin("/v1/completions", body)
        await inside.passes(5)
        asking.leave()
        say(f"the client has left after {len(inside.engine.steps)} passes")
        await asyncio.sleep(0.1)
        await afterwards(inside)

    Inside.run(script)


def too_late() -> None:
    """A client of stage 06 asks for 1,000 tokens, and the server allows half a second for an answer."""

    async def script(inside: Inside) -> None:
        body = {"prompt": ONCE, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        answer = await inside.ask("/v1/completions", body)
        say(f"status {answer.status}: {answer.json()['error']['message']}")
        await asyncio.sleep(0.1)
        await afterwards(inside)

    Inside.run(script, request_timeout=0.5)


def is_it_alive() -> None:
    """Somebody looks at stage 06's /health again and again, while a client has a prompt of 1,000 tokens scored, five times."""

    async def script(inside: Inside) -> None:
        ids = (encode(CROWD[0]) * 100)[:1000]
        waits: list[float] = []

        async def look() -> None:
            while True:
                begun = time.perf_counter()
                await asyncio.sleep(0.002)
                await inside.ask("/health")
                waits.append(time.perf_counter() - begun)

        looking = asyncio.create_task(look())
        await asyncio.sleep(0.1)
        quiet, waits[:] = max(waits), []
        begun = time.perf_counter()
        for _ in range(5):
            await inside.ask(
                "/v1/completions", {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
            )
        seconds = time.perf_counter() - begun
        looking.cancel()
        say(f"idle: the longest wait for /health was {quiet * 1e3:.0f} ms")
        say(
            f"scoring for {seconds:.1f} s: /health answered {len(waits)} times; the longest wait was {max(waits) * 1e3:.0f} ms"
        )

    Inside.run(script)


def half_an_answer() -> None:
    """A client of stage 06 reads a stream of 30 tokens as OpenAI's own client does, and the engine fails at the ninth pass."""

    logging.disable()  # the server's log is for its owner

    async def script(inside: Inside) -> None:
        forward, passes = inside.engine._forward, 0

        def failing(work: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 9:
                raise RuntimeError("a planted failure of the hardware")
            return forward(work)

        inside.engine._forward = failing
        body = {
            "prompt": ONCE,
            "max_tokens": 30,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        answer = await inside.ask("/v1/completions", body)
        say(f"status {answer.status}")
        text = ""
        for event in answer.events():
            if event == "[DONE]":
                say("[DONE]")
                break
            if "error" in event:
                say(f"{text!r}\nan error: {event['error']['message']}")
                return
            text += event["choices"][0]["text"]
        say(f"{text!r}\nthe loop over the stream has ended, and nothing was raised")

    Inside.run(script)


# ---- stage 07 ----


def in_hand() -> None:
    """Stage 07 loads a mock server with 8 users, 40 requests in all. A bar is the number of requests in hand, at ten moments."""
    mock, when = load("stage07_loadtest.mock"), load("stage07_loadtest.schedule")

    async def script() -> Any:
        async with mock.serving(mock.Behaviour(ttft=0.02, itl=0.005)) as server:
            target = load("stage07_loadtest.client").Target(server.url, timeout=60)
            ask = load("stage07_loadtest.workload").Ask
            asks = [ask([1, 2, 3, number], 8) for number in range(40)]
            return await load("stage07_loadtest.load").run_point(
                target, asks, when.closed(8, 40)
            ), server

    point, server = asyncio.run(script())
    seen = point.in_flight[:: max(1, len(point.in_flight) // 10)]
    bars([(f"{at * 1e3:.0f} ms", count) for at, count in seen], "in hand")
    say(
        f"at most {server.most_running} at once; {len(point.records) / point.duration:.0f} requests/s"
    )


def lengths() -> None:
    """Stage 07's workload "mixed", as it is drawn: 24 requests, and how many tokens each asks for."""
    asks = load("stage07_loadtest.workload").make("mixed", 24, 0)
    bars(
        [(f"request {number}", ask.max_tokens) for number, ask in enumerate(asks, 1)], "tokens", 0.3
    )


def a_frozen_client() -> None:
    """Stage 07 sends 100 requests a second to a mock server that answers at once; but the load generator's own machine freezes
    for half a second. This is what its users waited, from when their requests were due."""
    mock, metrics = load("stage07_loadtest.mock"), load("stage07_loadtest.metrics")

    async def script() -> Any:
        async with mock.serving(mock.Behaviour(ttft=0.002, itl=0)) as server:

            async def hiccup() -> None:
                while server.requests < 20:
                    await asyncio.sleep(0.001)
                time.sleep(0.5)

            freezing = asyncio.create_task(hiccup())
            target = load("stage07_loadtest.client").Target(server.url, timeout=60)
            asks = [
                load("stage07_loadtest.workload").Ask([1, 2, 3, number], 1) for number in range(100)
            ]
            when = load("stage07_loadtest.schedule").poisson(100, 100, 4)
            point = await load("stage07_loadtest.load").run_point(target, asks, when)
            await freezing
            return point

    found = metrics.summarize(asyncio.run(script()), metrics.Slo())
    shown = [
        (f"p{percent}", (found.at(metrics.TTFT_INTENDED, percent) or 0) * 1e3)
        for percent in (50, 90, 95)
    ]
    bars([(name, round(value)) for name, value in shown], "ms", 0.1)
    notes = [flag for flag in found.flags if not flag.startswith("short")]
    say(f"not to be trusted: {'; '.join(notes)}" if notes else "no reason for distrust")


def who_says_less() -> None:
    """Stage 07 asks a mock server for 20 answers of 8 tokens. Every second one is a token short."""
    mock, metrics = load("stage07_loadtest.mock"), load("stage07_loadtest.metrics")

    async def script() -> Any:
        async with mock.serving(
            mock.Behaviour(ttft=0.002, itl=0.001, fault="wrong_count", fault_every=2)
        ) as server:
            target = load("stage07_loadtest.client").Target(server.url, timeout=60)
            asks = [
                load("stage07_loadtest.workload").Ask([1, 2, 3, number], 8) for number in range(20)
            ]
            return await load("stage07_loadtest.load").run_point(
                target, asks, load("stage07_loadtest.schedule").closed(4, 20)
            )

    found = metrics.summarize(asyncio.run(script()), metrics.Slo())
    say(f"{found.succeeded} of {found.requests} succeeded; failures: {found.failures or 'none'}")
    say(f"tokens counted: {found.completion_tokens}")

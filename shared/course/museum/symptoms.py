"""How each bug shows: programs of a few lines that run a stage and print what a user would see.

Each runs twice in processes of its own, with the reference and with the student's copy: see
show.py. Its docstring is shown to the reader: it tells what runs, never what is wrong. Stages are
loaded by name when a symptom runs, because the copy must be laid over its stage first.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shared import models, registry
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
    from shared import checkpoint  # PyTorch takes seconds: not for the texts of the exhibits

    weights = checkpoint.load("stories")
    return stages.load_model(weights), load_tokenizer(weights.folder)


def engine(stage: str, contexts: int | None = None, **options: Any) -> Any:
    """The engine of a stage for the embedded model."""
    return load(f"{stage}.engine").make(stories()[0], contexts, **options)


def request(*arguments: Any) -> Any:
    return load("stage04_continuous.request").Request(*arguments)


def greedy(count: int, **options: Any) -> Any:
    return stages.sampling_params()(max_tokens=count, **options)


def encode(text: str) -> list[int]:
    return stories()[1].encode(text)


def decode(ids: Sequence[int]) -> str:
    return stories()[1].decode(list(ids)).strip()


def say(text: str, indent: str = "") -> None:
    """Print and flush, so that the output survives if the rest never comes."""
    for line in text.splitlines() or [""]:
        print(
            textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent), flush=True
        )


def bars(values: Iterable[tuple[str, float]], unit: str, scale: float = 1.0) -> None:
    """A bar of `scale` signs per unit for each value: both sides of a symptom need one scale."""
    for name, value in values:
        print(f"{name:>16} {'#' * min(60, round(scale * value))} {value:g} {unit}", flush=True)


def tell(prompts: Sequence[str], outputs: Sequence[Any]) -> None:
    """Each prompt with its answer."""
    for prompt, output in zip(prompts, outputs, strict=True):
        count, reason = len(output.token_ids), output.finish_reason
        say(f"{prompt} / {decode(output.token_ids)}")
        say(f"[{output.error or f'{count} tokens, finish reason {reason}'}]", "    ")


# ---- stages 01 to 03 ----


def the_end_of_the_context() -> None:
    """Stage 01 continues a text of 1,020 tokens, of the 1,024 that the model can see, by up to 10
    more."""
    naive = engine("stage01_forward")
    prompt = (encode(ONCE) * 1020)[:1020]
    for token in naive.stream(prompt, greedy(10, ignore_eos=True)):
        place, text = len(prompt) + len(naive.steps), decode([token.id])
        say(f"token {place}: {text!r}, finish reason {token.finish_reason}")


def a_story() -> None:
    """Stage 02 tells two stories."""
    cached = engine("stage02_kv_cache")
    for prompt in (ONCE, CROWD[0]):
        tell([prompt], cached.generate([encode(prompt)], greedy(40)))


def a_batch() -> None:
    """Stage 03 continues three prompts of different lengths as one batch."""
    batches = engine("stage03_batching")
    tell(CROWD, batches.generate([encode(prompt) for prompt in CROWD], greedy(30)))


def a_batch_by_hand() -> None:
    """Stage 03 continues three prompts of different lengths as one batch, on a machine without
    fused attention: softmax is written out."""

    def plain(q: Any, keys: Any, values: Any, mask: Any) -> Any:
        scores = q @ keys.mT / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ values

    load("stage03_batching.cache").masked_attention = plain
    a_batch()


def answers_that_end() -> None:
    """Stage 03 continues three prompts as one batch, each until its story ends."""
    batches = engine("stage03_batching")
    outputs = batches.generate([encode(prompt) for prompt in CROWD], greedy(400))
    for prompt, output in zip(CROWD, outputs, strict=True):
        say(f"{prompt} / ... {decode(output.token_ids[-12:])}")
        say(f"[{len(output.token_ids)} tokens, finish reason {output.finish_reason}]", "    ")


# ---- stage 04 ----


def slots() -> None:
    """Stage 04 answers six requests in four slots. Each column is a step; each letter is a request
    computed in it."""
    slotted = engine("stage04_continuous", 4)
    lengths = (12, 5, 9, 7, 8, 6)
    for name, count in zip("abcdef", lengths, strict=True):
        slotted.add(request(encode(CROWD[1]), greedy(count, ignore_eos=True), name))
    for _ in slotted.run():
        pass
    for slot in range(4):
        rows = [{share.slot: share.request_id for share in step.slots} for step in slotted.steps]
        print(f"slot {slot} |{''.join(row.get(slot, '.') for row in rows)}|", flush=True)
    say(f"{sum(lengths)} tokens in {len(slotted.steps)} steps")


def neighbours() -> None:
    """Stage 04 continues one prompt alone, and then again beside two others."""
    slotted = engine("stage04_continuous")
    prompts = (ONCE, "There was once a merry boy named", "Long ago there")
    for together in ([ONCE], prompts):
        outputs = slotted.generate([encode(prompt) for prompt in together], greedy(40))
        tell(together[:1], outputs[:1])


def computed_again() -> None:
    """Stage 05 answers two requests with memory for hardly more than one: the second is preempted
    and computed again later. Its class Request is stage 04's."""
    preempted([ONCE, CROWD[0]], 60, blocks=6)


# ---- stage 05 ----


def paged(blocks: int, block_size: int = 16, **options: Any) -> Any:
    """Stage 05's engine with a pool of `blocks` blocks."""
    pool = load("stage05_paged.blocks").BlockPool(blocks, block_size)
    return engine("stage05_paged", pool=pool, max_sequences=min(8, blocks), **options)


def preempted(prompts: Sequence[str], count: int, blocks: int) -> None:
    small = paged(blocks)
    tell(prompts, small.generate([encode(prompt) for prompt in prompts], greedy(count)))
    say(f"preemptions: {small.scheduler.counts.preemptions}")


def block_borders() -> None:
    """Stage 05 writes 40 tokens of one request into blocks of 8. Each line is a step: the number of
    tokens with keys and values after it, and a box for each of the request's blocks."""
    small = paged(8, block_size=8)
    long = small.add(request(encode(ONCE), greedy(32, ignore_eos=True)))
    for _ in small.run():
        step = small.steps[-1]
        if step.used_tokens % 8 in (7, 0, 1):
            print(f"{step.used_tokens:4} tokens {'[8]' * step.owned_blocks}", flush=True)
    say(decode(long.output.token_ids))


def asked_twice() -> None:
    """Stage 05 answers the same prompt twice. It has 32 tokens: exactly two blocks."""
    small = paged(16)
    prompt = (encode(CROWD[0]) * 3)[:32]
    for number in (1, 2):
        output = small.generate([prompt], greedy(20))[0]
        say(f"{number}: {decode(output.token_ids)}")
        say(f"[found in the prefix cache: {small.scheduler.counts.hit_tokens} tokens]", "    ")


def a_small_prefix_cache() -> None:
    """Stage 05 with ten blocks answers three prompts, one after the other, and then the first one
    again."""
    small = paged(10)
    prompts = [(encode(prompt) * 4)[:36] for prompt in CROWD]
    for prompt in (*prompts, prompts[0]):
        output = small.generate([prompt], greedy(70, ignore_eos=True))[0]
        say(f"{decode(prompt[:12])} ... / {decode(output.token_ids[:30])}")


def resumed() -> None:
    """Stage 05 answers two requests with memory for hardly more than one: one is preempted, and
    finds some of its own blocks again when it comes back."""
    preempted([ONCE, CROWD[0]], 80, blocks=8)


def a_block_given_back() -> None:
    """Stage 05 answers a prompt, then two others at once that begin like the first."""
    small = paged(12)
    prompt = (encode(CROWD[0]) * 3)[:40]
    first = small.generate([prompt], greedy(20, ignore_eos=True))[0]
    say(f"... / {decode(first.token_ids)}")
    ends = [encode(" and his friend"), encode(" but one day the")]
    outputs = small.generate([prompt + end for end in ends], greedy(25))
    for end, output in zip(ends, outputs, strict=True):
        say(f"...{decode(end)} / {decode(output.token_ids)}")


def a_loss_to_be_found() -> None:
    """A program takes a block from the pool behind the engine's back and never gives it back.
    Stage 05's sanitizer looks after every step."""
    small = paged(16, sanitize=True)
    small.add(request(encode(ONCE), greedy(20)))
    small.step()
    small.scheduler.pool.take()
    try:
        for _ in small.run():
            pass
    except AssertionError as error:
        say(f"{type(error).__name__}: {error}")
        return
    owned, left = small.scheduler.pool.owned, len(small.requests)
    say(f"{len(small.steps)} steps, and the sanitizer has found nothing.")
    say(f"{owned} block is owned, and there are {left} requests.")


def what_the_client_has_heard() -> None:
    """Two clients read their answers as stage 05 computes them, with memory for hardly more than
    one: the second is preempted. This is what each has received."""
    small = paged(6)
    heard: dict[str, list[int]] = {}
    for name, prompt in (("first", ONCE), ("second", CROWD[0])):
        small.add(request(encode(prompt), greedy(60, ignore_eos=True), name))
        heard[name] = []
    for name, token in small.run():
        heard[name].append(token.id)
    for name, ids in heard.items():
        say(f"{name}: {decode(ids)}")
        say(f"[{len(ids)} tokens received, 60 asked for]", "    ")


def a_fork() -> None:
    """Stage 05 begins a story, forks it after 12 tokens, and samples the fork. The original should
    read as it would without a fork."""
    small = paged(32)
    first = small.add(request(encode(CROWD[0]), greedy(40)))
    while len(first.output.token_ids) < 12:
        small.step()
    other = greedy(40, temperature=1.5, seed=3)
    child = load("stage05_paged.fork").fork(small, first.id, other)
    for _ in small.run():
        pass
    say(f"the original: {decode(first.output.token_ids)}")
    say(f"the fork:     {decode(child.output.token_ids)}")


def who_is_let_in() -> None:
    """Four requests come to stage 05's engine, which has 64 free blocks. Each may take 1,100 tokens
    and needs one sentence. A line shows the state after 1, 10, 100, ... steps."""
    small = paged(64)
    stop = tuple(encode("."))
    for prompt in (*CROWD, "There was once a timid girl named"):
        small.add(request(encode(prompt), greedy(1100, stop_token_ids=stop)))
    step = tokens = 0
    while small.scheduler.unfinished:
        tokens += len(small.step())
        step += 1
        if step == 10 ** (len(str(step)) - 1):
            scheduler = small.scheduler
            say(
                f"step {step}: {len(scheduler.running)} run, {len(scheduler.waiting)} wait; "
                f"{scheduler.pool.owned} of {scheduler.pool.count} blocks owned; {tokens} tokens"
            )
    say(f"step {step}: all have ended; {tokens} tokens")


# ---- stage 06 ----


def letters() -> None:
    """A stream of stage 06 gets the tokens of a text, one after the other. This is what the client
    reads."""
    tokenizer = stories()[1]
    stream = load("stage06_serving.text").TextStream(tokenizer, ())
    for text in ("A caf\u00e9 in Z\u00fcrich, 5 \u20ac.", "\u4f60\u597d"):
        say("".join(stream.push(token) for token in tokenizer.encode(text)) + stream.flush())


def no_stream() -> None:
    """A client of stage 06 wants its answer in one piece, "stream": false, and reads it as JSON."""

    async def script(inside: Inside) -> None:
        for fields in ({}, {"stream": False}):
            body = {"prompt": ONCE, "max_tokens": 8, "temperature": 0, **fields}
            answer = await inside.ask("/v1/completions", body)
            kind = answer.headers["content-type"]
            say(f"{fields or 'without the field'}: status {answer.status}, {kind}")
            try:
                say(answer.json()["choices"][0]["text"].strip(), "    ")
            except ValueError as error:
                say(f"{type(error).__name__}: {error}", "    ")

    Inside.run(script)


LONG = {"prompt": ONCE, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}


async def afterwards(inside: Inside) -> None:
    """What the engine does in the next half second, when it should have nothing to do."""
    await asyncio.sleep(0.1)
    since, passes = time.monotonic(), len(inside.engine.steps)
    for _ in range(3):
        await asyncio.sleep(0.2)
        pool, more = inside.engine.scheduler.pool, len(inside.engine.steps) - passes
        later = time.monotonic() - since
        say(f"{later:4.1f} s later: {pool.owned} of {pool.count} blocks owned, {more} more steps")
        passes += more


def a_client_that_leaves() -> None:
    """A client of stage 06 wants 1,000 tokens in one piece, and hangs up after the first few are
    computed."""

    async def script(inside: Inside) -> None:
        asking = inside.begin("/v1/completions", LONG)
        await inside.passes(5)
        asking.leave()
        say(f"the client has left after {len(inside.engine.steps)} steps")
        await afterwards(inside)

    Inside.run(script)


def too_late() -> None:
    """A client of stage 06 wants 1,000 tokens, and the server allows half a second per answer."""

    async def script(inside: Inside) -> None:
        answer = await inside.ask("/v1/completions", LONG)
        say(f"status {answer.status}: {answer.json()['error']['message']}")
        await afterwards(inside)

    Inside.run(script, request_timeout=0.5)


def is_it_alive() -> None:
    """A monitor reads stage 06's /health again and again, while a client has a text of a million
    characters counted in tokens five times."""

    async def script(inside: Inside) -> None:
        waits: list[float] = []

        async def look() -> None:
            while True:
                started = time.perf_counter()
                await asyncio.sleep(0.002)
                await inside.ask("/health")
                waits.append(time.perf_counter() - started)

        looking = asyncio.create_task(look())
        await asyncio.sleep(0.1)
        quiet, waits[:] = max(waits), []
        started = time.perf_counter()
        for _ in range(5):
            await inside.ask("/tokenize", {"prompt": "1 " * 500_000})
        seconds, longest = time.perf_counter() - started, max(waits) * 1e3
        looking.cancel()
        say(f"idle: the longest wait for /health was {quiet * 1e3:.0f} ms")
        say(
            f"tokenizing for {seconds:.1f} s: /health answered {len(waits)} times; "
            f"the longest wait was {longest:.0f} ms"
        )

    Inside.run(script)


def half_an_answer() -> None:
    """A client of stage 06 reads a stream of 30 tokens as OpenAI's own client does, and the engine
    fails at the ninth step."""
    logging.disable()  # the server's log is for its operator

    async def script(inside: Inside) -> None:
        runner, passes = inside.engine.runner, 0
        run: Callable[..., Any] = runner.run

        def failing(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 9:
                raise RuntimeError("a planted failure of the hardware")
            return run(*arguments)

        runner.run = failing
        answer = await inside.ask("/v1/completions", LONG | {"max_tokens": 30, "stream": True})
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


def load_mock(behaviour: dict[str, Any], asks: Sequence[Any], schedule: Any) -> tuple[Any, Any]:
    """One point of a load on a mock server; the point and the server."""
    mock, client = load("stage07_loadtest.mock"), load("stage07_loadtest.client")

    async def script() -> tuple[Any, Any]:
        async with mock.serving(mock.Behaviour(**behaviour)) as server:
            target = client.Target(server.url, timeout=60)
            return await load("stage07_loadtest.load").run_point(target, asks, schedule), server

    return asyncio.run(script())


def asks(count: int, tokens: int) -> list[Any]:
    ask = load("stage07_loadtest.workload").Ask
    return [ask([1, 2, 3, number], tokens) for number in range(count)]


def in_hand() -> None:
    """Stage 07 loads a mock server with 8 users, 40 requests in all. Each bar is the number of
    requests in flight at one of ten moments."""
    closed = load("stage07_loadtest.schedule").closed(8, 40)
    point, server = load_mock({"ttft": 0.02, "itl": 0.005}, asks(40, 8), closed)
    samples = point.in_flight[:: max(1, len(point.in_flight) // 10)]
    bars([(f"{at * 1e3:.0f} ms", count) for at, count in samples], "in flight")
    rate = len(point.records) / point.duration
    say(f"at most {server.most_running} at once; {rate:.0f} requests/s")


def lengths() -> None:
    """24 requests, drawn from stage 07's workload "mixed", and the tokens of each answer."""
    mixed = load("stage07_loadtest.workload").make("mixed", 24, 0)
    counts = [(f"request {number}", ask.max_tokens) for number, ask in enumerate(mixed, 1)]
    bars(counts, "tokens", 0.3)


def a_frozen_client() -> None:
    """Stage 07 sends 100 requests a second to a mock server that answers at once, but the load
    generator's own machine freezes for half a second. This is how long its users waited, counted
    from when their requests were due."""
    mock, metrics = load("stage07_loadtest.mock"), load("stage07_loadtest.metrics")
    client, schedule = load("stage07_loadtest.client"), load("stage07_loadtest.schedule")

    async def script() -> Any:
        async with mock.serving(mock.Behaviour(ttft=0.002, itl=0)) as server:

            async def hiccup() -> None:
                while server.requests < 20:
                    await asyncio.sleep(0.001)
                time.sleep(0.5)

            freezing = asyncio.create_task(hiccup())
            target = client.Target(server.url, timeout=60)
            arrivals = schedule.poisson(100, 100, 4)
            run_point = load("stage07_loadtest.load").run_point
            point = await run_point(target, asks(100, 1), arrivals)
            await freezing
            return point

    summary = metrics.summarize(asyncio.run(script()), metrics.Slo())
    waits = [(p, (summary.at(metrics.TTFT_INTENDED, p) or 0) * 1e3) for p in (50, 90, 95)]
    bars([(f"p{percent}", round(value)) for percent, value in waits], "ms", 0.1)
    notes = [flag for flag in summary.flags if not flag.startswith("short")]
    say(f"not to be trusted: {'; '.join(notes)}" if notes else "no reason for distrust")


def who_says_less() -> None:
    """Stage 07 asks a mock server for 20 answers of 8 tokens. Every second one is a token short."""
    metrics, schedule = load("stage07_loadtest.metrics"), load("stage07_loadtest.schedule")
    fault = {"ttft": 0.002, "itl": 0.001, "fault": "wrong_count", "fault_every": 2}
    point, _ = load_mock(fault, asks(20, 8), schedule.closed(4, 20))
    summary = metrics.summarize(point, metrics.Slo())
    failures = summary.failures or "none"
    say(f"{summary.succeeded} of {summary.requests} succeeded; failures: {failures}")
    say(f"tokens counted: {summary.completion_tokens}")


# ---- stage 08 ----


def a_page_and_a_model() -> None:
    """Stage 08 runs a small model with random weights on a text of 12 tokens, on the NumPy page and
    in PyTorch. Each line has the likeliest next token at each position."""
    torch, checkpoint = load("torch"), load("shared.checkpoint")
    config = load("stage08_llama.config").LlamaConfig(211, 64, 48, 3, 6, 2, tied=False, n_inner=80)
    drawn = checkpoint.random_tensors(config).items()
    weights = {name: tensor * (12 if tensor.ndim == 2 else 1) for name, tensor in drawn}
    ids = list(range(2, 14))
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    page = load("stage08_llama.numpy_llama").llama(ids, arrays, 3, 6, 2, epsilon=1e-5)
    loaded = checkpoint.Checkpoint(config, weights)
    model = load("stage08_llama.model").load_model(loaded)
    attend = load("stage01_forward.attention").Recompute().attend
    logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))
    say(f"the page:  {page.argmax(-1).tolist()}")
    say(f"the model: {logits.argmax(-1).tolist()}")


def far_positions() -> None:
    """Stage 08 turns one query and one key, two positions apart, and multiplies them: at the
    beginning of a text, and ever further from it."""
    torch, rope = load("torch"), load("stage08_llama.rope")
    q, k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0))
    turns = rope.frequencies(rope.Rope(), 64)
    for place in (2, 100, 255, 1001, 10_003, 30_001):
        cos, sin = rope.rotation(torch.tensor([place, place - 2]), turns)
        score = (rope.rotate(q, cos[0], sin[0]) * rope.rotate(k, cos[1], sin[1])).sum()
        say(f"places {place:,} and {place - 2:,}: score {score:.2f}")


def a_stretched_context() -> None:
    """Stage 08 makes the angles of Llama-3.2-1B, which was trained on texts of 8,192 tokens and is
    meant for 131,072. Each line gives the number of tokens in which a pair of channels turns
    once."""
    config = load("stage08_llama.shapes").PRESETS["meta-llama/Llama-3.2-1B"]
    turns = load("stage08_llama.rope").frequencies(config.rope, config.head_dim)
    for pair in (0, 8, 16, 24, 31):
        say(f"pair {pair}: {2 * math.pi / turns[pair]:,.0f} tokens")


def two_configs() -> None:
    """Stage 08 reads the config.json of Qwen3-0.6B, and of a Qwen2 whose file mentions a window."""
    shape = {"vocab_size": 151936, "max_position_embeddings": 32768, "intermediate_size": 3072}
    shape |= {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
    shape |= {"num_key_value_heads": 8, "sliding_window": 4096, "max_window_layers": 4}
    for kind, fields in (("qwen3", {"head_dim": 128}), ("qwen2", {"use_sliding_window": False})):
        config = registry.load(registry.CONFIGS[kind])(shape | fields, kind, "config.json")
        queries = config.shapes()["layers.0.self_attn.q_proj.weight"]
        seen = min(config.windows, default=config.n_positions)
        say(f"{kind}: the matrix of the queries is {queries}; a query sees {seen:,} tokens")


# ---- stage 09 ----


def memory_that_had_an_owner() -> None:
    """Stage 09 attends to 5 tokens in blocks of 4. First the second block is new; then it
    is one that another request gave back, with values that had overflowed."""
    torch, online = load("torch"), load("stage09_kernels.online")
    q, *tokens = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    for name, left in (("new", 0.0), ("given back", math.inf)):
        cache = torch.full((2, 2, 4, 4), left)
        for place, (key, value) in enumerate(zip(tokens[::2], tokens[1::2], strict=True)):
            cache[place // 4, 0, place % 4], cache[place // 4, 1, place % 4] = key, value
        output = online.attend(q, cache[:, 0], cache[:, 1], [0, 1], 5)
        say(f"a second block that is {name}: {[round(number, 3) for number in output.tolist()]}")


def an_edited_header() -> None:
    """Stage 09 compiles a file that includes number.h and runs it; then number.h is edited, and a
    new process does the same."""
    library = load("stage09_kernels.library")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        library.cache_folder = lambda: folder / "cache"
        (folder / "one.c").write_text('#include "number.h"\nint one(void) { return NUMBER; }\n')
        for number in (1, 2):
            (folder / "number.h").write_text(f"#define NUMBER {number}\n")
            library.load.cache_clear()  # as a new process
            say(f"number.h has {number}, the library {library.load(folder / 'one.c').one()}")


def some_processors() -> None:
    """Stage 09 chooses instructions for four processors, by what they report."""
    library = load("stage09_kernels.library")
    library.platform.machine = lambda: "x86_64"
    laptop = ["avx2", "fma3"]
    server, hidden = library.WIDE_NEEDS, [*laptop, "avx512_f"]
    for name, has in (
        ("a laptop", laptop),
        ("a server", server),
        ("a newer server", [*server, "avx512_bf16"]),
        ("a virtual machine that hides some", hidden),
    ):
        library.capabilities = lambda has=has: dict.fromkeys(has, True)
        say(f"{name}: {', '.join(library.levels())}")


def a_chat_with_kernels() -> None:
    """Stage 09 answers with the embedded Llama, stories-chat. The first line is stage 05's answer,
    the second the kernels'."""
    weights = models.load("stories-chat")
    model, tokenizer = stages.load_model(weights), load_tokenizer(weights.folder)
    prompt = tokenizer.encode("Once upon a time there was")
    for stage in ("stage05_paged", "stage09_kernels"):
        (output,) = load(f"{stage}.engine").make(model, 1).generate([prompt], greedy(24))
        say(f"{stage[:7]}: {tokenizer.decode(output.token_ids).strip()}")


# ---- stage 10 ----


def rounded_beside_others() -> None:
    """Stage 10 multiplies a token's activations by a matrix in int8: alone, and then beside another
    user's token, whose numbers are a hundred times as large."""
    torch, layers = load("torch"), load("stage10_quantization.layers")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator) for rows in (4, 2))
    matrix = load("stage10_quantization.convert").INT8.quantized("w", weight)
    x[1] *= 100
    for name, count in (("alone", 1), ("beside another", 2)):
        outputs = layers.multiply(matrix, x[:count])[0].tolist()
        say(f"{name}: {[round(number, 2) for number in outputs]}")


def zeros_in_two_versions() -> None:
    """Stage 10 reads the same eight weights of a row from a GPTQ file of the first version, and of
    the second."""
    torch, packed = load("torch"), load("stage10_quantization.formats.packed")
    for version, zero in (("gptq", 0x44444444), ("gptq_v2", 0x55555555)):
        parts = {
            "qweight": torch.full((1, 8), 0x76543210, dtype=torch.int32),
            "qzeros": torch.full((1, 1), zero, dtype=torch.int32),
            "scales": torch.full((1, 8), 0.5),
        }
        options = {"bits": 4, "group_size": 8, "checkpoint_format": version}
        matrix = packed.gptq(parts, (8, 8), options)
        say(f"{version}: {matrix.dequantized()[0].tolist()}")


def columns_out_of_order() -> None:
    """Stage 10 rounds a matrix to four bits by GPTQ, its columns in their order and then by the
    size of their inputs. The loss is that of the layer's outputs, over that of the nearest
    codes."""
    torch, convert = load("torch"), load("stage10_quantization.convert")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=generator) * torch.logspace(-1, 1, 128)
    x = torch.randn(512, 128, generator=generator) * torch.rand(128, generator=generator) ** 3
    hessian = x.t() @ x

    def loss(matrix: Any) -> float:
        error = matrix.dequantized() - weight
        return float((error @ hessian * error).sum())

    nearest = loss(convert.INT4.quantized("w", weight))
    for name, act_order in (("in order", False), ("by size", True)):
        matrix = load("stage10_quantization.gptq").gptq(weight, hessian, convert.INT4, act_order)
        say(f"columns {name}: {loss(matrix) / nearest:.0%}")


def a_smoothed_story() -> None:
    """Stage 05 tells a story with the embedded model, before and after stage 10 has moved scales
    from its activations into its weights."""
    model = stages.load_model(models.load("stories"))
    for name in ("before", "after"):
        if name == "after":
            load("stage10_quantization.smoothquant").smooth(model, [load("torch").arange(200)])
        (output,) = load("stage05_paged.engine").make(model, 1).generate([encode(ONCE)], greedy(60))
        say(f"{name}: {decode(output.token_ids)}")


# ---- stage 12 ----


def equal_replicas() -> None:
    """Stage 12 routes 40 requests with one prompt, one after the other, among four idle replicas
    that all have it."""
    routing = load("stage12_distributed.router.routing").Routing(seed=0)
    prompt = list(range(64))
    for name in "ABCD":
        routing.add(name).remember(routing.digests(prompt))
    chosen = [routing.choose(routing.digests(prompt), len(prompt)).replica.name for _ in range(40)]
    say(", ".join(f"replica {name}: {chosen.count(name)} requests" for name in "ABCD"))


def a_busy_neighbour() -> None:
    """Stage 12 routes 16 conversations, each cached on one replica: first while nothing else runs,
    then while one long answer runs somewhere."""
    routing = load("stage12_distributed.router.routing").Routing(seed=0)
    for name in "ABCD":
        routing.add(name)

    def ask(number: int) -> Any:
        prompt = list(range(100 * number, 100 * number + 96))
        route = routing.choose(routing.digests(prompt), len(prompt))
        routing.start(route)
        return route

    for number in range(17):
        routing.finish(ask(number))
    for when in ("alone", "beside a long answer"):
        if when != "alone":
            ask(16)
        hits = 0
        for number in range(16):
            route = ask(number)
            hits += route.cached > 0
            routing.finish(route)
        say(f"{when}: {hits} of 16 conversations find what they have computed")


def a_late_copy() -> None:
    """Stage 12 computes the prompts of two requests in one process and decodes them in another,
    which is busy for a while. There is room for one prompt. The third line is what a single engine
    answers to the first prompt."""
    from multiprocessing import Pipe

    leases = load("stage12_distributed.disaggregated.leases")
    make, (model, tokenizer) = load("stage05_paged.engine").make, stories()
    prompts = [tokenizer.encode(text) for text in CROWD[:2]]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        memory, now = leases.Memory(Path(folder), 5, 64), 0.0
        cache = functools.partial(leases.MappedCache, memory)
        first, second = (
            make(model, pool=memory.pool(decode, 4), make_cache=cache) for decode in (False, True)
        )
        (ours, theirs), leases.PATIENCE = Pipe(), 0
        prefill, decode = leases.Prefill(first, theirs), leases.Disaggregated(second, ours)
        prefill.clock, decode.clock = lambda: now, lambda: 0.0
        decode.post = ours.send
        requests = [decode.add(request(prompt, greedy(16))) for prompt in prompts]
        for _ in range(4):
            prefill.turn()
            now += 20  # seconds
        while decode.requests:
            prefill.turn()
            decode.step()
        for answered in requests:
            answer = answered.output.error or tokenizer.decode(answered.output.token_ids)
            say(f"status {503 if answered.output.error else 200}: {answer.strip()}")
        (alone,) = make(model, 1).generate(prompts[:1], greedy(16))
        say(f"alone: {tokenizer.decode(alone.token_ids).strip()}")


def a_drafted_story() -> None:
    """Stage 11 continues a text with drafts from the text itself. The second line is what stage 05
    answers."""
    make, (model, tokenizer) = load("stage05_paged.engine").make, stories()
    drafting = load("stage11_speculative.engine").with_drafts
    ngram = load("stage11_speculative.proposers").NGram
    prompt = tokenizer.encode(
        "Rosa met a mouse. Rosa met a fox. Rosa met a mouse. Rosa met a fox. Rosa met"
    )
    for engine in (drafting(make(model, 1), ngram(2, 1)), make(model, 1)):
        (output,) = engine.generate([prompt], greedy(24))
        say(f"{tokenizer.decode(output.token_ids).strip()}")


def an_answer_in_json() -> None:
    """Stage 11 asks for two properties, in JSON, and shows white space as it would be escaped."""
    grammar = load("stage11_speculative.grammar")
    model, tokenizer = stories()
    eos = tokenizer.eos_id or 0
    fields = {"name": {"type": "string", "maxLength": 12}, "colour": {"enum": ["red", "grey"]}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    source = grammar.start(grammar.of_schema(schema | {"additionalProperties": False}))
    form = grammar.Form(grammar.Grammars(tokenizer, tokenizer.vocab_size, (eos,)), source)
    continuous = load("stage05_paged.engine").make(model, 1)
    asked = request(encode(ONCE), greedy(60))
    form(asked)
    continuous.add(asked)
    for _ in continuous.run():
        pass
    say(repr(tokenizer.decode(id for id in asked.output.token_ids if id != eos)))
    say(
        f"[{len(asked.output.token_ids)} tokens, finish reason {asked.output.finish_reason}]",
        "    ",
    )


# ---- stage 13 ----


def a_window_across_tiles() -> None:
    """Stage 13's page in PyTorch: three new tokens of a sequence of 70, each of which sees the last
    5. Tiles have 64 keys."""
    torch, naive = load("torch"), load("stage13_gpu.naive")
    q, keys, values = torch.randn(3, 80, 4, generator=torch.Generator().manual_seed(0))
    outputs = naive.prefill(q[67:70], keys, values, [4, 1, 0, 2, 3], 16, 67, window=5)
    for position, output in enumerate(outputs.tolist(), 67):
        say(f"token {position}: {[round(number, 3) for number in output]}")


def three_rows_in_a_graph_of_four() -> None:
    """Stage 13 answers three requests together in Triton's interpreter, in graphs of four rows.
    What stands in for a graph computes the step again. It needs Triton (requirements-gpu.txt)."""
    gpu, (model, _) = "stage13_gpu", stories()
    organs = {
        "make_cache": load(f"{gpu}.cache").GpuCache,
        "make_runner": load(f"{gpu}.runner").GpuRunner,
    }
    together = load("stage05_paged.engine").make(model, 3, **organs)

    def capture(work: Callable[[], Any]) -> Any:
        results = work()

        def replay() -> None:
            for old, new in zip(results, work(), strict=True):
                old.copy_(new)

        return replay, results

    runner = together.runner
    runner.graphs = load(f"{gpu}.graphs").Graphs(runner.cache, runner.compute, capture)
    tell(CROWD, together.generate([encode(prompt) for prompt in CROWD], greedy(5)))

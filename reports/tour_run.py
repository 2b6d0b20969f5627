"""All stages, one workload: `python -m reports.tour`.

Every stage with an engine answers the same prompts, with memory for the same number of contexts;
then the server of stage 06 answers them over HTTP, and stage 07 load-tests it. The answers must be
the first stage's, token for token; a table shows each stage's speed. It is a tour, not a benchmark:
one run, on a machine that may have other work to do, so it measures how fast the machine is now and
takes fewer or shorter stories if it is slow. The numbers to trust are in the reports.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from reports import stages
from shared import cli, parity, paths
from shared.errors import UserError
from shared.server import MODULE as SERVER
from shared.server import own_server
from shared.stories import grammar

FIRST = "Once upon a time"
STORIES = (32, 16, 8)  # as many as the machine answers in time; then 8 or 4 shorter ones
FIRST_SECONDS = 12  # at most for the first stage, by the estimate: all others take as long together
LENGTHS = (4, 24, 12, 32, 8, 48, 16, 20)  # tokens of the prompts, in turn
SHARES = (1.0, 0.25, 0.5, 0.25, 0.75, 0.4, 0.6, 0.3)  # of --max-tokens, in turn
CONTEXTS = 8  # memory for keys and values, in whole contexts
WARM_UP = 4  # tokens: libraries choose their kernels at the first call
TRIAL = (48, 1.0)  # at most this many tokens, and seconds, to measure the first stage
LOAD = "stage07_loadtest"
ROUNDS = 2  # requests of each user of the load
BAR = 24  # characters
FALLS = {  # why a stage may be slower than one before it
    SERVER: "event loop and clients share the processor with the engine, and requests come one by "
    "one",
    LOAD: "its users also wait between two answers, so steps are not always full",
}


@dataclass
class Answer:
    """One answer, with the names that `parity.compare` reads. first: seconds to its first token."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first: float = 0.0


@dataclass
class Row:
    """What a stage did with the whole workload."""

    stage: str
    tokens: int
    seconds: float
    firsts: list[float]  # seconds from the start, or from the request, to each first token

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Work:
    """The workload: prompts as token ids, and the options of each answer."""

    prompts: list[list[int]]
    sampling: list[Any]

    @property
    def most(self) -> int:
        """Tokens of all answers, at most."""
        return sum(params.max_tokens for params in self.sampling)


def workload(loaded: cli.Loaded, count: int, max_tokens: int) -> Work:
    """The beginnings of `count` stories, with lengths as varied as those of their answers."""
    longest, params = loaded.config.n_positions // 2, stages.sampling_params()
    prompts = [loaded.tokenizer.encode(FIRST)]
    stories = grammar.stories("tour")
    for length in itertools.islice(itertools.cycle(LENGTHS), 1, count):
        prompts.append(loaded.tokenizer.encode(next(stories).text)[: min(length, longest)])
    shares = itertools.islice(itertools.cycle(SHARES), count)
    return Work(prompts, [params(max_tokens=max(1, int(max_tokens * share))) for share in shares])


def speed(engine: Any, loaded: cli.Loaded) -> float:
    """Seconds that the first stage's engine takes for a token now, at a usual length."""
    tokens, seconds = TRIAL
    prompt = workload(loaded, 2, tokens).prompts[1]
    times = []
    for _ in engine.stream(prompt, stages.sampling_params()(max_tokens=tokens)):
        times.append(time.perf_counter())
        if len(times) > WARM_UP and times[-1] - times[WARM_UP - 1] > seconds:
            break
    measured = times[WARM_UP - 1 :]
    return (measured[-1] - measured[0]) / max(1, len(measured) - 1)


def fitting(loaded: cli.Loaded, max_tokens: int, cost: float) -> Work:
    """The longest workload that the first stage answers in FIRST_SECONDS, at `cost` seconds a
    token; the shortest if none fits."""
    few, fewest = STORIES[-1], max(1, STORIES[-1] // 2)
    sizes = [(count, max_tokens) for count in STORIES]
    sizes += [(few, max_tokens // 2), (few, max_tokens // 4), (fewest, max_tokens // 8)]
    for count, tokens in sizes:
        work = workload(loaded, count, max(1, tokens))
        if cost * work.most <= FIRST_SECONDS:
            break
    return work


# ---- engines ------------------------------------------------------------------------------------


def collect(
    tokens: Iterable[tuple[int, Any]], work: Work, label: str, total: int | None
) -> list[Answer]:
    """Read (place, token) pairs to their end; with a `label`, a terminal shows a progress bar."""
    answers = [Answer() for _ in work.prompts]
    columns = TextColumn("  {task.description}"), BarColumn(BAR), TextColumn("{task.fields[done]}")
    with Progress(
        *columns, transient=True, disable=not (label and sys.stdout.isatty())
    ) as progress:
        bar = progress.add_task(label, total=total or work.most, done="")
        started = time.perf_counter()
        for number, (place, token) in enumerate(tokens, 1):
            answer = answers[place]
            answer.first = answer.first or time.perf_counter() - started
            answer.token_ids.append(token.id)
            answer.finish_reason = token.finish_reason
            progress.update(bar, completed=number, done=f"{number:,} tokens")
    return answers


def streamed(engine: Any, work: Work, loaded: cli.Loaded) -> Iterator[tuple[int, Any]]:
    """The first answer, printed token by token as it is computed."""
    print(f"\n{loaded.tokenizer.decode(work.prompts[0])}", end="", flush=True)
    for token, text in cli.with_text(engine.stream(work.prompts[0], work.sampling[0]), loaded):
        print(text, end="", flush=True)
        yield 0, token
    print(" ..." if token.finish_reason == "length" else "", end="\n\n", flush=True)


def run_engine(
    name: str, make: Any, loaded: cli.Loaded, work: Work, total: int | None
) -> tuple[Row, list[Answer]]:
    """Answer the whole workload with the engine of a stage; the first stage shows its first answer
    as it grows."""
    engine = make(loaded.model, CONTEXTS)
    short = [replace(params, max_tokens=WARM_UP) for params in work.sampling[:1]]
    for _ in stages.answer(engine, work.prompts[:1], short):
        pass
    started = time.perf_counter()
    if total is None:
        first = collect(streamed(engine, work, loaded), work, "", None)[:1]
        rest = Work(work.prompts[1:], work.sampling[1:])
        before = time.perf_counter() - started
        tokens = stages.answer(engine, rest.prompts, rest.sampling)
        answers = [*first, *collect(tokens, rest, "the other stories", None)]
        for answer in answers[1:]:
            answer.first += before
    else:
        tokens = stages.answer(engine, work.prompts, work.sampling)
        answers = collect(tokens, work, f"{len(work.prompts)} stories", total)
    return row_of(name, answers, time.perf_counter() - started), answers


def row_of(name: str, answers: Sequence[Answer], seconds: float) -> Row:
    tokens = sum(len(answer.token_ids) for answer in answers)
    return Row(name, tokens, seconds, [answer.first for answer in answers])


# ---- the server ---------------------------------------------------------------------------------


def server_options(options: argparse.Namespace, loaded: cli.Loaded, count: int) -> list[str]:
    """Options that make the server use the same model, machine and memory, for `count` stories."""
    config = loaded.config
    memory = CONTEXTS * config.n_positions * config.kv_bytes_per_token(loaded.dtype)
    values = {
        "model": options.model,
        "device": loaded.device.type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "linear": loaded.linear.split()[0],  # without "(not measured)"
        "threads": str(options.threads or 0),
        "kv-memory": str(memory),
        "max-num-seqs": str(count),
    }
    flags = ["--random-weights"] if options.random_weights else []
    return [*itertools.chain(*((f"--{name}", text) for name, text in values.items())), *flags]


async def over_http(url: str, work: Work) -> tuple[Row, list[Answer]]:
    """All prompts at once, each as a stream. Raises UserError if the server refuses one."""
    answers = [Answer() for _ in work.prompts]

    async def ask(place: int, most: int | None = None) -> Answer:
        answer, params = Answer(), work.sampling[place]
        body = {
            "prompt": work.prompts[place],
            "max_tokens": most or params.max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                problem = (await response.text())[:300]
                raise UserError(f"The server answered {response.status}: {problem}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    answer.token_ids += choice.get("token_ids") or []
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                    answer.first = answer.first or time.perf_counter() - started
        return answer

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        started = time.perf_counter()
        await ask(0, WARM_UP)
        started = time.perf_counter()
        answers = await asyncio.gather(*map(ask, range(len(work.prompts))))
    return row_of(SERVER, answers, time.perf_counter() - started), answers


def load_test(url: str, work: Work, lengths: Sequence[int]) -> tuple[Row, str]:
    """Run as many users as prompts, who ask again once they have their answers; returns the row,
    and what the users saw."""
    load, metrics, client, schedule, requests = (
        importlib.import_module(f"{LOAD}.{name}")
        for name in ("load", "metrics", "client", "schedule", "workload")
    )
    asks = [requests.Ask(*ask) for ask in zip(work.prompts, lengths, strict=True)] * ROUNDS
    closed = schedule.closed(len(work.prompts), len(asks))
    point = asyncio.run(load.run_point(client.Target(url), asks, closed))
    summary = metrics.summarize(point, metrics.Slo())
    firsts = [wait for wait in map(metrics.ttft, point.records) if wait is not None]
    between = (summary.at("itl", 50) or 0.0) * 1e3
    seen = (
        f"{summary.succeeded} of {summary.requests} requests served to {len(work.prompts)} users; "
        f"a token every {between:.0f} ms (median), goodput {summary.goodput:.1f} requests/s"
    )
    return Row(LOAD, summary.completion_tokens, summary.seconds, firsts), seen


# ---- what is shown ------------------------------------------------------------------------------


def title(name: str) -> None:
    """The stage's name and the question that it answers."""
    question = getattr(importlib.import_module(name), "QUESTION", "")
    print(f"{name}: {question}", flush=True)


def compare(
    name: str, expected: Sequence[Answer], got: Sequence[Answer], work: Work, loaded: cli.Loaded
) -> str:
    """In words, how the answers of a stage compare with the first stage's.

    Below float64 a difference at a near tie is allowed, counted and shown: see parity.py. Raises
    ParityError at any other difference.
    """
    result, oracle = parity.Parity(), None
    for place, (want, have) in enumerate(zip(expected, got, strict=True)):
        wanted: Any = want
        if (want.token_ids, want.finish_reason) != (have.token_ids, have.finish_reason):
            oracle = oracle or stages.oracle(loaded.model)
            params = replace(work.sampling[place], logprobs=parity.LIKELIEST)
            (wanted,) = oracle.generate([work.prompts[place]], params)
        parity.compare(name, [wanted], [have], loaded.dtype, result)
    return str(result)


def table(rows: Sequence[Row], console: Console) -> Table:
    """Each stage's speed, beside a bar chart of it, and the wait for the first token."""
    block = "█" if "utf" in console.encoding.lower() else "#"
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("stage", no_wrap=True)
    for heading in ("tok/s", "speed-up", "first token"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("tok/s", no_wrap=True)
    fastest = max(row.rate for row in rows)
    for row in rows:
        median = sorted(row.firsts)[len(row.firsts) // 2]
        shown.add_row(
            row.stage,
            f"{row.rate:,.0f}",
            f"{row.rate / rows[0].rate:.1f}x",
            f"{median:.2f} s",
            block * max(1, round(BAR * row.rate / fastest)),
        )
    return shown


def falls(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each stage that is slower than one before it."""
    for place, row in enumerate(rows[1:], 1):
        best = max(rows[:place], key=lambda earlier: earlier.rate)
        if row.rate < best.rate:
            why = FALLS.get(row.stage, "it adds no speed to this workload")
            yield f"{row.stage} is slower than {best.stage}: {why}."


def visit(loaded: cli.Loaded, engines: dict[str, Any], options: argparse.Namespace) -> int:
    """Run `engines` (name -> make), the server and the load test; returns the exit status, 1 if a
    token differs."""
    console = Console(highlight=False)
    print(f"Measuring {loaded} ...", flush=True)
    cost = speed(next(iter(engines.values()))(loaded.model, CONTEXTS), loaded)
    work = fitting(loaded, options.max_tokens, cost)
    lengths = sorted(len(prompt) for prompt in work.prompts)
    longest = max(params.max_tokens for params in work.sampling)
    whole = len(work.prompts) == STORIES[0] and longest == options.max_tokens
    print(
        f"The first stage makes {1 / cost:,.3g} tokens a second here, so the tour has "
        f"{'all of its' if whole else 'only'} {len(work.prompts)} stories: prompts\n"
        f"of {lengths[0]} to {lengths[-1]} tokens, greedy answers of at most {longest}, and memory "
        f"for {CONTEXTS}\nwhole contexts of {loaded.config.n_positions:,} tokens.\n"
    )
    rows: list[Row] = []
    expected: list[Answer] = []
    differ: list[str] = []

    def note(row: Row, answers: Sequence[Answer]) -> None:
        try:
            verdict = compare(row.stage, expected, answers, work, loaded) if rows else "the oracle"
        except parity.ParityError as error:
            verdict = f"DIFFERENT, {error}"
            differ.append(row.stage)
        rows.append(row)
        print(f"  {row.tokens:,} tokens in {row.seconds:.2f} s; {verdict}\n", flush=True)

    for name, make in engines.items():
        title(name)
        row, answers = run_engine(name, make, loaded, work, rows[0].tokens if rows else None)
        expected = expected or answers
        note(row, answers)
    if options.serve:
        title(SERVER)
        print("  starting the server ...", flush=True)
        with own_server(server_options(options, loaded, len(work.prompts)), quiet=True) as server:
            print(f"  {len(work.prompts)} clients at once, over HTTP ...", flush=True)
            note(*asyncio.run(over_http(server.url, work)))
            title(LOAD)
            print(f"  {len(work.prompts)} users, {ROUNDS} requests each ...", flush=True)
            counts = [len(answer.token_ids) for answer in expected]
            row, seen = load_test(server.url, work, counts)
            rows.append(row)
            print(f"  {row.tokens:,} tokens in {row.seconds:.2f} s; {seen}\n", flush=True)
    console.print(table(rows, console))
    for line in falls(rows):
        print(line)
    print(
        f"\nNot the same tokens as the first stage: {', '.join(differ)}."
        if differ
        else "\nAll stages gave the same tokens. Next: read stage01_forward/README.md, and run\n"
        '  python -m stage01_forward "Once upon a time"'
    )
    return 1 if differ else 0


def run(options: argparse.Namespace) -> int:
    """Load the model of the options and visit all stages; returns the exit status."""
    options.serve = {SERVER, LOAD} <= set(paths.discover())
    return visit(cli.load_model_from(options), stages.engines(), options)

"""Load a server, by default ours: `python -m stage07_loadtest`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from shared import cli
from shared.errors import UserError
from shared.server import MODULE as SERVER
from shared.server import own_server

from . import metrics, results, schedule, server, workload
from .client import HTTP_OTHER, PROTOCOL, REFUSED, Record, Target, open_session, send
from .load import Point, run_point
from .metrics import Slo, Summary
from .schedule import Schedule
from .workload import Ask

MODULE = "stage07_loadtest"
USERS = (1, 2, 4, 8, 16)
LEAST_REQUESTS, REQUESTS_A_USER = 20, 4  # defaults of a closed loop
OPEN_REQUESTS = 50  # default of an open loop
# Closed loops that end by time: prompts made beforehand, at most per user and second, and in all.
MOST_A_SECOND, MOST_MADE = 20, 250_000
WARMUP = 8  # requests before an open loop
QUEUE = 64  # least --max-queue of our server
WORKLOADS = (
    "fixed: prompts and answers of one length; mixed: lognormal lengths, a few of them very long; "
    f"shared: prompts with {workload.SYSTEM} tokens in common"
)


def schedules(options: argparse.Namespace) -> Iterator[tuple[Schedule, int]]:
    """The schedules in order, closed loops first, and the number of requests of each."""
    for users in options.users:
        count = max(LEAST_REQUESTS, REQUESTS_A_USER * users)
        if options.seconds is not None:
            most = math.ceil(users * (1 + options.seconds * MOST_A_SECOND))
            count = max(users, min(MOST_MADE, most))
        if options.requests is not None:
            count = max(users, options.requests)
        yield schedule.closed(users, count), count
    for rate in options.rates:
        timed = OPEN_REQUESTS if options.seconds is None else max(1, round(rate * options.seconds))
        count = options.requests or min(timed, MOST_MADE)
        yield schedule.poisson(rate, count, options.seed), count


async def measure(
    target: Target, options: argparse.Namespace, report: Callable[[Point], object]
) -> bool:
    """Measure all points and pass each to `report`. When cancelled, report what the current point
    has and stop. Returns whether all were measured.

    Raises UserError if the server cannot be measured at all.
    """
    async with open_session(target) as session:
        name, context = await server.describe(session, target)
        target = replace(target, model=target.model or name)
        longest = context or workload.CONTEXT
        (first,) = requests(options, 1, options.seed, longest)
        check(target, await send(session, target, first, 0.0, asyncio.get_running_loop().time))
    for number, (when, count) in enumerate(schedules(options), 1):
        warmup = when.users or WARMUP
        seed = f"{options.seed} {number}"  # new prompts: a prefix cache has those of the last point
        asks = requests(options, warmup + count, seed, longest)
        point = await run_point(target, asks, when, warmup=warmup, seconds=options.seconds)
        if point.records:
            report(point)
        if point.interrupted:
            return False
    return True


def requests(options: argparse.Namespace, count: int, seed: int | str, longest: int) -> list[Ask]:
    """Requests of the workload. Raises UserError as `workload.make` does."""
    lengths = {"prompt": options.prompt_tokens, "answer": options.answer_tokens}
    return workload.make(options.workload, count, seed, longest=longest, **lengths)


def check(target: Target, record: Record) -> None:
    """Raise UserError if the first request failed in a way that all others would."""
    if record.failure in (REFUSED, HTTP_OTHER, PROTOCOL):
        raise UserError(
            f"{target.url} does not serve completions ({record.failure}: {record.detail}): start a "
            "server there, or leave --url out to load ours."
        )


# ---- the table ----------------------------------------------------------------------------------

COLUMNS = (
    *(("load", 18), ("requests", 9), ("success", 8), ("req/s", 7), ("tok/s", 8)),
    *(("TTFT p50", 9), ("p95", 7), ("TPOT p50", 9), ("p95", 7), ("ITL p95", 8)),
    *(("E2E p50", 8), ("p95", 7), ("goodput", 8)),
)


def header(limits: Slo) -> str:
    """The lines above the rows."""
    names = [f"{name:>{width}}" for name, width in COLUMNS[1:]]
    return (
        "Latencies in ms from the intended start, failures infinite; "
        f"goodput: requests/s within {limits}.\n{'load':<18}{''.join(names)}"
    )


def row(point: Summary) -> str:
    """One row of the table."""

    def ms(name: str, percent: int, adjusted: bool = True) -> str:
        value = point.at(name, percent, adjusted)
        return "-" if value is None else "inf" if math.isinf(value) else f"{value * 1e3:,.0f}"

    latencies = (metrics.TTFT_INTENDED, metrics.TPOT)
    cells = (
        f"{point.load:<18}",
        *(str(point.requests), f"{point.success_rate:.1%}"),
        *(f"{point.request_rate:.2f}", f"{point.output_rate:,.1f}"),
        *(ms(name, percent) for name in latencies for percent in (50, 95)),
        ms(metrics.ITL, 95, adjusted=False),
        *(ms(metrics.E2E_INTENDED, percent) for percent in (50, 95)),
        f"{point.goodput:.2f}",
    )
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def notes(points: Sequence[Summary]) -> Iterator[str]:
    """Lines below the table: failures by kind, and reasons not to trust a point."""
    for point in points:
        failed = [f"{count} {kind}" for kind, count in point.failures.items()]
        if failed or point.flags:
            yield f"{point.load}: {'; '.join([*failed, *point.flags])}"


# ---- the command line ---------------------------------------------------------------------------


def several(kind: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """An argparse type: comma-separated values."""
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))


def slo(text: str) -> Slo:
    """An argparse type: "ttft=1,tpot=0.2", in seconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(
                f"invalid limits '{text[:40]}': write ttft=1,tpot=0.2,e2e=10 or some of them"
            )
        limits[name] = cli.number(0, 1e6, above=True)(value)
    return Slo(**limits)


def parser() -> cli.Parser:
    parser = cli.Parser(
        MODULE,
        "Stage 07, the load test: load an OpenAI-style server, by default ours, and measure what "
        "its users see.",
        f"  python -m {MODULE} --users 1,4,16 --out results\n"
        f"  python -m {MODULE} --users 1,8,64 --model gpt2 -- --dtype bfloat16\n"
        f"  python -m {MODULE} --url http://127.0.0.1:8000 --rates 2,4 --seconds 30\n"
        f"Options after -- are passed to our server; see python -m {SERVER} --help",
    )
    seconds, whole = cli.number(0, 86_400, above=True), cli.whole_number
    for option, kind, default, about in (
        ("--url", cli.address, None, "address of the server; default: start our own"),
        ("--model", str, None, "model on the server, or model that ours loads; default: the first"),
        ("--timeout", seconds, 300.0, "seconds after which a request fails"),
        ("--users", several(whole(1, 10_000)), None, "closed loops of N users who each wait for "
         f"their answer; default: {','.join(map(str, USERS))}, or none with another load"),
        ("--rates", several(cli.number(0, 1e6, above=True)), (), "open loops of R requests per "
         "second at random times"),
        ("--requests", whole(1, MOST_MADE), None, f"requests per point; default: {REQUESTS_A_USER} "
         f"per user but at least {LEAST_REQUESTS}, {OPEN_REQUESTS} in open loops"),
        ("--seconds", seconds, None, "send nothing later than this after the start"),
        ("--prompt-tokens", whole(1, 1_000_000), None, "tokens of each prompt; in mixed the "
         "median, in shared after the common ones"),
        ("--answer-tokens", whole(1, 1_000_000), None, "tokens of each answer; in mixed the "
         "median"),
        ("--seed", whole(0, 2**31), 0, "seed of prompts and times"),
        ("--slo", slo, Slo(ttft=1.0, tpot=0.2), "limits in seconds for goodput; default: "
         "ttft=1,tpot=0.2"),
        ("--out", Path, None, "folder to write all requests, the summary and a chart to"),
    ):  # fmt: skip
        parser.add_argument(option, type=kind, default=default, help=about)
    parser.add_argument("--workload", choices=workload.LENGTHS, default="fixed", help=WORKLOADS)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, extra = parser().parse_args(arguments[:split]), arguments[split + 1 :]
    if options.url and extra:
        raise UserError(
            "Options after -- are for our server, but --url names another: leave one of them out."
        )
    options.users = options.users or (() if options.rates else USERS)
    queue = str(max([QUEUE, *options.users]))
    model = ["--model", options.model] if options.model else []
    own_options = None if options.url else ["--max-queue", queue, *model, *extra]
    writer = None
    if options.out:
        configuration = {name: str(value) for name, value in vars(options).items()}
        writer = results.Writer(options.out, configuration | {"server": own_options})
    summaries: list[Summary] = []

    def report(point: Point) -> None:
        if not summaries:
            print(header(options.slo))
        summaries.append(metrics.summarize(point, options.slo))
        if writer:
            writer.add(point, summaries[-1])
        print(row(summaries[-1]), flush=True)

    with nullcontext(None) if own_options is None else own_server(own_options) as ours:
        target = Target(
            url=options.url if ours is None else ours.url,
            model=options.model if options.url else None,
            key=os.environ.get("STAIRCASE_API_KEY", ""),
            timeout=options.timeout,
        )
        try:
            complete = asyncio.run(measure(target, options, report))
        except KeyboardInterrupt:  # between points
            complete = False
    print("\n".join(["", *notes(summaries)]))
    if writer and summaries:
        writer.draw()
        print(f"Written: {options.out}")
    if not complete:
        raise KeyboardInterrupt
    return 0


if __name__ == "__main__":
    cli.run(main)
